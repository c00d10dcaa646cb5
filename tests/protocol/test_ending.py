"""How runs fail and are cancelled: nothing new, settle, undo in the recorded order, end."""

from typing import Any

import pytest
from tests.protocol.driver import KEYLESS, MAIL, PAY, READ, REFUND, UNDO, Book, code, wrote

from tidefast.protocol.contracts import Undo
from tidefast.protocol.events import Event
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import Epoch, StepId, derived_id
from tidefast.protocol.verdicts import Done, Refused, Settled

HOTEL, CAR, LOOK = StepId("hotel"), StepId("car"), StepId("look")
ENDINGS = ("fail", "cancel")


def booked(*steps: StepId) -> Book:
    """A run that has committed these steps, each with a declared undo, and one mail that nobody can take back."""
    book = Book()
    book.granted()
    book.committed(MAIL, KEYLESS)
    for step in steps:
        book.committed(step)
    return book


def end(book: Book, how: str) -> Any:
    return book.fail() if how == "fail" else book.cancel()


def undo(book: Book, step: StepId, attempt: int = 1) -> None:
    assert code(book.compensate(step)) == "Send"
    assert book.settle(step_id=derived_id(step, "undo"), attempt=attempt).verdict == Settled("committed", joined=True)


def again(book: Book) -> Any:
    """The holder says once more that the run shall end, in other words than the first time."""
    if not book.head.is_live:
        book.granted()
    return book.fail(error="it was ending")


@pytest.mark.parametrize("how", ENDINGS)
def test_an_ending_run_records_what_it_undoes_newest_first_and_what_stays(how: str) -> None:
    book = booked(PAY, HOTEL, CAR)
    decision = end(book, how)
    assert decision.verdict.state == {"fail": "failing", "cancel": "cancelling"}[how]
    plan = decision.events[-1].data
    assert (plan["undo"], plan["kept"]) == ([CAR, HOTEL, PAY], [MAIL])
    assert book.head.to_undo == (CAR, HOTEL, PAY)


@pytest.mark.parametrize("how", ENDINGS)
def test_the_undos_are_admitted_in_the_recorded_order_only_and_then_the_run_ends(how: str) -> None:
    book = booked(PAY, HOTEL)
    end(book, how)
    if how == "cancel":
        book.granted()
    early = book.compensate(PAY)
    assert isinstance(early.verdict, Refused) and not early.events
    assert (early.verdict.code, early.verdict.reason) == ("unsettled_effects", "to_undo")
    assert early.verdict.facts == {"steps": [HOTEL, PAY]}
    assert again(book).verdict == Refused("unsettled_effects", "to_undo", {"steps": [HOTEL, PAY]})
    undo(book, HOTEL)
    assert again(book).verdict == Refused("unsettled_effects", "to_undo", {"steps": [PAY]})
    undo(book, PAY)
    assert wrote(again(book)) == [{"fail": "run_failed", "cancel": "run_cancelled"}[how]]
    assert {book.step(step).state for step in (PAY, HOTEL)} == {"compensated"}
    assert book.step(MAIL).state == "committed", "what no contract can undo stays"


@pytest.mark.parametrize("how", ENDINGS)
def test_a_step_in_doubt_is_on_the_list_and_leaves_it_when_it_turns_out_not_to_have_happened(how: str) -> None:
    book = booked(PAY)
    book.admit(HOTEL)
    book.settle("doubted", HOTEL)
    end(book, how)
    assert book.head.to_undo == (HOTEL, PAY)
    assert again(book).verdict == Refused("unsettled_effects", "unsettled", {"steps": [HOTEL]})
    book.ms += 60_000
    book.renew() if book.head.is_live else None
    book.preempt()
    book.granted()
    assert code(book.admit(HOTEL, stored=True)) == "Send"
    book.settle("refused", HOTEL, 2)
    assert book.step(HOTEL).state == "rejected" and book.head.to_undo == (PAY,)
    undo(book, PAY)
    assert again(book).verdict.state in ("failed", "cancelled")


def test_a_doubt_that_applied_is_joined_and_then_undone_in_its_turn() -> None:
    book = booked(PAY)
    book.admit(HOTEL)
    book.settle("doubted", HOTEL)
    book.fail()
    book.admit(HOTEL, stored=True)
    book.settle(step_id=HOTEL, attempt=2)
    undo(book, HOTEL)
    undo(book, PAY)
    assert wrote(again(book)) == ["run_failed"]


@pytest.mark.parametrize("how", ENDINGS)
def test_a_run_with_nothing_open_and_nothing_to_undo_ends_at_once(how: str) -> None:
    book = booked()
    book.admit(PAY)
    book.settle("unsent")
    decision = end(book, how)
    assert wrote(decision) == ["step_withdrawn", {"fail": "run_failed", "cancel": "run_cancelled"}[how]]
    assert book.head.state == {"fail": "failed", "cancel": "cancelled"}[how] and not book.head.is_live


