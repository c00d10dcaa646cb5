"""Asking the provider: what counts as an answer, from when on it may be asked, and what follows from each answer."""

from dataclasses import replace
from typing import Any

import pytest
from tests.protocol.driver import HERE, KEYED, KEYLESS, PAY, REFUND, RUN, TIMEOUT_MS, TTL_MS, UNDO, Book, code, wrote

from tidefast.protocol.commands import AnswerProbe
from tidefast.protocol.contracts import Contract, Probe
from tidefast.protocol.doubt import PROBE_PAUSE_FIRST_MS, PROBE_PAUSE_MAX_MS, clear_ms, next_move, probe_due_ms
from tidefast.protocol.laws import History, judge
from tidefast.protocol.patterns import Pattern
from tidefast.protocol.probing import read_answer
from tidefast.protocol.records import Recovery
from tidefast.protocol.verdicts import Ask, Decision, Refused, Send, Settled, Wait

LAG_MS = 10_000
PROBE = Probe(
    found=Pattern(0, (("data.0.id", "string"),)),
    absent=Pattern(0, (("data", "empty"),)),
    many=Pattern(0, (("data.1.id", "string"),)),
    lag_ms=LAG_MS,
    url="http://127.0.0.1:9/charges?key={key}",
)
ASKABLE = KEYLESS._replace(probe=PROBE._replace(url="http://127.0.0.1:9/sent"), probe_tries=3)
ASKABLE_KEYED = KEYED._replace(probe=PROBE, probe_tries=3)


def doubtful(contract: Contract = ASKABLE) -> Book:
    """A step whose attempt was lost with its owner."""
    book = Book()
    book.granted()
    book.admit(contract=contract)
    book.die()
    book.mark_lost()
    return book


def answered(book: Book, word: Any, **other: Any) -> Decision:
    """The provider's word on PAY, asked for now."""
    command = AnswerProbe(RUN, PAY, word, book.ms, len(book.step().attempts), '{"body":{"id":"ch_1"}}')
    return book.submit(replace(command, **other))


def after_lag(book: Book) -> Book:
    book.ms = max(book.ms, clear_ms(book.step()) + 1)
    return book


def lawful(book: Book) -> None:
    history = History(RUN, tuple(book.log), tuple(book.digests), book.view.namespace, book.contracts)
    assert judge(history) == ()


@pytest.mark.parametrize("contract,ttl", [(ASKABLE, 0), (ASKABLE_KEYED, TTL_MS)])
def test_a_holder_that_asks_for_a_doubt_without_a_safe_replay_is_told_when_the_provider_can_say(
    contract: Contract, ttl: int
) -> None:
    book = doubtful(contract)
    book.ms += ttl
    book.granted()
    first = book.step().attempts[0]
    due = first.deadline_ms + LAG_MS + 1
    assert book.admit(contract=contract).verdict == Ask(PAY, 1, due)
    assert book.head.probe_ms == max(due, first.admitted_ms + contract.window_ms)
    assert book.step().state == "in_doubt"


def test_a_lost_attempt_is_booked_in_the_same_decision_that_says_whom_to_ask() -> None:
    book = Book()
    book.granted()
    book.admit(contract=ASKABLE)
    book.die()
    decision = book.admit(contract=ASKABLE)
    assert wrote(decision) == ["step_doubted"] and isinstance(decision.verdict, Ask)


def test_while_the_key_is_surely_remembered_the_replay_goes_first_and_nobody_is_asked_before_the_window_ends() -> None:
    book = doubtful(ASKABLE_KEYED)
    assert probe_due_ms(book.step()) == book.step().attempts[0].admitted_ms + ASKABLE_KEYED.window_ms
    book.granted()
    assert isinstance(book.admit(contract=ASKABLE_KEYED).verdict, Send)
    assert book.head.probe_ms == 0, "nobody is asked about an attempt that is out"


