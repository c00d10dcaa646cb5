"""Contracts: what a provider promises about a tool, and what follows from it.

A contract is data. It is stored with each intent, so that a doubt is judged by what was promised when the effect was
caused, not by what the configuration says today. `contract_table.py` reads it from a file; `render_request` makes the
bytes that an intent stores and every replay sends again.
"""

import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from tidefast.protocol.canonical import JSON, canonical, digest
from tidefast.protocol.ids import KeyForm, spell_key
from tidefast.protocol.patterns import PLACEHOLDER, Pattern, RenderError, fill, member

ToolKind = Literal["http", "python", "smtp", "model", "workspace"]
Tls = Literal["starttls", "tls", "none"]
Effect = Literal["none", "external", "model", "workspace"]
BodyForm = Literal["json", "form"]
TtlFrom = Literal["first_sent", "completed"]

TIMEOUT_DEFAULT_MS = 30_000  # what most providers' own clients wait
MARGIN_DEFAULT_MS = 300_000  # covers clock error and queueing at the edge of a provider's memory
PROBE_TRIES_DEFAULT = 8
BODYLESS = frozenset(("GET", "DELETE"))
FORM = "application/x-www-form-urlencoded"
PYTHON_KEY = "field:key"  # a python tool receives the key as its parameter `key`
SMTP_PORTS: Mapping[Tls, int] = {"starttls": 587, "tls": 465, "none": 25}
_ATOM, _LABEL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+", r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
ADDRESS = re.compile(rf"(?=.{{3,254}}\Z)(?=[^@]{{1,64}}@){_ATOM}(?:\.{_ATOM})*@({_LABEL}(?:\.{_LABEL})*)", re.ASCII)
SENDER = re.compile(r"(?:([^<>\"\\@,;:]{0,128}?) ?<([^<>]+)>|([^<> ]+))")


class Probe(NamedTuple):
    """How to ask whether a call took effect: an address of the same origin, or another tool that only reads.

    Whatever `found`, `absent` and `many` don't tell apart is *unclear*. `lag_ms` is the longest time from an attempt's
    deadline until an effect of it shows in the answer, requests that still queue at the provider included.
    """

    found: Pattern
    absent: Pattern | None = None  # None: its absence can't be told
    many: Pattern | None = None  # more than one effect of this one key
    lag_ms: int = 0
    method: str = "GET"
    url: str = ""
    tool: str = ""
    args: Mapping[str, JSON] = {}  # of the tool, or the body of a POST
    receipt: str = ""  # which member of the answer is the effect's own record; empty: all of it


class Undo(NamedTuple):
    """How to reverse the effect: another tool, its arguments taken from the step's own receipt and arguments."""

    tool: str
    args: Mapping[str, JSON]
    nothing: Pattern | None = None  # the undo's answer that means: there was nothing to undo


class Require(NamedTuple):
    """What must hold before the first sending: a tool that only reads, and what its answer must be like."""

    tool: str
    match: Pattern
    args: Mapping[str, JSON] = {}


class Limits(NamedTuple):
    """How much of a tool is let out; 0 is no limit. `by` names an argument whose values are counted apart.

    What would go over `per_minute` waits; what would go over the others is refused. `spend` names the argument, a
    whole number, that the two `spend_…` limits add up.
    """

    per_minute: int = 0
    per_day: int = 0
    per_run: int = 0
    by: str = ""
    spend: str = ""
    spend_per_day: int = 0
    spend_per_run: int = 0


class Credential(NamedTuple):
    """Which header carries the provider's credential, and which environment variable of the gateway holds it.

    For a mail server the variable holds the password of `user`.
    """

    header: str
    env: str
    user: str = ""


