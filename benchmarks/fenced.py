"""Tidefast, embedded on SQLite the way `tidefast run` wires it: app, worker, SDK run, local authority, gateway."""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from tidefast.cli.embedded import LocalAuthority

import tidefast as tf
from tidefast.cli import wiring
from tidefast.cli.place import system_clock
from tidefast.sdk.heartbeat import LoopHeartbeat
from tidefast.sdk.worker import Worker
from tidefast.stores.sqlite import SqliteStore

STEPS = 10  # of a run; the other two programs have the same number


class Listeners:
    """Who hears of a step as it is sent, and as it is done."""

    called: Callable[[int], None] = staticmethod(lambda number: None)
    done: Callable[[int], None] = staticmethod(lambda number: None)


listeners = Listeners()
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))  # as `tidefast run` without --verbose

app = tf.App()


@app.tool(key_ttl="24h")
async def hello(name: str, number: int, key: str) -> dict[str, Any]:
    """The smallest effect there is: no waiting, so that all the time measured is the books'."""
    listeners.called(number)
    return {"hi": name, "number": number}


@app.agent(version="1")
async def greeter(run: tf.Run, name: str) -> int:
    for number in range(STEPS):
        await run.tool(f"greet-{number}", hello, name=name, number=number)
    return STEPS


@app.agent(version="1")
async def walker(run: tf.Run, steps: int) -> int:
    """One long run; says when each step was done."""
    for number in range(steps):
        await run.tool(f"greet-{number}", hello, name="a", number=number)
        listeners.done(number)
    return steps


@app.agent(version="1")
async def rememberer(run: tf.Run, steps: int) -> int:
    """The same, going on from its checkpoint instead of from the top."""
    for number in range(run.state or 0, steps):
        await run.tool(f"greet-{number}", hello, name="a", number=number)
        listeners.done(number)
        if number + 1 in (steps // 2, steps - 2):
            await run.checkpoint(number + 1)
    return steps


async def _house(file: Path, *, create: bool = False) -> tuple[wiring.Parts, LocalAuthority]:
    store = SqliteStore.open(file, create=create)
    clock = system_clock(store)
    book = wiring.build_tools(None, "fenced:app", [tool.contract for tool in app.tools.values()])
    parts = await wiring.build_authority(store, book, wiring.local_runner(clock, app), None, clock)
    return parts, LocalAuthority(parts.authority)


async def _drive(authority: LocalAuthority, run_id: str) -> str:
    worker = Worker(authority, app, LoopHeartbeat(authority), max_runs=1)
    return await worker.finish(run_id)


async def steps_per_s(directory: Path, width: int, runs: int) -> tuple[float, float]:
    """(steps per second, CPU µs per step) of ten-step runs, `width` at once."""
    parts, authority = await _house(directory / "fenced.db", create=True)
    left = iter(range(runs))

    async def one() -> None:
        for number in left:
            await authority.create_run(f"r-{number}", "greeter", "1", '"a"')
            outcome = await _drive(authority, f"r-{number}")
            assert outcome == "completed", outcome

    cpu, begun = time.process_time(), time.perf_counter()
    await asyncio.gather(*[one() for _ in range(width)])
    took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    await parts.stop()
    return runs * STEPS / took, cpu / (runs * STEPS) * 1e6


async def long_run(directory: Path, agent: str, steps: int) -> list[float]:
    """CPU clock after each step of one run with many steps; the run is left one step before its end."""
    parts, authority = await _house(directory / f"{agent}.db", create=True)
    marks: list[float] = []
    done = asyncio.Event()

    def note(number: int) -> None:
        marks.append(time.process_time())
        if number == steps - 2:
            done.set()

    listeners.done = note
    await authority.create_run("long", agent, "1", str(steps))
    task = asyncio.create_task(_drive(authority, "long"))
    await done.wait()
    listeners.done = Listeners.done
    await parts.authority.preempt("long", "benchmark", "left here", None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await parts.stop()
    return marks


async def resume_ms(directory: Path, agent: str) -> float:
    """For a run left by `long_run`: milliseconds from asking for its lease until its next new step is in its tool."""
    copy = directory / "resumed"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    shutil.copy(directory / f"{agent}.db", copy / f"{agent}.db")
    parts, authority = await _house(copy / f"{agent}.db")
    sent = asyncio.Event()
    listeners.called = lambda number: sent.set()
    begun = time.perf_counter()
    task = asyncio.create_task(_drive(authority, "long"))
    await sent.wait()
    took = time.perf_counter() - begun
    await asyncio.wait_for(task, 30)
    await parts.stop()
    return took * 1e3
