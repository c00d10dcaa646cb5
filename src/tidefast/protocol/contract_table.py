"""Contracts from a table: exactly the members that are known, every problem at once, never half of one."""

import re
import urllib.parse
from collections.abc import Iterator, Mapping

from tidefast.protocol.canonical import JSON, CanonicalError
from tidefast.protocol.contracts import (
    BODYLESS,
    MARGIN_DEFAULT_MS,
    PROBE_TRIES_DEFAULT,
    PYTHON_KEY,
    TIMEOUT_DEFAULT_MS,
    Contract,
    Credential,
    Limits,
    Probe,
    Require,
    Undo,
    sender_parts,
)
from tidefast.protocol.fields import Fields, Problem
from tidefast.protocol.patterns import PLACEHOLDER, Pattern, placeholders

TIMEOUT_MAX_MS = 3_600_000
LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))
# What makes no sense for a mail: its codes are fixed by SMTP itself, and no server remembers a key.
NOT_FOR_MAIL = (
    *("method", "key", "key_form", "key_ttl", "ttl_from", "key_scope", "payload_bound"),
    *("refusals", "retries", "stored_failures", "body", "expect"),
)
_HEADER_AND_VARIABLE = "a header's name and an environment variable's name"
COUNT_MAX = 2**43  # a sum is kept in millionths
PER_MINUTE_MAX = 1_000  # each place of a minute is kept by itself
PATTERN_LIST = 'a list like [402, { status = 400, "error.code" = "declined" }]'
REUSED = Pattern(422)  # what the draft standard of the header Idempotency-Key says for a key with another body
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", re.ASCII)
_RESERVED_HEADERS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "authorization", "cookie", "content-type")
)


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
        body=reader.choice("body", ("json", "form"), default="json"),
        ttl_from=reader.choice("ttl_from", ("first_sent", "completed"), default="first_sent"),
        payload_bound=reader.payload_bound(),
        expect=reader.pattern("expect"),
        probe=reader.probe(),
        probe_tries=reader.number("probe_tries", PROBE_TRIES_DEFAULT, 1_000, least=1),
        undo_safe_if_absent=reader.flag("undo_safe_if_absent"),
        independent=reader.flag("independent"),
        require=reader.require(),
        limits=reader.limits(),
        secret=reader.secret(),
    )
    problems = reader.problems() + relations(contract, table) + reader.unknown()
    return (None if problems else contract), problems


