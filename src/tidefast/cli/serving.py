"""Commands of the two long-lived processes: `serve` and `worker`.

`serve` owns a store's file. Everything that is wrong with its configuration is gathered and told at once. While the
tools' process imports the app, this one imports the server, so that both are ready early.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli import wiring
from tidefast.cli.desk import given_key, server_url
from tidefast.cli.errors import CliError, ConfigProblems, ExitCode
from tidefast.cli.log import configure_log
from tidefast.cli.loop import run_program
from tidefast.cli.options import DEFAULT_STORE, AsJson, DurationMs, Models, OperatorKey, StoreName, Tools
from tidefast.cli.place import own, store_path, system_clock
from tidefast.cli.tracing import start_tracing
from tidefast.protocol.contracts import Contract
from tidefast.protocol.lease import LEASE_DEFAULT_MS, LEASE_MAX_MS, LEASE_MIN_MS
from tidefast.server.keyfile import KeysRefused, read_keys
from tidefast.services.process_runner import ProcessRunner
from tidefast.services.tools import ConfigError, ToolBook
from tidefast.stores.sqlite import SqliteStore
from tidefast.wire.place import PORT_DEFAULT, URL_DEFAULT
from tidefast.wire.secretfile import SecretRefused

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from tidefast.server.credentials import Credentials, Files
    from tidefast.server.door import Hosts

PORT_MAX = 65_535
RUNS_DEFAULT = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `serve` was asked for."""

    store: Path
    host: str
    port: int
    tools: Path | None
    models: Path | None
    app: str | None
    files: "Files"
    names: frozenset[str]
    notify: str | None
    notify_secret: Path
    as_json: bool


class Problems:
    """Gathers what is wrong, so that one start tells all of it."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def check(self, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except (ConfigError, SecretRefused, KeysRefused) as error:
            self.found += str(error).splitlines()
        except CliError as error:
            self.found.append(f"{error.what}: {error.todo}")
        return None


def serve(
    *,
    store: StoreName = DEFAULT_STORE,
    host: Annotated[
        str, Parameter(help="The address to listen on; without --keys only this machine's own are served.")
    ] = "127.0.0.1",
    port: Annotated[int, Parameter(help="The port to listen on; 0 takes a free one.")] = PORT_DEFAULT,
    tools: Tools = None,
    models: Models = None,
    app: Annotated[
        str | None, Parameter(help="MODULE:APP whose python tools are offered; they run in a process of their own.")
    ] = None,
    keys: Annotated[
        Path | None, Parameter(help="The file of callers' keys (see `tidefast keys`); with it every caller needs one.")
    ] = None,
    allow_host: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="A name under which clients reach this server; may be given several times."),
    ] = (),
    secret: Annotated[
        Path | None, Parameter(help="The file with the key that signs leases; made beside the store at first use.")
    ] = None,
    operator_key: OperatorKey = None,
    notify: Annotated[
        str | None, Parameter(help="The webhook that is told of held steps, frozen and failed runs: http(s)://….")
    ] = None,
    notify_secret: Annotated[
        Path | None, Parameter(help="The file with the key that signs notices; made beside the store at first use.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Serve an authority and its gateway over HTTP.

    Prints one line when it is ready. SIGTERM and SIGINT end it in order: what is in flight is settled first.
    """
    problems = Problems()
    path = problems.check(lambda: store_path(store))
    if not 0 <= port <= PORT_MAX:
        problems.found.append(f"--port {port}: expected 0 to {PORT_MAX}")
    if path is None:
        path = Path(DEFAULT_STORE)
    from tidefast.server import keys as places
    from tidefast.server.credentials import Files

    files = Files(secret or places.secret_path(path), operator_key or places.operator_key_path(path), keys)
    names = frozenset(name.lower() for name in allow_host)
    signs = notify_secret or places.notify_secret_path(path)
    settings = Settings(path, host, port, tools, models, app, files, names, notify, signs, as_json)
    configure_log()
    run_program(_serve(settings, problems))
    return ExitCode.OK


