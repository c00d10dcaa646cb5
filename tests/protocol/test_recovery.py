"""After a restore: older epochs are dead for good, and what may have been sent in lost commits is no first sending."""

import pytest
from tests.protocol.driver import (
    KEYED,
    KEYLESS,
    MAIL,
    NAMESPACE,
    PAY,
    READ,
    RUN,
    TIMEOUT_MS,
    TTL_MS,
    UNDO,
    Book,
    Provider,
    call_of,
    code,
    wrote,
)

from tidefast.protocol.events import chain
from tidefast.protocol.ids import EPOCHS_PER_INCARNATION, StepId, step_key
from tidefast.protocol.laws import LAWS, History, judge
from tidefast.protocol.records import Recovery
from tidefast.protocol.verdicts import Refused, Send, Wait


def restore(book: Book, *, lost_ms: int = 10_000) -> None:
    """The book as a backup holds it: what comes after is lost, `lost_ms` pass, and the copy is put into service."""
    last = book.log[-1].at_ms
    wall = last + book.wall_offset
    book.ms += lost_ms
    window = Recovery(last, wall, book.ms)
    book.view = book.view._replace(incarnation=book.view.incarnation + 1, recovery=window)
    book.die()
    book.preempt()


def close(book: Book) -> None:
    book.view = book.view._replace(recovery=None)


def is_lawful(book: Book, **world: object) -> bool:
    history = History(RUN, tuple(book.log), tuple(book.digests), NAMESPACE, book.contracts)
    found = judge(history._replace(**world))
    assert not found, found
    return True


def a_run(*, created_only: bool = False) -> Book:
    book = Book()
    if not created_only:
        book.granted()
    return book


def test_every_older_epoch_is_refused_and_the_next_one_is_above_all_that_can_have_been_issued() -> None:
    book = a_run()
    old = book.right()
    lost = [book.right(epoch) for epoch in (2, 3, 900)]  # grants that the backup doesn't know
    restore(book)
    for right in (old, *lost):
        assert code(book.admit(right=right)) == "stale_epoch"
        assert code(book.renew(right)) == "stale_epoch"
        assert code(book.checkpoint(right=right)) == "stale_epoch"
        assert code(book.complete(right)) == "stale_epoch"
    right = book.granted()
    assert right.epoch == EPOCHS_PER_INCARNATION + 1
    for older in (old, *lost):
        assert code(book.admit(right=older)) == "stale_epoch"
    assert is_lawful(book)


def test_a_keyless_first_sending_is_held_because_it_may_have_been_sent_in_lost_commits() -> None:
    book = a_run()
    restore(book)
    book.granted()
    decision = book.admit(MAIL, KEYLESS)
    assert (code(decision), wrote(decision)) == ("step_held", ["step_presumed", "step_held"])
    assert isinstance(decision.verdict, Refused) and decision.verdict.reason == "lost_commits"
    assert decision.contract == KEYLESS, "an event names a contract that the store would not hold"
    attempt = book.step(MAIL).attempts[0]
    assert (attempt.state, attempt.owner, attempt.epoch) == ("lost", "", EPOCHS_PER_INCARNATION)
    assert is_lawful(book)


def test_a_keyed_first_sending_is_a_replay_whose_window_began_at_the_last_durable_commit() -> None:
    book = a_run()
    point = book.log[-1].at_ms
    restore(book)
    book.granted()
    decision = book.admit()
    assert wrote(decision) == ["step_presumed", "step_fenced"]
    assert isinstance(decision.verdict, Send) and decision.verdict.is_replay and decision.verdict.attempt == 2
    first = book.step().first_sent
    assert first is not None and (first.admitted_ms, first.number) == (point, 1)
    book.settle(attempt=2)
    assert book.step().state == "committed"
    assert is_lawful(book)


def test_a_keyed_first_sending_is_held_once_the_provider_may_have_forgotten_the_lost_one() -> None:
    book = a_run()
    restore(book, lost_ms=TTL_MS)
    book.granted()
    assert code(book.admit()) == "step_held"
    assert book.step().reason == "lost_commits"


@pytest.mark.parametrize("wall_back", [False, True])
def test_both_clocks_must_say_that_the_lost_sending_is_remembered(wall_back: bool) -> None:
    book = a_run()
    restore(book)
    book.granted()
    book.mark_ms = book.now.wall_ms + TTL_MS if wall_back else 0
    assert code(book.admit()) == ("step_held" if wall_back else "Send")


def test_the_refusal_of_a_replay_settles_the_lost_sending_only_once_that_can_land_no_more() -> None:
    book = a_run()
    restore(book)
    book.granted()
    book.admit()
    book.settle("refused", attempt=2)
    assert book.step().state == "in_doubt", "the lost request may still land"
    book.ms += TIMEOUT_MS
    right = book.granted()
    assert isinstance(book.admit(right=right).verdict, Send)
    book.settle("refused", attempt=3)
    assert book.step().state == "rejected"
    assert is_lawful(book)