class Contract(NamedTuple):
    """What a provider promises about one tool. Durations are milliseconds; `key_ttl_ms` 0 means: does not dedup."""

    tool: str
    kind: ToolKind
    effect: Effect = "external"
    url: str = ""
    method: str = "POST"
    args: Mapping[str, JSON] | None = None  # JSON Schema of the arguments
    key: str = "none"  # header:NAME | field:PATH | none; a python tool takes it as its parameter `key`
    key_form: KeyForm = "hex"
    key_ttl_ms: int = 0
    margin_ms: int = MARGIN_DEFAULT_MS
    key_scope: str = ""
    timeout_ms: int = TIMEOUT_DEFAULT_MS
    refusals: tuple[Pattern, ...] = ()
    retries: int = 0
    stored_failures: bool = False
    undo: Undo | None = None
    credential: Credential | None = None
    body: BodyForm = "json"
    ttl_from: TtlFrom = "first_sent"
    payload_bound: tuple[Pattern, ...] = ()  # answers that say: this key was used with another body
    expect: Pattern | None = None  # what the answer of a success looks like
    probe: Probe | None = None
    probe_tries: int = PROBE_TRIES_DEFAULT
    undo_safe_if_absent: bool = False
    independent: bool = False
    require: Require | None = None
    limits: Limits | None = None
    secret: tuple[str, ...] = ()  # dotted paths of arguments that are shown to nobody
    sender: str = ""  # smtp: `from` in a configuration
    tls: Tls = "starttls"  # smtp: how the conversation is kept from others
    escapes: bool = False  # workspace: effects outside the replica are possible

    @property
    def dedups(self) -> bool:
        """Whether the provider promises to know a key again."""
        return self.key != "none" and self.key_ttl_ms > 0

    @property
    def window_ms(self) -> int:
        """How long after the first sending a replay may be admitted; 0 without a key."""
        return self.key_ttl_ms - self.timeout_ms - self.margin_ms if self.dedups else 0

    @property
    def origin(self) -> str:
        if self.kind in ("python", "model"):
            return f"{self.kind}:{self.tool}"
        if self.kind == "workspace":
            return self.url
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def scope(self) -> str:
        """What the provider keeps keys apart by; another scope at replay would be another memory."""
        return f"{self.origin} {self.key_scope}".strip()

    def to_json(self) -> str:
        """The canonical text that is stored with intents; `from_json` reads it back."""
        return canonical({name: _plain(value) for name, value in zip(self._fields, self, strict=True)})

    @classmethod
    def from_json(cls, record: Mapping[str, JSON]) -> "Contract":
        """The contract that `to_json` spelled. The constructor refuses members that this version doesn't know."""
        fields: dict[str, Any] = dict(record)
        for name in ("refusals", "payload_bound"):
            fields[name] = tuple(map(_pattern, fields[name]))
        for name, kind in _NESTED.items():
            fields[name] = None if fields[name] is None else kind(**fields[name])
        for holder, names in (("probe", ("found", "absent", "many")), ("undo", ("nothing",)), ("require", ("match",))):
            if fields[holder] is not None:
                fields[holder] = fields[holder]._replace(
                    **{name: _pattern(getattr(fields[holder], name)) for name in names}
                )
        fields["expect"], fields["secret"] = _pattern(fields["expect"]), tuple(fields["secret"])
        return cls(**fields)


_NESTED: Mapping[str, Any] = {
    "probe": Probe,
    "undo": Undo,
    "require": Require,
    "limits": Limits,
    "credential": Credential,
}


def _plain(value: Any) -> JSON:
    """A member of a contract as JSON."""
    if isinstance(value, Pattern):
        return value.to_json()
    if isinstance(value, Probe | Undo | Require | Limits | Credential):
        return {name: _plain(inner) for name, inner in zip(value._fields, value, strict=True)}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def _pattern(record: Any) -> Any:
    if record is None:
        return None
    status, members = record
    return Pattern(status, tuple((path, wanted) for path, wanted in members))


