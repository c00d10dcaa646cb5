"""What is told over HTTP, for both ends: the records of `protocol.answers`, spelled as JSON and read back.

Bodies are canonical text all the way: they are put into the answer as the JSON they are, and taken out as the very
bytes that came. Member names are those of the records, with `_json` left off where a body is put in.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from tidefast.protocol.answers import (
    BudgetInfo,
    EventInfo,
    JournalEntry,
    JournalPage,
    LeaseGrant,
    RunCreated,
    RunInfo,
    StepAnswer,
    StepInfo,
)
from tidefast.protocol.records import Attempt, AttemptState, RunState, StepKind, StepState
from tidefast.protocol.verdicts import Done, Renewed, Settled

Record = (
    BudgetInfo
    | StepAnswer
    | JournalPage
    | LeaseGrant
    | RunCreated
    | RunInfo
    | EventInfo
    | StepInfo
    | Done
    | Renewed
    | Settled
)
T = TypeVar("T")


class _StepAnswer(Struct):
    run_id: str
    step_id: str
    state: StepState
    epoch: int
    key: str
    replayed: bool
    receipt: Raw
    undo: str | None = None


class _JournalEntry(Struct):
    step_id: str
    kind: StepKind
    state: StepState
    epoch: int
    key: str
    call_digest: str
    settled_seq: int
    reason: str
    data: Raw
    undo: str | None = None


class _JournalPage(Struct):
    entries: list[_JournalEntry]
    next: int


class _LeaseGrant(Struct):
    run_id: str
    agent: str
    agent_version: str
    epoch: int
    holder: str
    lease_ms: int
    expires_at_ms: int
    input: Raw
    checkpoint: int
    state: Raw
    is_ending: bool
    unsettled: list[str]
    journal: list[_JournalEntry]
    journal_next: int
    token: str


class _RunCreated(Struct):
    run_id: str
    state: RunState
    was_new: bool


class _RunInfo(Struct):
    run_id: str
    agent: str
    agent_version: str
    state: RunState
    epoch: int
    is_live: bool
    holder: str
    expires_at_ms: int
    checkpoint: int
    seq: int
    digest: str
    created_ms: int
    frozen: str
    held: list[str]
    unsettled: list[str]
    input: Raw
    result: Raw


class _EventInfo(Struct):
    seq: int
    at_ms: int
    kind: str
    epoch: int
    step_id: str | None
    data: Raw
    digest: str


class _Attempt(Struct):
    number: int
    epoch: int
    owner: str
    admitted_ms: int
    admitted_wall_ms: int
    deadline_ms: int
    older_over: bool
    state: AttemptState


class _StepInfo(Struct):
    run_id: str
    step_id: str
    kind: StepKind
    state: StepState
    tool: str
    effect: str
    key: str
    epoch: int
    reason: str
    attempts: list[_Attempt]
    undo_of: str | None
    closed_by: str | None
    intent: Raw
    receipt: Raw
    settled_seq: int
    now_ms: int
    doubt_since_ms: int = 0
    next_move: str = ""
    next_at_ms: int = 0
    refusals_line: str = ""


class _BudgetInfo(Struct):
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


class _Done(Struct):
    state: str
    seq: int
    was_new: bool


class _Renewed(Struct):
    expires_at_ms: int


class _Settled(Struct):
    state: StepState
    joined: bool
    is_diverged: bool


def spell(record: Record) -> dict[str, Any]:
    """A record as an object that `encode` can put into an answer."""
    match record:
        case JournalPage(entries=entries):
            return {"entries": [_plain(entry) for entry in entries], "next": record.next}
        case LeaseGrant(journal=journal):
            return {**_plain(record), "journal": [_plain(entry) for entry in journal]}
        case StepInfo(attempts=attempts):
            return {**_plain(record), "attempts": [attempt._asdict() for attempt in attempts]}
        case _:
            return _plain(record)


def spell_all(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """A list of records under a name."""
    return {name: [spell(record) for record in records]}


def encode(answer: object) -> bytes:
    return msgspec.json.encode(answer)


def _plain(record: object) -> dict[str, Any]:
    names: tuple[str, ...] = getattr(record, "_fields", ()) or record.__slots__  # type: ignore[attr-defined]
    plain: dict[str, Any] = {}
    for name in names:
        value = getattr(record, name)
        if name.endswith("_json"):
            plain[name.removesuffix("_json")] = Raw(value.encode())
        else:
            plain[name] = value
    return plain


# --- the way back: raises `msgspec.DecodeError` (with it `ValidationError`) for an answer that isn't one --------------


def read(body: bytes, kind: type[T]) -> T:
    """The record of this kind in an answer."""
    return _record(msgspec.json.decode(body, type=SHAPES[kind]), kind)


def read_all(body: bytes, name: str, kind: type[T]) -> list[T]:
    """The records under a name in an answer."""
    lists = msgspec.json.decode(body, type=dict[str, list[Raw]])
    if name not in lists:
        raise msgspec.ValidationError(f"the answer has no `{name}`")
    return [read(bytes(record), kind) for record in lists[name]]


def _record(shape: Any, kind: type[T]) -> T:
    fields: dict[str, Any] = {}
    for name in shape.__struct_fields__:
        value = getattr(shape, name)
        if isinstance(value, Raw):
            fields[f"{name}_json"] = bytes(value).decode()
        elif isinstance(value, list):
            fields[name] = tuple(_entry(entry) for entry in value)
        else:
            fields[name] = value
    return kind(**fields)


def _entry(entry: Any) -> Any:
    if isinstance(entry, _JournalEntry):
        return _record(entry, JournalEntry)
    if isinstance(entry, _Attempt):
        return Attempt(**msgspec.structs.asdict(entry))
    return entry


SHAPES: dict[type, type[Struct]] = {
    StepAnswer: _StepAnswer,
    JournalEntry: _JournalEntry,
    JournalPage: _JournalPage,
    LeaseGrant: _LeaseGrant,
    RunCreated: _RunCreated,
    RunInfo: _RunInfo,
    EventInfo: _EventInfo,
    StepInfo: _StepInfo,
    BudgetInfo: _BudgetInfo,
    Done: _Done,
    Renewed: _Renewed,
    Settled: _Settled,
}