class _Reader(Fields):
    """The members that only a contract has."""

    def key(self) -> str:
        value = self.get("key")
        if value is None or value == "none":
            return "none"
        if isinstance(value, str) and value.startswith("header:") and _header_problem(value[7:]) is None:
            return value
        if isinstance(value, str) and value.startswith("field:") and value[6:]:
            return value
        if isinstance(value, str) and value.startswith("meta:"):
            self.fault("key", "meta:NAME is for tools of kind mcp, which this version does not have")
        else:
            self.fault("key", f'expected "header:NAME", "field:PATH" or "none", found {value!r}')
        return "none"

    def refusals(self) -> tuple[Pattern, ...]:
        value = self.get("refusals")
        if value is None:
            return ()
        return self._patterns("refusals", value)

    def payload_bound(self) -> tuple[Pattern, ...]:
        value = self.get("payload_bound")
        if value is None or value is False:
            return ()
        return (REUSED,) if value is True else self._patterns("payload_bound", value)

    def _patterns(self, name: str, value: object) -> tuple[Pattern, ...]:
        if not isinstance(value, list):
            self.fault(name, f"expected {PATTERN_LIST}")
            return ()
        found: list[Pattern] = []
        for entry in value:
            status, members = (entry.get("status"), entry) if isinstance(entry, Mapping) else (entry, {})
            if not isinstance(status, int) or isinstance(status, bool) or not 300 <= status <= 599:
                self.fault(name, f"expected a status from 300 to 599 in each entry, found {entry!r}")
                continue
            rest = {path: wanted for path, wanted in members.items() if path != "status"}
            if self.json(name, rest) is not None:
                found.append(Pattern(status, tuple(sorted(rest.items()))))
        return tuple(found)

    def undo(self) -> Undo | None:
        inner = self._table_of("undo", '{ tool = "NAME", args = { … } }')
        if inner is None:
            return None
        tool, args, nothing = inner.text("tool"), inner.table("args") or {}, inner.pattern("nothing")
        if not tool:
            inner.fault("tool", "expected the name of a tool")
        self._only(inner, "args", args, ("args", "receipt"))
        self.closed(inner)
        return Undo(tool, args, nothing)

    def probe(self) -> Probe | None:
        inner = self._table_of("probe", '{ url = "…?key={key}", found = { … }, lag = "10s" }')
        if inner is None:
            return None
        found, absent, many = inner.pattern("found"), inner.pattern("absent"), inner.pattern("many")
        probe = Probe(
            found=found or Pattern(),
            absent=absent,
            many=many,
            lag_ms=inner.duration("lag", -1),
            method=inner.choice("method", ("GET", "POST"), default="GET"),
            url=inner.text("url"),
            tool=inner.text("tool"),
            args=inner.table("args") or {},
            receipt=inner.text("receipt"),
        )
        if found is None:
            inner.fault("found", 'expected what the answer is like if it happened, such as { "data.0.id" = "string" }')
        if probe.lag_ms < 0:
            inner.fault("lag", "expected how long after its deadline a call may still show in the answer, at worst")
        if bool(probe.url) == bool(probe.tool):
            inner.fault("url", "expected either a url or the name of a tool that only reads")
        if probe.args and probe.url and probe.method == "GET":
            inner.fault("args", "expected no args, because GET sends no body: put them into the url")
        for name, pattern in (("found", found), ("absent", absent), ("many", many)):
            self._only(inner, name, [] if pattern is None else [value for _, value in pattern.members], ("args", "key"))
        self._only(inner, "url", probe.url, ("args", "key"))
        self._only(inner, "args", probe.args, ("args", "key"))
        self.closed(inner)
        return probe

    def require(self) -> Require | None:
        inner = self._table_of("require", '{ tool = "NAME", match = { "open" = true } }')
        if inner is None:
            return None
        tool, match, args = inner.text("tool"), inner.pattern("match"), inner.table("args") or {}
        if not tool:
            inner.fault("tool", "expected the name of a tool that only reads")
        if match is None:
            inner.fault("match", 'expected what its answer must be like, such as { "open" = true }')
        self._only(inner, "args", args, ("args",))
        self._only(inner, "match", [value for _, value in match.members] if match else [], ("args",))
        self.closed(inner)
        return Require(tool, match or Pattern(), args)

    def limits(self) -> Limits | None:
        inner = self._table_of("limits", "{ per_minute = 60, per_run = 5 }")
        if inner is None:
            return None
        limits = Limits(
            per_minute=inner.number("per_minute", 0, PER_MINUTE_MAX, least=1),
            per_day=inner.number("per_day", 0, COUNT_MAX, least=1),
            per_run=inner.number("per_run", 0, COUNT_MAX, least=1),
            by=_path_of_argument(inner, "by"),
            spend=_path_of_argument(inner, "spend"),
            spend_per_day=inner.number("spend_per_day", 0, COUNT_MAX, least=1),
            spend_per_run=inner.number("spend_per_run", 0, COUNT_MAX, least=1),
        )
        if bool(limits.spend) != bool(limits.spend_per_day or limits.spend_per_run):
            inner.fault("spend", "expected both the argument that is added up and spend_per_day or spend_per_run")
        if not (limits.per_minute or limits.per_day or limits.per_run or limits.spend):
            inner.fault("per_run", "expected at least one limit")
        self.closed(inner)
        return limits

    def secret(self) -> tuple[str, ...]:
        value = self.get("secret")
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(path, str) and path for path in value):
            self.fault("secret", 'expected a list of arguments like ["card.number"]')
            return ()
        return tuple(value)

    def credential(self) -> Credential | None:
        is_mail = self.get("kind") == "smtp"
        example = '{ user = "NAME", env = "NAME" }' if is_mail else '{ header = "Authorization", env = "NAME" }'
        inner = self._table_of("credential", example)
        if inner is None:
            return None
        header, env = inner.text("user" if is_mail else "header"), inner.text("env")
        self.closed(inner)
        if not header or not env or not (is_mail or _HEADER_NAME.fullmatch(header)):
            what = "a user's name and the name of the variable with the password" if is_mail else _HEADER_AND_VARIABLE
            self.fault("credential", f"expected {what}, like {example}")
        return Credential("", env, header) if is_mail else Credential(header, env)

    def _table_of(self, name: str, example: str) -> Fields | None:
        value = self.get(name)
        return None if value is None else self.inner(name, value, example)

    def _only(self, inner: Fields, name: str, template: JSON, sources: tuple[str, ...]) -> None:
        """A template may ask for these sources only: `{key}`, `{args.order}`, `{receipt.body.id}`."""
        for asked in placeholders(template):
            source, dot, _ = asked.partition(".")
            if source not in sources or (dot and source == "key"):
                known = " or ".join("{key}" if each == "key" else f"{{{each}.…}}" for each in sources)
                inner.fault(name, f"expected placeholders like {known}, found {{{asked}}}")


def _path_of_argument(inner: Fields, name: str) -> str:
    path = inner.text(name)
    if path and not (path.startswith("args.") and path[5:]):
        inner.fault(name, f'expected an argument like "args.cents", found {path!r}')
    return path


def relations(contract: Contract, table: Mapping[str, object]) -> tuple[Problem, ...]:
    """What must hold between members."""
    return tuple(Problem(member, expected) for member, expected in _misfits(contract, table))


