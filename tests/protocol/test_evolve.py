"""Events and what they mean: the log alone gives the rows back, and an event that can't be is an error."""

import pytest
from tests.protocol.driver import KEYED, KEYLESS, MAIL, NAMESPACE, PAY, READ, RUN, TIMEOUT_MS, UNDO, Book

from tidefast.protocol.events import CHAIN_START, Event, chain, first_broken
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import Epoch, StepId
from tidefast.protocol.records import View
from tidefast.protocol.run import blank


def eventful() -> Book:
    """A run that saw most kinds of events."""
    book = Book()
    book.granted()
    book.admit(StepId("look"), READ)
    book.settle("doubted", StepId("look"))
    book.committed()
    book.checkpoint()
    book.save_result()
    book.compensate()
    book.settle("unlisted", UNDO)
    book.ms += TIMEOUT_MS + 1
    book.resolve("refused", UNDO)
    book.granted()
    book.admit(MAIL, KEYLESS)
    book.release()
    book.settle("refused", MAIL)
    book.settle("applied", MAIL)
    book.thaw()
    return book


def test_the_log_folded_again_gives_the_same_rows() -> None:
    book = eventful()
    folded = book.refold()
    assert (folded.run, folded.steps) == (book.head, book.view.steps)
    assert book.head.version == book.head.seq == len(book.log)


def test_the_digest_of_a_known_log_never_changes() -> None:
    """Golden: a change here breaks the audit of every log that was ever written."""
    event = Event(1, 1000, "run_created", Epoch(0), None, '{"agent":"refund"}')
    step = Event(2, 1001, "step_committed", Epoch(4294967297), StepId("pay~undo"), "{}")
    first = chain(CHAIN_START, event)
    assert (
        event.canonical()
        == '{"at_ms":1000,"data":{"agent":"refund"},"epoch":0,"kind":"run_created","seq":1,"step_id":null}'
    )
    assert first == "e2c3b33d13129c88a64a169bb9c7a12ef46c7ce746df0f7cd7001006c3d08800"
    assert chain(first, step) == "fbd14ab67f7d8755b5d5b4b703bffb50c59c926be14f790063757e0d3fc04e55"


def test_an_edit_a_swap_a_splice_and_a_gap_show_where_they_were_made() -> None:
    book = eventful()
    whole = list(zip(book.log, book.digests, strict=True))
    assert first_broken(whole) == 0 and first_broken([]) == 0
    for place in range(len(whole)):
        event, digest = whole[place]
        edited = [*whole[:place], (event._replace(at_ms=event.at_ms + 1), digest), *whole[place + 1 :]]
        assert first_broken(edited) == place + 1
        assert first_broken([*whole[:place], *whole[place + 1 :]]) == (place + 1 if place + 1 < len(whole) else 0)
    assert first_broken([whole[1], whole[0], *whole[2:]]) == 1


def test_a_view_without_a_run_needs_the_runs_name() -> None:
    view = View(NAMESPACE, 0, frozenset())
    created = eventful().log[0]
    assert evolve(view, created, RUN).run == Book().head
    anonymous = evolve(view, created).run
    assert anonymous is not None and anonymous.run_id == "" and blank(RUN).version == 0


@pytest.mark.parametrize("kind", ["step_committed", "nonsense"])
def test_a_steps_event_that_names_no_step_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match="names none"):
        evolve(Book().view, Event(2, 1, kind, Epoch(0), None, "{}"))  # type: ignore[arg-type]


def test_an_event_of_a_step_that_no_intent_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="no intent made"):
        evolve(Book().view, Event(2, 1, "step_held", Epoch(0), PAY, "{}"))


def test_a_runs_event_that_names_a_step_is_an_error() -> None:
    book = Book()
    book.granted()
    book.committed()
    with pytest.raises(ValueError, match="can't happen"):
        evolve(book.view, Event(9, 1, "run_created", Epoch(0), PAY, "{}"))


def test_the_head_lists_a_step_while_it_is_open_or_may_land_and_no_longer() -> None:
    book = Book()
    book.granted()
    book.admit(contract=KEYLESS)
    book.settle("doubted")
    book.ms += 1
    book.resolve("applied")
    book.admit(contract=KEYLESS)
    assert [(step.step_id, step.is_unsettled) for step in book.head.open] == [(PAY, False)], "it may still land"
    assert book.head.open[0].wire_until_ms == book.step().attempts[0].deadline_ms
    book.ms += TIMEOUT_MS
    book.granted()
    book.admit(MAIL, KEYED)
    assert [step.step_id for step in book.head.open] == [MAIL]


def test_the_state_of_a_run_follows_from_the_facts() -> None:
    book = Book()
    states = [book.head.state]
    book.granted()
    states.append(book.head.state)
    book.pause()
    states.append(book.head.state)
    book.freeze()
    states.append(book.head.state)
    book.thaw()
    book.resume()
    book.admit(MAIL, KEYLESS)
    book.settle("unlisted", MAIL)
    book.release()
    states.append(book.head.state)
    book.resolve("applied", MAIL)
    book.granted()
    book.fail()
    book.preempt()
    states.append(book.head.state)
    book.granted()
    book.admit(MAIL, stored=True)
    book.fail()
    states.append(book.head.state)
    assert states == ["claimable", "leased", "paused", "frozen", "held", "failing", "failed"]
