"""Found between parts that were built at once: probes, endings, undos, the window after a restore."""

from typing import Any

import pytest
from tests.protocol.driver import KEYED, KEYLESS, PAY, READ, REFUND, RUN, TIMEOUT_MS, UNDO, Book, code, wrote

from tidefast.protocol.commands import AnswerProbe
from tidefast.protocol.contracts import Probe
from tidefast.protocol.doubt import clear_ms
from tidefast.protocol.ids import StepId
from tidefast.protocol.laws import History, judge
from tidefast.protocol.patterns import Pattern
from tidefast.protocol.records import Recovery
from tidefast.protocol.verdicts import Refused, Wait

TWO = StepId("two")
ASKED = KEYLESS._replace(
    undo=KEYED.undo,
    probe=Probe(Pattern(0, (("id", "string"),)), Pattern(404), lag_ms=10_000, url="http://127.0.0.1:9/sent"),
)


def answered(book: Book, word: Any, step: StepId = PAY) -> list[str]:
    """The provider's word on a step, asked for as soon as it may be."""
    book.ms = max(book.ms, clear_ms(book.step(step)) + 1)
    return wrote(book.submit(AnswerProbe(RUN, step, word, book.ms, len(book.step(step).attempts))))


def restored(book: Book, *, after_ms: int = 10_000) -> None:
    """The books stand as a backup holds them: what came in the last `after_ms` is lost, and nobody has a lease yet."""
    point = book.ms
    book.ms += after_ms
    window = Recovery(point, point + book.wall_offset, book.ms)
    book.view = book.view._replace(incarnation=1, recovery=window)
    book.die()
    book.preempt()


@pytest.mark.parametrize("how", ["unsent", "refused", "absent", "not_applied"])
@pytest.mark.parametrize("ends_by", ["fail", "cancel"])
def test_an_ending_run_withdraws_what_turned_out_not_to_have_happened_and_undoes_the_rest(
    how: Any, ends_by: str
) -> None:
    book = Book()
    book.granted()
    book.committed()
    book.admit(TWO, ASKED._replace(retries=3))
    if how in ("absent", "not_applied"):
        book.settle("unlisted", TWO)
    getattr(book, ends_by)()
    assert book.head.to_undo == (TWO, PAY)
    if how == "absent":
        answered(book, "absent", TWO)
    elif how == "not_applied":
        book.ms = clear_ms(book.step(TWO)) + 1
        book.resolve("not_applied", TWO)
    else:
        book.settle(how, TWO)
    assert book.step(TWO).state == "pending"
    book.ms += TIMEOUT_MS
    book.granted()
    left = book.fail(error="again").verdict
    assert isinstance(left, Refused) and (left.reason, left.facts["steps"]) == ("to_undo", [PAY])
    assert (book.step(TWO).state, book.head.to_undo) == ("rejected", (PAY,))
    assert code(book.compensate()) == "Send"
    book.settle(step_id=UNDO)
    book.fail(error="again")
    assert book.head.end == ("failed" if ends_by == "fail" else "cancelled")
    lawful(book)


def test_a_step_that_is_being_undone_is_not_withdrawn_before_its_undo_is_settled() -> None:
    book = Book()
    book.granted()
    book.admit(contract=KEYED._replace(undo_safe_if_absent=True))
    book.ms = book.step().attempts[0].deadline_ms + 1
    book.mark_lost()
    book.granted()
    book.fail()
    book.compensate()
    book.settle("unsent")
    assert (book.step().state, book.step().closed_by) == ("pending", UNDO)
    book.fail(error="again")
    assert book.step().state == "pending"
    book.settle(step_id=UNDO)
    book.fail(error="again")
    assert (book.step().state, book.head.end) == ("compensated", "failed")
    lawful(book)


@pytest.mark.parametrize("outcome", ["refused", "unsent"])
def test_an_undo_that_was_refused_for_good_is_not_asked_about_and_never_sent_again_by_itself(outcome: str) -> None:
    refund = REFUND._replace(probe=ASKED.probe)
    book = Book()
    book.granted()
    book.committed()
    book.compensate(contract=refund)
    book.settle(outcome, UNDO)
    assert book.step(UNDO).state == ("held" if outcome == "refused" else "pending")
    assert book.head.probe_ms == 0 and not answered(book, "absent", UNDO)


