"""Commands that begin runs: `run`, all in this process, and `start`, at a server.

`run` owns the store's file, and that proves that whoever drove the run before is dead: its lease is ended, and the run
goes on under the next epoch from what its log holds.
"""

import asyncio
import secrets
import signal
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli import wiring
from tidefast.cli.case import tell_held, why_stopped
from tidefast.cli.desk import all_events, at_server, given_key, must, server_url
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.log import configure_log
from tidefast.cli.loop import run_program
from tidefast.cli.options import DEFAULT_STORE, AsJson, Models, StoreName, Tools, Url, checked_id, json_text
from tidefast.cli.place import own, system_clock
from tidefast.protocol.answers import EventInfo, RunCreated, RunInfo, StepInfo
from tidefast.protocol.lease import LEASE_MAX_MS
from tidefast.protocol.points import Hook
from tidefast.sdk.app import App, load_app
from tidefast.sdk.errors import Error
from tidefast.wire.answers import spell
from tidefast.wire.place import URL_DEFAULT


def run(
    app: str,
    agent: str,
    input: str,
    /,
    *,
    run_id: Annotated[str | None, Parameter(help="The run's name; a run that exists goes on where it stands.")] = None,
    store: StoreName = DEFAULT_STORE,
    tools: Tools = None,
    models: Models = None,
    verbose: Annotated[bool, Parameter(negative="", help="Tell on standard error what happens.")] = False,
    as_json: AsJson = False,
) -> int:
    """Drive one run of an agent of MODULE:APP to its end, in this process and without a server.

    INPUT is JSON or @FILE. The exit code is 0 only if the run is completed. After a crash the same command with
    --run-id goes on: finished steps answer from the log, and nothing is done a second time.
    """
    name = checked_id(run_id or f"r-{secrets.token_hex(8)}", "--run-id")
    input_json = json_text(input, "INPUT")
    configure_log("info" if verbose else "warning")  # a long wait is told in any case
    if as_json:
        out.keep_stdout()
    loaded = load_app(app)
    if agent not in loaded.agents:
        known = ", ".join(sorted(loaded.agents)) or "none"
        raise CliError("usage", f"{app} has no agent {agent}", f"it has: {known}", ExitCode.USAGE)
    info, held, events = run_program(_run(loaded, app, agent, input_json, name, store, tools, models))
    if as_json:
        out.document({"run": spell(info), "held": [spell(step) for step in held]})
    else:
        _tell(info, held, events, store)
    if info.state in ("held", "frozen", "paused"):
        return ExitCode.PERSON
    return ExitCode.OK if info.state == "completed" else ExitCode.OTHER


async def _run(
    app: App, name: str, agent: str, input_json: str, run_id: str, store: str, tools: Path | None, models: Path | None
) -> tuple[RunInfo, list[StepInfo], list[EventInfo]]:
    book = wiring.build_tools(tools, name, [tool.contract for tool in app.tools.values()])
    served = wiring.build_models(models)
    hook = wiring.fault_hook()
    opened = own(store, create=True)
    clock = system_clock(opened)
    parts = await wiring.build_authority(opened, book, wiring.local_runner(clock, app), hook, clock, served)
    try:
        authority = parts.authority
        must(await authority.create_run(run_id, agent, app.agents[agent].version, input_json))
        info = must(await authority.run(run_id))
        _check_version(info, app)
        if info.is_live:
            # Owning the file proves that the process which held this lease has ended.
            must(await authority.preempt(run_id, "tidefast run", "its process has ended", info.epoch))
        if info.state in ("claimable", "leased", "failing", "cancelling"):
            await _drive(parts, app, run_id, hook)
        info = must(await authority.run(run_id))
        held = [must(await authority.step(run_id, step)) for step in info.held]
        return info, held, await all_events(authority.reads, info.run_id)
    finally:
        await parts.stop()


def _check_version(info: RunInfo, app: App) -> None:
    """A run goes only to a version of its agent that says it can drive it. Raises `CliError`; nothing was changed."""
    spec = app.agents[info.agent]
    if info.agent_version in spec.versions or info.state in ("completed", "failed", "cancelled"):
        return
    known = ", ".join(spec.versions)
    what = f"run {info.run_id} belongs to version {info.agent_version} of {info.agent}; this app drives {known}"
    todo = f'release that version, or declare it compatible: @app.agent(accepts=["{info.agent_version}"])'
    raise CliError("version", what, todo)


async def _drive(parts: wiring.Parts, app: App, run_id: str, hook: Hook | None) -> None:
    """Drive the run until it ends, is held or is frozen. A signal gives the lease back first."""
    from tidefast.sdk.heartbeat import LoopHeartbeat
    from tidefast.sdk.worker import Worker
    from tidefast.services.local import LocalAuthority

    authority = LocalAuthority(parts.authority)
    # As long as leases get: nobody else can take a run of a store that this process owns, and agent code may block.
    worker = Worker(authority, app, LoopHeartbeat(authority), lease_ms=LEASE_MAX_MS, max_runs=1, hook=hook)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    try:
        await worker.finish(run_id, try_again=False)
    except Error:
        info = await parts.authority.run(run_id)
        if not isinstance(info, RunInfo) or info.state not in ("frozen", "held", "paused"):
            raise  # what is frozen, held or paused is told with the command that lets it go on
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _tell(info: RunInfo, held: list[StepInfo], events: list[EventInfo], store: str) -> None:
    out.line(f"run {info.run_id}: ", (info.state, out.STYLES.get(info.state, "bold")))
    if info.state in ("completed", "failed", "cancelled"):
        out.line(info.result_json)
    elif info.state in ("frozen", "paused"):
        for line in why_stopped(info, events, None, store):
            out.line(line)
    elif not held:
        out.line(f"it can go on: repeat the command with --run-id {info.run_id}")
    for step in held:
        tell_held(step, [event for event in events if event.step_id == step.step_id], None, store)


def start(
    agent: str,
    input: str,
    /,
    *,
    run_id: Annotated[str | None, Parameter(help="The run's name; drawn by chance if it is left out.")] = None,
    version: Annotated[str, Parameter(help="The agent's version that the run belongs to.")] = "1",
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Create a run at a server; its workers take it. INPUT is JSON or @FILE.

    Starting the same run again, with the same agent and input, changes nothing.
    """
    name = checked_id(run_id or f"r-{secrets.token_hex(8)}", "--run-id")
    input_json = json_text(input, "INPUT")
    created = asyncio.run(_start(name, checked_id(agent, "AGENT"), version, input_json, server_url(url) or URL_DEFAULT))
    if as_json:
        out.document(spell(created))
    else:
        out.line(f"run {created.run_id} ", "is created" if created.was_new else f"exists and is {created.state}")
    return ExitCode.OK


async def _start(run_id: str, agent: str, version: str, input_json: str, url: str) -> RunCreated:
    async with at_server(url, given_key(), writes=True) as desk:
        return must(await desk.create_run(run_id, agent, version, input_json))
