"""The seam in plain dicts: for tests, the simulator and the checker.

Nothing here survives the process, but an engine may: a second engine built over the same object finds what the first
one committed, as after a restart. Records are immutable, so they are handed out as they are.
"""

from collections.abc import Iterable, Mapping, Sequence

from tidefast.protocol.answers import JournalEntry
from tidefast.protocol.budget import Budget
from tidefast.protocol.events import Event
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.notices import Notice
from tidefast.protocol.records import Recovery, RunHead, Step
from tidefast.stores.base import (
    JOURNAL_ENTRY_BYTES,
    MARK_STEP_MS,
    RUN_KEY_MAX,
    Batch,
    Identity,
    StoreCorrupt,
    StoredEvent,
    StoreUnavailable,
    start_ms,
    utf8_length,
)
from tidefast.stores.memory_workspaces import MemoryWorkspaces

FINISHED = frozenset(("committed", "rejected", "compensated"))


class MemoryStore(MemoryWorkspaces):
    """See `Store`. A failed commit leaves it as it was and, as with a file, closes it to further ones."""

    def __init__(self, namespace: bytes = bytes(16), incarnation: int = 0) -> None:
        super().__init__()
        self._identity = Identity(namespace, incarnation, 0)
        self._keys: dict[RunId, int] = {}
        self._heads: dict[int, RunHead] = {}
        self._open: set[int] = set()  # of these the ones that have not ended: a claim looks at no other
        self._events: dict[int, list[StoredEvent]] = {}
        self._steps: dict[int, dict[StepId, Step]] = {}
        self._contracts: dict[str, str] = {}
        self._budgets: dict[str, Budget] = {}
        self._notices: dict[str, Notice] = {}
        self._failed = False

    def copy(self) -> "MemoryStore":
        """What a backup holds: this moment of it."""
        copy = MemoryStore()
        with self._lock:
            copy._identity, copy._open = self._identity, set(self._open)
            copy._keys, copy._heads, copy._contracts = dict(self._keys), dict(self._heads), dict(self._contracts)
            copy._events = {key: list(log) for key, log in self._events.items()}
            copy._steps = {key: dict(steps) for key, steps in self._steps.items()}
        return copy

    def restored(self, wall_ms: int) -> "MemoryStore":
        """A store made of this backup: the next incarnation, its window open as of this wall clock."""
        made = self.copy()
        point_ms = max((log[-1].event.at_ms for log in made._events.values()), default=0)
        window = Recovery(point_ms, point_ms, start_ms(wall_ms, self._identity.mark_ms))
        incarnation = self._identity.incarnation + 1
        made._identity = Identity(self._identity.namespace, incarnation, window.restored_ms, window)
        return made

    def identity(self) -> Identity:
        return self._identity

    def run_key_max(self) -> int:
        with self._lock:
            return max((*self._heads, *self._places), default=0)

    def load_head(self, run_id: RunId) -> tuple[int, RunHead] | None:
        with self._lock:
            key = self._keys.get(run_id)
            return None if key is None else (key, self._heads[key])

    def _in_order(self) -> list[tuple[int, RunHead]]:
        with self._lock:
            return sorted(self._heads.items())

    def live_heads(self) -> Sequence[tuple[int, RunHead]]:
        return [(key, head) for key, head in self._in_order() if head.is_live]

    def fenced_runs(self) -> Sequence[RunId]:
        return [head.run_id for _, head in self._in_order() if any(step.state == "fenced" for step in head.open)]

    def load_step(self, run_key: int, step_id: StepId) -> Step | None:
        with self._lock:
            return self._steps.get(run_key, {}).get(step_id)

    def step_ids(self, run_key: int, limit: int) -> Sequence[StepId]:
        with self._lock:
            return list(self._steps.get(run_key, {}))[:limit]

    def _finished(self, run_key: int, after: int) -> Iterable[Step]:
        with self._lock:
            steps = list(self._steps.get(run_key, {}).values())
        finished = [step for step in steps if step.settled_seq > max(after, 0) and step.state in FINISHED]
        return sorted(finished, key=lambda step: step.settled_seq)

    def forgotten(self, run_key: int, since_seq: int, epoch: Epoch) -> Sequence[StepId]:
        return [s.step_id for s in self._finished(run_key, since_seq) if s.is_mutating and s.epoch != epoch]

    def effects(self, run_key: int) -> Sequence[StepId]:
        with self._lock:
            steps = list(self._steps.get(run_key, {}).values())
        return [step.step_id for step in steps if step.is_mutating]

    def load_contract(self, digest: str) -> str | None:
        with self._lock:
            return self._contracts.get(digest)

    def load_budget(self, name: str) -> Budget | None:
        with self._lock:
            return self._budgets.get(name)

    def budgets(self, after: str, limit: int) -> Sequence[Budget]:
        with self._lock:
            return [self._budgets[name] for name in sorted(self._budgets) if name > after][:limit]

    def load_event(self, run_key: int, seq: int) -> StoredEvent | None:
        with self._lock:
            log = self._events.get(run_key, [])
            return log[seq - 1] if 1 <= seq <= len(log) else None

    def load_events(self, run_key: int, after: int, limit: int) -> Sequence[StoredEvent]:
        with self._lock:
            return self._events.get(run_key, [])[after : after + limit]

    def load_steps(self, run_key: int, after: StepId | None, limit: int) -> Sequence[Step]:
        with self._lock:
            steps = sorted(self._steps.get(run_key, {}).items())
        return [step for step_id, step in steps if step_id > (after or "")][:limit]

    def journal(self, run_key: int, after: int, bytes_max: int) -> tuple[Sequence[JournalEntry], int]:
        entries: list[JournalEntry] = []
        size = 0
        for step in self._finished(run_key, after):
            receipt = self.load_event(run_key, step.receipt_seq)
            data_json = "{}" if receipt is None else receipt.event.data_json
            size += JOURNAL_ENTRY_BYTES + utf8_length(data_json)
            if entries and size > bytes_max:
                return entries, entries[-1].settled_seq
            entries.append(
                JournalEntry(
                    step_id=step.step_id,
                    kind=step.kind,
                    state=step.state,
                    epoch=step.epoch,
                    key=step.key,
                    call_digest=step.call_digest,
                    settled_seq=step.settled_seq,
                    reason=step.reason,
                    data_json=data_json,
                    undo=step.closed_by,
                )
            )
        return entries, 0

    def claimable(
        self, agents: Mapping[str, Sequence[str]], now_ms: int, limit: int, prefix: str = ""
    ) -> Sequence[RunId]:
        with self._lock:
            heads = [self._heads[key] for key in sorted(self._open)]
        found = [
            head.run_id
            for head in heads
            if head.agent in agents
            and (not agents[head.agent] or head.agent_version in agents[head.agent])
            and head.state in ("claimable", "failing", "cancelling")
            and head.not_before_ms <= now_ms
            and head.run_id.startswith(prefix)
        ]
        return found[:limit]

    def probing(self, now_ms: int, limit: int) -> Sequence[RunId]:
        due = sorted((head.probe_ms, key, head.run_id) for key, head in self._in_order() if 0 < head.probe_ms <= now_ms)
        return [run_id for _, _, run_id in due[:limit]]

    def runs(self, after: RunId | None, limit: int, state: str | None, prefix: str = "") -> Sequence[RunHead]:
        with self._lock:
            start = 0 if after is None else self._keys.get(after, RUN_KEY_MAX)
        found = [
            head
            for key, head in self._in_order()
            if key > start and state in (None, head.state) and head.run_id.startswith(prefix)
        ]
        return found[:limit]

    def notices(self, due_ms: int, limit: int) -> Sequence[Notice]:
        with self._lock:
            due = [notice for notice in self._notices.values() if notice.due_ms <= due_ms]
        return sorted(due, key=lambda notice: (notice.due_ms, notice.id))[:limit]

    def held_runs(self, after: RunId | None, limit: int, prefix: str = "") -> Sequence[RunHead]:
        return [head for head in self.runs(after, RUN_KEY_MAX, None, prefix) if head.held_steps][:limit]

    def commit(self, batch: Batch) -> None:
        """Take a batch whole. Raises `StoreCorrupt`, having taken nothing, for one that contradicts the store."""
        with self._lock:
            if self._failed:
                raise StoreUnavailable("this store takes no further batch after a failed commit")
            fault = self._fault(batch) or self._fault_of_workspaces(batch.workspaces, batch.writes)
            if fault:
                self._failed = True
                raise StoreCorrupt(f"committing: the write contradicts what the store holds ({fault})")
            for key, event, digest in batch.events:
                # A copy of the fields alone: what a rule knew beside them is not read back from a file either.
                self._events.setdefault(key, []).append(StoredEvent(key, Event(*event), digest))
            for key, head in batch.heads.items():
                self._heads[key] = head
                (self._open.discard if head.end else self._open.add)(key)
                self._keys[head.run_id] = key
            for (key, step_id), step in batch.steps.items():
                self._steps.setdefault(key, {})[step_id] = step
            for digest, body in batch.contracts.items():
                self._contracts.setdefault(digest, body)
            self._take_workspaces(batch.workspaces, batch.writes, batch.pruned)
            self._budgets.update(batch.budgets)
            for name, notice in batch.notices.items():
                if notice is None:
                    self._notices.pop(name, None)
                else:
                    self._notices[name] = notice
            if batch.mark_ms >= self._identity.mark_ms + MARK_STEP_MS:
                self._identity = self._identity._replace(mark_ms=batch.mark_ms)

    def _fault(self, batch: Batch) -> str:
        """What a file's constraints would say of this batch; empty if nothing."""
        lengths: dict[int, int] = {}
        for key, event, _ in batch.events:
            length = lengths.get(key, len(self._events.get(key, [])))
            if event.seq != length + 1:
                return f"event {event.seq} of run {key} after event {length}"
            lengths[key] = length + 1
        names = dict(self._keys)
        for key, head in batch.heads.items():
            known = self._heads.get(key)
            if known is not None and (head.epoch < known.epoch or head.version < known.version):
                return f"an epoch or a version of {head.run_id} would decrease"
            if names.setdefault(head.run_id, key) != key or not 1 <= key <= RUN_KEY_MAX:
                return f"the run {head.run_id} has another key than {key}"
        for key, step_id in batch.steps:
            if key not in self._heads and key not in batch.heads:
                return f"the step {step_id} belongs to no run"
        return ""

    def close(self) -> None:
        """Nothing to give back; the content stays for the next engine."""
