"""The doubt table, row by row, and the window in which a provider surely remembers a key."""

from typing import Any

import pytest
from tests.protocol.driver import KEYED, KEYLESS, LEASE_MS, PAY, READ, TIMEOUT_MS, TTL_MS, Book, code, wrote

from tidefast.protocol.contracts import MARGIN_DEFAULT_MS
from tidefast.protocol.doubt import judge, line_to_add, other_doubt, outcome_of, window_open
from tidefast.protocol.patterns import Pattern
from tidefast.protocol.records import Now
from tidefast.protocol.verdicts import Refused

ROOM_MS = TTL_MS - TIMEOUT_MS - MARGIN_DEFAULT_MS  # a replay must be admitted in less than this after the first sending


def doubtful(contract: Any = KEYED) -> Book:
    book = Book()
    book.granted()
    book.admit(contract=contract)
    book.settle("doubted")
    return book


@pytest.mark.parametrize(
    "stored,today,waited_ms,verdict",
    [
        (READ, READ, 0, ("ask_again", "no_effect")),
        (READ, READ, 10 * TTL_MS, ("ask_again", "no_effect")),
        (KEYED, KEYED, 0, ("replay", "deduped")),
        (KEYED, KEYED, ROOM_MS - 1, ("replay", "deduped")),
        (KEYED, KEYED, ROOM_MS, ("hold", "key_window")),
        (KEYLESS, KEYLESS, 0, ("hold", "no_key")),
        (KEYED._replace(key_ttl_ms=0), KEYED, 0, ("hold", "no_key")),
        (KEYED, None, 0, ("hold", "tool_gone")),
        (READ, None, 0, ("hold", "tool_gone")),
        (KEYED, KEYED._replace(key_scope="acct_2"), 0, ("hold", "scope_changed")),
        (KEYED, KEYED._replace(url="http://127.0.0.1:8/charges"), 0, ("hold", "scope_changed")),
        (KEYED, KEYED._replace(key_ttl_ms=1, retries=9), 0, ("replay", "deduped")),
        (KEYLESS, KEYED, 0, ("hold", "no_key")),
    ],
)
def test_a_doubt_is_judged_by_the_contract_stored_with_the_intent(
    stored: Any, today: Any, waited_ms: int, verdict: tuple[str, str]
) -> None:
    book = doubtful(stored)
    book.ms += waited_ms
    assert judge(book.step(), stored, today, book.now) == verdict


@pytest.mark.parametrize("stored,events", [(KEYED, ["step_fenced"]), (KEYLESS, ["step_held"]), (READ, ["step_fenced"])])
def test_the_row_is_what_an_asking_holder_gets(stored: Any, events: list[str]) -> None:
    book = doubtful(stored)
    decision = book.admit(contract=stored)
    assert wrote(decision) == events
    if events == ["step_held"]:
        assert isinstance(decision.verdict, Refused)
        assert (decision.verdict.code, decision.verdict.reason) == ("step_held", "no_key")
        assert decision.verdict.facts == {"steps": [PAY]}


def test_a_replay_past_the_window_is_held_and_nothing_is_sent() -> None:
    book = doubtful()
    book.ms += ROOM_MS
    book.granted()
    assert (code(book.admit()), book.step().reason) == ("step_held", "key_window")


def test_both_clocks_must_say_that_the_key_is_remembered() -> None:
    step = doubtful().step()
    first = step.attempts[0]
    near, far = 1, ROOM_MS
    for ms, wall, is_open in ((near, near, True), (far, near, False), (near, far, False), (near, -1_000, True)):
        now = Now(first.admitted_ms + ms, first.admitted_wall_ms + wall)
        assert window_open(step, KEYED, now) is is_open


def test_a_wall_clock_behind_its_mark_by_more_than_the_margin_closes_every_window() -> None:
    book = doubtful()
    book.mark_ms = book.now.wall_ms + MARGIN_DEFAULT_MS
    assert window_open(book.step(), KEYED, book.now)
    book.mark_ms += 1
    assert not window_open(book.step(), KEYED, book.now)
    assert code(book.admit()) == "step_held"