def test_cancelling_ends_the_lease_at_once_and_its_holder_starts_nothing_more() -> None:
    book = booked(PAY)
    right = book.right()
    book.admit(HOTEL)
    assert wrote(book.cancel()) == ["lease_preempted", "run_cancelling"]
    assert code(book.admit(CAR, right=right)) == "stale_epoch"
    assert book.settle(step_id=HOTEL).verdict == Settled("applied", joined=False), "the late answer is kept"
    assert book.head.state == "cancelling"
    book.granted()
    assert code(book.admit(CAR)) == "run_ending"
    assert code(book.admit(HOTEL, stored=True)) == "Answer"
    undo(book, HOTEL)
    undo(book, PAY)
    assert wrote(again(book)) == ["run_cancelled"] and book.head.end == "cancelled"


def test_cancelling_a_frozen_and_paused_run_lets_it_go_to_its_end() -> None:
    book = booked(PAY)
    book.pause()
    book.freeze()
    assert wrote(book.cancel()) == ["run_thawed", "run_resumed", "lease_preempted", "run_cancelling"]
    book.granted()
    undo(book, PAY)
    assert wrote(again(book)) == ["run_cancelled"]


def test_a_diverged_run_is_not_cancelled_before_a_person_has_settled_what_contradicts() -> None:
    book = booked()
    book.admit()
    book.settle("refused")
    book.settle("applied")
    decision = book.cancel()
    assert (code(decision), wrote(decision)) == ("run_frozen", []) and book.head.diverged == (PAY,)


def test_cancelling_twice_or_what_fails_already_says_nothing_new() -> None:
    book = booked(PAY)
    first = book.cancel()
    assert book.cancel().verdict == Done("cancelling", first.verdict.seq, was_new=False)  # type: ignore[union-attr]
    failing = booked(PAY)
    failing.fail()
    assert failing.cancel().verdict == Done("failing", failing.head.ending_seq, was_new=False)
    ended = booked()
    ended.cancel()
    assert ended.cancel().verdict == Done("cancelled", ended.head.end_seq, was_new=False)


def test_the_holders_last_word_on_a_cancelled_run_may_be_repeated() -> None:
    book = booked(PAY)
    book.cancel()
    right = book.granted()
    undo(book, PAY)
    ended = book.fail(right, "cancelled")
    assert ended.verdict == Done("cancelled", book.head.end_seq)
    assert book.fail(right, "cancelled").verdict == Done("cancelled", book.head.end_seq, was_new=False)
    assert code(book.fail(right, "other")) == "run_ended"


def test_what_was_compensated_or_given_up_before_is_not_undone_again() -> None:
    book = booked(PAY, HOTEL, CAR)
    undo(book, HOTEL)
    book.compensate(CAR)
    book.settle("refused", derived_id(CAR, "undo"))
    book.resolve("refused", derived_id(CAR, "undo"))
    book.fail()
    assert book.head.to_undo == (PAY,)
    assert code(book.compensate(MAIL)) == "run_ending", "an ending run undoes what its list names and nothing else"


def test_an_undo_that_had_begun_is_finished_before_the_list_is_worked_off() -> None:
    book = booked(PAY, HOTEL)
    book.compensate(PAY)
    book.settle("doubted", UNDO)
    book.fail()
    assert book.head.to_undo == (HOTEL, PAY)
    assert again(book).verdict == Refused("unsettled_effects", "unsettled", {"steps": [PAY, UNDO]})
    assert code(book.compensate(PAY)) == "Send"
    book.settle(step_id=UNDO, attempt=2)
    undo(book, HOTEL)
    assert wrote(again(book)) == ["run_failed"]


def test_a_person_who_calls_an_undo_refused_takes_its_step_off_the_list() -> None:
    book = booked(PAY, HOTEL)
    book.fail()
    book.compensate(HOTEL)
    book.settle("refused", derived_id(HOTEL, "undo"))
    assert again(book).verdict.reason == "unsettled" and book.head.held_steps == (derived_id(HOTEL, "undo"),)
    book.resolve("refused", derived_id(HOTEL, "undo"))
    assert book.head.to_undo == (PAY,)
    undo(book, PAY)
    assert wrote(again(book)) == ["run_failed"] and book.step(HOTEL).state == "committed"


