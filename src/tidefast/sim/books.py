"""A provider's own ledger against the logs, effect by effect.

Every effect that a provider counts must belong to one step, and every step must have as many effects as the log says:
one if it is committed or applied, none if it was rejected, compensated or never sent, none or one while a person is
asked. A provider's rows name the idempotency key, or, where it takes none, the run and the step. The laws judge the
same counts (`double_apply`, `unlogged_effect`); this says it per effect, for people.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.trace import Facts, Trace, fold
from tidefast.sim.history import Ledger, Reader, plain_key
from tidefast.stores.base import Store

ONE = frozenset(("committed", "applied"))
OPEN = frozenset(("held", "in_doubt", "fenced"))


class Effect(NamedTuple):
    """One row of a provider's ledger: something that it did, and whether it was taken back."""

    key: str = ""
    run: str = ""
    step: str = ""
    name: str = ""  # the provider's own name for it
    is_undone: bool = False


class Entry(NamedTuple):
    """One mutating step with what its provider counts for it."""

    run: RunId
    step: StepId
    tool: str
    key: str
    state: str
    effects: tuple[Effect, ...]

    @property
    def net(self) -> int:
        return sum(1 for effect in self.effects if not effect.is_undone)


@dataclass(frozen=True, slots=True)
class Books:
    """The comparison. Each list names what doesn't fit; `open` is what a person has still to settle."""

    entries: Sequence[Entry]
    applied: int  # effects that the provider counts, those taken back left out
    doubles: list[Entry] = field(default_factory=list)  # more than one effect
    missing: list[Entry] = field(default_factory=list)  # the log says done, the provider knows nothing
    unbooked: list[Entry] = field(default_factory=list)  # the log says not done, the provider did it
    strangers: list[Effect] = field(default_factory=list)  # no step of any log
    open: list[Entry] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not (self.doubles or self.missing or self.unbooked or self.strangers)

    def count(self, *states: str) -> int:
        return sum(1 for entry in self.entries if entry.state in states)


def compare(effects: Sequence[Effect], traces: Iterable[Trace], tools: Collection[str] | None = None) -> Books:
    """Match a ledger with the logs. `tools` names those that this provider carries out; None: all of them."""
    by_key: dict[str, list[Effect]] = {}
    by_step: dict[tuple[str, str], list[Effect]] = {}
    for effect in effects:
        if effect.key:
            by_key.setdefault(plain_key(effect.key), []).append(effect)
        else:
            by_step.setdefault((effect.run, effect.step), []).append(effect)
    entries: list[Entry] = []
    for trace in traces:
        run = trace.history.run_id
        for step in trace.steps.values():
            if step.is_mutating and step.undo_of is None and (tools is None or step.tool in tools):
                found = [*by_key.pop(step.key, ()), *by_step.pop((run, step.step_id), ())]
                entries.append(Entry(run, step.step_id, step.tool, step.key, _state(step), tuple(found)))
    strangers = [effect for rest in (by_key, by_step) for found in rest.values() for effect in found]
    books = Books(entries, sum(1 for effect in effects if not effect.is_undone), strangers=strangers)
    for entry in entries:
        _judge(entry, books)
    return books


def _state(step: Facts) -> str:
    """The step's state; one that is being undone may still be there or not."""
    return "in_doubt" if step.closed_by is not None and step.state != "compensated" else step.state


def _judge(entry: Entry, books: Books) -> None:
    if entry.state in OPEN:
        books.open.append(entry)
    if entry.net > 1:
        books.doubles.append(entry)
    elif entry.state in ONE and entry.net == 0:
        books.missing.append(entry)
    elif entry.state not in ONE | OPEN and entry.net > 0:
        books.unbooked.append(entry)


def read_traces(store: Store) -> Iterator[Trace]:
    """The folded log of every run of a store, one at a time."""
    reader = Reader(store)
    for run_id in reader.run_ids():
        reading = reader.read(run_id)
        if reading is not None:
            yield fold(reading.history)


def read_effects(rows: Iterable[Mapping[str, object]]) -> list[Effect]:
    """Effects from a provider's rows: `key`, or `step` as `RUN/STEP`; `undone` and `id` where there are any.

    A row that has both is matched by its key. Raises `ValueError` for a row that has neither.
    """
    effects: list[Effect] = []
    for place, row in enumerate(rows, 1):
        key, place_name = row.get("key"), row.get("step")
        run, slash, step = place_name.partition("/") if isinstance(place_name, str) else ("", "", "")
        if isinstance(key, str) and key:
            run = step = ""
        elif not slash:
            raise ValueError(f"effect {place}: expected a key, or a step written RUN/STEP")
        key_text = key if isinstance(key, str) else ""
        effects.append(Effect(key_text, run, step, str(row.get("id", "")), row.get("undone") is True))
    return effects


def to_ledger(effects: Iterable[Effect], tools: frozenset[str] | None = None) -> Ledger:
    """The same effects as net counts, for the auditor."""
    keys: dict[str, int] = {}
    steps: dict[tuple[RunId, StepId], int] = {}
    for effect in effects:
        net = 0 if effect.is_undone else 1
        if effect.key:
            key = plain_key(effect.key)
            keys[key] = keys.get(key, 0) + net
        else:
            name = (RunId(effect.run), StepId(effect.step))
            steps[name] = steps.get(name, 0) + net
    return Ledger(keys, steps, tools)
