"""Contracts: what a provider promises about a tool, and what follows from it.

A contract is data. It is stored with each intent, so that a doubt is judged by what was promised when the effect was
caused, not by what the configuration says today. `parse_contract` accepts exactly the members it knows and reports
every problem at once; `render_request` makes the bytes that an intent stores and every replay sends again.
"""

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from tidefast.protocol.canonical import JSON, CanonicalError, canonical, digest
from tidefast.protocol.ids import KeyForm, spell_key

ToolKind = Literal["http", "python", "smtp", "model", "workspace"]
Tls = Literal["starttls", "tls", "none"]
Effect = Literal["none", "external", "model", "workspace"]
Word = TypeVar("Word", bound=str)

TIMEOUT_DEFAULT_MS = 30_000  # what most providers' own clients wait
MARGIN_DEFAULT_MS = 300_000  # covers clock error and queueing at the edge of a provider's memory
TIMEOUT_MAX_MS = 3_600_000
DURATION_MAX_MS = 10 * 366 * 86_400_000
BODYLESS = frozenset(("GET", "DELETE"))
PYTHON_KEY = "field:key"  # a python tool receives the key as its parameter `key`
SMTP_PORTS: Mapping[Tls, int] = {"starttls": 587, "tls": 465, "none": 25}
LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))
# What makes no sense for a mail: its codes are fixed by SMTP itself, and no server remembers a key.
NOT_FOR_MAIL = ("method", "key", "key_form", "key_ttl", "key_scope", "refusals", "retries", "stored_failures")
_ATOM, _LABEL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+", r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
ADDRESS = re.compile(rf"(?=.{{3,254}}\Z)(?=[^@]{{1,64}}@){_ATOM}(?:\.{_ATOM})*@({_LABEL}(?:\.{_LABEL})*)", re.ASCII)
SENDER = re.compile(r"(?:([^<>\"\\@,;:]{0,128}?) ?<([^<>]+)>|([^<> ]+))")
_DURATION = re.compile(r"(\d{1,9})(ms|s|m|h|d)", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", re.ASCII)
_RESERVED_HEADERS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "authorization", "cookie", "content-type")
)


class Refusal(NamedTuple):
    """One definite answer: a status, and members of the answer's body that must have these values."""

    status: int
    members: tuple[tuple[str, JSON], ...] = ()

    def matches(self, status: int, body: JSON) -> bool:
        return status == self.status and all(_has(body, path, value) for path, value in self.members)


class Undo(NamedTuple):
    """How to reverse the effect: another tool, its arguments taken from the step's own receipt and arguments."""

    tool: str
    args: Mapping[str, JSON]


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
    refusals: tuple[Refusal, ...] = ()
    retries: int = 0
    stored_failures: bool = False
    undo: Undo | None = None
    credential: Credential | None = None
    sender: str = ""  # smtp: `from` in a configuration
    tls: Tls = "starttls"  # smtp: how the conversation is kept from others
    escapes: bool = False  # workspace: effects outside the replica are possible

    @property
    def dedups(self) -> bool:
        """Whether the provider promises to know a key again."""
        return self.key != "none" and self.key_ttl_ms > 0

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
        record: dict[str, JSON] = dict(self._asdict())
        record["refusals"] = [
            [refusal.status, [list(member) for member in refusal.members]] for refusal in self.refusals
        ]
        record["undo"] = None if self.undo is None else [self.undo.tool, self.undo.args]
        record["credential"] = None if self.credential is None else list(self.credential)
        return canonical(record)

    @classmethod
    def from_json(cls, record: Mapping[str, JSON]) -> "Contract":
        """The contract that `to_json` spelled. The constructor refuses members that this version doesn't know."""
        fields: dict[str, object] = dict(record)
        refusals: list[tuple[int, list[tuple[str, JSON]]]] = fields["refusals"]  # type: ignore[assignment]
        fields["refusals"] = tuple(
            Refusal(status, tuple((path, value) for path, value in members)) for status, members in refusals
        )
        undo, credential = fields["undo"], fields["credential"]
        fields["undo"] = None if undo is None else Undo(*undo)  # type: ignore[misc]
        fields["credential"] = None if credential is None else Credential(*credential)  # type: ignore[misc]
        return cls(**fields)  # type: ignore[arg-type]


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


class Problem(NamedTuple):
    """One fault of a contract: which member, what was expected."""

    member: str
    expected: str

    def __str__(self) -> str:
        return f"{self.member}: {self.expected}"


class RenderError(ValueError):
    """The arguments do not fit the contract's templates; the message names the place."""