def test_a_preempted_undo_of_an_ending_run_is_finished_under_its_key_by_the_next_holder_and_the_one_after() -> None:
    book = booked(PAY)
    book.fail()
    book.compensate(PAY)
    for attempt in (2, 3):
        book.die(sorted(book.view.instances)[0])
        book.granted()
        assert code(book.compensate(PAY, owner=sorted(book.view.instances)[0])) == "Send"
        assert len(book.step(UNDO).attempts) == attempt and len({book.step(UNDO).key}) == 1
    book.settle(step_id=UNDO, attempt=3)
    assert wrote(again(book)) == ["run_failed"] and book.step().state == "compensated"


# --- an undo that can't be written


@pytest.mark.parametrize("why", ["tool_gone", "undo_unwritten"])
def test_an_ending_run_holds_an_undo_that_can_not_be_written_and_a_person_settles_it(why: str) -> None:
    book = booked(PAY)
    book.fail()
    other: dict[str, Any] = {"contract": None} if why == "tool_gone" else {"problem": "the receipt has no body.id"}
    decision = book.compensate(PAY, **other)
    assert (code(decision), wrote(decision)) == ("step_held", ["undo_begun", "step_held"])
    held = book.step(UNDO)
    assert (held.state, held.reason, held.attempts, held.undo_of) == ("held", why, (), PAY)
    book.release()
    assert code(book.grant()) == "step_held"
    book.resolve("applied", UNDO)
    book.granted()
    assert wrote(book.compensate(PAY, **other)) == ["step_committed", "step_compensated"]
    assert wrote(again(book)) == ["run_failed"]
    assert book.refold().run == book.head


def test_an_undo_that_was_held_unwritten_goes_out_once_it_can_be_written() -> None:
    book = booked(PAY)
    book.fail()
    book.compensate(PAY, contract=None)
    book.resolve("not_applied", UNDO)
    assert book.step(UNDO).state == "pending"
    assert again(book).verdict == Refused("unsettled_effects", "unsettled", {"steps": [PAY, UNDO]})
    assert code(book.admit(UNDO, REFUND, stored=True)) == "not_found", "there is no stored call to be asked for"
    assert wrote(book.compensate(PAY, contract=None)) == ["step_held"], "the hold is said again"
    book.resolve("not_applied", UNDO)
    assert wrote(book.compensate(PAY)) == ["step_fenced"]
    book.settle(step_id=UNDO)
    assert wrote(again(book)) == ["run_failed"]


def test_while_the_run_goes_on_its_agent_hears_why_an_undo_can_not_be_written() -> None:
    book = booked(PAY)
    decision = book.compensate(PAY, problem="the receipt has no body.id")
    assert isinstance(decision.verdict, Refused) and not decision.events
    assert (decision.verdict.code, decision.verdict.reason) == ("invalid", "undo_args")


# --- an undo that the agent gives


def test_an_undo_may_be_given_for_a_step_whose_contract_declares_none() -> None:
    book = booked()
    book.compensate(MAIL, REFUND, {"to": "a"}, is_given=True)
    book.settle(step_id=derived_id(MAIL, "undo"))
    assert book.step(MAIL).state == "compensated"


def test_another_given_undo_of_the_same_step_is_a_conflict_and_sends_nothing() -> None:
    book = booked(PAY)
    book.compensate(PAY, REFUND, {"cents": 1}, is_given=True)
    other = book.compensate(PAY, REFUND, {"cents": 2}, is_given=True)
    assert (code(other), wrote(other)) == ("step_conflict", [])
    assert code(book.compensate(PAY, REFUND, {"cents": 1}, is_given=True)) == "Wait"
    book.settle("doubted", UNDO)
    book.fail()
    assert code(book.compensate(PAY)) == "Send", "unasked, the stored one is finished"


def test_facts_of_another_run_are_never_undone_and_a_reading_has_nothing_to_undo() -> None:
    book = booked()
    book.admit(LOOK, READ._replace(undo=Undo("refund", {})))
    book.settle(step_id=LOOK)
    assert code(book.compensate(StepId("of-another-run"))) == "already_decided"
    assert wrote(book.fail()) == ["run_failed"]


def test_an_event_that_a_log_has_of_an_ending_is_read_back_as_it_was_written() -> None:
    book = booked(PAY)
    book.cancel()
    view = book.refold()
    assert view.run == book.head
    assert evolve(view, Event(book.head.seq + 1, 1, "run_resumed", Epoch(0), None, "{}")).run is not None


def test_a_held_step_that_holds_nothing_else_does_hold_a_run_that_is_ending() -> None:
    book = Book()
    book.granted()
    book.admit(MAIL, KEYLESS._replace(independent=True))
    book.settle("unlisted", MAIL)
    assert book.head.holding == ()
    book.fail()
    book.release()
    assert (book.head.state, code(book.grant())) == ("held", "step_held")
    book.resolve("applied", MAIL)
    book.granted()
    assert code(book.admit(MAIL, stored=True)) == "Answer"
    assert wrote(again(book)) == ["run_failed"]