def test_the_window_counts_from_the_oldest_attempt_that_is_not_proved_never_sent() -> None:
    """First attempt never sent, a long pause, the second sent and lost: the second one's admission counts."""
    book = Book()
    book.granted()
    book.admit()
    assert window_open(book.step(), KEYED, book.now)
    book.settle("unsent")
    assert book.step().first_sent is None and window_open(book.step(), KEYED, book.now)
    book.ms += 25 * TTL_MS
    book.granted()
    book.admit()
    book.settle("doubted", attempt=2)
    assert code(book.admit()) == "Send"
    book.ms += ROOM_MS
    book.granted()
    book.die()
    assert code(book.admit(owner="boot-1+")) == "step_held"


def test_a_refused_replay_after_the_window_settles_no_other_doubt() -> None:
    book = doubtful()
    book.ms += TIMEOUT_MS + 1
    book.granted()
    book.admit()
    book.ms += ROOM_MS
    assert wrote(book.settle("refused", attempt=2)) == ["step_refused"] and book.step().state == "in_doubt"


def test_other_doubt_names_the_attempts_that_may_still_have_had_an_effect() -> None:
    book = doubtful()
    book.admit()
    step = book.step()
    assert [attempt.number for attempt in other_doubt(step, step.attempts[1])] == [1]


def test_time_alone_never_settles_a_doubt() -> None:
    book = doubtful(KEYLESS)
    book.admit(contract=KEYLESS)
    book.ms += 1_000 * TTL_MS
    assert code(book.mark_lost()) == "already_decided"
    assert book.step().state == "held"
    book.ms += LEASE_MS
    book.lapse()
    assert code(book.grant()) == "step_held"


@pytest.mark.parametrize(
    "status,body,outcome",
    [
        (200, None, ("applied", "")),
        (201, {}, ("applied", "")),
        (299, None, ("applied", "")),
        (402, None, ("refused", "status_402")),
        (409, {"code": "used"}, ("refused", "status_409")),
        (409, {"code": "running"}, ("doubted", "status_409")),
        (408, None, ("doubted", "status_408")),
        (425, None, ("doubted", "status_425")),
        (429, None, ("doubted", "status_429")),
        (500, None, ("doubted", "status_500")),
        (503, None, ("doubted", "status_503")),
        (302, None, ("unlisted", "status_302")),
        (400, {"error": "declined"}, ("unlisted", "status_400")),
        (404, None, ("unlisted", "status_404")),
    ],
)
def test_a_status_is_an_outcome_only_where_the_contract_lists_it(status: int, body: Any, outcome: Any) -> None:
    contract = KEYED._replace(refusals=(Pattern(402), Pattern(409, (("code", "used"),))))
    assert outcome_of(contract, status, body) == outcome


def test_a_success_that_does_not_look_as_expected_is_not_the_providers_word() -> None:
    contract = KEYED._replace(expect=Pattern(0, (("id", "string"),)))
    assert outcome_of(contract, 200, {"id": "ch_1"}) == ("applied", "")
    assert outcome_of(contract, 200, {"login": "please"}) == ("unlisted", "unexpected_answer")
    assert outcome_of(contract, 200, None, is_whole=False) == ("applied", "")


def test_the_word_that_a_key_was_used_with_another_body_is_an_outcome_of_its_own() -> None:
    contract = KEYED._replace(payload_bound=(Pattern(422),), refusals=(Pattern(422, (("code", "declined"),)),))
    assert outcome_of(contract, 422, {"code": "declined"}) == ("refused", "status_422")
    assert outcome_of(contract, 422, {"code": "reused"}) == ("key_reused", "status_422")


@pytest.mark.parametrize(
    "body,line",
    [
        ({"error": {"code": "no_such"}}, '{ status = 404, "error.code" = "no_such" }'),
        ({"error": "gone"}, '{ status = 404, "error" = "gone" }'),
        ({"errors": [{"code": 7}]}, '{ status = 404, "errors.0.code" = 7 }'),
        ({"error": "empty"}, "404"),
        (None, "404"),
    ],
)
def test_an_unlisted_answer_names_the_line_that_would_list_it(body: Any, line: str) -> None:
    assert line_to_add(404, body) == line
