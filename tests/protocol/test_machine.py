"""The three doors: what each command needs, and that an accepted verb told again says the same and writes nothing."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
from tests.protocol.driver import MAIL, PAY, RUN, TIMEOUT_MS, UNDO, Book

from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.commands import CreateRun, Fail, Lapse, Renew, Settle
from tidefast.protocol.ids import Epoch, StepId
from tidefast.protocol.machine import Needs, decide, needs, with_target
from tidefast.protocol.points import Point
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Settled


def test_the_needs_of_a_command_follow_from_the_command_alone() -> None:
    right = Right(RUN, Epoch(1), "w1")
    assert needs(Renew(right)) == Needs(RUN)
    assert needs(Fail(right, "no")).effects
    assert needs(Lapse(RUN)) == needs(CreateRun(RUN, "a", "1", "{}")) == Needs(RUN)
    assert needs(Settle(RUN, UNDO, 1, "applied", "null")).steps == (UNDO, PAY)
    assert with_target(StepId("plan~x")) == (StepId("plan~x"),)


Told = Callable[[Book], Any]
ACCEPTED: list[tuple[str, Callable[[Book], Any], Told]] = [
    ("create", lambda book: None, lambda book: book.create()),
    ("grant", lambda book: book.preempt(), lambda book: book.grant("w9", "req-9")),
    ("apply", lambda book: book.committed(), lambda book: book.admit()),
    ("join", lambda book: (book.admit(), book.granted(), book.settle()), lambda book: book.admit()),
    ("compensate", lambda book: undone(book), lambda book: book.compensate()),
    ("result", lambda book: None, lambda book: book.save_result()),
    ("checkpoint", lambda book: None, lambda book: book.checkpoint()),
    ("release", lambda book: None, lambda book: book.release(book.right(1))),
    ("complete", lambda book: None, lambda book: book.complete(book.right(1))),
    ("fail", lambda book: None, lambda book: book.fail(book.right(1))),
    ("preempt", lambda book: None, lambda book: book.preempt()),
    ("thaw", lambda book: book.release(reason="drift"), lambda book: book.thaw()),
    ("resolve", lambda book: held(book), lambda book: book.resolve("not_applied")),
    ("settle", lambda book: book.admit(), lambda book: book.settle()),
    ("settle late", lambda book: (book.admit(), book.preempt()), lambda book: book.settle()),
    ("settle refused", lambda book: book.admit(), lambda book: book.settle("refused")),
    ("settle unsent", lambda book: book.admit(), lambda book: book.settle("unsent")),
    ("settle doubted", lambda book: book.admit(), lambda book: book.settle("doubted")),
    ("settle unlisted", lambda book: book.admit(), lambda book: book.settle("unlisted")),
]


def undone(book: Book) -> None:
    book.committed()
    book.compensate()
    book.settle(step_id=UNDO)


def held(book: Book) -> None:
    book.admit()
    book.settle("unlisted")
    book.ms += TIMEOUT_MS + 1


@pytest.mark.parametrize("name,prepare,tell", ACCEPTED, ids=[name for name, _, _ in ACCEPTED])
def test_an_accepted_verb_told_again_writes_nothing_and_answers_alike(name: str, prepare: Told, tell: Told) -> None:
    book = Book()
    book.granted()
    prepare(book)
    first = tell(book)
    after = book.view
    again = tell(book)
    assert not again.events and book.view == after, name
    assert type(again.verdict) is type(first.verdict)
    if isinstance(first.verdict, Settled):
        assert again.verdict.state == first.verdict.state
    if isinstance(first.verdict, Done):
        assert not again.verdict.was_new


def test_a_grants_token_is_put_in_by_the_server_and_never_shows_in_a_log_line() -> None:
    grant = LeaseGrant(RUN, "refund", "1", Epoch(1), "w1", 15_000, 0, "null", 0, "null", False, ())
    assert grant.token == "" and grant.with_token("secret").token == "secret"
    assert "secret" not in repr(grant.with_token("secret")) and grant.with_token("") == grant


def test_the_points_of_the_fault_injector_are_named_after_who_stops_there() -> None:
    assert {point.split(".")[0] for point in get_args(Point)} == {"sdk", "gateway"}


def test_equal_arguments_give_equal_decisions() -> None:
    book = Book()
    book.granted()
    command = Renew(book.right())
    assert decide(book.view, command, book.now) == decide(book.view, command, book.now)


def test_decide_never_looks_past_its_needs() -> None:
    """The driver shows only what `needs` names; a run with several steps open goes through every rare verb so."""
    book = Book()
    book.granted()
    book.committed()
    book.admit(MAIL)
    book.settle("unsent", MAIL)
    book.compensate()
    book.die()
    book.granted()
    book.mark_lost(UNDO)
    book.fail()
    book.compensate(owner="boot-1+")
    book.settle(step_id=UNDO, attempt=2)
    book.fail()
    assert (book.head.end, book.step().state, book.step(MAIL).state) == ("failed", "compensated", "rejected")
