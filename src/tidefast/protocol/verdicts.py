"""What a caller is told. A refusal is a value with a code, a finer reason and the facts; it is never an exception.

Each verdict says by its type what the services must do next: send, answer, wait or refuse. Codes are the same words in
HTTP, SDK, CLI, logs and metrics.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tidefast.protocol.canonical import JSON
from tidefast.protocol.contracts import Contract
from tidefast.protocol.events import Event
from tidefast.protocol.ids import Epoch, RunId, StepId, WorkspaceId
from tidefast.protocol.records import Guard, StepState, WorkspaceGuard
from tidefast.protocol.workspace import Plan

Code = Literal[
    "stale_epoch",
    "lease_lapsed",
    "lease_held",
    "step_conflict",
    "step_in_flight",
    "step_pending",
    "in_doubt",
    "step_held",
    "step_rejected",
    "already_decided",
    "checkpoint_stale",
    "run_conflict",
    "run_ended",
    "run_frozen",
    "run_paused",
    "run_ending",
    "unsettled_effects",
    "moved",
    "limit_reached",
    "overloaded",
    "no_replica",
    "not_found",
    "invalid",
]


@dataclass(frozen=True, slots=True)
class Refused:
    """Refused, and nothing was written that the code doesn't imply. `facts` names epochs, steps and times."""

    code: Code
    reason: str
    facts: Mapping[str, JSON] = field(default_factory=dict)


class WriteOrder(NamedTuple):
    """Where a workspace's mutating call goes: to this replica epoch, onto a disk that holds this index."""

    workspace_id: WorkspaceId
    epoch: Epoch
    log_index: int


@dataclass(frozen=True, slots=True)
class Send:
    """The intent is durable: send this attempt. `intent_seq` names the event that holds the stored call."""

    attempt: int
    key: str
    contract: Contract
    intent_seq: int
    deadline_ms: int
    is_replay: bool
    contract_digest: str = ""  # of a first intent's contract, which has to be stored with it; empty for a replay
    is_first: bool = False  # no attempt of the step can have left yet
    write: WriteOrder | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The books already hold the answer; nothing is sent. `receipt_seq` names the event that holds the receipt."""

    step_id: StepId
    state: StepState
    epoch: Epoch
    key: str
    receipt_seq: int
    replayed: bool
    closed_by: StepId | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: ask again when something of the run has moved, or at `until_ms`. Nothing was written."""

    code: Literal["step_in_flight", "step_pending", "in_doubt", "no_replica"]
    reason: str
    until_ms: int
    blocking_step: StepId
    blocking_run: RunId | None = None  # where it is another run's step: runs may share a workspace
    workspace_id: WorkspaceId | None = None  # where something of a workspace must move first


@dataclass(frozen=True, slots=True)
class AskReplica:
    """A call was sent to a replica that lives, and its end isn't known: its journal answers found or absent."""

    workspace_id: WorkspaceId
    epoch: Epoch
    attempt: int
    until_ms: int  # until then its own sender may still settle it, if that is alive


@dataclass(frozen=True, slots=True)
class ReplicaGranted:
    """The lease over a workspace, and what its new replica must do with its disk."""

    epoch: Epoch
    lease_ms: int
    expires_at_ms: int
    plan: Plan
    log_index: int
    chain: str


@dataclass(frozen=True, slots=True)
class Ask:
    """In doubt, and the provider can say: ask it, not before `due_ms`, and tell the rules what it answered."""

    step_id: StepId
    attempts: int
    due_ms: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease, with the place of the newest checkpoint."""

    epoch: Epoch
    holder: str
    lease_ms: int
    expires_at_ms: int
    checkpoint: int
    checkpoint_seq: int
    is_ending: bool  # nothing new begins: what is open is settled, what can be is undone, then the run ends


@dataclass(frozen=True, slots=True)
class Renewed:
    """The new expiry. Not yet durable: losing a renewal only shortens a lease."""

    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class Done:
    """The verb was accepted, now or when it was first sent. `seq` names the event that holds it."""

    state: str
    seq: int
    was_new: bool = True


@dataclass(frozen=True, slots=True)
class Settled:
    """Where the step stands after a settle; `joined` if it was committed in the same transaction."""

    state: StepState
    joined: bool
    is_diverged: bool = False


Verdict = Refused | Send | Answer | Ask | Wait | Granted | Renewed | Done | Settled | AskReplica | ReplicaGranted


class Decision(NamedTuple):
    """A verdict and everything that must be true together with it.

    `events` of the run and `writes` of the workspace are appended in order, in one transaction; `guards` are the heads
    that were read. `must_sync` is False only for a renewal.
    `contract` is one that an event names though nothing is sent, so that the store holds it.
    """

    verdict: Verdict
    events: tuple[Event, ...] = ()
    guards: tuple[Guard | WorkspaceGuard, ...] = ()
    must_sync: bool = True
    contract: Contract | None = None
    writes: tuple[Event, ...] = ()
