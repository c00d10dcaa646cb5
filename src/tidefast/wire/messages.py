"""What may be asked over HTTP: one structure per request body, and the strict way to read them.

The structures are the schema: names, types, ranges and defaults stand there once. `decode` refuses unknown members
(naming the nearest known one), wrong types (a boolean or `7.0` is no integer), values out of range and bad ids, each as
a `Problem` with its own reason. JSON values that only pass through (arguments, inputs, states, results) become
canonical text here and are not decoded again.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

import msgspec
from msgspec import Meta, Struct, inspect

from tidefast.protocol.canonical import BODY_BYTES_MAX, INTEGER_MAX, JSON
from tidefast.protocol.ids import is_derived_id, is_id
from tidefast.protocol.lease import LEASE_DEFAULT_MS, LEASE_MAX_MS, LEASE_MIN_MS
from tidefast.protocol.records import RunState
from tidefast.wire.problem import Problem, invalid, too_large
from tidefast.wire.strict import BadInput, canonical_text, read_object, type_name
from tidefast.wire.tokens import is_holder

WAIT_MAX_MS = 60_000
WAIT_DEFAULT_MS = 30_000
PAGE_MAX = 1000
PAGE_DEFAULT = 100
TOKENS_MAX = 1000
NOTE_LENGTH_MAX = 4096
WORD_LENGTH_MAX = 128  # of what people name freely: versions, holders, request ids, tools

Id = Annotated[str, Meta(extra={"form": "id"})]
NamedId = Annotated[str, Meta(extra={"form": "named_id"})]  # may be derived: named, not minted
StepPath = Annotated[str, Meta(extra={"form": "step_path"})]  # RUN/STEP
Word = Annotated[str, Meta(extra={"form": "word"})]
Note = Annotated[str, Meta(max_length=NOTE_LENGTH_MAX)]
AnyJson = Annotated[str, Meta(extra={"form": "json"})]  # any JSON value, held as canonical text
ObjectJson = Annotated[str, Meta(extra={"form": "object"})]
LeaseMs = Annotated[int, Meta(ge=LEASE_MIN_MS, le=LEASE_MAX_MS)]
WaitMs = Annotated[int, Meta(ge=0, le=WAIT_MAX_MS)]
Count = Annotated[int, Meta(ge=1, le=PAGE_MAX)]
Whole = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INTEGER_MAX)]


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """A request body. Members without a default must be sent."""


class CreateRun(Message):
    agent: Id
    input: AnyJson
    run_id: Id | None = None
    version: Word = "1"


class Claim(Message):
    agents: dict[Id, list[Word]]
    holder: Word
    lease_ms: LeaseMs = LEASE_DEFAULT_MS
    wait_ms: WaitMs = 0
    max: Count = 1
    request_id: Word | None = None


class Grant(Message):
    holder: Word
    lease_ms: LeaseMs = LEASE_DEFAULT_MS
    request_id: Word | None = None


class Empty(Message):
    """A verb that says everything by its address."""


class Release(Message):
    reason: Literal["done", "error", "held", "shutdown", "drift"] = "done"
    detail: Note = ""


class RenewMany(Message):
    tokens: Annotated[list[str], Meta(min_length=1, max_length=TOKENS_MAX)]


class Apply(Message):
    """Either `tool` with `args`, or `stored: true` for the call that the books hold."""

    tool: Word | None = None
    args: ObjectJson | None = None
    stored: bool = False
    wait_ms: WaitMs = WAIT_DEFAULT_MS


class SaveResult(Message):
    value: AnyJson


class Compensate(Message):
    """`tool` with `args` for an undo that the step's contract isn't to say."""

    tool: Word | None = None
    args: ObjectJson | None = None
    wait_ms: WaitMs = WAIT_DEFAULT_MS


class SaveCheckpoint(Message):
    seq: Positive
    state: AnyJson


class Complete(Message):
    result: AnyJson = "null"
    asked: list[NamedId] = []
    dropped: list[NamedId] = []


class Fail(Message):
    error: str


class Expect(Message, omit_defaults=True):
    """What an operator saw: the run's newest epoch (0: never granted), and how many attempts the step had."""

    epoch: Whole | None = None
    attempts: Whole | None = None


class ExpectRun(Message):
    epoch: Whole


class Oversee(Message):
    """A verb of an operator on a run: why, and the epoch that they saw."""

    note: Note = ""
    expect: ExpectRun | None = None


class Resolve(Message):
    verdict: Literal["applied", "not_applied", "refused", "compensated"]
    note: Note
    receipt: AnyJson = "null"
    looked_at_ms: Whole | None = None
    expect: Expect | None = None


class RunsQuery(Message):
    after: NamedId | None = None
    limit: Count = PAGE_DEFAULT
    state: RunState | None = None


class AfterSeqQuery(Message):
    after: Whole = 0
    limit: Count = PAGE_DEFAULT


class AfterStepQuery(Message):
    after: NamedId | None = None
    limit: Count = PAGE_DEFAULT


