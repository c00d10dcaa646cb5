"""Puts the parts of a process together: store, engine, gateway, keeper, authority, and the way they end.

Nothing is answered after a failed flush: when the engine says so, the process exits at once, without a handler, a drain
or a last word to any caller. What it held is judged again at the next start.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.place import system_clock
from tidefast.engine.clock import Clock
from tidefast.engine.engine import Engine
from tidefast.protocol.contracts import Contract
from tidefast.protocol.points import Hook
from tidefast.services.authority import Authority
from tidefast.services.closer import Closer
from tidefast.services.contents import Contents
from tidefast.services.gateway import Gateway
from tidefast.services.http_sender import HttpSender
from tidefast.services.keeper import Keeper
from tidefast.services.model_hop import ModelHop
from tidefast.services.model_sender import ModelSender
from tidefast.services.models import ModelBook, load_models
from tidefast.services.python_runner import LocalRunner, NotSentByTool, RefusedByTool
from tidefast.services.replicas import LEASE_MS, Replicas
from tidefast.services.tools import ConfigError, PythonRunner, ToolBook, load_contracts
from tidefast.services.workspaces import Workspaces
from tidefast.stores.base import Store
from tidefast.stores.blobs import BlobStore
from tidefast.stores.memory_blobs import MemoryBlobs
from tidefast.stores.sqlite_blobs import SqliteBlobs, contents_beside
from tidefast.wire.workspace import verb_facts

if TYPE_CHECKING:
    from tidefast.sdk.app import App
    from tidefast.services.smtp_sender import SmtpSender

POINTS_VARIABLE = "TIDEFAST_POINTS"


class Stoppable(Protocol):
    async def stop(self) -> None: ...


@dataclass(slots=True)
class Parts:
    """What one process runs. `stop` ends it in order."""

    store: Store
    clock: Clock
    engine: Engine
    gateway: Gateway
    keeper: Keeper
    http: HttpSender
    models: ModelSender
    authority: Authority
    closer: Closer
    tool_process: Stoppable | None = None
    notifier: Stoppable | None = None

    async def stop(self) -> None:
        """Settle what is in flight, then end each part after those that use it. The store is closed last."""
        await self.closer.stop()
        await self.gateway.drain()
        await self.gateway.workspaces.stop()
        await self.keeper.stop()
        if self.notifier is not None:
            await self.notifier.stop()
        await self.engine.stop()
        await self.http.close()
        await self.models.close()
        if self.tool_process is not None:
            await self.tool_process.stop()
        self.store.close()


async def build_authority(
    store: Store,
    tools: ToolBook,
    runner: PythonRunner | None = None,
    hook: Hook | None = None,
    clock: Clock | None = None,
    models: ModelBook | None = None,
    *,
    sweeps: bool = True,
    replica_lease_ms: int = LEASE_MS,
) -> Parts:
    """An authority over a store that this process owns, started. Without `sweeps` no lease lapses by itself."""
    clock = clock or system_clock(store)
    engine = Engine(store, clock)
    engine.on_failure = die
    engine.start()
    http = HttpSender(clock)
    workspaces = _workspaces(engine, store, replica_lease_ms)
    gateway = Gateway(engine, tools, http, runner, hook, _smtp(tools, clock), workspaces)
    workspaces.start()
    keeper = Keeper(engine, prober=gateway.prober)
    if sweeps:
        await keeper.start()
    else:
        await keeper.take_over()
    sender = ModelSender(clock)
    hop = ModelHop(engine, gateway, models or ModelBook(), sender)
    authority = Authority(engine, gateway, hop)
    closer = Closer(authority)
    if sweeps:
        closer.start()
    return Parts(store, clock, engine, gateway, keeper, http, sender, authority, closer)


def _workspaces(engine: Engine, store: Store, lease_ms: int) -> Workspaces:
    """The workspaces of a store; their contents lie in a file beside the store's."""
    path: Path | None = getattr(store, "path", None)

    def blobs() -> BlobStore:
        return (
            MemoryBlobs()
            if path is None
            else SqliteBlobs(contents_beside(path), clock_ms=lambda: engine.clock.now().wall_ms)
        )

    contents = Contents(engine, blobs)
    return Workspaces(engine, contents, Replicas(engine, contents, lease_ms), verb_facts)


def _smtp(tools: ToolBook, clock: Clock) -> "SmtpSender | None":
    """Who hands mails over, if any tool does."""
    if not any(contract.kind == "smtp" for contract in tools.contracts()):
        return None
    from tidefast.services.smtp_sender import SmtpSender  # only here: it loads ssl and email

    return SmtpSender(clock)


def die(failure: BaseException) -> None:
    """End this process now. The one place where nothing is tidied up: no caller may hear anything any more."""
    error = CliError(
        "store_unavailable",
        f"the store failed, and what it was writing may or may not be there: {failure}",
        "start again; what was not answered is judged anew",
        ExitCode.UNKNOWN,
    )
    sys.stderr.write(f"{error.line()}\n")
    sys.stderr.flush()
    os._exit(ExitCode.UNKNOWN)


def build_models(file: Path | None) -> ModelBook:
    """The models of a gateway; none without a file. Raises `ConfigError` with every problem."""
    return ModelBook() if file is None else load_models(file)


def build_tools(file: Path | None, app: str, of_app: Iterable[Contract], *, needs_credentials: bool = True) -> ToolBook:
    """All tools of a gateway. Raises `ConfigError` with every problem of both sources."""
    problems: list[str] = []
    contracts: list[Contract] = []
    if file is not None:
        try:
            contracts = load_contracts(file)
        except ConfigError as error:
            problems += str(error).splitlines()
    named = {contract.tool for contract in contracts}
    for contract in of_app:
        if contract.tool in named:
            problems.append(f"{file}: tools.{contract.tool}: expected one contract, --app {app} declares it as well")
        else:
            contracts.append(contract)
    try:
        source = str(file) if file is not None else f"--app {app}"
        book = ToolBook(contracts, source, needs_credentials=needs_credentials)
    except ConfigError as error:
        problems += str(error).splitlines()
    if problems:
        raise ConfigError("\n".join(problems))
    return book


def credential_variables(file: Path | None) -> frozenset[str]:
    """The variables that hold a gateway's credentials; none of a file that can't be read, which is told elsewhere."""
    try:
        contracts = load_contracts(file) if file is not None else []
    except ConfigError:
        return frozenset()
    return frozenset(contract.credential.env for contract in contracts if contract.credential is not None)


def local_runner(clock: Clock, app: "App") -> LocalRunner:
    """Runs an app's python tools in this process, their own refusals put into the words of the services."""
    functions = {name: tool.raising(RefusedByTool, NotSentByTool) for name, tool in app.tools.items()}
    return LocalRunner(clock, functions, frozenset(name for name, tool in app.tools.items() if tool.takes_key))


def fault_hook() -> Hook | None:
    """The hook of a fault injector that listens where `TIDEFAST_POINTS` says; None in ordinary use."""
    address = os.environ.get(POINTS_VARIABLE)
    if not address:
        return None
    scheme, _, path = address.partition(":")
    if scheme != "unix" or not path:
        raise CliError("config", f"{POINTS_VARIABLE}={address}", "expected unix:/PATH/OF/A/SOCKET", ExitCode.CONFIG)
    from tidefast.sim.points import connect  # only here: nobody else pays for it

    return connect(path)
