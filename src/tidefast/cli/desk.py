"""The operator's desk: reads and operator verbs, at a server or in a store's file.

With `--url` (or `TIDEFAST_URL`) a server is asked. Otherwise the store's file is opened: reads go beside whoever owns
it; a verb that writes needs the file for itself, and is refused with the owner's url while a server has it.
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from tidefast.cli.errors import CliError, ExitCode, refusal
from tidefast.cli.place import own, store_path, system_clock
from tidefast.engine.engine import Engine
from tidefast.protocol.answers import BudgetInfo, EventInfo, RunCreated, RunInfo, StepInfo
from tidefast.protocol.budget import Limit
from tidefast.protocol.commands import ResolveVerdict, RunVerb
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.verdicts import Done, Refused, Settled
from tidefast.services.reads import Reads
from tidefast.stores.sqlite import SqliteStore
from tidefast.wire.place import KEY_VARIABLE, URL_VARIABLE

if TYPE_CHECKING:
    from tidefast.services.authority import Authority

PAGE = 1_000
BY = "operator"  # whom the log names for a verb of the file's owner; a server names the bearer of its key
T = TypeVar("T")


class Reader(Protocol):
    """What can be read at either place."""

    async def run(self, run_id: RunId) -> RunInfo | Refused: ...

    async def runs(self, after: str | None, limit: int, state: str | None) -> Sequence[RunInfo]: ...

    async def events(self, run_id: RunId, after: int, limit: int) -> Sequence[EventInfo] | Refused: ...

    async def steps(self, run_id: RunId, after: str | None, limit: int) -> Sequence[StepInfo] | Refused: ...

    async def step(self, run_id: RunId, step_id: StepId) -> StepInfo | Refused: ...

    async def held(self) -> Sequence[StepInfo]: ...

    async def budgets(self, after: str, limit: int) -> Sequence[BudgetInfo]: ...


class Writer(Reader, Protocol):
    """What an operator can do at either place."""

    async def create_run(
        self, run_id: str | None, agent: str, agent_version: str, input_json: str
    ) -> RunCreated | Refused: ...

    async def oversee(self, verb: RunVerb, run_id: str, note: str, expect_epoch: int | None) -> Done | Refused: ...

    async def raise_budget(self, name: str, limit: Limit, note: str) -> BudgetInfo | Refused: ...

    async def resolve(
        self,
        run_id: str,
        step_id: str,
        verdict: ResolveVerdict,
        note: str,
        receipt_json: str,
        looked_at_ms: int | None,
        expect_attempts: int | None,
        expect_epoch: int | None = None,
    ) -> Settled | Refused: ...


def must(answer: T | Refused) -> T:
    """The answer; a refusal ends the command."""
    if isinstance(answer, Refused):
        raise refusal(answer)
    return answer


async def all_events(reader: Reader, run_id: RunId) -> list[EventInfo]:
    found: list[EventInfo] = []
    while page := must(await reader.events(run_id, found[-1].seq if found else 0, PAGE)):
        found += page
    return found


async def all_steps(reader: Reader, run_id: RunId) -> list[StepInfo]:
    found: list[StepInfo] = []
    while page := must(await reader.steps(run_id, found[-1].step_id if found else None, PAGE)):
        found += page
    return found


def server_url(url: str | None) -> str | None:
    """The server that a command was pointed at; an empty value counts as none."""
    return url or os.environ.get(URL_VARIABLE) or None


def given_key() -> str | None:
    """The key in TIDEFAST_KEY; none if it is empty or not set."""
    return os.environ.get(KEY_VARIABLE) or None


def server_key(url: str, store: str) -> str | None:
    """The key to call a server with: the one given, else the operator's beside the store that this server owns."""
    key = given_key()
    if key is not None:
        return key
    from tidefast.server import keys

    path = store_path(store)
    owner = SqliteStore.owner(path) if path.parent.is_dir() else None
    return keys.read_operator_key(path) if owner is not None and owner.url == url.rstrip("/") != "" else None


@asynccontextmanager
async def reading(url: str | None, store: str) -> AsyncIterator[Reader]:
    """Reads at a server, or in a file whoever owns it."""
    address = server_url(url)
    if address is not None:
        async with at_server(address, server_key(address, store), writes=False) as server:
            yield server
        return
    opened = SqliteStore.open_read_only(store_path(store))
    try:
        # Never started, so it can only read.
        yield Reads(Engine(opened, system_clock(opened), inline=True))
    finally:
        opened.close()


