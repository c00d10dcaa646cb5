"""Commands that look: `runs`, `show`, `log`, `held`. They change nothing, and go beside a server that has the file."""

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from tidefast.cli import show as out
from tidefast.cli.desk import all_events, all_steps, must, reading
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE, AsJson, StoreName, Url, checked_id
from tidefast.cli.place import store_path
from tidefast.protocol.answers import EventInfo, RunInfo, StepInfo
from tidefast.protocol.ids import RunId
from tidefast.protocol.records import NOT_SETTLED, RunState
from tidefast.stores.sqlite import SqliteStore
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
            tell_held(step, url, store)
    if info.frozen:
        out.line("")
        out.line(f"frozen: {info.frozen}; let it go on with: {command('thaw', info.run_id, url=url, store=store)}")
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
    steps = asyncio.run(_held(url, store))
    if as_json:
        out.document(spell_all("steps", steps))
        return 0
    if not steps:
        out.line("no step is held")
    for place, step in enumerate(steps):
        if place:
            out.line("")
        tell_held(step, url, store)
    return 0


async def _held(url: str | None, store: str) -> Sequence[StepInfo]:
    async with reading(url, store) as desk:
        return await desk.held()


def tell_held(step: StepInfo, url: str | None, store: str) -> None:
    """A held step for people: what was asked, why it is held, and what to say once the provider was looked at."""
    out.line(
        ("held", "bold red"), f"  run {step.run_id}, step {step.step_id}: {step.tool} ({step.reason or 'in doubt'})"
    )
    out.line(f"  key       {step.key}")
    out.line(f"  call      {out.short(_member(step.intent_json, 'args'), 400)}")
    for attempt in step.attempts:
        sent = out.moment(attempt.admitted_wall_ms)
        out.line(
            f"  attempt   {attempt.number}: {attempt.state}, sent {sent} UTC under epoch {out.epoch(attempt.epoch)}"
        )
    on_wire = [attempt.deadline_ms for attempt in step.attempts if attempt.state in NOT_SETTLED]
    if on_wire and max(on_wire) >= step.now_ms:
        out.line(
            f"  until     {out.moment(max(on_wire))} UTC its request may still land; only then look for the last time"
        )
    if step.doubt_since_ms:
        out.line(f"  in doubt  since {out.moment(step.doubt_since_ms)} UTC")
    if step.next_move == "probe":
        out.line(f"  next      its provider is asked by itself, not before {out.moment(step.next_at_ms)} UTC")
    if step.refusals_line:
        out.line(f"  refusals  if that answer is always a definite no, add {step.refusals_line} to the tool's refusals")
    out.line("  look at the provider, then say what is so:")
    for verdict, meaning in (("applied", "it happened"), ("not_applied", "it did not"), ("refused", "never do it")):
        looked = [] if verdict == "applied" else ["--looked", "0s"]
        rest = [verdict, *looked, "--expect-attempts", str(len(step.attempts)), "--note", "WHY"]
        settle = command("resolve", step.run_id, step.step_id, *rest, url=url, store=store)
        out.line(f"    {settle}", (f"   # {meaning}", "dim"))


def owners_url(store: str) -> str | None:
    """Where the process that owns a store's file can be asked; None if nobody owns it or it says nothing."""
    owner = SqliteStore.owner(store_path(store))
    return owner.url or None if owner is not None else None


def command(*words: str, url: str | None, store: str) -> str:
    """A command line that can be pasted."""
    if not url:
        url = owners_url(store)
    if url:
        words = (*words, "--url", url)
    if store != DEFAULT_STORE:
        words = (*words, "--store", store)  # beside a server's url: where its operator's key stands
    return shlex.join(("tidefast", *words))


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


def _member(record_json: str, name: str) -> str:
    record: Mapping[str, Any] = msgspec.json.decode(record_json) or {}
    return _spelled(record.get(name))


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
