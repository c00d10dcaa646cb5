"""Commands that look: `runs`, `show`, `log`, `held`. They change nothing, and go beside a server that has the file."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from tidefast.cli import show as out
from tidefast.cli.case import history, tell_held, why_stopped
from tidefast.cli.desk import all_events, all_steps, must, reading
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE, AsJson, StoreName, Url, checked_id
from tidefast.protocol.answers import EventInfo, RunInfo, StepInfo
from tidefast.protocol.ids import RunId
from tidefast.protocol.records import RunState
from tidefast.wire.answers import spell, spell_all

# What a line of the timeline tells of an event, in this order.
TOLD = ("tool", "attempt", "number", "holder", "lease_ms", "by", "verdict", "note", "reason", "detail", "error")
BODIES = ("input", "args", "receipt", "value", "state", "result")


def runs(
    *,
    state: Annotated[RunState | None, Parameter(help="Only runs in this state.")] = None,
    after: Annotated[str | None, Parameter(help="Only runs created after this one.")] = None,
    limit: Annotated[int, Parameter(help="How many at most, 1 to 1000.")] = 100,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """List runs in the order of their creation."""
    if after is not None:
        checked_id(after, "--after")
    found = asyncio.run(_runs(url, store, after, max(1, min(limit, 1_000)), state))
    if as_json:
        out.document(spell_all("runs", found))
        return 0
    rows = [
        (each.run_id, f"{each.agent}/{each.agent_version}", each.state, out.epoch(each.epoch), str(each.checkpoint))
        for each in found
    ]
    out.table(("RUN", "AGENT", "STATE", "EPOCH", "CHECKPOINT"), rows)
    return 0


async def _runs(url: str | None, store: str, after: str | None, limit: int, state: str | None) -> Sequence[RunInfo]:
    async with reading(url, store) as desk:
        return await desk.runs(after, limit, state)


def show(
    run: str,
    /,
    *,
    svg: Annotated[Path | None, Parameter(help="Draw the run's timeline into this file instead.")] = None,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """One run: what it is now, its timeline, and each step with its attempts."""
    info, events, steps = asyncio.run(_show(url, store, checked_id(run, "RUN")))
    if svg is not None:
        return _draw(info.run_id, events, svg)
    if as_json:
        out.document({"run": spell(info), **spell_all("events", events), **spell_all("steps", steps)})
        return 0
    _tell_run(info)
    out.line("")
    out.line(("timeline", "bold"))
    for event in events:
        _tell_event(event, events[0].at_ms)
    if steps:
        out.line("")
        out.table(("STEP", "KIND", "STATE", "EPOCH", "ATTEMPTS", "TOOL", "KEY", "REASON"), map(_step_row, steps))
    for step in steps:
        if step.state == "held":
            out.line("")
            tell_held(step, [event for event in events if event.step_id == step.step_id], url, store)
    for place, line in enumerate(why_stopped(info, events, url, store)):
        if not place:
            out.line("")
        out.line(line)
    return 0


def _draw(run: RunId, events: Sequence[EventInfo], path: Path) -> int:
    from tidefast.sim.picture import draw

    try:
        path.write_text(draw(run, events) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError("config", f"--svg {path}: {error}", "name a writable file", ExitCode.CONFIG) from error
    out.line(f"drew {len(events)} events of run {run} into {path}")
    return 0


async def _show(url: str | None, store: str, run: str) -> tuple[RunInfo, list[EventInfo], list[StepInfo]]:
    async with reading(url, store) as desk:
        info = must(await desk.run(RunId(run)))
        steps = await all_steps(desk, info.run_id)
        for place, step in enumerate(steps):
            if step.state == "held":  # with its stored call: somebody has to decide about it
                steps[place] = must(await desk.step(info.run_id, step.step_id))
        return info, await all_events(desk, info.run_id), steps


def log(
    run: str,
    /,
    *,
    after: Annotated[int, Parameter(help="Only events above this seq.", validator=Number(gte=0))] = 0,
    url: Url = None,
    store: StoreName = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """The log of a run: every event with its data and its place in the chain of digests."""
    events = [event for event in asyncio.run(_log(url, store, checked_id(run, "RUN"))) if event.seq > after]
    if as_json:
        out.document(spell_all("events", events))
        return 0
    for event in events:
        out.line(
            f"{event.seq:>5}  {out.moment(event.at_ms)}  {out.epoch(event.epoch):>4}  ",
            (event.kind, "bold"),
            f"  {event.step_id or '-'}  {event.digest[:12]}  {event.data_json}",
        )
    return 0


async def _log(url: str | None, store: str, run: str) -> list[EventInfo]:
    async with reading(url, store) as desk:
        return await all_events(desk, RunId(run))


def held(*, url: Url = None, store: StoreName = DEFAULT_STORE, as_json: AsJson = False) -> int:
    """Every step that waits for a person, with its stored call and the commands that settle it."""
    found = asyncio.run(_held(url, store))
    if as_json:
        out.document(spell_all("steps", [step for step, _ in found]))
        return 0
    if not found:
        out.line("no step is held")
    for place, (step, events) in enumerate(found):
        if place:
            out.line("")
        tell_held(step, events, url, store)
    return 0


async def _held(url: str | None, store: str) -> list[tuple[StepInfo, list[EventInfo]]]:
    async with reading(url, store) as desk:
        return [(step, await history(desk, step)) for step in await desk.held()]


def _tell_run(info: RunInfo) -> None:
    out.line("run         ", (info.run_id, "bold"))
    out.line("state       ", (info.state, out.STYLES.get(info.state, "")))
    out.line(f"agent       {info.agent}, version {info.agent_version}")
    holder = f", held by {info.holder} until {out.moment(info.expires_at_ms)} UTC" if info.is_live else ""
    out.line(f"epoch       {out.epoch(info.epoch)}{holder}")
    out.line(f"checkpoint  {info.checkpoint or '-'}")
    out.line(f"created     {out.moment(info.created_ms)} UTC")
    if info.unsettled:
        out.line(f"unsettled   {', '.join(info.unsettled)}")
    out.line(f"input       {out.short(info.input_json, 400)}")
    if info.state in ("completed", "failed", "cancelled"):
        out.line(f"{'result' if info.state == 'completed' else 'error':<12}{out.short(info.result_json, 400)}")


def _tell_event(event: EventInfo, start_ms: int) -> None:
    data: Mapping[str, Any] = msgspec.json.decode(event.data_json)
    told = [f"{name} {data[name]}" for name in TOLD if data.get(name) not in (None, "", [])]
    told += [
        f"{name} {out.short(_spelled(data[name]), 80)}" for name in BODIES if name in data and data[name] is not None
    ]
    kind = event.kind
    out.line(
        f"{(event.at_ms - start_ms) / 1_000:>+9.3f}s  epoch {out.epoch(event.epoch):>3}  ",
        (f"{kind:<16}", _style(kind)),
        f"  {event.step_id or '':<12}  {', '.join(told)}".rstrip(),
    )


def _style(kind: str) -> str:
    if kind in ("step_held", "run_frozen", "run_failed"):
        return "bold red"
    if kind in ("lease_preempted", "lease_lapsed", "step_doubted", "step_presumed", "late_receipt"):
        return "magenta"
    return "green" if kind in ("step_committed", "run_completed", "checkpoint_saved") else "bold"


def _step_row(step: StepInfo) -> tuple[str, ...]:
    attempts = " ".join(f"{attempt.number}:{attempt.state}" for attempt in step.attempts)
    words = (step.step_id, step.kind, step.state, out.epoch(step.epoch), attempts, step.tool, step.key, step.reason)
    return tuple(word or "-" for word in words)


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
