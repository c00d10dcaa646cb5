"""Undoing what may not have happened: only where the contract calls that safe, and not while anything can land."""

import pytest
from tests.protocol.driver import KEYLESS, PAY, REFUND, RUN, TIMEOUT_MS, UNDO, Book, code, wrote

from tidefast.protocol.contracts import Undo
from tidefast.protocol.doubt import clear_ms
from tidefast.protocol.laws import History, judge
from tidefast.protocol.patterns import Pattern
from tidefast.protocol.verdicts import Refused, Send, Wait

SAFE = KEYLESS._replace(
    undo=Undo("refund", {"order": "{args.order}"}, Pattern(404)), undo_safe_if_absent=True, independent=True
)
NOTHING = '{"body":{"error":"no such charge"},"status":404}'


def doubtful(*, is_held: bool = False) -> Book:
    book = Book()
    book.granted()
    book.admit(contract=SAFE)
    book.settle("doubted")
    if is_held:
        assert code(book.admit(contract=SAFE)) == "step_held"
    return book


def cleared(book: Book) -> Book:
    book.ms = clear_ms(book.step()) + 1
    book.granted()
    return book


def lawful(book: Book) -> None:
    assert judge(History(RUN, tuple(book.log), tuple(book.digests), book.view.namespace, book.contracts)) == ()


@pytest.mark.parametrize("is_held", [False, True])
def test_a_doubt_is_undone_once_nothing_of_it_can_land_and_is_compensated_with_the_undos_commit(is_held: bool) -> None:
    book = doubtful(is_held=is_held)
    until = clear_ms(book.step()) + 1
    assert book.compensate().verdict == Wait("step_pending", "older_attempt", until, PAY)
    cleared(book)
    assert wrote(book.compensate()) == ["undo_begun", "step_fenced"]
    assert (book.step().state, book.step().closed_by) == ("in_doubt", UNDO) and book.head.holding == ()
    assert code(book.resolve("applied")) == "already_decided", "it is closed"
    assert wrote(book.settle(step_id=UNDO)) == ["step_committed", "step_compensated"]
    assert book.step().state == "compensated"
    lawful(book)


def test_the_undo_of_a_doubt_is_finished_by_the_next_holder_under_its_own_key() -> None:
    book = cleared(doubtful(is_held=True))
    first = book.compensate().verdict
    book.die()
    book.mark_lost(UNDO)
    book.granted()
    again = book.compensate().verdict
    assert isinstance(first, Send) and isinstance(again, Send) and first.key == again.key
    book.settle("applied", UNDO, attempt=2)
    assert book.step().state == "compensated"
    lawful(book)


def test_where_the_contract_does_not_call_it_safe_a_doubt_is_not_undone() -> None:
    book = Book()
    book.granted()
    book.admit(contract=SAFE._replace(undo_safe_if_absent=False))
    book.settle("doubted")
    cleared(book)
    assert code(book.compensate()) == "already_decided"


def test_it_waits_for_the_word_of_an_owner_that_lives() -> None:
    book = Book()
    book.granted()
    book.admit(contract=SAFE)
    book.ms += TIMEOUT_MS + 1
    book.mark_lost()
    cleared(book)
    assert code(book.compensate()) == "already_decided"
    book.settle("doubted")
    assert isinstance(book.compensate().verdict, Send)


@pytest.mark.parametrize("outcome", ["refused", "unlisted"])
def test_an_undo_that_found_nothing_is_held_under_that_name_and_the_doubt_stays_one(outcome: str) -> None:
    book = cleared(doubtful())
    book.compensate()
    assert wrote(book.settle(outcome, UNDO, receipt=NOTHING)) == ["step_held"]
    assert (book.step(UNDO).state, book.step(UNDO).reason) == ("held", "undo_nothing")
    book.resolve("refused", UNDO)
    assert (book.step().state, book.step().closed_by) == ("in_doubt", None)
    lawful(book)


@pytest.mark.parametrize("receipt", ["null", "7", '{"body":null,"status":null}'])
def test_an_answer_that_is_not_the_contracts_nothing_is_a_refusal_like_any_other(receipt: str) -> None:
    book = cleared(doubtful())
    book.compensate()
    book.settle("refused", UNDO, receipt=receipt)
    assert book.step(UNDO).reason == "undo_refused"


def test_an_ending_run_undoes_such_a_doubt_instead_of_asking_a_person() -> None:
    book = doubtful()
    assert wrote(book.fail()) == ["run_failing"] and book.head.to_undo == (PAY,)
    told = book.admit(contract=SAFE, stored=True).verdict
    assert isinstance(told, Refused) and (told.code, told.reason) == ("already_decided", "undo_instead")
    again = book.fail(error="again").verdict
    assert isinstance(again, Refused) and (again.reason, again.facts["steps"]) == ("to_undo", [PAY])
    cleared(book)
    book.compensate()
    book.settle(step_id=UNDO)
    book.fail(error="again")
    assert book.head.end == "failed" and book.step().state == "compensated"
    lawful(book)


def test_a_receipt_that_comes_while_the_doubt_is_being_undone_is_kept_and_the_undo_goes_on() -> None:
    book = cleared(doubtful())
    book.compensate(contract=REFUND)
    assert wrote(book.settle()) == ["step_applied"]
    assert wrote(book.settle(step_id=UNDO)) == ["step_committed", "step_compensated"]
    lawful(book)
