"""What attacks on the rules found, and the rigs after them: each test says what must hold, and its fault is mended."""

import decimal
import tomllib
from importlib import resources
from typing import Any

import pytest
from tests.protocol.driver import (
    HERE,
    KEYED,
    KEYLESS,
    MAIL,
    PAY,
    READ,
    REFUND,
    TIMEOUT_MS,
    UNDO,
    Book,
    code,
    wrote,
)

from tidefast.protocol.canonical import CanonicalError, canonical
from tidefast.protocol.commands import Admit
from tidefast.protocol.contract_table import parse_contract
from tidefast.protocol.contracts import contract_digest, render_request
from tidefast.protocol.ids import StepId
from tidefast.protocol.patterns import Pattern

LOOK = StepId("look")
HTTP = {"kind": "http", "url": "http://h/"}


def two_attempts(contract: Any = KEYED) -> Book:
    """Attempt 1 is lost with its instance, which lived after all; attempt 2 is out."""
    book = Book()
    book.granted()
    book.admit(contract=contract)
    book.die()
    book.admit(contract=contract, owner="boot-1+")
    assert [attempt.state for attempt in book.step().attempts] == ["lost", "out"]
    return book


# --- law 1, 9: a late word on an older attempt says nothing of a newer one


@pytest.mark.parametrize("retries", [0, 3])
def test_a_late_refusal_of_an_older_attempt_does_not_settle_a_newer_one_that_is_out(retries: int) -> None:
    book = two_attempts(KEYED._replace(retries=retries))
    book.settle("refused", attempt=1)
    assert book.step().state == "fenced" and book.step().attempts[1].state == "out"
    book.settle("applied", attempt=2)
    assert book.step().state == "committed" and not book.head.frozen


@pytest.mark.parametrize("late", ["refused", "unsent"])
def test_a_late_word_on_an_older_attempt_leaves_the_step_in_flight(late: str) -> None:
    book = two_attempts()
    book.settle(late, attempt=1)
    assert (code(book.admit(owner="boot-1+")), len(book.step().attempts)) == ("Wait", 2)


def test_a_late_refusal_of_an_older_attempt_does_not_settle_a_newer_doubt() -> None:
    book = two_attempts()
    book.settle("doubted", attempt=2)
    book.settle("refused", attempt=1)
    assert book.step().state == "in_doubt" and book.step().attempts[1].state == "doubted"


# --- law 7 and the hold


@pytest.mark.parametrize("outcome", [None, "unlisted"])
def test_a_read_restated_as_an_effect_waits_like_an_effect(outcome: str | None) -> None:
    book = Book()
    book.granted()
    book.admit(LOOK, READ)
    book.settle("unsent", LOOK)
    book.admit(MAIL, KEYLESS)
    if outcome:
        book.granted()
        book.settle(outcome, MAIL)
    else:
        book.granted()
    decision = book.admit(LOOK, KEYED)
    assert code(decision) in ("Wait", "step_held") and not decision.events


# --- law 1: undo of an undo


def test_an_undo_can_not_be_undone_while_its_target_is_booked_as_compensated() -> None:
    book = Book()
    book.granted()
    book.committed()
    book.compensate()
    book.settle(step_id=UNDO)
    assert not book.compensate(UNDO, REFUND).events


# --- law 14: evidence is dated


@pytest.mark.parametrize("looked", [None, 10**12])
def test_a_word_that_nothing_happened_says_when_its_speaker_looked(looked: int | None) -> None:
    book = Book()
    book.granted()
    book.admit(contract=KEYLESS)
    book.settle("unlisted")
    book.ms += TIMEOUT_MS + 1
    assert not book.resolve("not_applied", looked_at_ms=looked).events


# --- law 5: an undo's stored call


def test_an_undo_that_was_refused_once_is_not_restated_with_other_arguments() -> None:
    book = Book()
    book.granted()
    book.committed()
    retried = REFUND._replace(retries=2)
    book.compensate(contract=retried)
    book.settle("refused", UNDO)
    before = book.step(UNDO).call_digest
    book.compensate(contract=retried, args={"charge": "another"})
    assert book.step(UNDO).call_digest == before


# --- law 13: a way forward


