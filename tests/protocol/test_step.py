"""A step's life: each row of the table as (state, command) -> verdict, events, next state."""

from typing import Any

import pytest
from tests.protocol.driver import (
    HERE,
    KEYED,
    KEYLESS,
    LEASE_MS,
    MAIL,
    PAY,
    READ,
    RUN,
    TIMEOUT_MS,
    UNDO,
    Book,
    code,
    wrote,
)

from tidefast.protocol.commands import Admit
from tidefast.protocol.contracts import contract_digest
from tidefast.protocol.ids import Epoch, StepId
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Answer, Refused, Send, Settled, Wait

RETRIED = KEYED._replace(retries=2)


def told(decision: Any) -> tuple[str, list[str]]:
    return code(decision), wrote(decision)


def fresh(contract: Any = KEYED, step: StepId = PAY) -> Book:
    """A run whose live holder has one step fenced."""
    book = Book()
    book.granted()
    book.admit(step, contract)
    return book


# --- the first admission


def test_a_first_admission_makes_the_intent_durable_with_all_that_a_replay_will_need() -> None:
    book = Book()
    book.granted()
    decision = book.admit(args={"cents": 50})
    key = book.step().key
    assert isinstance(decision.verdict, Send) and wrote(decision) == ["step_fenced"]
    assert (decision.verdict.attempt, decision.verdict.key, decision.verdict.is_replay) == (1, key, False)
    data = book.log[-1].data
    assert data["args"] == {"cents": 50} and data["key"] == key and data["contract"] == contract_digest(KEYED)
    assert data["request"]["headers"]["Idempotency-Key"] == key  # type: ignore[index,call-overload]
    assert data["deadline_ms"] == book.ms + TIMEOUT_MS and data["owner"] == HERE
    assert (book.step().state, book.step().epoch, book.step().attempts[0].state) == ("fenced", 1, "out")
    assert book.head.unsettled == (PAY,)


def test_a_tool_that_nobody_knows_is_refused() -> None:
    book = Book()
    book.granted()
    assert told(book.admit(contract=None)) == ("not_found", [])


def test_the_stored_call_of_a_step_that_never_was_is_not_found() -> None:
    book = Book()
    book.granted()
    assert told(book.admit(stored=True)) == ("not_found", [])


# --- asking again, state by state


def test_asking_for_a_committed_step_answers_the_first_receipt_and_sends_nothing() -> None:
    book = fresh()
    book.settle()
    decision = book.admit()
    step = book.step()
    assert decision.verdict == Answer(PAY, "committed", step.epoch, step.key, step.receipt_seq, True)
    assert not decision.events
    book.granted()
    assert book.admit().verdict == decision.verdict, "a successor hears it under the epoch that joined it"


def test_asking_with_other_arguments_or_another_tool_is_a_conflict_that_says_what_is_stored() -> None:
    book = fresh()
    for decision in (book.admit(args={"cents": 70}), book.admit(contract=KEYLESS)):
        assert isinstance(decision.verdict, Refused) and not decision.events
        assert decision.verdict.code == "step_conflict"
        assert decision.verdict.facts["stored_tool"] == "charge"
        assert decision.verdict.facts["stored_digest"] == book.step().call_digest


@pytest.mark.parametrize("outcome", ["applied", "refused", "unsent", "doubted"])
def test_other_arguments_are_a_conflict_in_every_state_under_the_same_epoch(outcome: str) -> None:
    book = fresh()
    book.settle(outcome)
    assert told(book.admit(args={"cents": 70})) == ("step_conflict", [])


def test_a_caller_whose_model_chose_other_words_may_ask_for_the_stored_call() -> None:
    book = fresh()
    book.settle()
    assert code(book.admit(args={"cents": 70}, stored=True)) == "Answer"


def test_a_step_in_flight_is_waited_for_until_its_deadline() -> None:
    book = fresh()
    decision = book.admit()
    assert decision.verdict == Wait("step_in_flight", "in_flight", book.ms + TIMEOUT_MS, PAY)
    assert not decision.events


def test_a_step_whose_owner_has_ended_is_booked_lost_and_replayed_under_its_key() -> None:
    book = fresh()
    key = book.step().key
    book.die()
    decision = book.admit(owner="boot-2")
    assert told(decision) == ("Send", ["step_doubted", "step_fenced"])
    assert isinstance(decision.verdict, Send) and decision.verdict.is_replay and decision.verdict.key == key
    assert decision.verdict.intent_seq == book.step().intent_seq == 3
    assert [attempt.state for attempt in book.step().attempts] == ["lost", "out"]