def test_found_is_a_receipt_that_the_next_holder_joins() -> None:
    book = after_lag(doubtful())
    assert answered(book, "found").verdict == Settled("applied", joined=False)
    book.granted()
    assert wrote(book.admit(contract=ASKABLE)) == ["step_committed"]
    assert book.log[book.step().receipt_seq - 1].data["receipt"] == {"body": {"id": "ch_1"}}
    lawful(book)


def test_absent_sends_the_step_again_under_a_live_epoch() -> None:
    book = after_lag(doubtful())
    assert answered(book, "absent").verdict == Settled("pending", joined=False)
    assert [attempt.state for attempt in book.step().attempts] == ["absent"] and book.head.probe_ms == 0
    book.granted()
    verdict = book.admit(contract=ASKABLE).verdict
    assert isinstance(verdict, Send) and verdict.attempt == 2
    lawful(book)


def test_a_receipt_of_an_attempt_that_was_booked_absent_freezes_the_run() -> None:
    book = after_lag(doubtful())
    answered(book, "absent")
    assert wrote(book.settle()) == ["late_receipt", "run_frozen"] and book.head.frozen == "diverged"


def test_unclear_is_asked_again_with_a_growing_pause_and_held_when_the_tries_are_spent_while_questions_go_on() -> None:
    book = after_lag(doubtful())
    pauses = []
    for tries in range(1, 3):
        assert answered(book, "unclear").verdict == Settled("in_doubt", joined=False)
        assert book.step().probes == tries
        pauses.append(book.head.probe_ms - book.ms)
        book.ms = book.head.probe_ms
    assert pauses == [PROBE_PAUSE_FIRST_MS, 2 * PROBE_PAUSE_FIRST_MS]
    decision = answered(book, "unclear")
    assert wrote(decision) == ["probe_answered", "step_held"] and decision.verdict == Settled("held", joined=False)
    assert book.step().reason == "probe_unclear" and book.head.probe_ms > book.ms
    for _ in range(12):
        book.ms = book.head.probe_ms
        assert wrote(answered(book, "unclear")) == ["probe_answered"]
    assert book.head.probe_ms - book.ms == PROBE_PAUSE_MAX_MS
    book.ms = book.head.probe_ms
    assert answered(book, "found").verdict == Settled("applied", joined=False), "a held step is still asked about"
    lawful(book)


def test_many_effects_of_one_key_freeze_the_run_one_time_and_a_person_says_which_it_was() -> None:
    book = after_lag(doubtful())
    decision = answered(book, "many")
    assert wrote(decision) == ["probe_answered", "run_frozen"] and book.head.diverged == (PAY,)
    assert decision.verdict == Settled("in_doubt", joined=False, is_diverged=True)
    book.ms = book.head.probe_ms
    assert wrote(answered(book, "many")) == ["probe_answered"]
    book.resolve("applied")
    assert book.head.diverged == () and book.thaw().events
    lawful(book)


@pytest.mark.parametrize(
    "late,refusal",
    [
        ({"attempts": 2}, ("moved", "attempts")),
        ({"asked_ms": 0}, ("moved", "looked_too_early")),
        ({"asked_ms": 10**9}, ("moved", "looked_too_early")),
    ],
)
def test_an_answer_counts_only_for_what_it_was_asked_about_and_from_when(late: Any, refusal: tuple[str, str]) -> None:
    book = after_lag(doubtful())
    verdict = answered(book, "absent", **late).verdict
    assert isinstance(verdict, Refused) and (verdict.code, verdict.reason) == refusal


def test_the_lag_of_the_contract_counts_from_the_deadline_of_every_attempt_that_is_open() -> None:
    book = doubtful()
    clear = book.step().attempts[0].deadline_ms + LAG_MS
    book.ms = clear
    assert code(answered(book, "absent")) == "moved"
    assert code(book.resolve("not_applied")) == "step_in_flight", "a person waits for the lag as well"
    book.ms = clear + 1
    assert answered(book, "absent").events


@pytest.mark.parametrize("word", ["found", "absent", "unclear", "many"])
def test_an_answer_is_dropped_when_the_step_has_moved_on(word: str) -> None:
    book = after_lag(doubtful())
    book.resolve("applied")
    assert code(answered(book, word)) == "already_decided" and not answered(book, word).events


