"""What may be asked of the authority: one frozen record per verb, complete in itself.

A worker's verb carries its `Right`, captured at the grant; there is no default and no look-up of the current one
(laws 11 and 15). Bodies arrive as canonical JSON text, already checked for size and form.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tidefast.protocol.contracts import Contract, Request
from tidefast.protocol.ids import Epoch, RunId, StepId, WorkspaceId
from tidefast.protocol.records import ReplicaRight, Right
from tidefast.protocol.workspace import Delta, Disk

ResolveVerdict = Literal["applied", "not_applied", "refused", "compensated"]
ProbeWord = Literal["found", "absent", "unclear", "many"]
OutcomeKind = Literal["applied", "refused", "unlisted", "unsent", "doubted", "key_reused", "unmet"]


@dataclass(frozen=True, slots=True)
class CreateRun:
    """Create a run, or find that the same one exists."""

    run_id: RunId
    agent: str
    agent_version: str
    input_json: str
    is_minted: bool = False  # the authority drew the id at random, so no lost commit can hold this run


@dataclass(frozen=True, slots=True)
class Grant:
    """Give the run's next epoch to a holder. A repeated `request_id` of that holder answers the first grant again."""

    run_id: RunId
    holder: str
    lease_ms: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Move the lease's expiry; never its epoch, and never back to life."""

    right: Right