def test_a_read_that_is_refused_after_a_doubt_gets_its_answer() -> None:
    book = Book()
    book.granted()
    book.admit(LOOK, READ)
    book.settle("doubted", LOOK)
    book.ms += TIMEOUT_MS + 1
    book.granted()
    book.admit(LOOK, READ)
    book.settle("refused", LOOK, 2)
    assert book.step(LOOK).state == "rejected"


def test_a_diverged_step_said_to_have_applied_after_its_undo_leaves_a_run_that_can_end() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.settle("doubted")
    book.admit()
    book.settle(attempt=2)
    book.compensate()
    book.settle(step_id=UNDO)
    book.settle(attempt=1)
    assert book.head.frozen == "diverged"
    book.resolve("applied")
    book.thaw()
    book.admit(stored=True)
    book.compensate()
    book.resolve("compensated")
    book.fail()
    book.fail()
    assert book.head.end == "failed"


def test_an_undo_called_compensated_in_a_diverged_run_does_not_lock_its_target() -> None:
    book = Book()
    book.granted()
    book.committed()
    book.compensate()
    book.settle("unlisted", UNDO)
    diverge(book)
    book.resolve("compensated", UNDO)
    book.thaw()
    assert book.step(UNDO).state != "compensated" or book.step().closed_by is None


def diverge(book: Book) -> None:
    """As if another step had contradicted the books."""
    book.ms += TIMEOUT_MS + 1
    book.view = book.view._replace(run=book.head._replace(frozen="diverged"))


def test_a_local_value_takes_no_verdict() -> None:
    book = Book()
    book.granted()
    book.save_result("sum")
    book.view = book.view._replace(run=book.head._replace(frozen="diverged"))
    assert not book.resolve("applied", StepId("sum")).events


# --- law 17: told again


def test_a_contradiction_told_twice_is_written_once_and_does_not_freeze_a_thawed_run() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.settle("unsent")
    book.settle("applied")
    book.resolve("applied")
    book.thaw()
    assert not book.settle("applied").events and not book.head.frozen


def test_a_fail_told_twice_while_effects_are_open_hears_failing_again() -> None:
    book = Book()
    book.granted()
    book.admit()
    first = book.fail()
    again = book.fail()
    assert (code(again), wrote(again)) == (code(first), [])


def test_a_release_told_twice_hears_the_same_answer() -> None:
    book = Book()
    right = book.granted()
    first, again = book.release(right).verdict, book.release(right).verdict
    assert (first.state, first.seq) == (again.state, again.seq)  # type: ignore[union-attr]


def test_an_apply_told_again_while_the_run_is_frozen_hears_its_receipt() -> None:
    book = Book()
    book.granted()
    book.committed()
    book.view = book.view._replace(run=book.head._replace(frozen="drift"))
    assert code(book.admit()) == "Answer"


# --- decide never raises; derived names are minted by the authority


@pytest.mark.parametrize("verb", ["fail", "grant", "settle", "release"])
def test_a_lone_surrogate_in_a_text_never_raises(verb: str) -> None:
    book = Book()
    book.granted()
    book.admit()
    match verb:
        case "fail":
            book.fail(error="\udcff")
        case "grant":
            book.preempt()
            book.grant("\udcff")
        case "settle":
            book.settle("doubted", reason="\udcff")
        case _:
            book.release(reason="error", detail="\udcff")


@pytest.mark.parametrize("verb", ["admit", "save_result"])
def test_a_caller_can_not_mint_the_name_of_an_undo(verb: str) -> None:
    book = Book()
    book.granted()
    book.committed()
    decision = book.admit(UNDO, REFUND) if verb == "admit" else book.save_result(UNDO)
    assert not decision.events


# --- canonical and contracts


@pytest.mark.parametrize("value", ["\ud800", ["\ud800"], {"\ud800": 1}, {"a": "\ud800"}])
def test_a_lone_surrogate_has_no_canonical_form(value: Any) -> None:
    with pytest.raises(CanonicalError):
        canonical(value)


def test_the_programs_decimal_precision_does_not_change_a_numbers_text() -> None:
    with decimal.localcontext(decimal.Context(prec=5)):
        assert canonical(0.1234567890123) == "0.1234567890123"


