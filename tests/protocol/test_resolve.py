"""A person's word: what it settles, when it is too early, and when it comes too late."""

from typing import Any

import pytest
from tests.protocol.driver import KEYED, KEYLESS, PAY, TIMEOUT_MS, UNDO, Book, code, wrote

from tidefast.protocol.ids import StepId
from tidefast.protocol.verdicts import Refused, Settled

NEXT = {"applied": "applied", "not_applied": "pending", "refused": "rejected", "compensated": "compensated"}


def doubtful(outcome: str = "doubted", contract: Any = KEYED) -> Book:
    book = Book()
    book.granted()
    book.admit(contract=contract)
    book.settle(outcome)
    return book


def diverged() -> Book:
    book = doubtful("unsent")
    book.settle()
    assert book.head.frozen == "diverged"
    return book


@pytest.mark.parametrize("verdict", sorted(NEXT))
@pytest.mark.parametrize("outcome", ["doubted", "unlisted"])
def test_a_verdict_on_a_step_in_doubt_or_held_is_recorded_with_who_and_why(verdict: str, outcome: str) -> None:
    book = doubtful(outcome)
    book.ms += TIMEOUT_MS + 1
    decision = book.resolve(verdict)
    assert decision.verdict == Settled(NEXT[verdict], joined=False)  # type: ignore[arg-type]
    assert wrote(decision) == ["step_resolved"] and book.step().state == NEXT[verdict]
    assert (book.log[-1].data["by"], book.log[-1].data["note"]) == ("ops", "looked")
    again = book.resolve(verdict)
    assert again.verdict == decision.verdict and not again.events


def test_an_applied_verdict_is_joined_and_heard_again_as_committed() -> None:
    book = doubtful()
    book.resolve("applied", receipt_json='{"body":1}')
    assert book.step().receipt_seq == book.log[-1].seq
    book.admit()
    assert book.resolve("applied").verdict == Settled("committed", joined=False)


@pytest.mark.parametrize("verdict", ["not_applied", "refused", "compensated"])
def test_it_did_not_happen_can_not_be_said_while_a_request_may_land(verdict: str) -> None:
    book = doubtful()
    deadline = book.step().attempts[0].deadline_ms
    book.ms = deadline
    decision = book.resolve(verdict)
    assert (code(decision), wrote(decision)) == ("step_in_flight", [])
    assert isinstance(decision.verdict, Refused) and decision.verdict.facts["until_ms"] == deadline


def test_it_happened_can_be_said_at_any_time() -> None:
    assert code(doubtful().resolve("applied")) == "Settled"


def test_a_look_before_the_last_deadline_proves_nothing_however_late_it_is_told() -> None:
    book = doubtful()
    book.ms += 10 * TIMEOUT_MS
    decision = book.resolve("not_applied", looked_at_ms=book.step().attempts[0].deadline_ms)
    assert (code(decision), wrote(decision)) == ("moved", [])


def test_a_person_who_looked_before_another_attempt_hears_that_it_moved() -> None:
    book = doubtful()
    book.admit()
    book.settle("doubted", attempt=2)
    book.ms += TIMEOUT_MS + 1
    decision = book.resolve("not_applied", expect_attempts=1)
    assert (code(decision), wrote(decision)) == ("moved", [])


def test_without_a_key_the_owner_of_a_lost_attempt_must_have_spoken_or_ended() -> None:
    book = Book()
    book.granted()
    book.admit(contract=KEYLESS)
    book.ms += TIMEOUT_MS + 1
    book.mark_lost()
    assert code(book.resolve("not_applied")) == "step_in_flight"
    book.die()
    assert code(book.resolve("not_applied")) == "Settled"


def test_with_a_key_a_silent_owner_changes_nothing() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.ms += TIMEOUT_MS + 1
    book.mark_lost()
    assert code(book.resolve("not_applied")) == "Settled"


@pytest.mark.parametrize("outcome", [None, "applied", "refused", "unsent"])
@pytest.mark.parametrize("verdict", sorted(NEXT))
def test_a_step_that_is_not_in_doubt_or_held_takes_no_verdict(outcome: str | None, verdict: str) -> None:
    book = Book()
    book.granted()
    book.admit()
    if outcome:
        book.settle(outcome)
    book.ms += TIMEOUT_MS + 1
    decision = book.resolve(verdict)
    assert (code(decision), wrote(decision)) == ("already_decided", [])


def test_an_undo_can_not_be_called_compensated_and_an_unknown_step_is_not_found() -> None:
    book = Book()
    book.granted()
    book.committed()
    book.compensate()
    book.settle("unlisted", UNDO)
    book.ms += TIMEOUT_MS + 1
    assert code(book.resolve("compensated", UNDO)) == "already_decided"
    assert code(book.resolve("applied", StepId("nope"))) == "not_found"


@pytest.mark.parametrize("verdict", ["applied", "compensated"])
def test_a_diverged_run_takes_applied_and_compensated_from_any_state(verdict: str) -> None:
    book = diverged()
    assert book.step().state == "pending"
    assert code(book.resolve(verdict)) == "Settled" and book.step().state == NEXT[verdict]
    book.thaw()
    assert not book.head.frozen and book.step(PAY).state == NEXT[verdict]


@pytest.mark.parametrize("verdict", ["not_applied", "refused"])
def test_a_diverged_run_takes_no_word_that_nothing_happened(verdict: str) -> None:
    assert code(diverged().resolve(verdict)) == "already_decided"


def test_a_step_said_not_to_have_happened_is_sent_again_under_its_key() -> None:
    book = doubtful(contract=KEYLESS)
    key = book.step().key
    book.ms += TIMEOUT_MS + 1
    book.resolve("not_applied")
    assert [attempt.state for attempt in book.step().attempts] == ["not_applied"]
    book.granted()
    assert code(book.admit(contract=KEYLESS)) == "Send" and book.step().key == key
