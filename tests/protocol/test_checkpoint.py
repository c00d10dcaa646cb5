"""Checkpoints: numbered, fenced, never ahead of an open effect."""

import pytest
from tests.protocol.driver import KEYLESS, MAIL, PAY, READ, Book, code, wrote

from tidefast.protocol.ids import StepId
from tidefast.protocol.verdicts import Done, Refused


def test_a_checkpoint_is_stored_with_its_digest_under_the_live_epoch() -> None:
    book = Book()
    book.granted()
    decision = book.checkpoint(1, '{"stage":"paid"}')
    assert decision.verdict == Done("saved", 3) and wrote(decision) == ["checkpoint_saved"]
    assert (book.head.checkpoint, book.head.checkpoint_seq, book.head.checkpoint_epoch) == (1, 3, 1)
    assert book.log[-1].data["state"] == {"stage": "paid"}


def test_numbers_may_skip_but_never_repeat_or_fall() -> None:
    book = Book()
    book.granted()
    book.checkpoint(4)
    for number in (4, 3, 0, -1):
        decision = book.checkpoint(number, '{"other":1}')
        assert (code(decision), wrote(decision)) == ("checkpoint_stale", [])
        assert isinstance(decision.verdict, Refused)
        assert decision.verdict.facts == {"number": number, "stored": 4}


def test_the_same_checkpoint_told_twice_is_stored_once() -> None:
    book = Book()
    book.granted()
    first = book.checkpoint(1)
    again = book.checkpoint(1)
    assert again.verdict == Done("saved", 3, was_new=False) and not again.events
    assert isinstance(first.verdict, Done) and first.verdict.seq == 3


def test_the_same_number_and_state_under_a_newer_epoch_is_another_checkpoint_and_stale() -> None:
    book = Book()
    book.granted()
    book.checkpoint(1)
    book.granted()
    assert code(book.checkpoint(1)) == "checkpoint_stale"


@pytest.mark.parametrize("outcome,state", [(None, "fenced"), ("doubted", "in_doubt"), ("unlisted", "held")])
def test_no_checkpoint_is_taken_over_a_mutating_step_whose_outcome_is_open(outcome: str | None, state: str) -> None:
    book = Book()
    book.granted()
    book.admit()
    if outcome is not None:
        book.settle(outcome)
    assert book.step().state == state
    decision = book.checkpoint()
    assert (code(decision), wrote(decision)) == ("unsettled_effects", [])
    assert isinstance(decision.verdict, Refused) and decision.verdict.facts == {"steps": [PAY]}


def test_an_applied_step_that_nobody_joined_and_a_pending_one_hold_the_checkpoint_back_too() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.granted()
    book.settle()
    assert book.step().state == "applied" and code(book.checkpoint()) == "unsettled_effects"
    book.admit()
    book.admit(MAIL, KEYLESS)
    book.settle("unsent", MAIL)
    assert book.step(MAIL).state == "pending" and code(book.checkpoint()) == "unsettled_effects"


def test_a_read_in_flight_holds_no_checkpoint_back() -> None:
    book = Book()
    book.granted()
    book.admit(StepId("look"), READ)
    assert code(book.checkpoint()) == "Done"


def test_a_failing_run_takes_no_checkpoint() -> None:
    book = Book()
    book.granted()
    book.admit(StepId("look"), READ)
    book.fail()
    decision = book.checkpoint()
    assert (code(decision), wrote(decision)) == ("run_ending", [])