def test_another_mutating_step_waits_until_the_lost_request_can_land_no_more() -> None:
    book = a_run()
    restore(book)
    book.granted()
    book.admit()
    book.settle("doubted", attempt=2)
    decision = book.admit(StepId("other"))
    assert isinstance(decision.verdict, Wait) and decision.verdict.reason == "older_attempt"
    book.ms += TIMEOUT_MS
    assert isinstance(book.admit(StepId("other"), right=book.granted()).verdict, Send)
    assert is_lawful(book)


def test_a_reading_and_a_local_step_are_asked_as_ever() -> None:
    book = a_run()
    restore(book)
    book.granted()
    assert wrote(book.admit(StepId("look"), READ)) == ["step_fenced"]
    assert wrote(book.save_result()) == ["step_result"]


@pytest.mark.parametrize(("outcome", "contract"), [("unsent", KEYLESS), ("unsent", KEYED)])
def test_a_pending_step_may_have_been_sent_again_in_lost_commits(outcome: str, contract: object) -> None:
    book = a_run()
    book.admit(contract=contract)  # type: ignore[arg-type]
    book.settle(outcome)
    assert book.step().state == "pending"
    restore(book)
    book.granted()
    decision = book.admit(contract=contract, args={"other": 1})  # type: ignore[arg-type]
    assert code(decision) == "step_conflict", "the stored call may have been sent"
    decision = book.admit(contract=contract)  # type: ignore[arg-type]
    kinds = ["step_presumed", "step_held"] if contract is KEYLESS else ["step_presumed", "step_fenced"]
    assert wrote(decision) == kinds
    assert is_lawful(book)


def test_a_run_does_not_fail_over_a_step_that_may_have_been_sent_in_lost_commits() -> None:
    book = a_run()
    book.admit()
    book.settle("unsent")
    restore(book)
    book.granted()
    decision = book.fail()
    assert wrote(decision) == ["run_failing"], "withdrawing it would book an effect as never done"
    assert wrote(book.admit(stored=True)) == ["step_presumed", "step_fenced"]
    book.settle(attempt=3)
    assert book.head.to_undo == (PAY,), "it may have happened, so it is undone"
    book.compensate()
    book.settle(step_id=UNDO, attempt=2)
    assert wrote(book.fail(error="again")) == ["run_failed"]
    assert is_lawful(book)


@pytest.mark.parametrize("contract", [KEYED, KEYLESS])
def test_what_was_in_doubt_before_may_have_been_sent_once_more(contract: object) -> None:
    book = a_run()
    book.admit(contract=contract)  # type: ignore[arg-type]
    restore(book)
    book.granted()
    decision = book.admit(contract=contract)  # type: ignore[arg-type]
    last = "step_fenced" if contract is KEYED else "step_held"
    assert wrote(decision) == ["step_doubted", "step_presumed", last]
    assert is_lawful(book)


def test_a_person_settles_the_lost_sending_with_the_step_and_is_asked_once() -> None:
    book = a_run()
    restore(book)
    book.granted()
    book.admit(MAIL, KEYLESS)
    assert code(book.resolve("not_applied", MAIL)) == "step_in_flight", "the lost request may still land"
    book.ms += TIMEOUT_MS + 1
    assert code(book.resolve("not_applied", MAIL)) == "Settled"
    right = book.granted()
    decision = book.admit(MAIL, KEYLESS, right=right)
    assert (code(decision), wrote(decision)) == ("Send", ["step_fenced"])
    assert is_lawful(book)


def test_a_verdict_on_a_step_that_was_held_before_the_restore_speaks_for_the_lost_sending_too() -> None:
    book = a_run()
    book.admit(MAIL, KEYLESS)
    book.settle("unlisted", MAIL)
    assert book.step(MAIL).state == "held"
    restore(book, lost_ms=TIMEOUT_MS * 3)
    assert code(book.resolve("not_applied", MAIL)) == "step_in_flight", "it may have been resolved and sent again"
    book.ms += TIMEOUT_MS + 1
    assert wrote(book.resolve("not_applied", MAIL)) == ["step_presumed", "step_resolved"]
    assert book.step(MAIL).state == "pending"
    right = book.granted()
    assert wrote(book.admit(MAIL, KEYLESS, right=right)) == ["step_fenced"]
    assert is_lawful(book)


def test_a_verdict_that_it_happened_needs_no_look_at_lost_sendings() -> None:
    book = a_run()
    book.admit(MAIL, KEYLESS)
    book.settle("unlisted", MAIL)
    restore(book)
    assert wrote(book.resolve("applied", MAIL)) == ["step_resolved"]


def test_a_lost_undo_is_replayed_under_its_own_key() -> None:
    book = a_run()
    book.committed()
    restore(book)
    book.granted()
    decision = book.compensate()
    assert wrote(decision) == ["undo_begun", "step_presumed", "step_fenced"]
    book.settle(step_id=UNDO, attempt=2)
    assert book.step().state == "compensated"
    assert is_lawful(book)