class WorkspacesQuery(Message):
    after: Id | None = None
    limit: Count = PAGE_DEFAULT


class EntriesQuery(Message):
    after: Note = ""
    limit: Count = PAGE_DEFAULT
    index: Whole | None = None


class IndexQuery(Message):
    index: Whole | None = None


class DiffQuery(Message):
    since: Whole
    until: Whole | None = None


class ReadWorkspace(Message):
    verb: Word
    args: ObjectJson
    wait_ms: WaitMs = WAIT_DEFAULT_MS


class Fetch(Message):
    digests: Annotated[list[Word], Meta(min_length=1, max_length=PAGE_MAX)]


class Chat(Message):
    """A request in the chat completions protocol: looked at for being one JSON object, and passed on as it is."""

    request: str


class BudgetsQuery(Message):
    after: Annotated[str, Meta(max_length=200)] = ""
    limit: Count = PAGE_DEFAULT


class RaiseBudget(Message):
    """The limits that are set; what is left out stays as it was. Money is in millionths of the price table's unit."""

    name: Annotated[str, Meta(max_length=200)]
    calls: Whole | None = None
    tokens: Whole | None = None
    micros: Whole | None = None
    note: Note = ""


class HeldQuery(Message):
    after: StepPath | None = None
    limit: Count = PAGE_DEFAULT


class JournalQuery(Message):
    after: Whole = 0


_DIGITS = re.compile(r"[0-9]{1,16}", re.ASCII)

M = TypeVar("M", bound=Message)
Check = Callable[[JSON, str], object]


class _Field(NamedTuple):
    is_needed: bool
    is_integer: bool
    is_json: bool
    check: Check


def decode(kind: type[M], body: bytes) -> M | Problem:
    """The message in a body, or why there is none. An empty body is a message whose members all have defaults."""
    if len(body) > BODY_BYTES_MAX:
        return too_large()
    try:
        if kind is Chat:
            read_object(body)
            return kind(request=body.decode())
        if not body and not any(field.is_needed for field in _fields(kind).values()):
            return kind()
        return _build(kind, read_object(body), "")
    except BadInput as bad:
        return invalid(bad.reason, bad.detail, bad.facts)


def decode_query(kind: type[M], pairs: list[tuple[str, str]]) -> M | Problem:
    """The message in a query string; numbers are plain ASCII digits."""
    fields = _fields(kind)
    members: dict[str, JSON] = {}
    try:
        for name, text in pairs:
            if name in members:
                raise BadInput("field_repeated", f"`{_shown(name)}` stands twice in the query", field=_shown(name))
            is_number = name in fields and fields[name].is_integer
            members[name] = int(text) if is_number and _DIGITS.fullmatch(text) else text
        return _build(kind, members, "")
    except BadInput as bad:
        return invalid(bad.reason, bad.detail, bad.facts)


def _shown(name: str) -> str:
    """A name that the caller chose, made safe to be told back."""
    return name[:64].encode("ascii", "backslashreplace").decode()


def _build(kind: type[M], members: Mapping[str, JSON], prefix: str) -> M:
    fields, values = _fields(kind), cast("dict[str, Any]", {})
    for name, value in members.items():
        field = fields.get(name)
        if field is None:
            raise _unknown(name, fields, prefix)
        values[name] = field.check(value, prefix + name)
    for name, field in fields.items():
        if field.is_needed and name not in values:
            raise BadInput("field_missing", f"`{prefix}{name}` is missing", field=prefix + name)
    return kind(**values)


def _unknown(name: str, fields: Mapping[str, _Field], prefix: str) -> BadInput:
    near = difflib.get_close_matches(name[:64], fields, n=1, cutoff=0.6)
    advice = f"did you mean `{near[0]}`?" if near else f"known are: {', '.join(sorted(fields)) or 'none'}"
    facts: dict[str, JSON] = {"field": _shown(prefix + name)}
    if near:
        facts["nearest"] = near[0]
    return BadInput("field_unknown", f"`{_shown(prefix + name)}` is not known here; {advice}", **facts)


_TABLES: dict[type[Message], dict[str, _Field]] = {}


def _fields(kind: type[Message]) -> dict[str, _Field]:
    """The checks of a message's members, made from its annotations at first use."""
    table = _TABLES.get(kind)
    if table is None:
        info = cast(inspect.StructType, inspect.type_info(kind))
        table = {field.encode_name: _field(field) for field in info.fields}
        _TABLES[kind] = table
    return table


def _field(field: inspect.Field) -> _Field:
    check = _check_of(field.type)
    is_json = check is canonical_text or check is _object
    return _Field(field.required, check.__name__ == "check_integer", is_json, check)


def _wrong(where: str, expected: str, value: JSON) -> BadInput:
    detail = f"`{where}` is {type_name(value)}, {expected} is expected"
    return BadInput("field_type", detail, field=where, expected=expected)