def test_a_cancel_between_a_restore_and_the_next_grant_withdraws_nothing_that_may_have_been_sent() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.settle("unsent")
    restored(book)
    assert wrote(book.cancel()) == ["run_cancelling"]
    book.granted()
    assert wrote(book.admit(stored=True, owner="boot-1+")) == ["step_presumed", "step_fenced"]
    lawful(book)


@pytest.mark.parametrize("verdict,state", [("not_applied", "pending"), ("refused", "rejected")])
def test_an_undo_without_a_call_takes_a_verdict_in_the_window_after_a_restore(verdict: Any, state: str) -> None:
    book = Book()
    book.granted()
    book.committed()
    book.fail()
    book.compensate(contract=None)
    restored(book)
    assert wrote(book.resolve(verdict, UNDO)) == ["step_resolved"] and book.step(UNDO).state == state
    lawful(book)


def test_a_doubt_is_not_undone_while_a_sending_of_it_in_lost_commits_may_land() -> None:
    book = Book()
    book.granted()
    book.admit(contract=KEYLESS._replace(undo=KEYED.undo, undo_safe_if_absent=True))
    book.settle("doubted")
    restored(book, after_ms=10 * TIMEOUT_MS)
    until = book.ms + TIMEOUT_MS + 1
    book.granted()
    assert book.compensate(owner="boot-1+").verdict == Wait("step_pending", "older_attempt", until, PAY)
    book.ms = until
    assert code(book.compensate(right=book.granted(), owner="boot-1+")) == "Send"
    lawful(book)


@pytest.mark.parametrize("late_ms,state", [(0, "in_doubt"), (10_000, "rejected")])
def test_a_refused_replay_settles_no_older_request_that_may_still_queue_at_the_provider(
    late_ms: int, state: str
) -> None:
    contract = KEYED._replace(probe=ASKED.probe)
    book = Book()
    book.granted()
    book.admit(contract=contract)
    book.settle("doubted")
    book.ms = book.step().attempts[0].deadline_ms + late_ms
    book.granted()
    book.admit(contract=contract)
    book.settle("refused", attempt=2)
    assert book.step().state == state


def test_two_receipts_of_a_call_without_a_key_are_two_effects_and_a_person_hears_of_the_second_one_too() -> None:
    book = Book()
    book.granted()
    book.admit(contract=ASKED)
    book.settle("doubted")
    answered(book, "absent")
    book.granted()
    book.admit(contract=ASKED)
    book.settle(attempt=1)
    book.resolve("applied")
    book.thaw()
    assert wrote(book.settle(attempt=2)) == ["late_receipt", "run_frozen"]
    assert book.resolve("applied").events and book.head.diverged == (), "said before, but of another receipt"
    book.thaw()
    book.admit(contract=ASKED)
    assert code(book.complete()) == "Done"
    lawful(book)


def test_a_late_answer_to_a_reading_does_not_keep_the_next_one_from_being_committed() -> None:
    read = READ._replace(retries=3)
    book = Book()
    book.granted()
    book.admit(contract=read)
    book.settle("refused")
    book.settle("applied")
    book.admit(contract=read)
    book.settle("applied", attempt=2)
    assert book.step().state == "committed"


def test_an_undo_that_was_never_sent_is_not_restated_as_another_tool_by_a_plain_call() -> None:
    book = Book()
    book.granted()
    book.committed()
    book.compensate()
    book.settle("unsent", UNDO)
    book.granted()
    assert code(book.admit(UNDO, KEYLESS)) == "step_conflict"
    assert code(book.compensate()) == "Send"


def test_a_begun_undo_whose_tool_is_gone_is_held_where_the_run_ends_so_that_a_person_can_act() -> None:
    book = Book()
    book.granted()
    book.committed()
    book.compensate()
    book.settle("unsent", UNDO)
    assert code(book.compensate(contract=None)) == "not_found"
    book.fail()
    assert wrote(book.compensate(contract=None)) == ["step_held"]
    book.resolve("refused", UNDO)
    assert wrote(book.fail(error="again")) == ["run_failed"]
    lawful(book)


def lawful(book: Book) -> None:
    history = History(RUN, tuple(book.log), tuple(book.digests), book.view.namespace, book.contracts)
    assert judge(history) == ()
