"""Leases: who may drive a run, and what everyone else is told. `Book.submit` asserts the guard of every decision."""

from typing import Any

import pytest
from tests.protocol.driver import HERE, LEASE_MS, PAY, RUN, Book, code, wrote

from tidefast.protocol.commands import Preempt
from tidefast.protocol.ids import EPOCHS_PER_INCARNATION, Epoch
from tidefast.protocol.lease import GRANTS_WITHOUT_PROGRESS_MAX, pause_ms
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Granted, Refused, Renewed


def told(decision: Any) -> tuple[str, list[str]]:
    return code(decision), wrote(decision)


# --- grants


def test_each_grant_raises_the_epoch_and_says_where_the_checkpoint_is() -> None:
    book = Book()
    first = book.grant()
    assert first.verdict == Granted(Epoch(1), "w1", LEASE_MS, book.ms + LEASE_MS, 0, 0, False)
    book.checkpoint(1)
    book.preempt()
    second = book.grant()
    assert second.verdict == Granted(Epoch(2), "w2", LEASE_MS, book.ms + LEASE_MS, 1, 3, False)
    assert wrote(second) == ["lease_granted"]


def test_a_raised_incarnation_puts_every_new_epoch_above_all_older_ones() -> None:
    book = Book()
    book.granted()
    book.view = book.view._replace(incarnation=2)
    book.granted()
    assert book.head.epoch == 2 * EPOCHS_PER_INCARNATION + 1
    assert told(book.admit(right=book.right(1))) == ("stale_epoch", [])


def test_a_repeated_request_of_the_same_holder_hears_its_first_grant_again() -> None:
    book = Book()
    first = book.grant("w1", "req-1")
    again = book.grant("w1", "req-1")
    assert again.verdict == first.verdict and not again.events
    assert told(book.grant("w2", "req-1")) == ("lease_held", [])
    assert told(book.grant("w1", "req-2")) == ("lease_held", [])


def test_a_live_lease_is_given_to_nobody_else_and_the_asker_hears_until_when() -> None:
    book = Book()
    book.granted()
    decision = book.grant("w2")
    assert isinstance(decision.verdict, Refused)
    assert decision.verdict.facts == {"holder": "w1", "live_epoch": 1, "until_ms": book.ms + LEASE_MS}


def test_a_grant_over_a_lapsed_lease_makes_the_lapse_a_fact_first() -> None:
    book = Book()
    book.granted()
    book.ms += LEASE_MS
    assert told(book.grant()) == ("Granted", ["lease_lapsed", "lease_granted"])
    assert book.log[-2].epoch == 1 and book.log[-1].epoch == 2


def test_ten_grants_without_progress_freeze_the_run_until_a_thaw_counts_anew() -> None:
    book = Book()
    for _ in range(GRANTS_WITHOUT_PROGRESS_MAX):
        book.granted()
    book.ms += LEASE_MS + 60_000
    assert told(book.grant("w11")) == ("run_frozen", ["lease_lapsed", "run_frozen"])
    assert book.head.frozen == "no_progress" and book.head.state == "frozen"
    assert told(book.grant("w11")) == ("run_frozen", [])
    assert told(book.thaw()) == ("Done", ["run_thawed"])
    assert code(book.grant("w11")) == "Granted" and book.head.grants_without_progress == 1


def test_a_run_that_nobody_held_freezes_without_a_lapse_before_it() -> None:
    book = Book()
    for _ in range(GRANTS_WITHOUT_PROGRESS_MAX):
        book.granted()
    book.preempt()
    book.ms += 60_000
    assert wrote(book.grant("w11")) == ["run_frozen"]


@pytest.mark.parametrize("progress", ["checkpoint", "commit", "result"])
def test_progress_starts_the_count_of_grants_anew(progress: str) -> None:
    book = Book()
    for _ in range(GRANTS_WITHOUT_PROGRESS_MAX - 1):
        book.granted()
    {"checkpoint": book.checkpoint, "commit": book.committed, "result": book.save_result}[progress]()
    assert book.head.grants_without_progress == 0


def test_the_pause_between_grants_starts_at_the_third_and_doubles_up_to_a_minute() -> None:
    assert [pause_ms(n) for n in range(1, 11)] == [0, 0, 1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000]


def test_a_run_in_its_pause_is_refused_with_the_time_when_it_ends() -> None:
    book = Book()
    for _ in range(3):
        book.granted()
    book.preempt()
    decision = book.grant()
    assert isinstance(decision.verdict, Refused)
    assert (decision.verdict.code, decision.verdict.reason) == ("lease_held", "pause")
    assert decision.verdict.facts == {"until_ms": book.ms + 1000}


# --- the fence


WORKERS_VERBS = ("admit", "compensate", "save_result", "checkpoint", "renew", "release", "complete", "fail")


@pytest.mark.parametrize("verb", WORKERS_VERBS)
def test_every_workers_verb_of_an_older_epoch_hears_stale_epoch_and_writes_nothing(verb: str) -> None:
    book = Book()
    book.granted()
    book.committed()
    old = book.right()
    book.granted()
    decision = getattr(book, verb)(right=old)
    assert told(decision) == ("stale_epoch", [])
    assert isinstance(decision.verdict, Refused) and decision.verdict.reason == "superseded"
    facts = {"epoch": 1, "live_epoch": 2, "is_live": True, "holder": "w2", "ended_at_ms": 0, "ended_by": ""}
    assert decision.verdict.facts == facts


@pytest.mark.parametrize("verb", WORKERS_VERBS)
def test_a_higher_epoch_than_was_ever_granted_gets_nobody_in(verb: str) -> None:
    book = Book()
    book.granted()
    assert told(getattr(book, verb)(right=book.right(9))) == ("stale_epoch", [])