def render_request(contract: Contract, args: Mapping[str, JSON], key: str) -> Request:
    """The HTTP request of a call: a pure function of contract, arguments and key. Raises `RenderError`."""
    url = _PLACEHOLDER.sub(lambda hit: _url_part(hit.group(1), args), contract.url)
    headers: dict[str, str] = {}
    body: JSON = dict(args)
    if contract.key.startswith("header:"):
        headers[contract.key[7:]] = spell_key(key, contract.key_form)
    elif contract.key.startswith("field:"):
        body = _with_member(dict(args), contract.key[6:].split("."), spell_key(key, contract.key_form))
    if contract.method in BODYLESS:
        left = set(args) - {name.removeprefix("args.").split(".")[0] for name in _PLACEHOLDER.findall(contract.url)}
        if left:
            raise RenderError(f"{contract.method} sends no body and the url has no place for {', '.join(sorted(left))}")
        return Request(contract.method, url, headers, "")
    return Request(contract.method, url, {**headers, "Content-Type": "application/json"}, canonical(body))


def render_undo(undo: Undo, args: Mapping[str, JSON], receipt: JSON) -> dict[str, JSON]:
    """The arguments of an undo step, filled in from the step's own arguments and receipt. Raises `RenderError`."""
    return {name: _fill(value, {"args": args, "receipt": receipt}) for name, value in undo.args.items()}


def duration_ms(text: str) -> int | None:
    """`30s`, `24h`, `500ms`, `5m`, `7d` as milliseconds; None for anything else."""
    hit = _DURATION.fullmatch(text)
    return int(hit.group(1)) * _UNIT_MS[hit.group(2)] if hit else None


def contract_digest(contract: Contract) -> str:
    """What an intent stores to name its contract."""
    return digest(contract.to_json())


def parse_contract(tool: str, table: Mapping[str, object]) -> tuple[Contract | None, tuple[Problem, ...]]:
    """A contract from a configuration table, or every problem found in it; never half of one."""
    reader = _Reader(table)
    contract = Contract(
        tool=tool,
        kind=reader.choice("kind", ("http", "python", "smtp")),
        effect=reader.choice("effect", ("external", "none"), default="external"),
        url=reader.text("url"),
        method=reader.choice("method", ("POST", "PUT", "PATCH", "DELETE", "GET"), default="POST"),
        args=reader.table("args"),
        key=reader.key(),
        key_form=reader.choice("key_form", ("hex", "uuid"), default="hex"),
        key_ttl_ms=reader.duration("key_ttl", 0),
        margin_ms=reader.duration("margin", MARGIN_DEFAULT_MS),
        key_scope=reader.text("key_scope"),
        timeout_ms=reader.duration("timeout", TIMEOUT_DEFAULT_MS),
        refusals=reader.refusals(),
        retries=reader.number("retries", 0, 100),
        stored_failures=reader.flag("stored_failures"),
        undo=reader.undo(),
        credential=reader.credential(),
        sender=reader.text("from"),
        tls=reader.choice("tls", ("starttls", "tls", "none"), default="starttls"),
    )
    reader.relations(contract)
    problems = reader.finish()
    return (None if problems else contract), problems