@asynccontextmanager
async def writing(url: str | None, store: str, operator_key: Path | None) -> AsyncIterator[Writer]:
    """An operator's verbs at a server, or in a file that nobody else owns."""
    address = server_url(url)
    if address is not None:
        async with at_server(address, _key(address, store, operator_key), writes=True) as server:
            yield server
        return
    from tidefast.cli import wiring  # only here: it loads the gateway, which nobody needs who only looks
    from tidefast.services.tools import ToolBook

    parts = await wiring.build_authority(own(store, create=False), ToolBook(()), sweeps=False)
    try:
        yield _Owner(parts.authority)
    finally:
        await parts.stop()


def _key(url: str, store: str, operator_key: Path | None) -> str | None:
    """The key from the file named, else the one given, else the operator's beside the store; None without any.

    Unasked it goes to no other address than the one that the store's own server has announced. Raises `CliError`.
    """
    from tidefast.server import keys
    from tidefast.wire import secretfile

    if operator_key is not None:
        try:
            return keys.PREFIX + secretfile.read(operator_key).hex()
        except FileNotFoundError:
            todo = "name the file that `tidefast serve` wrote beside its store"
            raise CliError("config", f"--operator-key {operator_key}: no such file", todo, ExitCode.CONFIG) from None
    known = server_key(url, store)
    if known is not None:
        return known
    path = store_path(store)
    if keys.read_operator_key(path) is None:
        return None
    owner = SqliteStore.owner(path)
    announced = owner.url if owner is not None else ""
    file = keys.operator_key_path(path)
    serves = f"the server of {path} is at {announced}" if announced else f"no server of {path} runs"
    todo = f"if that server may have it, say so: --operator-key {file}"
    if announced:
        todo = f"ask --url {announced}, or, {todo}"
    raise CliError("config", f"the key beside the store is not sent to {url}: {serves}", todo, ExitCode.CONFIG)


class _Owner:
    """The verbs of the process that owns the file."""

    def __init__(self, authority: "Authority") -> None:
        self._authority = authority
        reads = authority.reads
        self.run, self.runs, self.events = reads.run, reads.runs, reads.events
        self.steps, self.step, self.held = reads.steps, reads.step, reads.held
        self.create_run, self.budgets = authority.create_run, reads.budgets

    async def raise_budget(self, name: str, limit: Limit, note: str) -> BudgetInfo | Refused:
        return await self._authority.raise_budget(name, limit, BY, note)

    async def oversee(self, verb: RunVerb, run_id: str, note: str, expect_epoch: int | None) -> Done | Refused:
        return await self._authority.oversee(verb, run_id, BY, note, expect_epoch)

    async def resolve(
        self,
        run_id: str,
        step_id: str,
        verdict: ResolveVerdict,
        note: str,
        receipt_json: str,
        looked_at_ms: int | None,
        expect_attempts: int | None,
        expect_epoch: int | None = None,
    ) -> Settled | Refused:
        return await self._authority.resolve(
            run_id, step_id, verdict, BY, note, receipt_json, looked_at_ms, expect_attempts, expect_epoch
        )


@asynccontextmanager
async def at_server(url: str, key: str | None, *, writes: bool) -> AsyncIterator[Writer]:
    """A server, with its silences told as errors: not reached, or an outcome that nobody knows."""
    import aiohttp

    from tidefast.sdk.authority import AuthorityUnavailable
    from tidefast.sdk.http import HttpAuthority, RequestRefused

    try:
        authority = HttpAuthority(url, key)
    except ValueError as error:
        raise CliError("usage", f"--url {url}", "expected http://HOST:PORT", ExitCode.USAGE) from error
    try:
        yield authority
    except RequestRefused as error:
        raise CliError("invalid", str(error), "correct it and ask again") from error
    except AuthorityUnavailable as error:
        if writes and not isinstance(error.__cause__, aiohttp.ClientConnectorError):
            todo = "look at the run before you repeat it"
            raise CliError("unknown", f"whether it was done is unknown: {error}", todo, ExitCode.UNKNOWN) from error
        todo = "start `tidefast serve` there, or name another address with --url"
        raise CliError("unreachable", str(error), todo, ExitCode.UNREACHABLE) from error
    finally:
        await authority.close()