def test_a_step_past_its_deadline_is_lost_even_if_its_owner_lives() -> None:
    book = fresh()
    book.ms += TIMEOUT_MS
    book.granted()
    assert told(book.admit()) == ("Send", ["step_doubted", "step_fenced"])
    assert book.step().attempts[1].older_over


def test_an_applied_step_is_joined_by_the_next_holder_and_nothing_is_sent() -> None:
    book = fresh()
    book.granted()
    assert book.settle().verdict == Settled("applied", joined=False)
    decision = book.admit()
    assert told(decision) == ("Answer", ["step_committed"])
    assert book.step().epoch == 2 and book.step().attempts[0].epoch == 1
    assert isinstance(decision.verdict, Answer) and decision.verdict.receipt_seq == book.step().receipt_seq


def test_a_rejected_step_is_answered_from_the_log_for_ever() -> None:
    book = fresh()
    book.settle("refused")
    book.granted()
    decision = book.admit()
    assert told(decision) == ("step_rejected", [])
    assert isinstance(decision.verdict, Refused)
    assert decision.verdict.facts["receipt_seq"] == book.step().receipt_seq > 0


def test_a_held_step_stays_held_for_whoever_asks() -> None:
    book = fresh()
    book.settle("unlisted")
    assert told(book.admit()) == ("step_held", [])


def test_a_compensated_step_is_answered_as_such_and_never_sent_again() -> None:
    book = fresh()
    book.settle()
    book.compensate()
    decision = book.admit()
    assert isinstance(decision.verdict, Answer) and decision.verdict.closed_by == UNDO
    book.settle(step_id=UNDO)
    decision = book.admit()
    assert isinstance(decision.verdict, Answer) and decision.verdict.state == "compensated" and not decision.events


def test_a_pending_step_is_sent_again_as_stored() -> None:
    book = fresh()
    book.settle("unsent")
    decision = book.admit()
    assert told(decision) == ("Send", ["step_fenced"])
    assert isinstance(decision.verdict, Send) and (decision.verdict.attempt, decision.verdict.is_replay) == (2, True)
    assert "args" not in book.log[-1].data and book.log[-1].data["intent_seq"] == 3


def test_a_step_never_sent_may_be_restated_by_a_newer_epoch_under_the_same_key() -> None:
    book = fresh()
    key = book.step().key
    book.settle("unsent")
    book.granted()
    decision = book.admit(args={"cents": 70})
    assert told(decision) == ("Send", ["step_fenced"])
    assert isinstance(decision.verdict, Send) and not decision.verdict.is_replay and decision.verdict.key == key
    assert book.log[-1].data["args"] == {"cents": 70} and book.step().intent_seq == book.log[-1].seq


def test_a_step_that_was_refused_once_was_sent_and_is_not_restated() -> None:
    book = fresh(RETRIED)
    book.settle("refused")
    assert book.step().state == "pending"
    book.granted()
    assert told(book.admit(contract=RETRIED, args={"cents": 70})) == ("step_conflict", [])
    assert told(book.admit(contract=RETRIED)) == ("Send", ["step_fenced"])


def test_a_restated_call_needs_its_tool_and_its_request() -> None:
    book = fresh()
    book.settle("unsent")
    assert told(book.admit(contract=None)) == ("not_found", [])
    book.granted()
    other = Admit(book.right(), PAY, "charge", '{"a":1}', "d" * 64, KEYED, None, HERE, book.ms + 1)
    assert told(book.submit(other)) == ("invalid", [])


def test_a_first_http_call_without_its_request_is_refused_because_a_replay_could_send_nothing() -> None:
    book = Book()
    book.granted()
    command = Admit(book.right(), PAY, "charge", "{}", "d" * 64, KEYED, None, HERE, book.ms + 1)
    assert told(book.submit(command)) == ("invalid", [])


def test_a_pending_step_whose_account_changed_is_restated_with_todays_contract() -> None:
    book = fresh()
    book.settle("unsent")
    moved = KEYED._replace(key_scope="acct_2")
    decision = book.admit(contract=moved)
    assert isinstance(decision.verdict, Send) and decision.verdict.contract == moved
    assert book.step().scope == moved.scope