async def _serve(settings: Settings, problems: Problems) -> None:
    hook = problems.check(wiring.fault_hook)
    end_tracing = problems.check(start_tracing)
    # Without the file there is no clock, and without a clock no tools' process: so a bad file is told with the rest.
    _check_files(settings, problems)
    if problems.found:
        raise ConfigProblems(problems.found)
    store = own(str(settings.store), create=True)
    clock = system_clock(store)
    hidden = wiring.credential_variables(settings.tools)
    runner = None if settings.app is None else ProcessRunner(clock, settings.app, hidden)
    try:
        starting = None if runner is None else asyncio.create_task(runner.start())
        await asyncio.sleep(0)  # the tools' process starts to import, and so does this one
        from tidefast.server import app as server_app
        from tidefast.server import serve as _warm  # noqa: F401 - loaded while the tools' process starts

        contracts = await _app_contracts(starting, problems)
        served = problems.check(lambda: wiring.build_models(settings.models))
        book = problems.check(lambda: wiring.build_tools(settings.tools, settings.app or "", contracts))
        credentials = problems.check(lambda: settings.files.load(store.identity().namespace))
        signs = problems.check(lambda: _notify_secret(settings))
        if problems.found or book is None or credentials is None:
            raise ConfigProblems(problems.found)
        parts = await wiring.build_authority(store, book, runner, hook, clock, served)
    except BaseException:
        if runner is not None:
            await runner.stop()
        store.close()
        raise
    parts.tool_process = runner
    if settings.notify is not None and signs is not None:
        parts.notifier = _notifier(parts, settings.notify, signs)
    app = server_app.build_app(parts.authority, credentials, _hosts(settings))
    parts.engine.on_commit = app.state.meters.committed
    try:
        await _listen(app, credentials, settings, parts, store, book)
    finally:
        await parts.stop()
        if end_tracing is not None:
            await asyncio.to_thread(end_tracing)


def is_webhook(url: str) -> bool:
    """Whether a text is an address that notices can be sent to."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _notify_secret(settings: Settings) -> bytes | None:
    """The key that signs notices, if there is anybody to send them to."""
    from tidefast.wire import secretfile

    return None if settings.notify is None else secretfile.read_or_make(settings.notify_secret)


def _notifier(parts: wiring.Parts, url: str, secret: bytes) -> wiring.Stoppable:
    from tidefast.services.notifier import Notifier  # only here: it loads an HTTP client

    notifier = Notifier(parts.engine, url, secret)
    notifier.start()
    return notifier


def _hosts(settings: Settings) -> "Hosts":
    """Under which names this server may be addressed: those given, and by number where it listens beyond loopback."""
    from tidefast.server.door import Hosts, is_loopback

    return Hosts(settings.names, any_number=not is_loopback(settings.host))


def _reload(credentials: "Credentials", files: "Files", namespace: bytes) -> None:
    """Read keys and secrets again. Files that can't be used change nothing, and the log says why."""
    import structlog

    log = structlog.get_logger("tidefast.server")
    try:
        credentials.replace(files.load(namespace))
    except (SecretRefused, KeysRefused) as error:
        log.error("credentials_kept", problems=str(error).splitlines())
        return
    log.info("credentials_read", keys=len(credentials.book.keys or {}), secrets=len(credentials.signer.secrets))


async def _listen(
    app: "Starlette",
    credentials: "Credentials",
    settings: Settings,
    parts: wiring.Parts,
    store: SqliteStore,
    book: ToolBook,
) -> None:
    warming: list[asyncio.Task[None]] = []

    def on_ready(url: str) -> None:
        store.announce(url)
        if any(contract.kind == "http" for contract in book.contracts()):
            warming.append(asyncio.create_task(parts.http.warm()))
        if settings.as_json:
            out.document(
                {"ready": True, "url": url, "store": str(store.path), "tools": book.names(), "pid": os.getpid()}
            )
        else:
            tools = ", ".join(book.names()) or "none"
            out.line(("ready", "bold green"), f"  {url}  store {store.path}  tools {tools}")

    from tidefast.server.serve import ServeRefused, serve

    try:
        namespace = store.identity().namespace
        await serve(
            app,
            settings.host,
            settings.port,
            on_ready,
            on_hangup=lambda: _reload(credentials, settings.files, namespace),
        )
    except ServeRefused as error:
        raise ConfigProblems([str(error)]) from error