def _check_of(info: inspect.Type) -> Check:
    extra: Mapping[str, str] = {}
    if isinstance(info, inspect.Metadata):
        extra, info = info.extra or {}, info.type
    if "form" in extra:
        return _FORMS[extra["form"]]
    match info:
        case inspect.UnionType(types=types):
            (inner,) = (member for member in types if not isinstance(member, inspect.NoneType))
            return _check_of(inner)  # a member may be left out, but null is no way to say so
        case inspect.IntType(ge=low, le=high):
            return _integer(cast(int, low), cast(int, high))
        case inspect.BoolType():
            return _boolean
        case inspect.StrType(max_length=longest):
            return _text(longest)
        case inspect.LiteralType(values=words):
            return _one_of([str(word) for word in words])
        case inspect.ListType(item_type=item, min_length=shortest, max_length=longest):
            return _list(_check_of(item), shortest or 0, longest)
        case inspect.DictType(key_type=key, value_type=item):
            return _map(_check_of(key), _check_of(item))
        case inspect.StructType(cls=cls):
            return _struct(cast(type[Message], cls))
        case _:
            raise TypeError(f"no check for {info}")


def _integer(low: int, high: int) -> Check:
    def check_integer(value: JSON, where: str) -> object:
        if type(value) is not int:
            raise _wrong(where, "integer", value)
        if not low <= value <= high:
            raise BadInput("field_range", f"`{where}` must be {low} to {high}", field=where, least=low, most=high)
        return value

    return check_integer


def _boolean(value: JSON, where: str) -> object:
    if type(value) is not bool:
        raise _wrong(where, "boolean", value)
    return value


def _string(value: JSON, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "string", value)
    if not value.isascii():
        canonical_text(value, where)  # refuses lone surrogates
    return value


def _text(longest: int | None) -> Check:
    def check_text(value: JSON, where: str) -> object:
        text = _string(value, where)
        if longest is not None and len(text) > longest:
            raise BadInput("field_range", f"`{where}` is longer than {longest} characters", field=where, most=longest)
        return text

    return check_text


def _one_of(words: list[str]) -> Check:
    def check_word(value: JSON, where: str) -> object:
        if _string(value, where) not in words:
            raise BadInput("field_range", f"`{where}` must be one of {', '.join(words)}", field=where, known=words)
        return value

    return check_word


def _list(check: Check, shortest: int, longest: int | None) -> Check:
    def check_list(value: JSON, where: str) -> object:
        if not isinstance(value, list):
            raise _wrong(where, "array", value)
        if len(value) < shortest or (longest is not None and len(value) > longest):
            detail = f"`{where}` must have {shortest} to {longest} entries"
            raise BadInput("field_range", detail, field=where, least=shortest, most=longest)
        return [check(entry, f"{where}[{place}]") for place, entry in enumerate(value)]

    return check_list


def _map(check_key: Check, check_value: Check) -> Check:
    def check_map(value: JSON, where: str) -> object:
        if not isinstance(value, dict):
            raise _wrong(where, "object", value)
        return {check_key(key, where): check_value(entry, f"{where}.{_shown(key)}") for key, entry in value.items()}

    return check_map


def _struct(kind: type[Message]) -> Check:
    def check_struct(value: JSON, where: str) -> object:
        if not isinstance(value, dict):
            raise _wrong(where, "object", value)
        return _build(kind, value, f"{where}.")

    return check_struct


def _id(value: JSON, where: str) -> object:
    if not is_id(_string(value, where)):
        raise bad_id(where)
    return value


def _named_id(value: JSON, where: str) -> object:
    text = _string(value, where)
    if not is_id(text) and not is_derived_id(text):
        raise bad_id(where)
    return value


def bad_id(where: str) -> BadInput:
    """The refusal of a text that can't name a run, a step or an agent."""
    detail = f"`{where}` is no id: 1 to 128 of A-Z a-z 0-9 . _ -, not starting with - or ."
    return BadInput("id_invalid", detail, field=where)


def _word(value: JSON, where: str) -> object:
    if not is_holder(_string(value, where)):
        raise BadInput(
            "text_invalid", f"`{where}` must be 1 to {WORD_LENGTH_MAX} visible ASCII characters", field=where
        )
    return value


def _step_path(value: JSON, where: str) -> object:
    text = _string(value, where)
    names = text.split("/")
    if len(names) != 2 or not all(is_id(name) or is_derived_id(name) for name in names):
        raise BadInput("id_invalid", f"`{where}` must be RUN/STEP", field=where)
    return text


def _object(value: JSON, where: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(where, "object", value)
    return canonical_text(value, where)


_FORMS: dict[str, Check] = {
    "id": _id,
    "named_id": _named_id,
    "step_path": _step_path,
    "word": _word,
    "json": canonical_text,
    "object": _object,
}


def encode(message: Message) -> bytes:
    """A message as bytes, for the client: members that hold canonical text are put in as the JSON they are."""
    record: dict[str, object] = {}
    for name, field in _fields(type(message)).items():
        value = getattr(message, name)
        if value is not None:
            record[name] = msgspec.Raw(value.encode()) if field.is_json else value
    return msgspec.json.encode(record)
