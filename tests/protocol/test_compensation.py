"""Undo: a fenced step of its own, with a key of its own, once."""

import pytest
from tests.protocol.driver import KEYED, MAIL, NAMESPACE, PAY, READ, REFUND, RUN, TIMEOUT_MS, UNDO, Book, code, wrote

from tidefast.protocol.ids import StepId, step_key
from tidefast.protocol.verdicts import Answer, Send, Settled


def paid() -> Book:
    book = Book()
    book.granted()
    book.committed()
    return book


def test_an_undo_closes_its_target_and_has_a_key_of_its_own() -> None:
    book = paid()
    decision = book.compensate()
    assert wrote(decision) == ["undo_begun", "step_fenced"] and isinstance(decision.verdict, Send)
    assert decision.verdict.key == step_key(NAMESPACE, RUN, UNDO) != book.step().key
    assert (book.step().closed_by, book.step(UNDO).undo_of, book.step(UNDO).kind) == (UNDO, PAY, "undo")
    assert set(book.head.unsettled) == {PAY, UNDO}


def test_the_undos_commit_and_the_targets_compensation_are_one_transaction() -> None:
    book = paid()
    book.compensate()
    decision = book.settle(step_id=UNDO)
    assert decision.verdict == Settled("committed", joined=True)
    assert wrote(decision) == ["step_committed", "step_compensated"]
    assert book.step().state == "compensated" and book.head.unsettled == ()


@pytest.mark.parametrize("state", ["unknown", "fenced", "in_doubt", "rejected", "pending", "held", "read", "local"])
def test_there_is_nothing_to_undo_unless_the_books_know_the_effect(state: str) -> None:
    book = Book()
    book.granted()
    if state == "local":
        book.save_result("pay")
    elif state != "unknown":
        book.admit(PAY, READ if state == "read" else KEYED)
        outcome = {"in_doubt": "doubted", "rejected": "refused", "pending": "unsent", "held": "unlisted"}.get(state)
        book.settle("applied" if state == "read" else outcome) if outcome or state == "read" else None
    decision = book.compensate()
    assert (code(decision), wrote(decision)) == ("already_decided", [])


def test_an_applied_step_of_a_dead_epoch_can_be_undone_without_joining_it() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.granted()
    book.settle()
    assert code(book.compensate()) == "Send"
    book.settle(step_id=UNDO)
    assert book.step().state == "compensated"


def test_an_undo_whose_tool_is_gone_is_refused_and_closes_nothing() -> None:
    book = paid()
    decision = book.compensate(contract=None)
    assert (code(decision), wrote(decision)) == ("not_found", []) and book.step().closed_by is None


def test_an_undo_waits_for_other_steps_older_requests_like_any_mutating_step() -> None:
    book = paid()
    book.admit(MAIL)
    book.granted()
    assert (code(book.compensate()), book.step().closed_by) == ("Wait", None)


def test_two_holders_who_both_undo_make_one_undo() -> None:
    book = paid()
    first = book.compensate()
    assert isinstance(first.verdict, Send)
    assert code(book.compensate()) == "Wait"
    book.settle(step_id=UNDO)
    again = book.compensate()
    assert isinstance(again.verdict, Answer) and again.verdict.state == "committed" and not again.events


def test_a_preempted_undo_is_replayed_by_the_next_holder_under_the_same_key() -> None:
    book = paid()
    first = book.compensate()
    book.die()
    book.granted()
    second = book.compensate(owner="boot-1+")
    assert wrote(second) == ["step_doubted", "step_fenced"]
    assert isinstance(first.verdict, Send) and isinstance(second.verdict, Send)
    assert second.verdict.key == first.verdict.key and second.verdict.is_replay


def test_an_undo_applied_under_a_dead_epoch_is_joined_with_its_target() -> None:
    for ask in ("compensate", "admit"):
        book = paid()
        book.compensate()
        book.granted()
        assert book.settle(step_id=UNDO).verdict == Settled("applied", joined=False)
        assert book.step().state == "committed"
        decision = book.compensate() if ask == "compensate" else book.admit(UNDO, REFUND, stored=True)
        assert wrote(decision) == ["step_committed", "step_compensated"]


def test_a_refused_undo_is_held_and_a_person_who_calls_it_refused_opens_the_target_again() -> None:
    book = paid()
    book.compensate()
    decision = book.settle("refused", UNDO)
    assert decision.verdict == Settled("held", joined=False) and wrote(decision) == ["step_held"]
    assert book.step(UNDO).reason == "undo_refused"
    book.resolve("refused", UNDO)
    assert (book.step(UNDO).state, book.step().closed_by, book.head.unsettled) == ("rejected", None, ())


def test_a_refused_undo_with_tries_left_is_pending_and_goes_out_again() -> None:
    book = paid()
    retried = REFUND._replace(retries=1)
    book.compensate(contract=retried)
    book.settle("refused", UNDO)
    assert book.step(UNDO).state == "pending"
    assert code(book.compensate(contract=retried)) == "Send"


def test_a_person_may_say_that_the_undo_happened_and_the_next_holder_joins_it() -> None:
    book = paid()
    book.compensate()
    book.settle("unlisted", UNDO)
    book.resolve("applied", UNDO)
    assert wrote(book.compensate()) == ["step_committed", "step_compensated"]


def test_an_undo_that_did_not_happen_is_sent_again() -> None:
    book = paid()
    book.compensate()
    book.settle("unlisted", UNDO)
    book.ms += TIMEOUT_MS + 1
    book.resolve("not_applied", UNDO)
    book.granted()
    assert code(book.compensate()) == "Send"


def test_a_closed_step_takes_no_verdict_until_its_undo_is_refused() -> None:
    book = paid()
    book.compensate()
    for verdict in ("applied", "not_applied", "refused", "compensated"):
        decision = book.resolve(verdict)
        assert (code(decision), wrote(decision)) == ("already_decided", [])


def test_compensating_is_admitted_while_the_run_is_failing() -> None:
    book = paid()
    book.admit(StepId("look"), READ)
    book.fail()
    assert code(book.compensate()) == "Send"