def test_an_answer_is_dropped_once_an_undo_has_begun_or_where_the_contract_has_no_probe() -> None:
    book = after_lag(doubtful(KEYLESS))
    assert code(answered(book, "found")) == "already_decided"
    unknown = Book().submit(AnswerProbe(RUN, PAY, "found", 1, 1))
    assert code(unknown) == "not_found"
    assert code(Book(created=False).submit(AnswerProbe(RUN, PAY, "found", 1, 1))) == "not_found"


def test_without_a_key_absent_counts_only_once_the_owner_of_a_lost_attempt_has_ended_or_spoken() -> None:
    book = Book()
    book.granted()
    book.admit(contract=ASKABLE)
    book.ms += TIMEOUT_MS + 1
    book.mark_lost()
    after_lag(book)
    verdict = answered(book, "absent").verdict
    assert isinstance(verdict, Refused) and verdict.reason == "owner_silent"
    assert HERE in book.view.instances and answered(book, "unclear").events, "what is no absence is taken"
    book.settle("doubted")
    assert code(answered(book, "absent")) == "moved", "no newer than the answer before"
    book.ms += 1
    assert answered(book, "absent").verdict == Settled("pending", joined=False)


def test_an_undo_in_doubt_is_asked_about_like_any_other_step() -> None:
    refund = REFUND._replace(key="none", key_ttl_ms=0, probe=PROBE._replace(url="http://127.0.0.1:9/refunds"))
    book = Book()
    book.granted()
    book.committed()
    book.compensate(contract=refund)
    book.settle("doubted", UNDO)
    book.ms = clear_ms(book.step(UNDO)) + 1
    assert book.submit(AnswerProbe(RUN, UNDO, "found", book.ms, 1)).verdict == Settled("applied", joined=False)
    book.granted()
    assert wrote(book.compensate(contract=refund)) == ["step_committed", "step_compensated"]
    lawful(book)


def test_a_frozen_run_is_still_asked_about() -> None:
    book = Book()
    book.granted()
    book.admit(contract=ASKABLE)
    book.admit("mail", KEYED)  # type: ignore[arg-type]
    book.settle("unsent", "mail")  # type: ignore[arg-type]
    book.settle("applied", "mail")  # type: ignore[arg-type]
    assert book.head.frozen == "diverged"
    book.settle("doubted")
    after_lag(book)
    assert answered(book, "found").verdict == Settled("applied", joined=False)


def test_where_the_memory_begins_at_the_end_of_a_call_a_replay_waits_until_no_older_attempt_can_land() -> None:
    contract = KEYED._replace(ttl_from="completed")
    book = Book()
    book.granted()
    book.admit(contract=contract)
    book.die()
    decision = book.admit(contract=contract)
    until = book.step().attempts[0].deadline_ms
    assert decision.verdict == Wait("step_pending", "older_attempt", until, PAY) and wrote(decision) == ["step_doubted"]
    book.ms = until
    book.granted()
    assert isinstance(book.admit(contract=contract).verdict, Send)


def test_an_independent_tool_that_is_held_does_not_hold_the_runs_other_steps() -> None:
    book = Book()
    book.granted()
    book.admit(contract=KEYLESS._replace(independent=True))
    book.settle("doubted")
    assert code(book.admit(contract=KEYLESS)) == "step_held"
    assert book.head.held_steps == (PAY,) and book.head.holding == ()
    assert isinstance(book.admit("mail", KEYED).verdict, Send)  # type: ignore[arg-type]
    book.settle(step_id="mail")  # type: ignore[arg-type]
    assert code(book.complete()) == "unsettled_effects"
    lawful(book)
    book.release()
    assert book.head.state == "claimable"
    book.granted()
    book.release(reason="held")
    assert book.head.state == "held" and code(book.grant()) == "step_held", "nothing is left to do but to wait"
    book.ms = clear_ms(book.step()) + 1
    book.resolve("not_applied")
    assert book.head.state == "claimable"