class Request(NamedTuple):
    """The bytes of one call, without the credential: what the intent stores and each attempt sends.

    Of a mail: `headers` are the envelope, `body` is the message.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    body: str

    def to_json(self) -> str:
        """The canonical text that the intent stores."""
        return canonical(self._asdict())


def render_request(contract: Contract, args: Mapping[str, JSON], key: str) -> Request:
    """The HTTP request of a call: a pure function of contract, arguments and key. Raises `RenderError`."""
    url = _filled_url(contract.url, {"args": args})
    headers: dict[str, str] = {}
    body: JSON = dict(args)
    if contract.key.startswith("header:"):
        headers[contract.key[7:]] = spell_key(key, contract.key_form)
    elif contract.key.startswith("field:"):
        body = _with_member(dict(args), contract.key[6:].split("."), spell_key(key, contract.key_form))
    if contract.method in BODYLESS:
        left = set(args) - {name.removeprefix("args.").split(".")[0] for name in PLACEHOLDER.findall(contract.url)}
        if left:
            raise RenderError(f"{contract.method} sends no body and the url has no place for {', '.join(sorted(left))}")
        return Request(contract.method, url, headers, "")
    if contract.body == "form":
        text = urllib.parse.urlencode(list(_form_members(body, "")))
        return Request(contract.method, url, {**headers, "Content-Type": FORM}, text)
    return Request(contract.method, url, {**headers, "Content-Type": "application/json"}, canonical(body))


def _form_members(value: JSON, name: str) -> Iterator[tuple[str, str]]:
    """A body as form fields: `a[b]=1`, `items[0]=x`. Raises `RenderError` for what a form can't say."""
    if isinstance(value, Mapping):
        for inner in sorted(value):
            yield from _form_members(value[inner], f"{name}[{inner}]" if name else inner)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _form_members(each, f"{name}[{place}]")
    elif value is None:
        raise RenderError(f"{name} is null, which a form can't say; leave it out")
    else:
        yield name, value if isinstance(value, str) else canonical(value)


def render_probe(probe: Probe, sources: Mapping[str, JSON]) -> Request:
    """The question of a probe that has a url; `sources` are `key` and `args`. Raises `RenderError`."""
    url = _filled_url(probe.url, sources)
    if probe.method in BODYLESS:
        return Request(probe.method, url, {}, "")
    body = canonical(fill(dict(probe.args), sources))
    return Request(probe.method, url, {"Content-Type": "application/json"}, body)


def render_undo(undo: Undo, args: Mapping[str, JSON], receipt: JSON) -> dict[str, JSON]:
    """The arguments of an undo step, filled in from the step's own arguments and receipt. Raises `RenderError`."""
    return {name: fill(value, {"args": args, "receipt": receipt}) for name, value in undo.args.items()}


def contract_digest(contract: Contract) -> str:
    """What an intent stores to name its contract."""
    return digest(contract.to_json())


def sender_parts(text: str) -> tuple[str, str] | None:
    """(display name, address) of `desk@shop.example` or `The desk <desk@shop.example>`; None for anything else."""
    hit = SENDER.fullmatch(text)
    if hit is None:
        return None
    name, address = (hit.group(1) or "").strip(), hit.group(2) or hit.group(3)
    return (name, address) if ADDRESS.fullmatch(address) else None


def _filled_url(url: str, sources: Mapping[str, JSON]) -> str:
    return PLACEHOLDER.sub(lambda hit: _url_part(hit.group(1), sources), url)


def _url_part(name: str, sources: Mapping[str, JSON]) -> str:
    found, value = member(sources, name)
    if not found or isinstance(value, bool) or not isinstance(value, str | int) or value in ("", ".", ".."):
        raise RenderError(f"the url needs {name} as text or an integer")
    return urllib.parse.quote(str(value), safe="")


def _with_member(record: dict[str, JSON], path: list[str], value: str) -> dict[str, JSON]:
    """A copy of the record with one (possibly nested) member set. Refuses to overwrite what the caller sent."""
    if len(path) == 1:
        if path[0] in record:
            raise RenderError(f"the argument {path[0]} is where the contract puts the key; leave it out")
        return {**record, path[0]: value}
    inner = record.get(path[0], {})
    if not isinstance(inner, Mapping):
        raise RenderError(f"the contract puts the key inside {path[0]}, which is not an object")
    return {**record, path[0]: _with_member(dict(inner), path[1:], value)}
