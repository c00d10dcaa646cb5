"""What the product claims, each as one test over the rules and a provider that counts for itself."""

from collections.abc import Callable

import pytest
from tests.claims.mutants import commit_on_200, epoch_in_the_key
from tests.protocol.driver import HERE, KEYLESS, MAIL, PAY, READ, REFUND, UNDO, Book, Provider, Rules, code, wrote

from tidefast.protocol.ids import StepId
from tidefast.protocol.machine import decide
from tidefast.protocol.verdicts import Answer, Decision, Send, Settled

SECOND = "boot-1+"  # the instance that takes over when the first one has died


def send(book: Book, provider: Provider, decision: Decision) -> int:
    """The request of a Send verdict lands at the provider."""
    assert isinstance(decision.verdict, Send), decision.verdict
    return provider.call(decision.verdict.key, book.ms)


# --- the stale resume


def stale_resume(rules: Rules, deaths: int = 1) -> Provider:
    """Charged, and dead before anything is recorded; each successor asks for the step again."""
    book, provider = Book(rules=rules), Provider()
    owner = HERE
    for _ in range(deaths + 1):
        book.granted()
        assert send(book, provider, book.admit(owner=owner)) == 200
        book.die(owner)
        owner += "+"
    book.settle(attempt=deaths + 1)
    assert book.step().state == "committed"
    return provider


@pytest.mark.parametrize("deaths", [1, 2, 5])
def test_a_worker_that_dies_between_charge_and_checkpoint_leads_to_one_charge(deaths: int) -> None:
    assert stale_resume(decide, deaths).applied == 1


def test_with_the_epoch_in_the_key_the_same_run_charges_twice() -> None:
    assert stale_resume(epoch_in_the_key).applied == 2
    assert stale_resume(epoch_in_the_key, deaths=5).applied == 6


def test_the_key_holds_neither_epoch_nor_attempt_nor_incarnation() -> None:
    keys = set()
    for incarnation in (0, 1, 7):
        book = Book(incarnation=incarnation)
        book.granted()
        book.granted()
        decision = book.admit()
        assert isinstance(decision.verdict, Send)
        keys.add(decision.verdict.key)
    assert len(keys) == 1


# --- the late 200


def late_200(rules: Rules) -> Book:
    """Epoch 1 sends; the lease moves; then its 200 arrives."""
    book, provider = Book(rules=rules), Provider()
    book.granted()
    assert send(book, provider, book.admit()) == 200
    book.granted()
    book.settle(attempt=1)
    return book


def late_200_after_the_undo(rules: Rules) -> tuple[Book, int]:
    """Epoch 1's answer is slow; epoch 2 replays, commits and undoes; then the first 200 arrives."""
    book, charges, refunds = Book(rules=rules), Provider(), Provider()
    book.granted()
    assert send(book, charges, book.admit()) == 200
    book.die()
    book.granted()
    assert send(book, charges, book.admit(owner=SECOND)) == 200
    book.settle(attempt=2)
    assert send(book, refunds, book.compensate(owner=SECOND)) == 200
    book.settle(step_id=UNDO)
    book.settle(attempt=1)
    return book, charges.applied - refunds.applied


def committed_while_live(book: Book) -> bool:
    """Law 2, read off the log: each commit names the epoch that was live at that place."""
    live = 0
    for event in book.log:
        if event.kind == "lease_granted":
            live = event.epoch
        elif event.kind in ("lease_preempted", "lease_released", "lease_lapsed"):
            live = 0
        elif event.kind == "step_committed" and event.epoch != live:
            return False
    return True


def test_a_late_receipt_is_evidence_and_commits_nothing() -> None:
    book = late_200(decide)
    assert book.step().state == "applied" and committed_while_live(book)
    joined = book.admit()
    assert wrote(joined) == ["step_committed"] and book.log[-1].epoch == 2, "the live holder joins, nothing is sent"


def test_a_late_receipt_commits_nothing_even_when_the_same_worker_holds_the_run_again() -> None:
    book = Book()
    book.grant("w")
    first = book.right(1, "w")
    book.admit(right=first)
    book.release(first)
    book.grant("w")
    assert book.head.epoch == 2 and book.head.holder == "w"
    assert book.settle().verdict == Settled("applied", joined=False)
    assert code(book.admit(right=first)) == "stale_epoch"


@pytest.mark.parametrize("end", ["preempt", "release", "lapse"])
def test_a_bare_200_commits_nothing_while_no_epoch_is_live(end: str) -> None:
    book = Book()
    book.granted()
    book.admit()
    book.ms = book.head.expires_at_ms
    getattr(book, end)()
    assert book.settle().verdict == Settled("applied", joined=False)


def test_a_late_200_can_not_bring_a_compensated_charge_back_into_the_books() -> None:
    book, net = late_200_after_the_undo(decide)
    assert (net, book.step().state, book.head.frozen) == (0, "compensated", "diverged")


def test_with_commit_on_200_a_dead_epoch_commits_and_the_books_claim_a_charge_that_is_not_there() -> None:
    assert not committed_while_live(late_200(commit_on_200))
    book, net = late_200_after_the_undo(commit_on_200)
    assert (net, book.step().state) == (0, "committed"), "the mutant tells the agent 'paid' of a refunded charge"