class _Reader:
    """Reads the members of one table, gathers what is wrong, and finally names the members nobody asked for."""

    def __init__(self, table: Mapping[str, object]) -> None:
        self._table = table
        self._known: set[str] = set()
        self._problems: list[Problem] = []

    def finish(self) -> tuple[Problem, ...]:
        unknown = [name for name in self._table if name not in self._known]
        known = ", ".join(sorted(self._known))
        return tuple(self._problems) + tuple(
            Problem(name, f"unknown member; known ones are {known}") for name in unknown
        )

    def fault(self, member: str, expected: str) -> None:
        self._problems.append(Problem(member, expected))

    def _get(self, name: str) -> object:
        self._known.add(name)
        return self._table.get(name)

    def choice(self, name: str, allowed: tuple[Word, ...], default: Word | None = None) -> Word:
        value = self._get(name)
        if value is None and default is not None:
            return default
        chosen = next((word for word in allowed if word == value), None)
        if chosen is None:
            self.fault(name, f"expected one of {', '.join(allowed)}, found {value!r}")
        return chosen or allowed[0]

    def text(self, name: str) -> str:
        value = self._get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > 2_048 or not value.isprintable():
            self.fault(name, "expected printable text of at most 2,048 characters")
            return ""
        return value

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.fault(name, "expected true or false")
        return False

    def number(self, name: str, default: int, maximum: int) -> int:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
            self.fault(name, f"expected an integer from 0 to {maximum}")
            return default
        return value

    def duration(self, name: str, default: int) -> int:
        value = self._get(name)
        if value is None:
            return default
        length = duration_ms(value) if isinstance(value, str) else None
        if length is None or length > DURATION_MAX_MS:
            self.fault(name, f'expected a duration like "30s" or "24h", at most ten years, found {value!r}')
            return default
        return length

    def table(self, name: str) -> Mapping[str, JSON] | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fault(name, "expected a table")
            return None
        return self._json(name, value)

    def _json(self, name: str, value: Mapping[str, JSON]) -> Mapping[str, JSON] | None:
        try:
            canonical(value)
        except CanonicalError as error:
            self.fault(name, f"expected JSON values: {error}")
            return None
        return value

    def key(self) -> str:
        value = self._get("key")
        if value is None or value == "none":
            return "none"
        if isinstance(value, str) and value.startswith("header:") and _header_problem(value[7:]) is None:
            return value
        if isinstance(value, str) and value.startswith("field:") and value[6:]:
            return value
        self.fault("key", f'expected "header:NAME", "field:PATH" or "none", found {value!r}')
        return "none"

    def refusals(self) -> tuple[Refusal, ...]:
        value = self._get("refusals")
        found: list[Refusal] = []
        for entry in value if isinstance(value, list) else []:
            status, members = (entry.get("status"), entry) if isinstance(entry, Mapping) else (entry, {})
            if not isinstance(status, int) or isinstance(status, bool) or not 300 <= status <= 599:
                self.fault("refusals", f"expected a status from 300 to 599 in each entry, found {entry!r}")
                continue
            rest = {path: wanted for path, wanted in members.items() if path != "status"}
            if self._json("refusals", rest) is not None:
                found.append(Refusal(status, tuple(sorted(rest.items()))))
        if value is not None and not isinstance(value, list):
            self.fault("refusals", 'expected a list like [402, { status = 400, "error.code" = "declined" }]')
        return tuple(found)

    def undo(self) -> Undo | None:
        value = self._get("undo")
        if value is None:
            return None
        if not isinstance(value, Mapping) or set(value) - {"tool", "args"} or not isinstance(value.get("tool"), str):
            self.fault("undo", 'expected { tool = "NAME", args = { … } }')
            return None
        args = value.get("args", {})
        if not isinstance(args, Mapping):
            self.fault("undo", "expected args to be a table")
            return None
        if self._json("undo", args) is None:
            return None
        for name in _placeholders(args):
            if name.split(".")[0] not in ("args", "receipt"):
                self.fault(
                    "undo", f"expected placeholders like {{receipt.body.id}} or {{args.order}}, found {{{name}}}"
                )
        return Undo(value["tool"], args)

    def credential(self) -> Credential | None:
        value = self._get("credential")
        if value is None:
            return None
        if self._table.get("kind") == "smtp":
            return self._password(value)
        if not isinstance(value, Mapping) or set(value) != {"header", "env"}:
            self.fault("credential", 'expected { header = "Authorization", env = "NAME" }')
            return None
        header, env = value["header"], value["env"]
        if not isinstance(header, str) or not _HEADER_NAME.fullmatch(header) or not isinstance(env, str) or not env:
            self.fault("credential", "expected a header's name and an environment variable's name")
            return None
        return Credential(header, env)

    def _password(self, value: object) -> Credential | None:
        user, env = (value.get("user"), value.get("env")) if isinstance(value, Mapping) else (None, None)
        is_whole = isinstance(value, Mapping) and set(value) == {"user", "env"}
        if not is_whole or not isinstance(user, str) or not isinstance(env, str) or not (user and env):
            self.fault("credential", 'expected { user = "NAME", env = "NAME OF THE VARIABLE WITH THE PASSWORD" }')
            return None
        return Credential("", env, user)

    def relations(self, contract: Contract) -> None:
        """What must hold between members."""
        try:
            contract.to_json()
        except CanonicalError as error:
            self.fault("args", f"expected a contract that can be stored: {error}")
        if contract.kind == "http":
            self._check_url(contract.url)
        elif contract.kind == "smtp":
            self._check_mail(contract)
        elif contract.url or contract.credential or contract.key not in ("none", PYTHON_KEY):
            self.fault("kind", f"a python tool has no url and no credential; its key is none or {PYTHON_KEY}")
        for name in ("from", "tls") if contract.kind != "smtp" else ():
            if name in self._table:
                self.fault(name, 'expected only where kind = "smtp"')
        if contract.method in BODYLESS and contract.key.startswith("field:"):
            self.fault("key", f"expected header:NAME, because {contract.method} sends no body")
        if contract.key_ttl_ms and contract.key == "none":
            self.fault("key_ttl", "expected a key as well: a provider can't remember what it isn't sent")
        if not 1 <= contract.timeout_ms <= TIMEOUT_MAX_MS:
            self.fault("timeout", "expected a duration from 1ms to 1h")
        if contract.dedups and contract.key_ttl_ms <= contract.timeout_ms + contract.margin_ms:
            self.fault("key_ttl", "expected more than timeout + margin, or no replay would ever be allowed")

    def _check_mail(self, contract: Contract) -> None:
        for name in NOT_FOR_MAIL:
            if name in self._table:
                self.fault(name, "expected nothing: SMTP fixes its refusals, and no mail server remembers a key")
        if contract.effect != "external":
            self.fault("effect", "expected external: a mail can't be called back")
        if sender_parts(contract.sender) is None:
            self.fault(
                "from", f'expected "desk@shop.example" or "The desk <desk@shop.example>", found {contract.sender!r}'
            )
        try:
            parts = urllib.parse.urlsplit(contract.url)
            is_plain = parts.scheme == "smtp" and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_plain = False
        if not is_plain or contract.url != f"smtp://{parts.netloc}" or set(parts.netloc) & set("@{}"):
            self.fault("url", f"expected smtp://HOST or smtp://HOST:PORT and nothing else, found {contract.url!r}")
        elif contract.credential is not None and contract.tls == "none" and parts.hostname not in LOOPBACK:
            self.fault("tls", "expected starttls or tls: a password isn't sent in the clear to another host")

    def _check_url(self, url: str) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
        except ValueError as error:
            self.fault("url", f"expected http(s)://HOST/PATH, found {url!r}: {error}")
            return
        if parts.scheme not in ("http", "https") or not parts.hostname or "{" in parts.netloc or "@" in parts.netloc:
            self.fault("url", f"expected http(s)://HOST/PATH with a fixed host and no credentials, found {url!r}")
        for name in _PLACEHOLDER.findall(url):
            if not name.startswith("args."):
                self.fault("url", f"expected placeholders like {{args.order}}, found {{{name}}}")