def _misfits(contract: Contract, table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    try:
        contract.to_json()
    except CanonicalError as error:
        yield "args", f"expected a contract that can be stored: {error}"
    if contract.kind == "http":
        yield from _url_faults("url", contract.url, ("args.",))
    elif contract.kind == "smtp":
        yield from _mail_faults(contract, table)
    elif contract.url or contract.credential or contract.key not in ("none", PYTHON_KEY):
        yield "kind", f"a python tool has no url and no credential; its key is none or {PYTHON_KEY}"
    for name in ("from", "tls") if contract.kind != "smtp" else ():
        if name in table:
            yield name, 'expected only where kind = "smtp"'
    if contract.method in BODYLESS and contract.key.startswith("field:"):
        yield "key", f"expected header:NAME, because {contract.method} sends no body"
    if contract.body == "form" and (contract.kind != "http" or contract.method in BODYLESS):
        yield "body", "expected an http tool whose method sends a body"
    if contract.key_ttl_ms and contract.key == "none":
        yield "key_ttl", "expected a key as well: a provider can't remember what it isn't sent"
    if not 1 <= contract.timeout_ms <= TIMEOUT_MAX_MS:
        yield "timeout", "expected a duration from 1ms to 1h"
    if contract.dedups and contract.key_ttl_ms <= contract.timeout_ms + contract.margin_ms:
        yield "key_ttl", "expected more than timeout + margin, or no replay would ever be allowed"
    if contract.payload_bound and not contract.dedups:
        yield "payload_bound", "expected a key and a key_ttl as well"
    yield from _doubt_misfits(contract)


def _mail_faults(contract: Contract, table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name in NOT_FOR_MAIL:
        if name in table:
            yield name, "expected nothing: SMTP fixes its refusals, and no mail server remembers a key"
    if contract.effect != "external":
        yield "effect", "expected external: a mail can't be called back"
    if sender_parts(contract.sender) is None:
        yield "from", f'expected "desk@shop.example" or "The desk <desk@shop.example>", found {contract.sender!r}'
    try:
        parts = urllib.parse.urlsplit(contract.url)
        is_plain = parts.scheme == "smtp" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_plain = False
    if not is_plain or contract.url != f"smtp://{parts.netloc}" or set(parts.netloc) & set("@{}"):
        yield "url", f"expected smtp://HOST or smtp://HOST:PORT and nothing else, found {contract.url!r}"
    elif contract.credential is not None and contract.tls == "none" and parts.hostname not in LOOPBACK:
        yield "tls", "expected starttls or tls: a password isn't sent in the clear to another host"


def _doubt_misfits(contract: Contract) -> Iterator[tuple[str, str]]:
    probe = contract.probe
    if contract.effect == "none":
        for name in ("probe", "undo", "require", "limits"):
            if getattr(contract, name) is not None:
                yield name, 'expected an effect other than "none": a read is simply asked again'
    if contract.undo_safe_if_absent and contract.undo is None:
        yield "undo_safe_if_absent", "expected an undo as well"
    asked = [] if contract.undo is None else placeholders(contract.undo.args)
    if contract.undo_safe_if_absent and any(name.partition(".")[0] == "receipt" for name in asked):
        yield "undo", "expected args without {receipt.…}: the undo of a doubt has no receipt to read"
    if probe is None:
        return
    if probe.url and contract.kind != "http":
        yield "probe", "expected the name of a tool: only an http tool is asked at a url"
    elif probe.url:
        yield from _url_faults("probe", probe.url, ("args.", "key"))
        if _origin(probe.url) != _origin(contract.url):
            yield "probe", f"expected a url of the tool's own origin {_origin(contract.url)}, found {probe.url!r}"
    if contract.key == "none" and any(name == "key" for name in _asked(probe)):
        yield "probe", "expected no {key}: the provider is never sent one"


def _asked(probe: Probe) -> list[str]:
    patterns = (pattern for pattern in (probe.found, probe.absent, probe.many) if pattern is not None)
    values: list[JSON] = [value for pattern in patterns for _, value in pattern.members]
    return placeholders([probe.url, probe.args, *values])


def _origin(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc}"


def _url_faults(name: str, url: str, sources: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        yield name, f"expected http(s)://HOST/PATH, found {url!r}: {error}"
        return
    if parts.scheme not in ("http", "https") or not parts.hostname or "{" in parts.netloc or "@" in parts.netloc:
        yield name, f"expected http(s)://HOST/PATH with a fixed host and no credentials, found {url!r}"
    for asked in PLACEHOLDER.findall(url):
        if not asked.startswith(sources):
            yield name, f"expected placeholders like {{args.order}}, found {{{asked}}}"


def _header_problem(name: str) -> str | None:
    if _HEADER_NAME.fullmatch(name) is None or name.lower() in _RESERVED_HEADERS:
        return "not a header that a contract may set"
    return None