@pytest.mark.parametrize("scenario", [late_200, lambda rules: late_200_after_the_undo(rules)[0]])
def test_every_commit_in_the_log_names_the_epoch_that_was_live(scenario: Callable[[Rules], Book]) -> None:
    assert committed_while_live(scenario(decide))


# --- checkpoints


def test_a_smaller_number_can_not_overwrite_a_checkpoint() -> None:
    book = Book()
    book.granted()
    book.checkpoint(2, '{"stage":"paid"}')
    before = book.head
    assert code(book.checkpoint(1, '{"stage":"new"}')) == "checkpoint_stale" and book.head == before


def test_the_right_next_number_under_an_old_epoch_is_refused_because_only_the_epoch_shows_it() -> None:
    book = Book()
    old = book.granted()
    book.checkpoint(1)
    book.granted()
    before = book.head
    decision = book.checkpoint(2, '{"stage":"old"}', old)
    assert (code(decision), wrote(decision)) == ("stale_epoch", []) and book.head == before
    assert code(book.checkpoint(2, '{"stage":"new"}')) == "Done"


def test_of_two_workers_who_both_think_they_hold_the_run_only_the_higher_epoch_checkpoints() -> None:
    book = Book()
    lower = book.granted()
    higher = book.granted()
    for number in (1, 2, 3):
        assert code(book.checkpoint(number, '{"by":"lower"}', lower)) == "stale_epoch"
        assert code(book.checkpoint(number, '{"by":"higher"}', higher)) == "Done"
    saved = [event for event in book.log if event.kind == "checkpoint_saved"]
    assert [event.epoch for event in saved] == [2, 2, 2]


# --- the fence comes first


def test_a_stale_epoch_is_refused_before_anything_of_the_body_is_looked_at() -> None:
    book = Book()
    old = book.granted()
    book.committed()
    book.granted()
    bodies: list[Decision] = [
        book.admit(args={"other": 1}, right=old),
        book.admit(contract=None, right=old),
        book.admit(StepId("never"), stored=True, right=old),
        book.compensate(MAIL, right=old),
        book.compensate(contract=None, right=old),
        book.checkpoint(-5, "{}", old),
        book.save_result("pay", right=old),
        book.complete(old),
        book.fail(old),
    ]
    assert [(code(decision), wrote(decision)) for decision in bodies] == [("stale_epoch", [])] * len(bodies)
    assert code(book.admit(args={"other": 1})) == "step_conflict", "the live holder hears what is wrong with it"


def test_a_zombie_sends_nothing_whatever_it_asks_for() -> None:
    book, provider = Book(), Provider()
    old = book.granted()
    book.granted()
    for step, contract in ((PAY, REFUND), (MAIL, REFUND), (StepId("look"), READ)):
        assert code(book.admit(step, contract, right=old)) == "stale_epoch"
    assert provider.applied == 0 and not book.view.steps


# --- doing it again


def test_a_duplicate_apply_answers_the_first_receipt_and_sends_nothing() -> None:
    book, provider = Book(), Provider()
    book.granted()
    send(book, provider, book.admit())
    assert code(book.admit()) == "Wait", "while the first is in flight the second waits"
    book.settle(receipt='{"body":{"id":"ch_1"},"status":200}')
    answers = [book.admit().verdict for _ in range(3)]
    book.granted()
    answers.append(book.admit().verdict)
    assert all(answer == answers[0] for answer in answers)
    first = answers[0]
    assert isinstance(first, Answer)
    assert book.log[first.receipt_seq - 1].data["receipt"] == {"body": {"id": "ch_1"}, "status": 200}
    assert provider.applied == 1


def test_a_preempted_compensation_is_finished_once_by_its_own_key() -> None:
    book, charges, refunds = Book(), Provider(), Provider()
    book.granted()
    send(book, charges, book.admit())
    book.settle()
    first = book.compensate()
    assert send(book, refunds, first) == 200
    book.die()
    book.granted()
    second = book.compensate(owner=SECOND)
    assert send(book, refunds, second) == 200
    book.settle(step_id=UNDO, attempt=2)
    assert isinstance(first.verdict, Send) and isinstance(second.verdict, Send)
    assert first.verdict.key == second.verdict.key != book.step().key
    assert (charges.applied, refunds.applied, book.step().state) == (1, 1, "compensated")
    third = book.compensate(owner=SECOND)
    assert isinstance(third.verdict, Answer) and not third.events
    assert wrote(book.settle(step_id=UNDO, attempt=1)) == ["late_receipt"], "the first refund's late 200 moves nothing"


def test_a_preempted_compensation_with_the_epoch_in_the_key_refunds_twice() -> None:
    book, refunds = Book(rules=epoch_in_the_key), Provider()
    book.granted()
    book.committed()
    send(book, refunds, book.compensate())
    book.die()
    book.granted()
    send(book, refunds, book.compensate(owner=SECOND))
    assert refunds.applied == 2


def test_a_doubt_that_no_provider_can_answer_is_held_and_never_sent_twice() -> None:
    book, provider = Book(), Provider(ttl_ms=0)
    book.granted()
    send(book, provider, book.admit(contract=KEYLESS))
    book.die()
    for _ in range(5):
        decision = book.admit(contract=KEYLESS, owner=SECOND)
        assert code(decision) == "step_held"
    assert provider.applied == 1
