"""Model hops in the books: asked again so often, and nothing in an answer is acted on before it is committed."""

import pytest
from tests.protocol.driver import KEYED, LEASE_MS, TIMEOUT_MS, Book, code, wrote

from tidefast.protocol.commands import SaveResult
from tidefast.protocol.contracts import Contract
from tidefast.protocol.ids import StepId, asked_by
from tidefast.protocol.machine import needs, with_target
from tidefast.protocol.verdicts import Refused, Send

PLAN = StepId("plan")
CALL = StepId("plan~0")
HOP = Contract("model:m", "model", "model", timeout_ms=TIMEOUT_MS, retries=2, stored_failures=True)


def say(book: Book, outcome: str) -> list[str]:
    """What became of the newest asking."""
    return wrote(book.settle(outcome, PLAN, attempt=len(book.step(PLAN).attempts)))


def asked(outcome: str | None = "applied") -> Book:
    book = Book()
    book.granted()
    assert isinstance(book.admit(PLAN, contract=HOP).verdict, Send)
    if outcome is not None:
        say(book, outcome)
    return book


def test_the_origin_of_a_model_is_its_name_so_that_another_upstream_may_answer() -> None:
    assert HOP.origin == "model:model:m"


def test_a_model_is_asked_again_so_often_and_then_given_up_without_a_person() -> None:
    book = asked("doubted")
    for _ in range(2):
        assert wrote(book.admit(PLAN, contract=HOP)) == ["step_fenced"]
        say(book, "doubted")
    decision = book.admit(PLAN, contract=HOP)
    assert wrote(decision) == ["step_withdrawn"]
    assert isinstance(decision.verdict, Refused)
    assert (decision.verdict.code, decision.verdict.reason) == ("step_rejected", "unanswered")
    step = book.step(PLAN)
    assert (step.state, step.reason, [a.state for a in step.attempts]) == ("rejected", "unanswered", ["doubted"] * 3)
    assert code(book.admit(PLAN, contract=HOP)) == "step_rejected"
    assert book.head.unsettled == ()


def test_an_asking_whose_gateway_died_counts_like_one_whose_answer_was_cut() -> None:
    book = asked(None)
    for _ in range(2):
        book.ms += TIMEOUT_MS
        book.granted()
        assert wrote(book.admit(PLAN, contract=HOP)) == ["step_doubted", "step_fenced"]
    book.ms += TIMEOUT_MS
    book.granted()
    assert wrote(book.admit(PLAN, contract=HOP)) == ["step_doubted", "step_withdrawn"]


def test_an_asking_that_surely_was_not_billed_counts_for_nothing() -> None:
    book = asked("unsent")
    for _ in range(9):
        assert wrote(book.admit(PLAN, contract=HOP)) == ["step_fenced"]
        say(book, "unsent")
    assert book.step(PLAN).state == "pending"


def test_an_answer_that_comes_after_the_giving_up_is_recorded_and_moves_nothing() -> None:
    book = asked("doubted")
    for _ in range(2):
        book.admit(PLAN, contract=HOP)
        say(book, "doubted")
    book.admit(PLAN, contract=HOP)
    assert wrote(book.settle("applied", PLAN, attempt=1)) == ["late_receipt"]
    assert (book.step(PLAN).state, book.head.frozen) == ("rejected", "")


def test_an_answer_finished_under_a_lost_lease_is_joined_by_the_successor_and_not_asked_again() -> None:
    book = asked(None)
    book.ms += LEASE_MS
    book.lapse()
    book.granted()
    assert wrote(book.settle("applied", PLAN)) == ["step_applied"]
    assert wrote(book.admit(PLAN, contract=HOP)) == ["step_committed"]


@pytest.mark.parametrize("outcome", [None, "doubted", "unsent"])
def test_no_call_of_an_answer_is_admitted_before_its_model_step_is_committed(outcome: str | None) -> None:
    book = asked(outcome)
    decision = book.admit(CALL)
    assert isinstance(decision.verdict, Refused)
    assert (decision.verdict.code, decision.verdict.reason) == ("invalid", "answer_not_committed")
    assert decision.events == ()
    local = book.submit(SaveResult(book.right(), CALL, "1"))
    assert code(local) == "invalid"


def test_an_applied_answer_of_an_older_epoch_is_no_ground_to_act_on_either() -> None:
    book = asked(None)
    book.ms += LEASE_MS
    book.lapse()
    book.granted()
    book.settle("applied", PLAN)
    assert code(book.admit(CALL)) == "invalid"
    book.admit(PLAN, contract=HOP)
    assert isinstance(book.admit(CALL).verdict, Send)


def test_a_committed_answer_lets_its_calls_out_and_only_its_calls() -> None:
    book = asked()
    assert isinstance(book.admit(CALL).verdict, Send)
    assert wrote(book.submit(SaveResult(book.right(), StepId("plan~1"), "1"))) == ["step_result"]
    for name in ("other~0", "plan~undo", "plan~0~0", "plan~x"):
        assert code(book.admit(StepId(name))) == "invalid"
    book.admit(StepId("pay"), contract=KEYED)
    assert code(book.admit(StepId("pay~0"))) == "invalid"


def test_a_call_of_an_answer_is_judged_with_the_step_that_asked_for_it() -> None:
    assert with_target(CALL) == (CALL, PLAN)
    assert asked_by(StepId("plan~12345")) is None
    book = asked()
    assert needs(SaveResult(book.right(), CALL, "1")).steps == (CALL, PLAN)