def sender_parts(text: str) -> tuple[str, str] | None:
    """(display name, address) of `desk@shop.example` or `The desk <desk@shop.example>`; None for anything else."""
    hit = SENDER.fullmatch(text)
    if hit is None:
        return None
    name, address = (hit.group(1) or "").strip(), hit.group(2) or hit.group(3)
    return (name, address) if ADDRESS.fullmatch(address) else None


def _header_problem(name: str) -> str | None:
    if _HEADER_NAME.fullmatch(name) is None or name.lower() in _RESERVED_HEADERS:
        return "not a header that a contract may set"
    return None


def _member(value: JSON, path: str) -> tuple[bool, JSON]:
    """(found, value) of a dotted path."""
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and part.isascii() and int(part) < len(value):
            value = value[int(part)]
        else:
            return False, None
    return True, value


def _has(body: JSON, path: str, wanted: JSON) -> bool:
    """Whether a member has exactly this value: true is not 1, while 1 and 1.0 are one JSON number."""
    found, value = _member(body, path)
    try:
        return found and canonical(value) == canonical(wanted)
    except CanonicalError:  # what the provider sent is no JSON value that a contract could name
        return False


def _url_part(name: str, args: Mapping[str, JSON]) -> str:
    found, value = _member(args, name.removeprefix("args."))
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


def _placeholders(template: JSON) -> list[str]:
    """The names that a template's texts ask for."""
    if isinstance(template, str):
        return _PLACEHOLDER.findall(template)
    if isinstance(template, Mapping):
        return [name for value in template.values() for name in _placeholders(value)]
    if isinstance(template, Sequence):
        return [name for value in template for name in _placeholders(value)]
    return []


def _fill(template: JSON, sources: Mapping[str, JSON]) -> JSON:
    """A template's value: a text that is one placeholder becomes the value it names, with its type."""
    if isinstance(template, Mapping):
        return {name: _fill(value, sources) for name, value in template.items()}
    if isinstance(template, list):
        return [_fill(value, sources) for value in template]
    if not isinstance(template, str):
        return template
    whole = _PLACEHOLDER.fullmatch(template)
    if whole:
        return _source(whole.group(1), sources)
    return _PLACEHOLDER.sub(lambda hit: str(_source(hit.group(1), sources)), template)


def _source(name: str, sources: Mapping[str, JSON]) -> JSON:
    found, value = _member(sources, name)
    if not found:
        raise RenderError(f"the undo needs {name}, which the step does not have")
    return value
