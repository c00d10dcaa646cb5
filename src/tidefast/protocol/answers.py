"""What workers and people are told, put together from verdicts and bodies. Shared by services, wire and SDK.

Bodies stay canonical JSON text on their way through, so that nothing is decoded twice. No record here holds a
credential; `token` is empty until the server (or the embedding program) fills it in.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.records import Attempt, RunState, StepKind, StepState


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The answer to apply, result and compensate: where the step stands, and its receipt as canonical text.

    A tool's receipt is `{status, content_type, body, digest, truncated}`; a local step's is its value.
    """

    run_id: RunId
    step_id: StepId
    state: StepState
    epoch: Epoch
    key: str
    replayed: bool
    receipt_json: str
    undo: StepId | None = None  # its undo, once begun


class JournalEntry(NamedTuple):
    """One finished step of a run, as it comes with a grant: enough to answer the agent without asking again."""

    step_id: StepId
    kind: StepKind
    state: StepState
    epoch: Epoch
    key: str
    call_digest: str
    settled_seq: int
    reason: str
    data_json: str  # the event that holds the receipt or the value
    undo: StepId | None = None


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease over one run, with what its holder needs to go on. Durable when it is answered."""

    run_id: RunId
    agent: str
    agent_version: str
    epoch: Epoch
    holder: str
    lease_ms: int
    expires_at_ms: int
    input_json: str
    checkpoint: int  # number of the newest checkpoint, 0 for none
    state_json: str  # its state, null for none
    is_ending: bool
    unsettled: tuple[StepId, ...]
    journal: tuple[JournalEntry, ...] = ()
    journal_next: int = 0  # where `journal` goes on; 0 when this is all
    token: str = field(default="", repr=False)

    def with_token(self, token: str) -> "LeaseGrant":
        return replace(self, token=token)


@dataclass(frozen=True, slots=True)
class JournalPage:
    """More finished steps; `next` 0 when there are none left."""

    entries: tuple[JournalEntry, ...]
    next: int


@dataclass(frozen=True, slots=True)
class RunCreated:
    run_id: RunId
    state: RunState
    was_new: bool


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as people see it."""

    run_id: RunId
    agent: str
    agent_version: str
    state: RunState
    epoch: Epoch
    is_live: bool
    holder: str
    expires_at_ms: int
    checkpoint: int
    seq: int
    digest: str
    created_ms: int
    frozen: str
    held: tuple[StepId, ...]
    unsettled: tuple[StepId, ...]
    input_json: str = "null"
    result_json: str = "null"  # the result of a completed run, the error of a failed one


@dataclass(frozen=True, slots=True)
class EventInfo:
    """One event of a run's log with its digest in the chain."""

    seq: int
    at_ms: int
    kind: str
    epoch: Epoch
    step_id: StepId | None
    data_json: str
    digest: str


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step as people see it: its stored call, its attempts and its receipt."""

    run_id: RunId
    step_id: StepId
    kind: StepKind
    state: StepState
    tool: str
    effect: str
    key: str
    epoch: Epoch
    reason: str
    attempts: tuple[Attempt, ...]
    undo_of: StepId | None
    closed_by: StepId | None
    intent_json: str  # the event that holds the stored call
    receipt_json: str  # the event that holds the receipt
    settled_seq: int
    now_ms: int  # the authority's clock when this was read: what a verdict's `looked_at_ms` is counted on
    doubt_since_ms: int = 0  # of a step in doubt or held: when its oldest open attempt was admitted
    next_move: str = ""  # replay, probe, undo or person
    next_at_ms: int = 0  # when at the earliest; 0: as soon as a holder asks
    refusals_line: str = ""  # of an unlisted answer: the entry of `refusals` that would list it


@dataclass(frozen=True, slots=True)
class BudgetInfo:
    """A budget as people see it. `estimated` is the part of `spent` that no provider has confirmed; no limit is None.

    Money is in millionths (`micros`) of the price table's unit. `note` says who set a limit here last, and why.
    """

    name: str
    spent_calls: int
    spent_tokens: int
    spent_micros: int
    estimated_calls: int
    estimated_tokens: int
    estimated_micros: int
    reserved_calls: int
    reserved_tokens: int
    reserved_micros: int
    limit_calls: int | None
    limit_tokens: int | None
    limit_micros: int | None
    note: str