def test_the_stored_call_of_a_pending_step_is_held_if_its_tool_or_account_has_gone() -> None:
    for contract, reason in ((None, "tool_gone"), (KEYED._replace(key_scope="acct_2"), "scope_changed")):
        book = fresh()
        book.settle("unsent")
        assert told(book.admit(contract=contract, stored=True)) == ("step_held", ["step_held"])
        assert book.step().reason == reason
    book = fresh()
    book.settle("unsent")
    assert told(book.admit(stored=True)) == ("Send", ["step_fenced"])


# --- settling


@pytest.mark.parametrize(
    "outcome,events,verdict,attempt",
    [
        ("applied", ["step_committed"], Settled("committed", joined=True), "applied"),
        ("refused", ["step_rejected"], Settled("rejected", joined=False), "refused"),
        ("unsent", ["step_unsent"], Settled("pending", joined=False), "unsent"),
        ("doubted", ["step_doubted"], Settled("in_doubt", joined=False), "doubted"),
        ("unlisted", ["step_doubted", "step_held"], Settled("held", joined=False), "doubted"),
    ],
)
def test_each_outcome_of_a_fenced_step(outcome: str, events: list[str], verdict: Settled, attempt: str) -> None:
    book = fresh()
    decision = book.settle(outcome)
    assert (decision.verdict, wrote(decision)) == (verdict, events)
    assert (book.step().state, book.step().attempts[0].state) == (verdict.state, attempt)
    again = book.settle(outcome)
    assert not again.events and isinstance(again.verdict, Settled) and again.verdict.state == verdict.state


@pytest.mark.parametrize(
    "outcome,events,state",
    [
        ("applied", ["step_applied"], "applied"),
        ("refused", ["step_rejected"], "rejected"),
        ("unsent", ["step_unsent"], "pending"),
        ("doubted", ["step_doubted"], "in_doubt"),
    ],
)
def test_facts_are_taken_after_the_lease_moved_but_only_the_join_is_not(
    outcome: str, events: list[str], state: str
) -> None:
    book = fresh()
    book.granted()
    assert wrote(book.settle(outcome)) == events and book.step().state == state
    assert book.log[-1].epoch == 1, "the event keeps the attempt's epoch"


def test_a_lease_past_its_expiry_that_no_event_has_ended_still_joins() -> None:
    book = fresh()
    book.ms += LEASE_MS + 1
    assert book.settle().verdict == Settled("committed", joined=True)


@pytest.mark.parametrize("before", ["fenced", "lost"])
def test_a_key_that_was_used_with_another_body_freezes_the_run(before: str) -> None:
    book = fresh()
    if before == "lost":
        book.die()
        book.mark_lost()
    decision = book.settle("key_reused")
    assert wrote(decision) == ["step_doubted", "run_frozen"] and book.head.frozen == "diverged"
    assert decision.verdict == Settled("in_doubt", joined=False, is_diverged=True)
    assert book.head.diverged == (PAY,) and code(book.thaw()) == "run_frozen"
    book.ms += TIMEOUT_MS + 1
    book.resolve("not_applied", looked_at_ms=book.ms)
    assert book.head.diverged == () and book.thaw().events


def test_an_unmet_precondition_rejects_the_step_whatever_the_retries_and_only_a_first_sending_asks() -> None:
    book = Book()
    book.granted()
    patient = KEYED._replace(retries=3)
    first = book.admit(contract=patient).verdict
    book.settle("unsent")
    second = book.admit(contract=patient).verdict
    assert isinstance(first, Send) and isinstance(second, Send) and first.is_first and second.is_first
    assert wrote(book.settle("unmet", attempt=2, reason="precondition")) == ["step_rejected"]
    assert (book.step().state, book.step().reason) == ("rejected", "precondition")
    refused = book.admit(contract=patient).verdict
    assert isinstance(refused, Refused) and refused.reason == "precondition"


def test_a_replay_is_no_first_sending() -> None:
    book = fresh()
    book.settle("doubted")
    verdict = book.admit().verdict
    assert isinstance(verdict, Send) and not verdict.is_first


def test_a_frozen_run_still_takes_facts_and_joins_them() -> None:
    book = fresh()
    book.admit(MAIL)
    book.settle("unsent", MAIL)
    book.settle("applied", MAIL)
    assert book.head.frozen == "diverged"
    assert book.settle().verdict == Settled("committed", joined=True)


