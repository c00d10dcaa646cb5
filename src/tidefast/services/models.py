"""The models that a gateway may ask: who serves them, what they cost, and what may be spent.

Read from a TOML file, checked in full before the gateway starts; every problem is reported at once with file, key and
what was expected. Credentials are named here and read from the environment at each sending.
"""

import math
import os
import tomllib
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from tidefast.protocol.budget import Amount, Limit, run_budget
from tidefast.protocol.chat import MODEL_TOOL, ChatCall, Usage
from tidefast.protocol.contract_table import TIMEOUT_MAX_MS
from tidefast.protocol.contracts import Contract, contract_digest
from tidefast.protocol.fields import duration_ms
from tidefast.protocol.ids import RunId, is_id
from tidefast.protocol.patterns import Pattern
from tidefast.services.tools import ConfigError, fits_header

REFUSALS = (400, 402, 404, 405, 406, 410, 411, 413, 414, 415, 422, 431)  # of the request itself: never billed, final
UNBILLED = (401, 403, 407, 425, 429)  # turned away before any model was asked
BYTES_PER_TOKEN = 2  # for reserving only, and deliberately too few: what a prompt costs is settled from the usage
MICROS = 1_000_000
Positive = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
MONEY_MAX = 10**9
T = TypeVar("T")


class CredentialTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Without `header` the value is sent as `Authorization: Bearer …`."""

    env: str
    header: str = ""


class UpstreamTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One server that speaks the chat completions protocol. `url` ends where `/chat/completions` begins."""

    url: str
    models: list[str]
    credential: CredentialTable | None = None
    concurrency: Positive = 16
    queue: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 64
    queue_wait: str = "30s"
    first_token: str = "60s"
    timeout: str = "10m"
    retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    unbilled: list[int] = []
    failures: Positive = 5  # in a row, until the upstream is left alone for `pause`
    pause: str = "10s"
    ask_usage: bool = True
    answer_tokens: Positive = 4_096


class PriceTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Per million tokens, in whatever unit the budgets are in."""

    input: Decimal
    output: Decimal


class LimitTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    calls: Count | None = None
    tokens: Count | None = None
    money: Decimal | None = None

    def limit(self) -> Limit:
        return Limit(self.calls, self.tokens, None if self.money is None else int(self.money * MICROS))


class BudgetsTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    run: LimitTable = LimitTable()
    agent: dict[str, LimitTable] = {}
    key: dict[str, LimitTable] = {}


class Settings(NamedTuple):
    """One upstream, with its durations in milliseconds."""

    name: str
    url: str
    table: UpstreamTable
    queue_wait_ms: int
    first_token_ms: int
    timeout_ms: int
    pause_ms: int


class Model(NamedTuple):
    """One model ready to be asked."""

    name: str
    upstream: str
    contract: Contract
    digest: str
    price: PriceTable | None


@dataclass(slots=True)
class ModelBook:
    """All models of one gateway. Empty without a file."""

    upstreams: dict[str, Settings] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    budgets: BudgetsTable = BudgetsTable()  # noqa: RUF009 - frozen

    def limits(self, run_id: RunId, agent: str, key: str) -> list[tuple[str, Limit]]:
        """The budgets that a call is booked in, with their configured limits."""
        found = [(run_budget(run_id), self.budgets.run.limit())]
        for kind, name, tables in (("agent", agent, self.budgets.agent), ("key", key, self.budgets.key)):
            if name:
                found.append((f"{kind}/{name}", tables.get(name, LimitTable()).limit()))
        return found

    def limit(self, name: str) -> Limit:
        """The configured limit of a budget by its name."""
        kind, _, of = name.partition("/")
        if kind == "run":
            return self.budgets.run.limit()
        return (self.budgets.agent if kind == "agent" else self.budgets.key).get(of, LimitTable()).limit()

    def estimate(self, model: Model, call: ChatCall, body_bytes: int) -> Amount:
        """What a call may come to cost, before anybody knows."""
        settings = self.upstreams[model.upstream]
        answer = settings.table.answer_tokens if call.answer_tokens is None else call.answer_tokens
        return cost(model, Usage(math.ceil(body_bytes / BYTES_PER_TOKEN), answer))


def cost(model: Model, usage: Usage) -> Amount:
    """What an answer has cost by its usage; money is rounded up."""
    micros = Decimal(0)
    if model.price is not None:  # per million tokens is millionths per token
        micros = usage.input_tokens * model.price.input + usage.output_tokens * model.price.output
    return Amount(1, usage.input_tokens + usage.output_tokens, math.ceil(micros))


def load_models(path: Path) -> ModelBook:
    """The models of a TOML file. Raises `ConfigError` with every problem of the file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable file: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected TOML: {error}") from error
    book, problems = ModelBook(), list(_unknown(document))
    tables = {name: document.get(name, {}) for name in ("upstreams", "prices", "budgets")}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{path}: {name}: expected tables")
    prices = {name: _read(PriceTable, table, f"prices.{name}", problems) for name, table in tables["prices"].items()}
    for name, table in tables["upstreams"].items():
        _upstream(book, name, table, prices, problems)
    book.budgets = _read(BudgetsTable, tables["budgets"], "budgets", problems) or BudgetsTable()
    problems += [f"prices.{name}: no upstream serves this model" for name in prices if name not in book.models]
    problems += _unpriced(book)
    if not book.models and not problems:
        problems.append("upstreams: expected at least one table like [upstreams.local]")
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return book