def test_a_lost_undo_without_a_key_is_held() -> None:
    book = a_run()
    book.committed()
    restore(book)
    book.granted()
    decision = book.compensate(contract=KEYLESS._replace(tool="refund"))
    assert wrote(decision) == ["undo_begun", "step_presumed", "step_held"]
    assert (book.step(UNDO).state, book.step().closed_by) == ("held", UNDO)
    assert is_lawful(book)


def test_a_run_that_was_created_again_under_the_same_name_may_be_a_lost_one() -> None:
    book = Book(created=False)
    book.view = book.view._replace(incarnation=1, recovery=Recovery(500, 500, 900))
    book.create()
    book.granted()
    assert code(book.admit(MAIL, KEYLESS)) == "step_held"
    assert is_lawful(book)


def test_a_run_that_the_authority_named_after_the_restore_is_new() -> None:
    book = Book(created=False)
    book.view = book.view._replace(incarnation=1, recovery=Recovery(500, 500, 900))
    book.create(is_minted=True)
    book.granted()
    assert wrote(book.admit(MAIL, KEYLESS)) == ["step_fenced"]


def test_a_closed_window_ends_with_the_next_grant() -> None:
    book = a_run()
    restore(book)
    book.granted()
    close(book)
    assert code(book.admit(MAIL, KEYLESS)) == "step_held", "the lease was granted in the window"
    other = a_run()
    restore(other)
    close(other)
    other.granted()
    assert wrote(other.admit(MAIL, KEYLESS)) == ["step_fenced"]
    assert is_lawful(other)


def test_a_second_restore_makes_the_sendings_of_the_first_window_lost_ones() -> None:
    book = a_run()
    restore(book)
    book.granted()
    book.admit()
    book.settle("unsent", attempt=2)
    assert book.step().state == "in_doubt"
    restore(book)
    right = book.granted()
    assert right.epoch == 2 * EPOCHS_PER_INCARNATION + 1
    assert wrote(book.admit()) == ["step_presumed", "step_fenced"]
    assert is_lawful(book)


def test_no_restore_makes_a_provider_without_keys_do_it_twice() -> None:
    provider = Provider(ttl_ms=0)
    key = step_key(NAMESPACE, RUN, MAIL)
    book = a_run()
    provider.call(key, book.ms)  # in commits that are lost
    restore(book)
    book.granted()
    if isinstance(book.admit(MAIL, KEYLESS).verdict, Send):
        provider.call(key, book.ms)
    assert provider.applied == 1


def test_the_auditor_finds_a_first_sending_that_forgets_the_restore() -> None:
    book = a_run()
    restore(book)
    book.granted()
    blind = book.view
    book.view = blind._replace(run=book.head._replace(recovery=None))  # a rule that does not look
    book.admit(MAIL, KEYLESS)
    history = History(RUN, tuple(book.log), tuple(book.digests), NAMESPACE, book.contracts)
    assert [found.law for found in judge(history, {"reissued_epoch": LAWS["reissued_epoch"]})] == ["reissued_epoch"]
    book.settle("unsent", MAIL)
    book.admit(MAIL, KEYLESS)
    history = History(RUN, tuple(book.log), tuple(book.digests), NAMESPACE, book.contracts)
    assert len(judge(history, {"reissued_epoch": LAWS["reissued_epoch"]})) == 1, "the second sending is a known one"


def test_a_log_with_a_presumed_sending_folds_to_the_same_books() -> None:
    book = a_run()
    restore(book)
    book.granted()
    book.admit(MAIL, KEYLESS)
    folded = book.refold()
    assert (folded.run, folded.steps) == (book.head, book.view.steps)
    digest = "0" * 64
    for event in book.log:
        digest = chain(digest, event)
    assert digest == book.head.digest
    assert call_of(MAIL, KEYLESS, None)[1] == "{}"


def test_paying_twice_across_a_restore_is_one_charge_for_a_provider_that_knows_keys() -> None:
    provider = Provider()
    book = a_run()
    key = step_key(NAMESPACE, RUN, PAY)
    provider.call(key, book.ms)
    restore(book)
    book.granted()
    assert isinstance(book.admit().verdict, Send)
    provider.call(key, book.ms)
    book.settle(attempt=2)
    assert provider.applied == 1
    assert is_lawful(book, applied={key: 1})


def test_an_undo_that_was_held_unwritten_may_have_been_written_and_sent_in_lost_commits() -> None:
    book = a_run()
    book.committed()
    book.fail()
    book.compensate(contract=None)
    book.resolve("not_applied", UNDO)
    restore(book)
    book.granted()
    decision = book.compensate(owner="boot-1+")
    assert wrote(decision) == ["step_presumed", "step_fenced"]
    assert book.step(UNDO).contract and [attempt.state for attempt in book.step(UNDO).attempts] == ["lost", "out"]
    assert book.refold().steps[UNDO] == book.step(UNDO)