@pytest.mark.parametrize("wanted,found", [(True, 1), (1, True), (0, False)])
def test_a_refusals_member_is_matched_with_its_exact_type(wanted: Any, found: Any) -> None:
    assert not Pattern(400, (("declined", wanted),)).matches(400, {"declined": found})


def test_an_address_that_can_not_be_parsed_is_a_problem_and_not_an_exception() -> None:
    contract, problems = parse_contract("t", {**HTTP, "url": "http://["})
    assert contract is None and {problem.member for problem in problems} == {"url"}


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("more", [{"key": "header:K", "key_ttl": "200000000d"}, {"args": deep(31)}])
def test_a_contract_that_parses_can_be_stored(more: dict[str, Any]) -> None:
    contract, problems = parse_contract("t", {**HTTP, **more})
    assert problems or (contract is not None and contract_digest(contract))


@pytest.mark.parametrize("template", ["{body.id}", "{receipt}x{nope.y}"])
def test_a_template_that_can_never_be_filled_is_a_problem_at_the_start(template: str) -> None:
    _, problems = parse_contract("t", {**HTTP, "undo": {"tool": "u", "args": {"a": template}}})
    assert {problem.member for problem in problems} == {"undo.args"}


def test_a_nested_argument_in_the_url_of_a_bodyless_call_counts_as_placed() -> None:
    contract, _ = parse_contract("t", {**HTTP, "method": "GET", "url": "http://h/{args.a.b}"})
    assert contract is not None and render_request(contract, {"a": {"b": 7}}, "").url == "http://h/7"


def test_every_word_of_the_demos_contracts_is_known() -> None:
    text = (resources.files("tidefast.demo") / "tools.toml").read_text(encoding="utf-8").replace("MAIL_PORT", "2525")
    table = tomllib.loads(text)
    for name, tool in table["tools"].items():
        assert parse_contract(name, tool)[1] == ()


# --- the second look


@pytest.mark.parametrize("late", [1, 2])
def test_two_answers_to_a_read_are_no_contradiction(late: int) -> None:
    """A read changes nothing, so a 404 and a 200 of two of its attempts are both true."""
    book = Book()
    book.granted()
    book.admit(LOOK, READ)
    book.die()
    book.admit(LOOK, READ, owner="boot-1+")
    book.settle("refused", LOOK, 3 - late)
    book.settle("applied", LOOK, late)
    assert not book.head.frozen


def test_a_step_whose_attempt_is_known_to_have_applied_is_never_sent_again_not_even_after_a_thaw() -> None:
    book = Book()
    book.granted()
    book.admit(contract=KEYLESS)
    book.settle("unsent")
    book.settle("applied")
    book.thaw()
    assert code(book.admit(contract=KEYLESS)) != "Send"


def test_no_run_completes_over_a_rejected_step_that_is_known_to_have_applied() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.settle("refused")
    book.settle("applied")
    book.thaw()
    assert code(book.complete()) != "Done"


@pytest.mark.parametrize("found", [2**60, "\udcff", 1e20])
def test_an_answer_that_is_not_i_json_matches_no_refusal_and_raises_nothing(found: Any) -> None:
    assert not Pattern(400, (("code", 1),)).matches(400, {"code": found})


def test_an_owner_that_says_lost_has_spoken_and_is_not_booked_as_silent() -> None:
    book = Book()
    book.granted()
    book.admit(contract=KEYLESS)
    book.settle("doubted", reason="lost")
    assert book.step().attempts[0].state == "doubted"


def test_progress_ends_the_pause_that_was_laid_on_a_run_without_any() -> None:
    book = Book()
    for _ in range(9):
        book.granted()
    book.checkpoint()
    book.release()
    assert code(book.grant()) == "Granted"


def test_a_refusal_that_settles_the_older_attempts_settles_them_when_tries_are_left_too() -> None:
    retried = KEYED._replace(retries=3)
    book = Book()
    book.granted()
    book.admit(contract=retried)
    book.settle("doubted")
    book.ms += TIMEOUT_MS + 1
    book.granted()
    book.admit(contract=retried)
    book.settle("refused", attempt=2)
    assert book.step().state == "pending"
    book.admit(contract=retried)
    book.settle("unsent", attempt=3)
    assert book.step().state == "pending"


