"""The person in charge: facts are taken, nothing new begins in a stopped run, and who did it and why stands."""

from typing import Any

import pytest
from tests.protocol.driver import KEYED, KEYLESS, MAIL, PAY, RUN, UNDO, Book, code, wrote

from tidefast.protocol.commands import RUN_VERBS, Resolve, RunVerb
from tidefast.protocol.ids import Epoch
from tidefast.protocol.verdicts import Done, Refused, Settled

STOPS = {"pause": ("run_paused", "operator"), "freeze": ("run_frozen", "operator")}
GOES_ON = {"pause": "resume", "freeze": "thaw"}


def ask(book: Book, verb: RunVerb, expect: int | None = None) -> Any:
    return book.submit(RUN_VERBS[verb](RUN, "ann", "why not", None if expect is None else Epoch(expect)))


@pytest.mark.parametrize("stop", STOPS)
def test_a_stopped_run_takes_facts_and_admits_nothing_new(stop: RunVerb) -> None:
    book = Book()
    right = book.granted()
    book.committed(MAIL, KEYLESS)
    book.admit()
    assert ask(book, stop).verdict.state in ("paused", "frozen")
    refused = STOPS[stop]
    for decision in (
        book.admit(UNDO.__class__("new")),
        book.compensate(MAIL),
        book.save_result(),
        book.checkpoint(),
        book.complete(),
        book.fail(),
    ):
        assert isinstance(decision.verdict, Refused) and not decision.events
        assert (decision.verdict.code, decision.verdict.reason) == refused
    assert code(book.admit(MAIL, KEYLESS)) == "Answer"
    assert code(book.renew()) == "Renewed", "neither pausing nor freezing ends the epoch"
    assert book.settle().verdict == Settled("committed", joined=True)
    book.release(right)
    assert (code(book.grant()), book.head.is_live) == (refused[0], False)
    assert ask(book, GOES_ON[stop]).verdict.was_new  # type: ignore[arg-type]
    assert code(book.grant()) == "Granted"


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_every_verb_says_who_and_why_and_nothing_new_when_it_is_repeated(verb: RunVerb) -> None:
    book = Book()
    book.granted()
    before: dict[str, list[RunVerb]] = {"resume": ["pause"], "thaw": ["freeze"]}
    for first in before.get(verb, []):
        ask(book, first)
    decision = ask(book, verb)
    assert decision.verdict.was_new
    for event in decision.events:
        assert (event.data["by"], event.data["note"]) == ("ann", "why not")
    again = ask(book, verb)
    assert isinstance(again.verdict, Done) and not again.verdict.was_new and not again.events


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_a_verb_of_somebody_who_saw_another_epoch_is_refused_as_moved(verb: RunVerb) -> None:
    book = Book()
    book.granted()
    book.granted()
    decision = ask(book, verb, expect=1)
    assert code(decision) == "moved" and not decision.events
    assert isinstance(decision.verdict, Refused)
    assert decision.verdict.facts == {"expected_epoch": 1, "live_epoch": 2}
    assert code(ask(book, verb, expect=2)) == "Done"


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_no_verb_moves_a_run_that_has_ended_or_that_is_not_there(verb: RunVerb) -> None:
    book = Book()
    book.granted()
    book.complete()
    assert (code(ask(book, verb)), wrote(ask(book, verb))) == ("run_ended", [])
    assert code(ask(Book(created=False), verb)) == "not_found"


def test_a_frozen_run_keeps_its_reason_when_it_is_frozen_again_and_can_be_paused_besides() -> None:
    book = Book()
    book.granted()
    book.release(reason="drift")
    assert not book.freeze().events and book.head.frozen == "drift"
    book.pause()
    assert book.head.state == "frozen"
    book.thaw()
    assert book.head.state == "paused"


def test_a_verdict_on_a_step_may_name_the_epoch_that_its_sender_saw() -> None:
    book = Book()
    book.granted()
    book.admit(MAIL, KEYLESS)
    book.settle("unlisted", MAIL)
    book.release()
    verdict = Resolve(RUN, MAIL, "applied", "ann", "seen", expect_epoch=Epoch(7))
    assert code(book.submit(verdict)) == "moved"
    assert book.resolve("applied", MAIL, expect_epoch=Epoch(1)).verdict == Settled("applied", joined=False)


def test_the_freeze_for_no_progress_names_the_step_where_the_run_was_last_seen() -> None:
    book = Book()
    for _ in range(10):
        right = book.granted()
        book.admit(PAY, KEYED)
        book.settle("unsent", attempt=len(book.step().attempts))
        book.release(right, "error")
    book.ms = max(book.ms, book.head.not_before_ms)
    frozen = book.grant()
    assert code(frozen) == "run_frozen" and frozen.events[-1].data["last_step"] == PAY
    bare = Book()
    for _ in range(10):
        bare.release(bare.granted())
    bare.ms = bare.head.not_before_ms
    assert bare.grant().events[-1].data["last_step"] is None
