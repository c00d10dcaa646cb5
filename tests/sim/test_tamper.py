"""Two thousand ways to tamper with a store, each found, and the first bad event named.

The store holds a run of every kind that the stories tell. Whoever only edits the file is found by the chain or by the
head; who rewrites a log whole, with digests, head and steps, only by an anchor that was taken before.
"""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.sim.books import CONTRACTS, NAMESPACE, Books
from tests.sim.stories import STORIES

from tidefast.protocol.events import CHAIN_START, Event, chain
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.records import View
from tidefast.sim.anchor import Anchor, make_key, read_key, write_anchor
from tidefast.sim.audit import AuditReport, audit
from tidefast.stores.base import Batch, StoredEvent
from tidefast.stores.memory import MemoryStore

TRIES = 2_000
Log = list[tuple[Event, str]]


class Tampered(NamedTuple):
    """A log as it was left behind, and the first event of it that is not what was written."""

    log: Log
    first: int
    is_whole: bool = False  # rewritten with digests, head and steps: only an anchor can tell


def logs() -> dict[RunId, Log]:
    found: dict[RunId, Log] = {}
    for name, story in STORIES.items():
        books = Books(RunId(name)).create()
        books.grant()
        story(books)
        found[books.run_id] = list(zip(books.events, books.digests, strict=True))
    return found


def rechained(events: list[Event]) -> Log:
    digest, log = CHAIN_START, Log()
    for place, event in enumerate(events, 1):
        moved = Event(place, *event[1:])
        digest = chain(digest, moved)
        log.append((moved, digest))
    return log


def projected(log: Log, run_id: RunId) -> View:
    view = View(NAMESPACE, 0, frozenset(), contracts=CONTRACTS)
    for event, _ in log:
        view = evolve(view, event, run_id)
    return view


def stored(true: dict[RunId, Log], run_id: RunId, tampered: Tampered) -> MemoryStore:
    """The store after the tampering: one log replaced, and where the forger was thorough its head and steps too."""
    store = MemoryStore(NAMESPACE)
    for key, (name, log) in enumerate(true.items(), 1):
        mine = tampered.log if name == run_id else log
        view = projected(mine if name == run_id and tampered.is_whole else log, name)
        assert view.run is not None
        batch = Batch()
        batch.events = [StoredEvent(key, event, digest) for event, digest in log]
        batch.heads[key] = view.run
        batch.steps = {(key, step.step_id): step for step in view.steps.values()}
        batch.contracts = {digest: contract.to_json() for digest, contract in CONTRACTS.items()}
        store.commit(batch)
        store._events[key] = [StoredEvent(key, event, digest) for event, digest in mine]  # past the store's own checks
    return store


# --- the ways ---------------------------------------------------------------------------------------------------------


def changed(event: Event, chance: random.Random) -> Event:
    match chance.randrange(4):
        case 0:
            return event._replace(at_ms=event.at_ms + chance.choice((-1, 1, 1_000)))
        case 1:
            return event._replace(epoch=Epoch(event.epoch + 1))
        case 2:
            return event._replace(step_id=StepId("other" if event.step_id is None else event.step_id + "x"))
        case _:
            return event._replace(
                data_json=event.data_json[:-1] + (',"z":1}' if len(event.data_json) > 2 else '"z":1}')
            )


def edit(log: Log, chance: random.Random, _: Log) -> Tampered:
    place = chance.randrange(len(log))
    event = Event(*changed(log[place][0], chance)[:6])
    return Tampered([*log[:place], (event, log[place][1]), *log[place + 1 :]], place + 1)


def edit_digest(log: Log, chance: random.Random, _: Log) -> Tampered:
    place = chance.randrange(len(log))
    digest = log[place][1]
    digest = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    return Tampered([*log[:place], (log[place][0], digest), *log[place + 1 :]], place + 1)


def cut(log: Log, chance: random.Random, _: Log) -> Tampered:
    length = chance.randrange(len(log))
    return Tampered(log[:length], length + 1)


def swap(log: Log, chance: random.Random, _: Log) -> Tampered:
    one, two = sorted(chance.sample(range(len(log)), 2))
    moved = list(log)
    moved[one], moved[two] = moved[two], moved[one]
    return Tampered(moved, one + 1)


def drop(log: Log, chance: random.Random, _: Log) -> Tampered:
    place = chance.randrange(len(log))
    return Tampered(log[:place] + log[place + 1 :], place + 1)


def double(log: Log, chance: random.Random, _: Log) -> Tampered:
    place = chance.randrange(len(log))
    return Tampered([*log[: place + 1], log[place], *log[place + 1 :]], place + 2)


def splice(log: Log, chance: random.Random, other: Log) -> Tampered:
    """A piece of another run's log, in place of what stood there."""
    place = chance.randrange(min(len(log), len(other)))
    piece = other[place : place + chance.randrange(1, 4)]
    return Tampered([*log[:place], *piece, *log[place + len(piece) :]], place + 1)