@pytest.mark.parametrize("before", ["doubted", "unlisted", "lost"])
def test_a_late_receipt_under_a_live_epoch_commits_from_doubt_and_from_held(before: str) -> None:
    book = fresh()
    if before == "lost":
        book.die()
        book.mark_lost()
    else:
        book.settle(before)
    assert book.settle().verdict == Settled("committed", joined=True)


@pytest.mark.parametrize("closed", [False, True])
def test_a_late_receipt_of_a_settled_step_is_evidence_and_moves_nothing(closed: bool) -> None:
    book = fresh()
    book.settle("doubted")
    book.admit()
    book.settle(attempt=2)
    if closed:
        book.compensate()
    before = book.step()
    decision = book.settle(attempt=1)
    assert wrote(decision) == ["late_receipt"] and not book.head.frozen
    assert book.step() == before._replace(attempts=book.step().attempts)
    assert not book.settle(attempt=1).events


def test_a_late_receipt_of_an_older_attempt_while_the_newer_is_out_is_the_answer() -> None:
    book = fresh()
    book.die()
    book.granted()
    book.admit(owner="boot-1+")
    assert book.settle(attempt=1).verdict == Settled("applied", joined=False)
    assert wrote(book.settle(attempt=2)) == ["late_receipt"]
    assert told(book.admit()) == ("Answer", ["step_committed"])


@pytest.mark.parametrize("booked", ["unsent", "refused", "not_applied", "compensated", "rejected_by_a_person"])
def test_a_receipt_that_contradicts_the_books_freezes_the_run(booked: str) -> None:
    book = fresh()
    match booked:
        case "unsent" | "refused":
            book.settle(booked)
        case "not_applied" | "rejected_by_a_person":
            book.settle("doubted")
            book.ms += TIMEOUT_MS + 1
            book.resolve("refused" if booked == "rejected_by_a_person" else "not_applied")
        case _:
            book.settle("doubted")
            book.admit()
            book.settle(attempt=2)
            book.compensate()
            book.settle(step_id=UNDO)
    state = book.step().state
    decision = book.settle(attempt=1)
    assert decision.verdict == Settled(state, joined=False, is_diverged=True)  # type: ignore[arg-type]
    assert wrote(decision) == ["late_receipt", "run_frozen"] and book.head.frozen == "diverged"
    assert book.step().state == state


def test_an_attempt_that_never_was_can_not_be_settled() -> None:
    book = fresh()
    for step, attempt in ((PAY, 0), (PAY, 2), (MAIL, 1)):
        assert told(book.settle("applied", step, attempt)) == ("not_found", [])
    book.save_result("sum")
    assert told(book.settle("applied", StepId("sum"))) == ("not_found", [])


# --- refusals and the retry policy


def test_a_refusal_with_tries_left_is_pending_and_the_last_one_is_final() -> None:
    book = fresh(RETRIED)
    for attempt, state in ((1, "pending"), (2, "pending"), (3, "rejected")):
        if attempt > 1:
            book.admit(contract=RETRIED)
        book.settle("refused", attempt=attempt)
        assert book.step().state == state
    assert book.log[-1].kind == "step_rejected"


def test_where_the_provider_stores_failures_the_first_refusal_is_final() -> None:
    book = fresh(RETRIED._replace(stored_failures=True))
    assert wrote(book.settle("refused")) == ["step_rejected"]


def test_a_refused_replay_settles_older_doubt_only_if_it_was_admitted_after_their_deadlines() -> None:
    book = fresh()
    book.settle("doubted")
    book.admit()
    assert wrote(book.settle("refused", attempt=2)) == ["step_refused"] and book.step().state == "in_doubt"
    book.ms += TIMEOUT_MS + 1
    book.granted()
    book.admit()
    assert wrote(book.settle("refused", attempt=3)) == ["step_rejected"]
    assert {attempt.state for attempt in book.step().attempts} == {"refused"}


def test_an_unlisted_answer_to_a_read_is_only_a_doubt() -> None:
    book = fresh(READ)
    assert wrote(book.settle("unlisted")) == ["step_doubted"]


# --- lost attempts, and the owner who speaks late


def test_an_attempt_is_lost_once_its_owner_has_ended_or_its_deadline_has_passed_not_before() -> None:
    book = fresh()
    assert told(book.mark_lost()) == ("step_in_flight", [])
    book.ms += TIMEOUT_MS
    assert told(book.mark_lost()) == ("Settled", ["step_doubted"])
    assert told(book.mark_lost()) == ("already_decided", [])
    assert told(book.mark_lost(MAIL)) == ("already_decided", [])
    other = fresh()
    other.die()
    assert other.mark_lost().verdict == Settled("in_doubt", joined=False)