def test_a_run_given_back_as_held_without_a_held_step_can_be_claimed() -> None:
    book = Book()
    book.granted()
    book.release(reason="held")
    assert book.head.state == "claimable"


def test_each_doubt_has_a_next_move_and_a_time() -> None:
    def move(book: Book, contract: Contract) -> tuple[str, int]:
        return next_move(book.step(), contract, book.now)

    book = doubtful()
    clear = clear_ms(book.step())
    assert move(book, ASKABLE) == ("probe", clear + 1)
    assert move(after_lag(doubtful(ASKABLE_KEYED)), ASKABLE_KEYED) == ("replay", 0)
    late = doubtful(KEYED._replace(ttl_from="completed"))
    until = late.step().attempts[0].deadline_ms
    assert move(late, KEYED._replace(ttl_from="completed")) == ("replay", until)
    held = doubtful(KEYLESS)
    assert move(held, KEYLESS) == ("person", clear_ms(held.step()) + 1)
    after_lag(book)
    for _ in range(3):
        book.ms = max(book.ms, book.head.probe_ms)
        answered(book, "unclear")
    assert book.step().state == "held" and move(book, ASKABLE) == ("probe", book.head.probe_ms)
    assert next_move(book.step()._replace(closed_by=UNDO), ASKABLE, book.now) == ("undo", 0)
    book.resolve("applied")
    assert move(book, ASKABLE) == ("", 0)


SOURCES = {"key": "k1", "args": {"cents": 5}}


@pytest.mark.parametrize(
    "status,body,word",
    [
        (200, {"data": [{"id": "a"}]}, "found"),
        (200, {"data": []}, "absent"),
        (200, {"data": [{"id": "a"}, {"id": "b"}]}, "many"),
        (200, {"data": [{"id": 7}]}, "unclear"),
        (200, {"data": None}, "unclear"),
        (200, None, "unclear"),
        (404, {"data": []}, "unclear"),
        (500, {"data": [{"id": "a"}]}, "unclear"),
        (None, {"data": []}, "absent"),
    ],
)
def test_an_answer_means_only_what_the_contract_can_tell_apart(status: int | None, body: Any, word: str) -> None:
    assert read_answer(PROBE, SOURCES, status, body) == word


def test_an_answer_that_fits_two_patterns_is_unclear_and_one_without_a_pattern_can_not_be_told() -> None:
    loose = PROBE._replace(absent=Pattern(0, (("data", "list"),)))
    assert read_answer(loose, SOURCES, 200, {"data": [{"id": "a"}]}) == "unclear"
    assert read_answer(loose, SOURCES, 200, {"data": [{"id": "a"}, {"id": "b"}]}) == "unclear"
    only_found = PROBE._replace(absent=None, many=None)
    assert read_answer(only_found, SOURCES, 200, {"data": []}) == "unclear"
    by_status = PROBE._replace(
        absent=Pattern(404), found=Pattern(0, (("reference", "{key}"), ("cents", "{args.cents}")))
    )
    assert read_answer(by_status, SOURCES, 404, None) == "absent"
    assert read_answer(by_status, SOURCES, 200, {"reference": "k1", "cents": 5}) == "found"
    assert read_answer(by_status, SOURCES, 200, {"reference": "k2", "cents": 5}) == "unclear"


def test_after_a_restore_an_answer_counts_only_if_it_speaks_of_the_sendings_that_were_lost_as_well() -> None:
    book = after_lag(doubtful())
    restored = restored_at(book)
    refused = answered(book, "absent")
    assert code(refused) == "moved" and not refused.events
    book.ms = restored + TIMEOUT_MS + LAG_MS + 1
    assert wrote(answered(book, "absent")) == ["step_presumed", "probe_answered"]
    assert [attempt.state for attempt in book.step().attempts] == ["absent", "absent"]
    lawful(book)


def restored_at(book: Book) -> int:
    """The store is restored from a backup as it stands; answers when that was."""
    book.ms += 1_000
    window = Recovery(book.ms - 500, book.ms - 500 + book.wall_offset, book.ms)
    book.view = book.view._replace(incarnation=1, recovery=window)
    return book.ms