def _check_files(settings: Settings, problems: Problems) -> None:
    """What can be judged before the store is opened."""
    from tidefast.server.door import is_loopback

    if not is_loopback(settings.host) and settings.files.keys is None:
        problems.found.append(
            f"--host {settings.host}: expected this machine's own address, 127.0.0.1 or ::1; others need --keys"
        )
    if settings.notify is not None and not is_webhook(settings.notify):
        problems.found.append(f"--notify {settings.notify}: expected http://HOST or https://HOST with a path")
    if settings.app is not None and not all(settings.app.partition(":")):
        problems.found.append(f"--app {settings.app}: expected MODULE:APP, like refunds:app")
    if problems.found:
        # The start fails in any case, so nothing is opened or made; the files are read to tell their problems as well.
        problems.check(lambda: wiring.build_tools(settings.tools, "", ()))
        problems.check(lambda: wiring.build_models(settings.models))
        for file in (settings.files.secret, settings.files.operator_key, settings.notify_secret):
            problems.check(lambda file=file: _read_secret(file))  # type: ignore[misc]
        if settings.files.keys is not None:
            problems.check(lambda: read_keys(settings.files.keys))  # type: ignore[arg-type]


async def _app_contracts(starting: asyncio.Task[list[Contract]] | None, problems: Problems) -> list[Contract]:
    if starting is None:
        return []
    try:
        return await starting
    except ConfigError as error:
        problems.found += str(error).splitlines()
        return []


def _read_secret(file: Path) -> None:
    from tidefast.wire import secretfile

    try:
        secretfile.read_all(file)
    except FileNotFoundError:
        return


def worker(
    app: str,
    /,
    *,
    url: Annotated[str | None, Parameter(help=f"The server (or TIDEFAST_URL); by default {URL_DEFAULT}.")] = None,
    max_runs: Annotated[int, Parameter(help="How many runs at once.")] = RUNS_DEFAULT,
    lease: Annotated[DurationMs, Parameter(help="How long a lease lasts without a heartbeat, 1s to 10m.")] = (
        LEASE_DEFAULT_MS
    ),
    as_json: AsJson = False,
) -> int:
    """Claim runs of an app's agents (MODULE:APP) at a server, and drive them.

    Prints one line when it begins to claim. SIGTERM and SIGINT give the leases back once what is in flight is settled.
    """
    if not LEASE_MIN_MS <= lease <= LEASE_MAX_MS:
        raise CliError("usage", f"--lease {lease}ms", "expected 1s to 10m", ExitCode.USAGE)
    if max_runs < 1:
        raise CliError("usage", f"--max-runs {max_runs}", "expected 1 or more", ExitCode.USAGE)
    if as_json:
        out.keep_stdout()
    configure_log()
    run_program(_work(app, server_url(url) or URL_DEFAULT, max_runs, lease, as_json))
    return ExitCode.OK


async def _work(name: str, url: str, max_runs: int, lease_ms: int, as_json: bool) -> None:
    from tidefast.sdk.app import load_app
    from tidefast.sdk.heartbeat import ThreadHeartbeat
    from tidefast.sdk.http import HttpAuthority
    from tidefast.sdk.worker import Worker

    hook = wiring.fault_hook()
    app, key = load_app(name), given_key()
    try:
        authority = HttpAuthority(url, key)
    except ValueError as error:
        raise CliError("usage", f"--url {url}", "expected http://HOST:PORT", ExitCode.USAGE) from error

    heartbeat = ThreadHeartbeat(lambda: HttpAuthority(url, key))
    driver = Worker(authority, app, heartbeat, lease_ms=lease_ms, max_runs=max_runs, hook=hook)
    agents = sorted(app.agents)
    if as_json:
        out.document({"ready": True, "url": url, "holder": driver.holder, "agents": agents, "pid": os.getpid()})
    else:
        out.line(("working", "bold green"), f"  {url}  as {driver.holder}  agents {', '.join(agents)}")
    try:
        await driver.run(handle_signals=True)
    finally:
        await authority.close()
