"""What the laws are judged on, read from a store run by run, with a provider's own ledger beside it.

A ledger is a small JSON text, a list of what the provider counts net per idempotency key, or per step where the
provider takes no key:

    [{"key": "8f1c…", "count": 1}, {"run": "refund-7", "step": "mail", "count": 1}]

or, where it speaks for some tools only, `{"tools": ["charge"], "effects": [ … ]}`. Events are read in pages, and one
run is held in memory at a time.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tidefast.protocol.canonical import digest
from tidefast.protocol.contracts import Contract
from tidefast.protocol.events import Event
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.laws import Ack, History
from tidefast.protocol.records import RunHead
from tidefast.protocol.trace import INTENTS
from tidefast.stores.base import Store

PAGE_EVENTS = 1_000
PAGE_RUNS = 200
CONTRACTS_KEPT = 1_000  # a store has few; the limit only keeps memory flat
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)


class LedgerError(ValueError):
    """The text is not a provider's ledger; the message says where and what was expected."""


class Ledger(NamedTuple):
    """A provider's own net count of effects. `tools` None: it speaks for every tool that changes the world."""

    keys: Mapping[str, int] = {}
    steps: Mapping[tuple[RunId, StepId], int] = {}
    tools: frozenset[str] | None = None


class Reading(NamedTuple):
    """One run as a store holds it: its head, and the log that the head was read with."""

    run_key: int
    head: RunHead
    history: History


def read_ledger(text: str) -> Ledger:
    """A ledger from its JSON text; rows of one key are added up. Raises `LedgerError`."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"a ledger is a JSON text, this is none: {error}") from error
    tools: frozenset[str] | None = None
    if isinstance(value, dict):
        if set(value) != {"tools", "effects"}:
            raise LedgerError('expected a list, or an object with exactly "tools" and "effects"')
        names, value = value["tools"], value["effects"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise LedgerError("tools: expected a list of tool names")
        tools = frozenset(names)
    if not isinstance(value, list):
        raise LedgerError("expected a list of effects")
    keys: dict[str, int] = {}
    steps: dict[tuple[RunId, StepId], int] = {}
    for place, row in enumerate(value, 1):
        _add_row(row, place, keys, steps)
    return Ledger(keys, steps, tools)


def _add_row(row: object, place: int, keys: dict[str, int], steps: dict[tuple[RunId, StepId], int]) -> None:
    wanted = 'expected {"key", "count"} or {"run", "step", "count"}'
    if not isinstance(row, dict) or set(row) not in ({"key", "count"}, {"run", "step", "count"}):
        raise LedgerError(f"effect {place}: {wanted}")
    count = row["count"]
    names = [row[name] for name in ("key", "run", "step") if name in row]
    if isinstance(count, bool) or not isinstance(count, int) or not all(isinstance(name, str) for name in names):
        raise LedgerError(f"effect {place}: {wanted}, the count an integer and the others texts")
    if "key" in row:
        key = plain_key(row["key"])
        keys[key] = keys.get(key, 0) + count
    else:
        step = (RunId(row["run"]), StepId(row["step"]))
        steps[step] = steps.get(step, 0) + count


def plain_key(key: str) -> str:
    """A key as the log spells it: a provider that wants UUIDs counts by UUIDs."""
    return key.replace("-", "").lower() if _UUID.fullmatch(key) else key


class Reader:
    """Reads the runs of one store. Contracts are shared by runs and kept once."""

    def __init__(
        self, store: Store, ledger: Ledger | None = None, acks: Mapping[RunId, tuple[Ack, ...]] | None = None
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._by_run: dict[RunId, dict[StepId, int]] = {}
        for (run_id, step_id), count in () if ledger is None else ledger.steps.items():
            self._by_run.setdefault(run_id, {})[step_id] = count
        self._acks = acks or {}
        self._namespace = store.identity().namespace
        self._contracts: dict[str, Contract] = {}
        self._seen_keys: set[str] = set()
        self._seen_runs: set[RunId] = set()

    def run_ids(self) -> Iterator[RunId]:
        """Every run that the store lists, in order of creation."""
        after: RunId | None = None
        while True:
            heads = self._store.runs(after, PAGE_RUNS, None)
            for head in heads:
                yield head.run_id
            if len(heads) < PAGE_RUNS:
                return
            after = heads[-1].run_id

    def read(self, run_id: RunId, now_ms: int = 0) -> Reading | None:
        """One run; None if the store has no head of it."""
        found = self._store.load_head(run_id)
        if found is None:
            return None
        run_key, head = found
        events: list[Event] = []
        digests: list[str] = []
        while True:
            page = self._store.load_events(run_key, len(events), PAGE_EVENTS)
            events.extend(stored.event for stored in page)
            digests.extend(stored.digest for stored in page)
            if len(page) < PAGE_EVENTS:
                break
        history = History(
            run_id=run_id,
            events=tuple(events),
            digests=tuple(digests),
            namespace=self._namespace,
            contracts=self._contracts_of(events),
            applied=self._applied(run_id, events),
            acknowledged=self._acks.get(run_id, ()),
            now_ms=now_ms,
            head_digest=head.digest,
            head_seq=head.seq,
            counted=None if self._ledger is None else self._ledger.tools,
        )
        return Reading(run_key, head, history)

    def strays(self) -> Iterator[tuple[RunId, StepId | None, str, int]]:
        """What the ledger counts and no run that was read has: effects that never passed the gateway."""
        if self._ledger is None:
            return
        for key, count in self._ledger.keys.items():
            if count and key not in self._seen_keys:
                yield RunId(""), None, key, count
        for (run_id, step_id), count in self._ledger.steps.items():
            if count and run_id not in self._seen_runs:
                yield run_id, step_id, step_id, count

    def _contracts_of(self, events: list[Event]) -> Mapping[str, Contract]:
        named = {str(name) for name in _members(events, "contract")}
        for name in named - self._contracts.keys():
            text = self._store.load_contract(name)
            contract = None if text is None or digest(text) != name else _parse(text)
            if contract is not None and len(self._contracts) < CONTRACTS_KEPT:
                self._contracts[name] = contract
        return {name: self._contracts[name] for name in named if name in self._contracts}

    def _applied(self, run_id: RunId, events: list[Event]) -> Mapping[str, int] | None:
        """The ledger's rows of this run; a key with no row is counted as zero by the laws."""
        if self._ledger is None:
            return None
        self._seen_runs.add(run_id)
        keys = {str(key) for key in _members(events, "key")} & self._ledger.keys.keys()
        self._seen_keys |= keys
        applied: dict[str, int] = {key: self._ledger.keys[key] for key in keys}
        return applied | {str(step_id): count for step_id, count in self._by_run.get(run_id, {}).items()}


def histories(
    store: Store, ledger: Ledger | None = None, acks: Mapping[RunId, tuple[Ack, ...]] | None = None
) -> Iterator[History]:
    """What the laws are judged on, for each run of a store that is at rest."""
    reader = Reader(store, ledger, acks)
    for run_id in reader.run_ids():
        reading = reader.read(run_id)
        if reading is not None:
            yield reading.history


def _members(events: list[Event], name: str) -> Iterator[object]:
    """A member of each intent that has it; an intent that can't be read has none."""
    for event in events:
        if event.kind not in INTENTS:
            continue
        try:
            data: object = json.loads(event.data_json)
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict) and name in data:
            yield data[name]


def _parse(text: str) -> Contract | None:
    """A stored contract; None if this version can't read it."""
    try:
        return Contract.from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