@pytest.mark.parametrize("verb", WORKERS_VERBS)
def test_another_holder_with_the_live_epoch_is_stale(verb: str) -> None:
    book = Book()
    book.granted()
    assert told(getattr(book, verb)(right=Right(RUN, Epoch(1), "thief"))) == ("stale_epoch", [])


@pytest.mark.parametrize("verb", [verb for verb in WORKERS_VERBS if verb != "release"])
def test_past_its_expiry_a_holder_may_do_nothing_but_release(verb: str) -> None:
    book = Book()
    book.granted()
    book.ms += LEASE_MS
    assert told(getattr(book, verb)(right=book.right())) == ("lease_lapsed", [])
    assert told(book.release()) == ("Done", ["lease_released"])


@pytest.mark.parametrize("verb", [verb for verb in WORKERS_VERBS if verb not in ("release", "renew")])
def test_a_frozen_run_takes_no_new_work(verb: str) -> None:
    book = Book()
    book.granted()
    book.admit()
    book.settle("unsent")
    book.settle("applied")
    assert book.head.frozen == "diverged"
    assert told(getattr(book, verb)(right=book.right())) == ("run_frozen", [])
    assert code(book.renew()) == "Renewed"


@pytest.mark.parametrize("verb", WORKERS_VERBS)
def test_after_the_end_a_zombie_hears_that_it_is_stale_and_the_last_holder_that_the_run_has_ended(verb: str) -> None:
    book = Book()
    book.granted()
    old = book.right()
    book.granted()
    last = book.right()
    book.preempt()
    book.granted()
    book.complete()
    assert told(getattr(book, verb)(right=old)) == ("stale_epoch", [])
    assert told(getattr(book, verb)(right=last)) == ("stale_epoch", [])


# --- renew, release, lapse, preempt, thaw


def test_a_renewal_moves_the_expiry_and_is_no_event() -> None:
    book = Book()
    book.granted()
    book.ms += 5_000
    decision = book.renew()
    assert decision.verdict == Renewed(book.ms + LEASE_MS) and not decision.events and not decision.must_sync
    assert book.head.expires_at_ms == book.ms + LEASE_MS


def test_a_lease_does_not_lapse_while_the_authority_itself_was_silent() -> None:
    book = Book()
    book.granted()
    book.ms += 10 * LEASE_MS
    book.grace_from_ms = book.ms
    assert code(book.lapse()) == "already_decided"
    assert code(book.renew()) == "Renewed"
    book.preempt()
    assert told(book.lapse()) == ("already_decided", [])


def test_the_sweep_ends_a_lease_only_once_it_is_past_its_time() -> None:
    book = Book()
    book.granted()
    book.ms += LEASE_MS - 1
    assert told(book.lapse()) == ("already_decided", [])
    book.ms += 1
    assert told(book.lapse()) == ("Done", ["lease_lapsed"])
    assert told(book.lapse()) == ("already_decided", [])
    assert told(book.renew()) == ("stale_epoch", [])
    assert book.head.lease_end == "lapsed" and book.head.state == "claimable"


def test_a_release_for_drift_freezes_the_run_in_the_same_transaction() -> None:
    book = Book()
    book.granted()
    assert told(book.release(reason="drift", detail="other words")) == ("Done", ["lease_released", "run_frozen"])
    assert book.head.frozen == "drift"
    assert told(book.grant()) == ("run_frozen", [])


def test_a_release_told_twice_writes_once() -> None:
    book = Book()
    right = book.granted()
    book.release(right)
    again = book.release(right)
    assert isinstance(again.verdict, Done) and not again.verdict.was_new and not again.events
    book.granted()
    assert told(book.release(right)) == ("stale_epoch", [])


def test_an_operator_preempts_the_epoch_that_they_looked_at_or_hears_that_it_moved() -> None:
    book = Book()
    book.granted()
    assert told(book.preempt(expect=7)) == ("moved", [])
    assert told(book.preempt(expect=1)) == ("Done", ["lease_preempted"])
    again = book.preempt()
    assert told(again) == ("Done", []) and isinstance(again.verdict, Done) and not again.verdict.was_new
    assert book.log[-1].data == {"by": "ops", "note": ""}


def test_thaw_of_a_run_that_is_not_frozen_changes_nothing() -> None:
    book = Book()
    decision = book.thaw()
    assert isinstance(decision.verdict, Done) and not decision.verdict.was_new and not decision.events


@pytest.mark.parametrize("verb", ["grant", "preempt", "thaw"])
def test_an_ended_run_can_be_neither_granted_nor_preempted_nor_thawed(verb: str) -> None:
    book = Book()
    book.granted()
    book.complete()
    assert told(getattr(book, verb)()) == ("run_ended", [])


def test_a_run_with_a_held_step_is_given_to_nobody_until_a_person_has_spoken() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.settle("unlisted")
    assert book.step().state == "held"
    book.release()
    assert book.head.state == "held"
    assert told(book.grant()) == ("step_held", [])
    book.resolve("applied")
    assert book.head.state == "claimable" and code(book.grant()) == "Granted"


def test_the_operators_verbs_record_who_and_why() -> None:
    book = Book()
    book.granted()
    book.submit(Preempt(RUN, "ada", "drill"))
    assert book.log[-1].data == {"by": "ada", "note": "drill"}


def test_losing_a_lease_books_nothing_against_the_step_in_flight() -> None:
    book = Book()
    book.granted()
    book.admit()
    book.preempt()
    assert book.step(PAY).attempts[0].state == "out" and book.step(PAY).attempts[0].owner == HERE