def _unknown(document: Mapping[str, Any]) -> Iterator[str]:
    for name in document:
        if name not in ("upstreams", "prices", "budgets"):
            yield f"{name}: unknown table; expected [upstreams.NAME], [prices.MODEL] or [budgets]"


def _read(kind: type[T], table: object, where: str, problems: list[str]) -> T | None:
    try:
        read = msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        problems.append(f"{where}: {error}")
        return None
    problems += _bad_money(read, where)
    return read


def _bad_money(read: object, where: str) -> Iterator[str]:
    """Amounts that are no money, wherever they stand."""
    if isinstance(read, msgspec.Struct):
        for name in read.__struct_fields__:
            yield from _bad_money(getattr(read, name), f"{where}.{name}")
    elif isinstance(read, dict):
        for name, value in read.items():
            yield from _bad_money(value, f"{where}.{name}")
    elif isinstance(read, Decimal) and not (read.is_finite() and 0 <= read <= MONEY_MAX):
        yield f"{where}: expected an amount from 0 to {MONEY_MAX:,}, found {read}"


def _upstream(
    book: ModelBook, name: str, table: object, prices: Mapping[str, PriceTable | None], problems: list[str]
) -> None:
    where = f"upstreams.{name}"
    read = _read(UpstreamTable, table, where, problems)
    if read is None:
        return
    before = len(problems)
    problems += [f"{where}.{problem}" for problem in _faults(name, read)]
    times = {
        member: _time(getattr(read, member), f"{where}.{member}", problems)
        for member in ("queue_wait", "first_token", "timeout", "pause")
    }
    for model in read.models:
        if not 1 <= len(model) <= 200 or not model.isprintable():
            problems.append(f"{where}.models: expected names of 1 to 200 printable characters, found {model[:50]!r}")
        elif model in book.models:
            problems.append(f"{where}.models: {model} is served by upstreams.{book.models[model].upstream} already")
        elif len(problems) == before:
            contract = Contract(
                tool=MODEL_TOOL + model,
                kind="model",
                effect="model",
                timeout_ms=times["timeout"],
                refusals=tuple(Pattern(status) for status in REFUSALS if status not in read.unbilled),
                retries=read.retries,
                stored_failures=True,  # a request that was refused is refused again
            )
            book.models[model] = Model(model, name, contract, contract_digest(contract), prices.get(model))
    url = read.url.rstrip("/") + "/chat/completions"
    book.upstreams[name] = Settings(
        name, url, read, times["queue_wait"], times["first_token"], times["timeout"], times["pause"]
    )


def _faults(name: str, table: UpstreamTable) -> Iterator[str]:
    if not is_id(name):
        yield "name: expected letters, digits, dots, dashes and underscores"
    try:
        parts = urllib.parse.urlsplit(table.url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        is_good = is_good and not parts.query and not parts.fragment and table.url.isascii()
    except ValueError:
        is_good = False
    if not is_good:
        yield f"url: expected http(s)://HOST/PATH without credentials and query, found {table.url!r}"
    if not table.models:
        yield "models: expected the names of the models that this upstream serves"
    for status in table.unbilled:
        if not 400 <= status <= 599:
            yield f"unbilled: expected statuses from 400 to 599, found {status}"
    if table.credential is not None:
        value = os.environ.get(table.credential.env, "")
        if not value:
            yield f"credential: expected the environment variable {table.credential.env} to be set"
        elif not fits_header(value):
            yield f"credential: expected {table.credential.env} to be printable ASCII in one line, no spaces around it"
        if table.credential.header and not table.credential.header.replace("-", "").isalnum():
            yield f"credential: expected a header's name, found {table.credential.header!r}"


def _time(text: str, where: str, problems: list[str]) -> int:
    length = duration_ms(text)
    if length is None or not 1 <= length <= TIMEOUT_MAX_MS:
        problems.append(f'{where}: expected a duration from 1ms to 1h, like "30s", found {text!r}')
        return 1
    return length


def _unpriced(book: ModelBook) -> Iterator[str]:
    """A budget in money that can't be checked would be no budget."""
    budgets = book.budgets
    tables = {"run": budgets.run, **{f"agent.{n}": t for n, t in budgets.agent.items()}}
    tables |= {f"key.{n}": t for n, t in budgets.key.items()}
    named = next((name for name, table in tables.items() if table.money is not None), None)
    for model in book.models.values() if named else ():
        if model.price is None:
            yield f"prices.{model.name}: expected a price, because budgets.{named} has money"
