"""The nouns: what a run, a step and an attempt are at one moment.

A head is the one row per run that decisions read. It names every unsettled step (`open`), so that each rule about the
run as a whole is judged from the head and at most a handful of steps, however long the run's history is.

All times are integer milliseconds; `_ms` without another word is the authority's clock (see `Now`).
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from tidefast.protocol.contracts import Contract
from tidefast.protocol.events import CHAIN_START
from tidefast.protocol.ids import Epoch, RunId, StepId, WorkspaceId

StepState = Literal["pending", "fenced", "in_doubt", "held", "applied", "committed", "rejected", "compensated"]
StepKind = Literal["tool", "undo", "local"]
AttemptState = Literal["out", "doubted", "lost", "applied", "unsent", "refused", "absent", "not_applied"]
RunState = Literal[
    "claimable", "leased", "held", "paused", "frozen", "failing", "cancelling", "completed", "failed", "cancelled"
]
RunEnding = Literal["", "failing", "cancelling"]
RunEnd = Literal["", "completed", "failed", "cancelled"]
LeaseEnd = Literal["", "released", "lapsed", "preempted", "completed", "failed", "cancelled"]
ReplicaEnd = Literal["", "released", "lapsed", "replaced"]

MUTATING = frozenset(("external", "workspace"))
NOT_SETTLED = frozenset(("out", "doubted", "lost"))
HAD_NO_EFFECT = frozenset(("unsent", "refused", "absent", "not_applied"))


class Now(NamedTuple):
    """The moment of a decision, given to the rules from outside.

    `ms` is the authority's clock and never goes back. `wall_ms` is the wall clock, `mark_ms` the highest wall clock
    that the store remembers; a wall clock behind its mark closes every key window. Before `grace_from_ms` plus its
    own length no lease counts as lapsed: the authority's own silence (a restart) is not charged to its workers.
    """

    ms: int
    wall_ms: int
    mark_ms: int = 0
    grace_from_ms: int = 0


class Recovery(NamedTuple):
    """The window after a restore: what was sent after `point_ms`, the last durable commit, may be missing here.

    Open until an operator closes it. A lost request can have been sent until `restored_ms` and lands by its timeout.
    """

    point_ms: int
    point_wall_ms: int
    restored_ms: int


class Right(NamedTuple):
    """What a lease token proves: this holder was granted this epoch of this run. The fence asks whether it is live."""

    run_id: RunId
    epoch: Epoch
    holder: str


class Attempt(NamedTuple):
    """One sending of an intent. Its deadline is fixed before the intent is submitted."""

    number: int
    epoch: Epoch
    owner: str  # boot id of the instance that sends it; empty for a sending that is presumed lost with the log
    admitted_ms: int
    admitted_wall_ms: int
    deadline_ms: int
    older_over: bool  # deadline and lag of each older attempt had passed when this one was admitted (law 9)
    state: AttemptState


class Step(NamedTuple):
    """One named unit of a run. Bodies are not here: `intent_seq` and `receipt_seq` point at the events with them."""

    step_id: StepId
    kind: StepKind
    state: StepState
    tool: str
    effect: str
    call_digest: str
    key: str
    contract: str  # digest of the contract stored with the intent; empty for a local step
    scope: str
    dedups: bool  # whether the stored contract promises to know the key again
    attempts: tuple[Attempt, ...]
    intent_seq: int
    receipt_seq: int
    epoch: Epoch  # the epoch that last asked for it and was let in; of a committed step the joining epoch
    undo_of: StepId | None
    closed_by: StepId | None  # its undo, once begun
    reason: str
    settled_seq: int  # 0 until committed, rejected or compensated
    lag_ms: int  # how long after its deadline an effect may still show in a probe; -1: the provider can't be asked
    window_ms: int  # how long after the first sending a replay may be admitted; 0 without a key
    is_independent: bool  # held, it doesn't hold the run's other steps
    probes: int  # unclear answers of the provider since the newest attempt
    probed_ms: int  # when it was asked last; 0 if it wasn't

    @property
    def is_mutating(self) -> bool:
        return self.effect in MUTATING

    @property
    def is_unsettled(self) -> bool:
        """Pending after an attempt or as an undo, fenced, in doubt, applied, held, or closed by an uncommitted undo."""
        if self.state in ("fenced", "in_doubt", "applied", "held"):
            return True
        if self.state == "pending":
            return bool(self.attempts) or self.undo_of is not None
        return self.closed_by is not None and self.state != "compensated"

    @property
    def doubts(self) -> tuple[Attempt, ...]:
        """The attempts that may still have had an effect."""
        return tuple(attempt for attempt in self.attempts if attempt.state in NOT_SETTLED)

    @property
    def first_sent(self) -> Attempt | None:
        """The oldest attempt that isn't proved never sent: where a provider's memory of the key begins."""
        return next((attempt for attempt in self.attempts if attempt.state != "unsent"), None)


class OpenStep(NamedTuple):
    """What the head keeps of an unsettled step, or of one whose request may still be on the wire."""

    step_id: StepId
    state: StepState
    is_mutating: bool
    is_unsettled: bool
    undo_of: StepId | None
    wire_epoch: Epoch
    wire_until_ms: int  # 0 when no request of it can land any more, or when another landing would change nothing
    probe_ms: int  # when the provider may be asked (again) whether it happened; 0: never
    is_independent: bool


class RunHead(NamedTuple):
    """The one row of a run that decisions read. `version` rises with each event; renewals move only `expires_at_ms`."""

    run_id: RunId
    agent: str
    agent_version: str
    created_ms: int
    input_digest: str
    version: int
    seq: int
    digest: str
    epoch: Epoch  # the newest epoch ever granted
    is_live: bool  # no event has ended that epoch
    holder: str
    request_id: str
    lease_ms: int
    expires_at_ms: int
    lease_end: LeaseEnd  # what ended the newest epoch, empty while live
    lease_end_seq: int
    lease_ended_ms: int
    parked: bool  # the newest holder gave the lease back because of a held step
    checkpoint: int  # number of the newest checkpoint, 0 for none
    checkpoint_seq: int
    checkpoint_epoch: Epoch
    checkpoint_digest: str
    grants_without_progress: int
    not_before_ms: int
    last_step: StepId | None  # the step of the newest event that names one: where the run was last seen
    paused: bool  # by an operator
    frozen: str  # reason, empty when not frozen
    diverged: tuple[StepId, ...]  # steps whose receipts contradict the books, until a person resolves each
    ending: RunEnding  # what the run is on its way to; empty while it isn't
    ending_seq: int  # the event that began the ending and says why; 0 if none did
    to_undo: tuple[StepId, ...]  # steps that an ending run still has to undo, in that order
    end: RunEnd
    end_seq: int
    end_digest: str  # of the result or the error, so that the verb that ended the run can be answered again
    open: tuple[OpenStep, ...]
    recovery: Recovery | None = None  # the window that its newest epoch was granted in

    @property
    def held_steps(self) -> tuple[StepId, ...]:
        return tuple(step.step_id for step in self.open if step.state == "held")

    @property
    def holding(self) -> tuple[StepId, ...]:
        """The held steps that hold the whole run: an independent one does once nothing else is left to do."""
        is_held = (step for step in self.open if step.state == "held")
        holds_all = self.parked or bool(self.ending)
        return tuple(step.step_id for step in is_held if holds_all or not step.is_independent)

    @property
    def probe_ms(self) -> int:
        """When the next probe of any step may be sent; 0: there is none to send."""
        return min((step.probe_ms for step in self.open if step.probe_ms), default=0)

    @property
    def unsettled(self) -> tuple[StepId, ...]:
        return tuple(step.step_id for step in self.open if step.is_unsettled)

    @property
    def state(self) -> RunState:
        """The word that people see; it follows from the facts and is stored nowhere."""
        if self.end:
            return self.end
        if self.frozen:
            return "frozen"
        if self.paused:
            return "paused"
        if self.is_live:
            return "leased"
        if self.holding:
            return "held"
        return self.ending or "claimable"


class ReplicaRight(NamedTuple):
    """What a replica's token proves: this process was granted this epoch of this workspace."""

    workspace_id: WorkspaceId
    epoch: Epoch
    boot_id: str


