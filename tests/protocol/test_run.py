"""How runs begin and end: twice is one, and nothing ends over an open effect."""

import pytest
from tests.protocol.driver import KEYED, KEYLESS, MAIL, PAY, READ, UNDO, Book, code, wrote

from tidefast.protocol.ids import StepId
from tidefast.protocol.verdicts import Done, Refused

PLAIN = KEYED._replace(undo=None)


def test_creating_a_run_twice_is_one_run_and_another_input_or_agent_is_a_conflict() -> None:
    book = Book(created=False)
    first = book.create()
    assert first.verdict == Done("claimable", 1) and wrote(first) == ["run_created"]
    again = book.create()
    assert again.verdict == Done("claimable", 1, was_new=False) and not again.events
    for other in ({"input_json": "{}"}, {"agent": "other"}):
        decision = book.create(**other)
        assert (code(decision), wrote(decision)) == ("run_conflict", [])


def test_creating_an_ended_run_again_answers_where_it_stands() -> None:
    book = Book()
    book.granted()
    book.complete()
    assert book.create().verdict == Done("completed", 1, was_new=False)


def test_a_run_completes_with_its_result_and_the_verb_told_twice_hears_the_same() -> None:
    book = Book()
    right = book.granted()
    assert wrote(book.complete(right)) == ["run_completed"]
    again = book.complete(right)
    assert again.verdict == Done("completed", 3, was_new=False) and not again.events
    assert code(book.complete(right, '"other"')) == "run_ended"
    assert book.head.state == "completed" and not book.head.is_live


@pytest.mark.parametrize("verb", ["complete", "checkpoint"])
@pytest.mark.parametrize("state", ["fenced", "in_doubt", "held", "applied", "pending"])
def test_no_run_completes_over_an_open_effect(state: str, verb: str) -> None:
    book = Book()
    book.granted()
    book.admit()
    if state == "applied":
        book.granted()
    outcome = {"in_doubt": "doubted", "held": "unlisted", "applied": "applied", "pending": "unsent"}.get(state)
    if outcome:
        book.settle(outcome)
    assert book.step().state == state
    decision = getattr(book, verb)()
    assert (code(decision), wrote(decision)) == ("unsettled_effects", [])


def test_a_run_completes_over_a_refusal_because_a_refusal_is_an_answer() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.settle("refused")
    assert book.step().state == "rejected" and code(book.complete()) == "Done"


def test_a_step_that_an_older_epoch_settled_must_be_asked_for_or_dropped_by_name() -> None:
    book = Book()
    book.granted()
    book.committed()
    book.granted()
    decision = book.complete()
    assert isinstance(decision.verdict, Refused) and decision.verdict.reason == "not_asked"
    assert decision.verdict.facts == {"steps": [PAY]} and not decision.events
    book.complete(dropped={PAY, MAIL})
    assert book.log[-1].data["dropped"] == [PAY]


def test_a_step_answered_from_the_journal_or_settled_before_the_checkpoint_is_not_forgotten() -> None:
    book = Book()
    book.granted()
    book.committed()
    book.granted()
    assert code(book.complete(asked={PAY})) == "Done"
    other = Book()
    other.granted()
    other.committed()
    other.checkpoint()
    other.granted()
    assert code(other.complete()) == "Done"


def test_a_run_with_nothing_open_fails_at_once_and_hears_the_same_again() -> None:
    book = Book()
    right = book.granted()
    assert wrote(book.fail(right)) == ["run_failed"]
    again = book.fail(right)
    assert again.verdict == Done("failed", 3, was_new=False) and not again.events
    assert code(book.fail(right, "other")) == "run_ended"


def test_a_run_with_an_open_effect_is_failing_until_a_holder_has_settled_it() -> None:
    book = Book()
    book.granted()
    book.admit(contract=PLAIN)
    assert wrote(book.fail()) == ["run_failing"]
    assert code(book.admit(MAIL)) == "run_ending"
    assert code(book.save_result()) == "run_ending"
    assert code(book.complete()) == "run_ending"
    book.settle("doubted")
    book.release()
    assert book.head.state == "failing"
    book.ms += 1
    book.granted()
    assert code(book.admit(stored=True)) == "Send"
    book.settle(attempt=2)
    assert wrote(book.fail()) == ["run_failed"]


def test_what_was_never_sent_is_withdrawn_when_the_run_fails() -> None:
    book = Book()
    book.granted()
    for step, contract in ((PAY, KEYED), (MAIL, KEYLESS), (StepId("look"), READ)):
        book.admit(step, contract)
        book.settle("unsent", step)
    assert wrote(book.fail()) == ["step_withdrawn"] * 3 + ["run_failed"]
    assert {step.state for step in book.view.steps.values()} == {"rejected"}
    assert book.head.open == ()


def test_a_failing_run_sends_no_pending_step_again_but_finishes_an_undo() -> None:
    book = Book()
    book.granted()
    book.committed()
    book.compensate()
    book.settle("unsent", UNDO)
    book.admit(MAIL, KEYLESS)
    book.settle("unsent", MAIL)
    assert wrote(book.fail()) == ["step_withdrawn", "run_failing"], "a pending undo is not withdrawn"
    assert code(book.compensate()) == "Send"
    book.settle(step_id=UNDO, attempt=2)
    assert wrote(book.fail()) == ["run_failed"]
    assert book.step().state == "compensated"


def test_local_values_are_journaled_once_and_the_first_one_stands() -> None:
    book = Book()
    book.granted()
    first = book.save_result("sum", "7")
    assert (code(first), wrote(first)) == ("Answer", ["step_result"])
    book.granted()
    again = book.save_result("sum", "8")
    assert (code(again), wrote(again)) == ("Answer", [])
    assert book.log[book.step(StepId("sum")).receipt_seq - 1].data == {"value": 7}
    book.admit()
    assert code(book.save_result("pay")) == "step_conflict"
    assert code(book.admit(StepId("sum"))) == "step_conflict"
    assert code(book.admit(StepId("sum"), stored=True)) == "Answer"


def test_failing_with_another_error_while_effects_are_open_is_refused_and_names_them() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.fail()
    decision = book.fail(error="other")
    assert (code(decision), wrote(decision)) == ("unsettled_effects", [])
    assert isinstance(decision.verdict, Refused) and decision.verdict.facts == {"steps": [PAY]}
