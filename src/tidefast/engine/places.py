"""Workspaces in memory: the heads that decisions read, and what their events write.

The engine's other half for `View.workspace`. A workspace's event moves its head by `evolve_workspace`; one that joins a
write also becomes a row of the write log with its delta, which stands in that event or in the one that it names.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidefast.protocol.events import Event
from tidefast.protocol.ids import RunId, StepId, WorkspaceId
from tidefast.protocol.records import Step, WorkspaceHead
from tidefast.protocol.replica import evolve_workspace
from tidefast.protocol.workspace import Delta, Entry
from tidefast.protocol.write import workspace_of
from tidefast.stores.base import Batch, Store, StoreCorrupt, StoredEvent
from tidefast.stores.workspaces import LoggedWrite, StoredWrite


class Delivered(msgspec.Struct):
    """The members of a workspace's event that a joined write needs."""

    run: str = ""
    index: int = 0
    chain: str = ""
    delta: dict[str, Entry | None] | None = None
    write_seq: int = 0


_decode = msgspec.json.Decoder(Delivered).decode


@dataclass(slots=True, eq=False)
class Place:
    """One workspace in memory."""

    key: int
    head: WorkspaceHead | None
    gathering: Any = None  # the batch that its newest events wait in
    unjoined: dict[int, Delta] = field(default_factory=dict)  # by seq: the delta of a receipt that waits for its join


class Places:
    """The workspaces of one engine."""

    def __init__(self, store: Store, new_key: Callable[[], int]) -> None:
        self._store = store
        self._new_key = new_key
        self._places: dict[WorkspaceId, Place] = {}

    def start(self) -> None:
        """Read the busy ones into memory."""
        for key, head in self._store.busy_workspaces():
            self._places[head.workspace_id] = Place(key, head)

    def busy(self) -> list[WorkspaceHead]:
        """The heads of the workspaces with a live replica or an open write."""
        heads = [place.head for place in self._places.values() if place.head is not None]
        return [head for head in heads if head.is_live or head.open is not None]

    def find(self, workspace_id: WorkspaceId) -> Place | None:
        place = self._places.get(workspace_id)
        if place is None:
            found = self._store.load_workspace(workspace_id)
            place = None if found is None else Place(*found)
        return place

    def shown(self, workspace_id: WorkspaceId | None, steps: Iterable[Step]) -> WorkspaceId | None:
        """Which workspace a rule must see: the one that the command names, or the one that a step writes to."""
        return workspace_id or next((place for place in map(workspace_of, steps) if place is not None), None)

    def gather(self, workspace_id: WorkspaceId, events: Iterable[Event], batch: Batch) -> Place:
        """Put a workspace's events into a batch."""
        place = self.find(workspace_id) or Place(self._new_key(), None)
        head = place.head or WorkspaceHead(workspace_id)
        for event in events:
            head = evolve_workspace(head, event)
            batch.events.append(StoredEvent(place.key, event, head.digest))
            if event.kind == "write_applied":
                place.unjoined = {event.seq: _decode(event.data_json).delta or {}}
            elif event.kind == "write_committed":
                batch.writes.append(self._joined(place, event))
        place.head = batch.workspaces[place.key] = head
        self._places[workspace_id] = place
        return place

    def _joined(self, place: Place, event: Event) -> StoredWrite:
        data = _decode(event.data_json)
        delta = data.delta if data.delta is not None else self.delta_at(place, data.write_seq)
        step_id = StepId(event.step_id or "")
        seq = data.write_seq or event.seq
        logged = LoggedWrite(data.index, RunId(data.run), step_id, event.at_ms, data.chain, seq, len(delta))
        place.unjoined = {}
        return StoredWrite(place.key, logged, delta)

    def delta_at(self, place: Place, seq: int) -> Delta:
        """The delta that a workspace's event holds, durable or not. Raises `StoreCorrupt` if it holds none."""
        known = place.unjoined.get(seq)
        if known is not None:
            return known
        stored = self._store.load_event(place.key, seq)
        delta = None if stored is None else _decode(stored.event.data_json).delta
        if delta is None:
            raise StoreCorrupt(f"the event {seq} of workspace {place.key} holds no delta; restore a backup")
        return delta

    def waiting_digests(self) -> set[str]:
        """The contents that deltas name which wait for their join, of every workspace."""
        waiting = [place for place in self._places.values() if place.head is not None and place.head.open is not None]
        deltas = [self.delta_at(p, p.head.open.write_seq) for p in waiting if p.head.open.write_seq]  # type: ignore[union-attr]
        return {entry.digest for delta in deltas for entry in delta.values() if entry is not None}

    def forget_idle(self, place: Place, workspace_id: WorkspaceId) -> None:
        """What is durable and neither live nor open is read again when somebody asks."""
        if place.head is not None and not place.head.is_live and place.head.open is None:
            self._places.pop(workspace_id, None)