class OpenWrite(NamedTuple):
    """The one mutating step that a workspace has open: fenced, in doubt, held, or applied and not joined."""

    run_id: RunId
    step_id: StepId
    attempt: int
    epoch: Epoch  # of the replica that was asked
    write_seq: int = 0  # the workspace's event that holds the delta of a receipt that is not joined
    chain: str = ""  # the chain's digest after that delta


class WorkspaceHead(NamedTuple):
    """The one row of a workspace that decisions read. `version` rises with each event; renewals move only the expiry.

    `seq` and `digest` are of the workspace's events; `log_index` and `chain` of its joined writes.
    """

    workspace_id: WorkspaceId
    created_ms: int = 0
    version: int = 0
    seq: int = 0
    digest: str = CHAIN_START
    epoch: Epoch = Epoch(0)  # the newest epoch ever granted
    is_live: bool = False  # no event has ended that epoch
    boot_id: str = ""
    lease_ms: int = 0
    expires_at_ms: int = 0
    lease_end: ReplicaEnd = ""  # what ended the newest epoch, empty while live
    lease_ended_ms: int = 0
    log_index: int = 0
    chain: str = CHAIN_START
    open: OpenWrite | None = None


class View(NamedTuple):
    """What a rule may see: the rows that `needs` asked for, and nothing to fetch more with."""

    namespace: bytes
    incarnation: int
    instances: frozenset[str]  # boot ids of the instances that live
    run: RunHead | None = None
    steps: Mapping[StepId, Step] = {}
    contracts: Mapping[str, Contract] = {}  # by digest: the contracts stored with those steps' intents
    forgotten: tuple[StepId, ...] = ()
    recovery: Recovery | None = None  # of the store, while its window is open
    workspace: WorkspaceHead | None = None
    workspace_id: WorkspaceId | None = None  # of the workspace that was looked for, whether or not there is one


class Guard(NamedTuple):
    """A head that a decision read, with the version it had; the decision is void if that has moved."""

    run_id: RunId
    version: int  # 0: there was no such run


class WorkspaceGuard(NamedTuple):
    """The same for a workspace's head."""

    workspace_id: WorkspaceId
    version: int  # 0: there was no such workspace