def test_a_replay_is_as_short_as_the_timeout_that_its_window_was_judged_by() -> None:
    book = Book()
    book.granted()
    book.admit(contract=KEYED)
    book.settle("doubted")
    longer = KEYED._replace(timeout_ms=3_600_000)
    decision = book.admit(contract=longer)
    assert decision.verdict.deadline_ms - book.ms <= KEYED.timeout_ms  # type: ignore[union-attr]
    assert book.step().attempts[-1].deadline_ms == decision.verdict.deadline_ms  # type: ignore[union-attr]


def test_arguments_that_fit_no_contract_are_refused_before_an_intent_also_when_restated() -> None:
    book = Book()
    book.granted()
    command = Admit(book.right(), PAY, "charge", "{}", "d" * 64, KEYED, None, HERE, book.ms + 1, args_problem="no")
    assert code(book.submit(command)) == "invalid"
    book.admit(contract=KEYED)
    book.settle("unsent")
    book.granted()
    again = Admit(book.right(), PAY, "charge", "[]", "e" * 64, KEYED, None, HERE, book.ms + 1, args_problem="no")
    assert code(book.submit(again)) == "invalid"


# --- found by the simulation


def test_a_run_whose_undo_was_preempted_completes_when_the_next_pass_has_asked_for_the_undo() -> None:
    """A pass that starts from a checkpoint asks for the undo, not for the step; the run must not wait for that."""
    book = Book()
    book.granted()
    book.committed()
    book.checkpoint()
    book.granted()
    book.compensate()
    book.settle("applied", UNDO)
    assert book.step().state == "compensated"
    book.granted()
    assert code(book.complete()) == "unsettled_effects"
    assert code(book.complete(asked={UNDO})) == "Done"


# --- found by the exhaustive search


def test_an_owner_that_speaks_after_it_was_given_up_is_not_silent_and_its_step_can_be_resolved() -> None:
    book = Book()
    book.granted()
    book.admit(MAIL, KEYLESS)
    book.ms += TIMEOUT_MS + 1
    book.granted()
    assert code(book.admit(MAIL, KEYLESS)) == "step_held"
    assert code(book.resolve("not_applied", MAIL)) == "step_in_flight", "its owner has not spoken yet"
    book.settle("doubted", MAIL)
    assert (book.step(MAIL).state, book.step(MAIL).attempts[0].state) == ("held", "doubted")
    assert not wrote(book.settle("doubted", MAIL))
    assert code(book.resolve("not_applied", MAIL)) == "Settled"


def test_an_older_owner_that_speaks_late_leaves_a_newer_attempt_in_flight() -> None:
    book = two_attempts()
    book.settle("doubted", attempt=1)
    assert (book.step().state, [a.state for a in book.step().attempts]) == ("fenced", ["doubted", "out"])


# --- found by the exhaustive search after the first landing


def diverged_after_its_undo() -> Book:
    """Pay is lost, replayed and undone; the run is complete; then the first attempt's own receipt comes."""
    book = Book()
    book.granted()
    book.admit()
    book.settle("doubted")
    book.admit()
    book.settle(attempt=2)
    book.compensate()
    book.settle(step_id=UNDO)
    book.complete(asked={PAY, UNDO})
    book.settle(attempt=1)
    assert (book.head.end, book.head.diverged) == ("completed", (PAY,))
    return book


@pytest.mark.parametrize("verdict", ["applied", "compensated"])
def test_a_verdict_in_a_diverged_run_is_taken_of_the_step_that_diverged_and_of_no_other(verdict: Any) -> None:
    book = diverged_after_its_undo()
    book.ms += TIMEOUT_MS + 1
    assert not book.resolve(verdict, UNDO).events
    assert book.step(UNDO).state == "committed"


def test_a_committed_step_whose_other_attempt_applied_too_stays_committed_by_the_word_of_a_person() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.settle("unsent")
    book.admit()
    book.settle(attempt=2)
    book.settle("applied", attempt=1)
    assert (book.head.frozen, book.step().state) == ("diverged", "committed")
    assert code(book.thaw()) == "run_frozen"
    book.resolve("applied")
    assert (book.step().state, book.head.unsettled, book.head.diverged) == ("committed", (), ())
    book.thaw()
    assert code(book.complete(asked={PAY})) == "Done"
