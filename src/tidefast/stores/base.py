"""What a store owes the engine.

A store keeps the log and its projections, and knows no rules. `commit` is the only door that writes: everything in a
batch becomes durable together or not at all, and an exception from it means that nobody knows which. Reads see
committed rows only. Inside a store a run has an integer key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tidefast.protocol.answers import JournalEntry
from tidefast.protocol.budget import Budget
from tidefast.protocol.events import Event
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.notices import Notice
from tidefast.protocol.records import Recovery, RunHead, Step, WorkspaceHead
from tidefast.stores.workspaces import StoredWrite, WorkspaceTables

RUN_KEY_MAX = 2**31 - 1  # with a seq of 32 bits beside it, it fills one signed 64-bit integer
JOURNAL_ENTRY_BYTES = 256  # what an entry counts against a page's limit beside its data
MARK_STEP_MS = 1_000  # the mark is written when it has moved by this, not with each batch


def start_ms(wall_ms: int, mark_ms: int) -> int:
    """Where an authority's clock starts: after everything that an earlier life of it can have committed."""
    return max(wall_ms, mark_ms + MARK_STEP_MS)


class StoreError(Exception):
    """A store can't do what it owes. The message says what, why and what to do next."""


class StoreUnavailable(StoreError):
    """The outcome of a write is unknown, or the store can't be reached: stop, don't retry and answer."""


class StoreCorrupt(StoreError):
    """What the store holds can't be what was written. The process stops."""


class StoreRefused(StoreError):
    """The store won't be opened: missing where one was expected, empty, foreign, newer, or owned by another process."""


class Identity(NamedTuple):
    """What tells one store from another. `mark_ms` is the latest time, of wall or authority, that was committed."""

    namespace: bytes  # 16 random bytes, drawn when the store was made
    incarnation: int
    mark_ms: int
    recovery: Recovery | None = None  # the window after a restore, until an operator closes it


class StoredEvent(NamedTuple):
    run_key: int  # or a workspace's key
    event: Event
    digest: str


@dataclass(slots=True)
class Batch:
    """What one commit writes. Heads and steps hold the last state only, however often they moved in the batch."""

    events: list[StoredEvent] = field(default_factory=list)
    heads: dict[int, RunHead] = field(default_factory=dict)
    steps: dict[tuple[int, StepId], Step] = field(default_factory=dict)
    contracts: dict[str, str] = field(default_factory=dict)
    budgets: dict[str, Budget] = field(default_factory=dict)
    notices: dict[str, Notice | None] = field(default_factory=dict)  # None: delivered, or given up
    mark_ms: int = 0
    workspaces: dict[int, WorkspaceHead] = field(default_factory=dict)
    writes: list[StoredWrite] = field(default_factory=list)
    pruned: dict[int, int] = field(default_factory=dict)  # by workspace: the oldest log index that stays whole


def utf8_length(text: str) -> int:
    """How many bytes a text takes."""
    return len(text) if text.isascii() else len(text.encode())


class Store(WorkspaceTables, Protocol):
    """Blocking. Reads may be called from the engine's thread, `commit` from one writer thread at a time."""

    def identity(self) -> Identity: ...

    def run_key_max(self) -> int:
        """The highest key in use by a run or a workspace; the engine numbers new ones from here."""

    def load_head(self, run_id: RunId) -> tuple[int, RunHead] | None: ...

    def live_heads(self) -> Sequence[tuple[int, RunHead]]:
        """Every run whose newest epoch no event has ended; read once at start."""

    def fenced_runs(self) -> Sequence[RunId]:
        """Runs with a step in state fenced; read once at start, to find what a dead instance left behind."""

    def load_step(self, run_key: int, step_id: StepId) -> Step | None: ...

    def step_ids(self, run_key: int, limit: int) -> Sequence[StepId]:
        """The ids of up to `limit` steps of a run, in any order."""

    def forgotten(self, run_key: int, since_seq: int, epoch: Epoch) -> Sequence[StepId]:
        """Mutating steps settled after `since_seq` whose asking epoch is another one, in order of their settling."""

    def effects(self, run_key: int) -> Sequence[StepId]:
        """Every mutating step of a run, in any order."""

    def load_contract(self, digest: str) -> str | None:
        """The canonical text of a contract that an intent named."""

    def load_event(self, run_key: int, seq: int) -> StoredEvent | None: ...

    def load_events(self, run_key: int, after: int, limit: int) -> Sequence[StoredEvent]:
        """Events with seq > `after`, in order."""

    def load_steps(self, run_key: int, after: StepId | None, limit: int) -> Sequence[Step]:
        """Steps in order of their ids."""

    def journal(self, run_key: int, after: int, bytes_max: int) -> tuple[Sequence[JournalEntry], int]:
        """Finished steps with settled_seq > `after`, in order of settling, and where to go on (0: that was all).

        Finished: committed, rejected, compensated. `data_json` is the data of the event at the step's receipt_seq
        (`{}` if it has none). An entry counts as its data and `JOURNAL_ENTRY_BYTES`; at least one is given even if it
        alone is larger than `bytes_max`.
        """

    def claimable(
        self, agents: Mapping[str, Sequence[str]], now_ms: int, limit: int, prefix: str = ""
    ) -> Sequence[RunId]:
        """Candidates for a claim, oldest first: not live, not ended, not frozen, not held, past `not_before_ms`.

        `agents` names the agents and for each its versions; no versions means any. Only ids that begin with `prefix`.
        """

    def probing(self, now_ms: int, limit: int) -> Sequence[RunId]:
        """Runs with a step in doubt or held about which a provider may be asked by now, longest due first."""

    def runs(self, after: RunId | None, limit: int, state: str | None, prefix: str = "") -> Sequence[RunHead]:
        """Heads in order of creation, after the run named (none if it's unknown); of one `RunHead.state` if given.

        Only runs whose ids begin with `prefix`.
        """

    def held_runs(self, after: RunId | None, limit: int, prefix: str = "") -> Sequence[RunHead]:
        """Like `runs`, but those with a held step, whatever their state is."""

    def load_budget(self, name: str) -> Budget | None: ...

    def budgets(self, after: str, limit: int) -> Sequence[Budget]:
        """Budgets with a name above `after`, in order of their names."""

    def notices(self, due_ms: int, limit: int) -> Sequence[Notice]:
        """Notices that are due by then, longest due first."""

    def commit(self, batch: Batch) -> None:
        """Make a batch durable. Raises `StoreUnavailable` if that can't be known."""

    def close(self) -> None: ...