def rewrite_chain(log: Log, chance: random.Random, other: Log) -> Tampered:
    """Edited and chained anew, but the head was left as it is: the last digest tells, not where it began."""
    bad = edit(log, chance, other)
    return Tampered(rechained([event for event, _ in bad.log]), bad.first)


def cut_whole(log: Log, chance: random.Random, _: Log) -> Tampered:
    """The tail cut, and head and steps put back to that moment: as a restored backup looks."""
    length = chance.randrange(1, len(log))
    return Tampered(log[:length], length + 1, is_whole=True)


def rewrite_whole(log: Log, chance: random.Random, _: Log) -> Tampered:
    """A moment moved, then everything made anew: digests, head and steps."""
    place = chance.randrange(len(log))
    events = [event for event, _ in log]
    events[place] = Event(*events[place]._replace(at_ms=events[place].at_ms + 1)[:6])
    return Tampered(rechained(events), place + 1, is_whole=True)


WAYS: tuple[Callable[[Log, random.Random, Log], Tampered], ...] = (
    edit,
    edit_digest,
    cut,
    swap,
    drop,
    double,
    splice,
    rewrite_chain,
    cut_whole,
    rewrite_whole,
)
BY_ANCHOR = {"cut_whole", "rewrite_whole"}


@pytest.fixture(scope="module")
def anchor_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("anchor")
    make_key(home / "key")
    true = logs()
    name, log = next(iter(true.items()))
    write_anchor(stored(true, name, Tampered(log, 0)), home / "anchor", read_key(home / "key"))
    return home / "anchor"


def test_the_store_is_cleared_before_anybody_tampers(anchor_file: Path) -> None:
    true = logs()
    name, log = next(iter(true.items()))
    report = audit(stored(true, name, Tampered(log, 0)), anchors=[Anchor(anchor_file)])
    assert report.is_ok, report.violations
    assert report.runs == len(STORIES) >= 18


def test_two_thousand_tries_are_found_and_the_first_bad_event_is_named(anchor_file: Path) -> None:
    true, chance = logs(), random.Random(18)
    names = list(true)
    tried, found, named = Counter[str](), Counter[str](), Counter[str]()
    for number in range(TRIES):
        way = WAYS[number % len(WAYS)]
        run_id = chance.choice(names)
        other = true[chance.choice([name for name in names if name != run_id])]
        tampered = way(true[run_id], chance, other)
        if tampered.log == true[run_id]:
            raise AssertionError(f"{way.__name__} changed nothing")
        # One run beside the tampered one is enough of a store; the anchor names the others, which are then gone.
        pair = {run_id: true[run_id]}
        report = audit(stored(pair, run_id, tampered), anchors=[Anchor(anchor_file)])
        mine = [violation for violation in report.violations if violation.run_id == run_id]
        tried[way.__name__] += 1
        found[way.__name__] += bool(mine)
        named[way.__name__] += _is_named(report, run_id, way.__name__, tampered, len(true[run_id]))
    assert tried.total() == TRIES and set(tried) == {way.__name__ for way in WAYS}
    assert found == tried
    assert named == tried, {way: tried[way] - named[way] for way in tried if tried[way] != named[way]}


def _is_named(report: AuditReport, run_id: RunId, way: str, tampered: Tampered, length: int) -> bool:
    first = report.first_bad.get(run_id)
    if way in ("rewrite_chain", "rewrite_whole"):
        # An anchor has one digest for the whole log: the range is named, and the first bad event lies in it.
        said = f"one of the events 1 to {length} was rewritten"
        return first == 1 and any(said in violation.why for violation in report.violations)
    named = {found.seq for found in report.violations if (found.law, found.run_id) == ("altered_log", run_id)}
    return first == tampered.first and first in named


def test_without_an_anchor_only_what_was_rewritten_whole_escapes() -> None:
    true, chance = logs(), random.Random(3)
    escaped: Counter[str] = Counter()
    for number in range(400):
        way = WAYS[number % len(WAYS)]
        run_id = chance.choice(list(true))
        other = true[chance.choice([name for name in true if name != run_id])]
        tampered = way(true[run_id], chance, other)
        escaped[way.__name__] += audit(stored({run_id: true[run_id]}, run_id, tampered)).is_ok
    assert {way for way, count in escaped.items() if count} <= BY_ANCHOR
    assert escaped["cut_whole"] > 30 and escaped["rewrite_whole"], escaped


def test_a_contract_that_was_altered_or_lost_is_named() -> None:
    true = logs()
    run_id = RunId("happy")
    for text in (None, '{"tool":"charge"}'):
        store = stored({run_id: true[run_id]}, run_id, Tampered(true[run_id], 0))
        for name in list(store._contracts):
            if text is None:
                del store._contracts[name]
            else:
                store._contracts[name] = text
        found = audit(store).violations
        assert found[0].law == "altered_log" and found[0].seq == 3
        assert ("is gone" if text is None else "was altered") in found[0].why