@pytest.mark.parametrize("late,state", [("unsent", "pending"), ("refused", "rejected"), ("doubted", "in_doubt")])
def test_the_owner_of_a_lost_attempt_may_settle_it_late(late: str, state: str) -> None:
    book = fresh()
    book.ms += TIMEOUT_MS
    book.mark_lost()
    book.settle(late)
    assert book.step().state == state
    assert code(book.settle(late)) == "Settled"


def test_a_held_step_whose_only_attempt_was_never_sent_is_pending_again() -> None:
    book = fresh(KEYLESS)
    book.ms += TIMEOUT_MS
    book.granted()
    assert told(book.admit(contract=KEYLESS)) == ("step_held", ["step_doubted", "step_held"])
    assert wrote(book.settle("unsent")) == ["step_unsent"] and book.step().state == "pending"


def test_a_late_word_on_one_attempt_leaves_a_held_step_held_while_another_is_in_doubt() -> None:
    book = fresh()
    book.die()
    book.admit(owner="boot-1+")
    book.settle("unlisted", attempt=2)
    assert book.step().state == "held"
    assert wrote(book.settle("unsent", attempt=1)) == ["step_unsent"] and book.step().state == "held"


# --- law 7: no overlap


def test_no_other_mutating_step_is_admitted_while_an_older_epochs_request_may_land() -> None:
    book = fresh()
    until = book.ms + TIMEOUT_MS
    book.granted()
    decision = book.admit(MAIL)
    assert decision.verdict == Wait("step_pending", "older_attempt", until, PAY) and not decision.events
    assert code(book.admit(StepId("look"), READ)) == "Send", "a read may go"
    assert code(book.save_result()) == "Answer", "a local step may go"
    book.ms = until
    book.granted()
    assert code(book.admit(MAIL)) == "Send"


def test_under_one_epoch_mutating_steps_may_run_beside_each_other() -> None:
    book = fresh()
    assert code(book.admit(MAIL)) == "Send"


def test_a_replay_of_the_very_step_may_go_at_once() -> None:
    book = fresh()
    book.die()
    book.granted()
    assert code(book.admit(owner="boot-1+")) == "Send"


def test_a_settled_request_is_off_the_wire_and_a_lost_one_is_not() -> None:
    book = fresh()
    book.die()
    book.mark_lost()
    book.granted()
    assert code(book.admit(MAIL, owner="boot-1+")) == "Wait"
    book.settle()
    assert code(book.admit(MAIL, owner="boot-1+")) == "Send"


def test_a_deduped_step_that_is_committed_does_not_count_as_on_the_wire() -> None:
    book = fresh()
    book.settle("doubted")
    book.admit()
    book.settle(attempt=2)
    book.granted()
    assert book.head.open == () and code(book.admit(MAIL)) == "Send"


def test_a_pending_step_and_a_doubt_wait_for_another_steps_older_request_too() -> None:
    for outcome in ("unsent", "doubted"):
        book = fresh()
        book.admit(MAIL)
        book.settle(outcome, MAIL)
        book.granted()
        assert told(book.admit(MAIL)) == ("Wait", [])


def test_a_held_step_holds_its_run() -> None:
    book = fresh()
    book.admit(MAIL)
    book.settle("unlisted", MAIL)
    for step in (PAY, StepId("new")):
        decision = book.admit(step)
        assert code(decision) in ("step_held", "Wait") and not decision.events
    assert code(book.admit(StepId("look"), READ)) == "Send"
    book.settle("doubted")
    assert told(book.admit()) == ("step_held", [])


def test_a_command_about_a_run_that_is_not_there_never_raises() -> None:
    book = Book(created=False)
    ghost = Right(RUN, Epoch(1), "w1")
    for verb in ("admit", "compensate", "save_result", "checkpoint", "renew", "release", "complete", "fail"):
        assert told(getattr(book, verb)(right=ghost)) == ("not_found", [])
    for decision in (book.settle(), book.mark_lost(), book.lapse(), book.preempt(), book.thaw()):
        assert told(decision) == ("not_found", [])
    assert told(book.resolve("applied")) == ("not_found", [])
    assert told(book.grant("w1")) == ("not_found", [])