@dataclass(frozen=True, slots=True)
class Release:
    """Give the lease back. `drift` freezes the run for a person."""

    right: Right
    reason: Literal["done", "error", "held", "shutdown", "drift"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Lapse:
    """The sweep: make a lease that is past its time a fact."""

    run_id: RunId


@dataclass(frozen=True, slots=True)
class OperatorVerb:
    """What every verb of an operator on a run says: who and why, and the epoch that they saw, if they say it."""

    run_id: RunId
    by: str
    note: str = ""
    expect_epoch: Epoch | None = None


class Preempt(OperatorVerb):
    """End the live epoch; the run can be claimed at once."""

    __slots__ = ()


class Pause(OperatorVerb):
    """Let nothing new begin, until `Resume`. The lease stays, and facts are taken."""

    __slots__ = ()


class Resume(OperatorVerb):
    """Let a paused run go on."""

    __slots__ = ()


class Freeze(OperatorVerb):
    """Stop a run for a person to look at, until `Thaw`. The lease stays, and facts are taken."""

    __slots__ = ()


class Thaw(OperatorVerb):
    """Let a frozen run go on; the count of grants without progress starts anew."""

    __slots__ = ()


class Cancel(OperatorVerb):
    """End the run: its lease at once, the run itself as soon as nothing is unsettled and what can be is undone."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Admit:
    """Ask for a step: the intent becomes durable, or what the books already hold is answered.

    `contract` is today's contract of the tool (None if the tool is gone); `deadline_ms` was fixed before this command
    was made. With `stored` the caller asks for the stored call, whatever its arguments were.
    """

    right: Right
    step_id: StepId
    tool: str
    args_json: str
    call_digest: str
    contract: Contract | None
    request: Request | None
    owner: str
    deadline_ms: int
    stored: bool = False
    contract_digest: str = ""  # of `contract`, if the caller has it at hand
    args_problem: str = ""  # why today's contract can't take the arguments; the books' own answer goes before it
    workspace_id: WorkspaceId | None = None  # of a workspace's tool
    replica: Epoch | None = None  # the replica epoch that is connected and restored


@dataclass(frozen=True, slots=True)
class Compensate:
    """Ask for the undo of a step, which is a fenced step of its own with a key of its own."""

    right: Right
    step_id: StepId
    undo_step_id: StepId
    tool: str
    args_json: str
    call_digest: str
    contract: Contract | None
    request: Request | None
    owner: str
    deadline_ms: int
    contract_digest: str = ""
    problem: str = ""  # why the undo can't be written as a call
    is_given: bool = False  # the caller says tool and arguments; otherwise they follow from the step's contract


@dataclass(frozen=True, slots=True)
class Write:
    """What a replica says that a mutating call changed: the write at `log_index`, under its epoch."""

    epoch: Epoch
    log_index: int
    delta: Delta
    chain: str


@dataclass(frozen=True, slots=True)
class Settle:
    """What became of one attempt, as its owner saw it. Names the attempt, because receipts may come late."""

    run_id: RunId
    step_id: StepId
    attempt: int
    outcome: OutcomeKind
    receipt_json: str  # the answer, or null
    reason: str = ""
    write: Write | None = None  # of a workspace's mutating call that was applied


@dataclass(frozen=True, slots=True)
class MarkLost:
    """The sweep: book an attempt whose owner has ended, or whose deadline has passed, as lost."""

    run_id: RunId
    step_id: StepId


@dataclass(frozen=True, slots=True)
class AnswerProbe:
    """What the provider said when it was asked whether a step in doubt took effect.

    Evidence is dated by when it was asked for: `asked_ms` is when the question was sent, `attempts` how many attempts
    the step had then.
    """

    run_id: RunId
    step_id: StepId
    answer: ProbeWord
    asked_ms: int
    attempts: int
    receipt_json: str = "null"  # of *found*: what the step's receipt is to be
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Journal the value of a local step."""

    right: Right
    step_id: StepId
    value_json: str


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Store the run's state under the next number."""

    right: Right
    number: int
    state_json: str


@dataclass(frozen=True, slots=True)
class Complete:
    """End the run with a result. `asked` names the steps that this pass answered from its journal."""

    right: Right
    result_json: str
    asked: frozenset[StepId] = frozenset()
    dropped: frozenset[StepId] = frozenset()


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run with an error, now or once what is unsettled is settled and what can be is undone.

    Of a run that is being cancelled it is the holder's word that all of this is done.
    """

    right: Right
    error: str


@dataclass(frozen=True, slots=True)
class Resolve:
    """A person says what became of a step in doubt or held."""

    run_id: RunId
    step_id: StepId
    verdict: ResolveVerdict
    by: str
    note: str
    receipt_json: str = "null"
    looked_at_ms: int | None = None
    expect_attempts: int | None = None
    expect_epoch: Epoch | None = None


@dataclass(frozen=True, slots=True)
class GrantReplica:
    """Give a workspace's next epoch to a replica; makes the workspace if there is none.

    `chain_there` is the log's digest at the disk's own index, None if the log doesn't reach it. What is joined never
    changes, so it needs no guard.
    """

    workspace_id: WorkspaceId
    boot_id: str
    lease_ms: int
    disk: Disk
    chain_there: str | None


@dataclass(frozen=True, slots=True)
class RenewReplica:
    """Move the expiry of a replica's lease; never its epoch, and never back to life."""

    right: ReplicaRight


@dataclass(frozen=True, slots=True)
class ReleaseReplica:
    """A replica ends in order."""

    right: ReplicaRight
    reason: str


@dataclass(frozen=True, slots=True)
class LapseReplica:
    """The sweep: make a replica's lease that is past its time a fact."""

    workspace_id: WorkspaceId


@dataclass(frozen=True, slots=True)
class LoseWrite:
    """The sweep: what is open in a workspace under an epoch that has ended is gone with its disk, or held."""

    workspace_id: WorkspaceId
    run_id: RunId
    step_id: StepId


RunVerb = Literal["preempt", "pause", "resume", "freeze", "thaw", "cancel"]
RUN_VERBS: Mapping[RunVerb, "type[Preempt | Pause | Resume | Freeze | Thaw | Cancel]"] = {
    "preempt": Preempt,
    "pause": Pause,
    "resume": Resume,
    "freeze": Freeze,
    "thaw": Thaw,
    "cancel": Cancel,
}

Command = (
    Admit
    | Settle
    | AnswerProbe
    | SaveResult
    | SaveCheckpoint
    | Compensate
    | Renew
    | Grant
    | Release
    | Complete
    | Fail
    | CreateRun
    | Lapse
    | MarkLost
    | Preempt
    | Pause
    | Resume
    | Freeze
    | Thaw
    | Cancel
    | Resolve
    | GrantReplica
    | RenewReplica
    | ReleaseReplica
    | LapseReplica
    | LoseWrite
)
