"""Whom a claimable run wakes: one waiter that may take it, and another one if that one is gone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tidefast.engine.clock import ManualClock
from tidefast.engine.engine import Engine
from tidefast.protocol.commands import CreateRun
from tidefast.protocol.ids import RunId
from tidefast.protocol.records import RunHead
from tidefast.stores.memory import MemoryStore


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def in_engine(main: Callable[[Engine], Awaitable[None]]) -> None:
    async def play() -> None:
        engine = Engine(MemoryStore(), ManualClock(), inline=True)
        engine.start()
        await main(engine)
        await engine.stop()

    asyncio.run(play())


def waiting(engine: Engine, agents: dict[str, list[str]], prefix: str = "") -> "asyncio.Task[None]":
    return asyncio.ensure_future(engine.claimers.wait(agents, prefix, 60_000))


def end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()


def test_a_new_run_wakes_the_first_that_may_take_it_and_no_other() -> None:
    async def main(engine: Engine) -> None:
        wrong = [
            waiting(engine, {"other": ["1"]}),
            waiting(engine, {"a": ["2"]}),
            waiting(engine, {"a": []}, "shop-"),
        ]
        right = [waiting(engine, {"a": ["1", "2"]}), waiting(engine, {"a": [], "other": ["7"]}, "r")]
        await turns()
        await engine.submit(CreateRun(RunId("r1"), "a", "1", "null"))
        await turns()
        assert [task.done() for task in (*wrong, *right)] == [False, False, False, True, False]
        await engine.submit(CreateRun(RunId("r2"), "a", "1", "null"))
        await turns()
        assert right[1].done() and not any(task.done() for task in wrong)
        end(*wrong)
        await turns()
        assert engine.claimers._of_agent == {}

    in_engine(main)


def test_a_waiter_that_is_cancelled_when_woken_passes_the_wake_on() -> None:
    async def main(engine: Engine) -> None:
        first, second = waiting(engine, {"a": []}), waiting(engine, {"a": []})
        await turns()
        await engine.submit(CreateRun(RunId("r1"), "a", "1", "null"))
        first.cancel()
        await turns()
        assert first.cancelled() and second.done()

    in_engine(main)


@pytest.mark.parametrize(("rests", "at_once"), [(0, True), (20, False)])
def test_a_run_that_rests_wakes_when_its_rest_is_over(rests: int, at_once: bool) -> None:
    async def main(engine: Engine) -> None:
        await engine.submit(CreateRun(RunId("r1"), "a", "1", "null"))
        head = engine.head(RunId("r1"))
        assert isinstance(head, RunHead)
        engine.claimers.changed(head._replace(not_before_ms=engine.clock.now().ms + rests))
        late = waiting(engine, {"a": []})  # it came when the rest had begun
        await turns()
        assert not late.done()
        if at_once:
            engine.claimers.changed(head)
        await asyncio.wait_for(late, 5)

    in_engine(main)


def test_a_waiter_gives_up_after_its_time() -> None:
    async def main(engine: Engine) -> None:
        await engine.claimers.wait({"a": []}, "", 1)
        assert engine.claimers._of_agent == {}

    in_engine(main)
