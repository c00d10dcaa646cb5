"""The sweep and the claims: what lapses, what a fault in the sweep does, and what a repeated claim hears."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
import structlog

from tidefast.engine.clock import SystemClock
from tidefast.protocol.ids import RunId
from tidefast.services.keeper import Keeper
from tidefast.services.python_runner import LocalRunner, NotSentByTool
from tidefast.services.tools import Outcome
from tidefast.sim.world import LEASE_MS, World
from tidefast.stores.memory import MemoryStore


def in_world(test: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(MemoryStore())
        await test(world)
        await world.stop()

    asyncio.run(run())


def test_the_sweep_lapses_every_lease_that_is_past_its_time_and_no_other() -> None:
    async def test(world: World) -> None:
        for number in range(5):
            await world.authority.create_run(f"r{number}", "agent", "1", "{}")
            await world.authority.grant(f"r{number}", "w", LEASE_MS * (1 if number < 3 else 4), "")
        world.clock.advance(LEASE_MS + 1)
        assert await world.keeper.sweep() == 3
        assert {head.run_id for head in world.engine.live_runs()} == {RunId("r3"), RunId("r4")}

    in_world(test)


def test_a_fault_in_the_sweep_is_told_and_not_slept_over() -> None:
    async def test(world: World) -> None:
        told: list[BaseException] = []
        heard = asyncio.Event()

        def on_failure(failure: BaseException) -> None:
            told.append(failure)
            heard.set()

        world.engine.on_failure = on_failure

        class Broken(Keeper):
            async def sweep(self) -> int:
                raise KeyError("lease")

        await Broken(world.engine, sweep_ms=1).start()
        await heard.wait()
        assert isinstance(told[0], KeyError)

    in_world(test)


def test_a_repeated_claim_hears_the_leases_that_its_first_answer_held() -> None:
    async def test(world: World) -> None:
        for name in "abc":
            await world.authority.create_run(name, "agent", "1", "{}")
        agents = {"agent": ["1"]}
        first = await world.authority.claim(agents, "w", LEASE_MS, 2, 0, "claim-1")
        again = await world.authority.claim(agents, "w", LEASE_MS, 2, 0, "claim-1")
        other = await world.authority.claim(agents, "w", LEASE_MS, 2, 0, "claim-2")
        assert [grant.epoch for grant in again] == [grant.epoch for grant in first]
        assert {grant.run_id for grant in again} == {grant.run_id for grant in first}
        assert len(other) == 1

    in_world(test)


def test_a_sync_tool_that_ends_after_its_deadline_is_told_as_what_it_was() -> None:
    may_end = threading.Event()

    def slow() -> str:
        assert may_end.wait(30)
        return "done"

    async def run() -> Outcome:
        clock = SystemClock(0)
        runner = LocalRunner(clock, {"slow": slow}, frozenset())
        deadline = clock.now().ms + 1
        asking = asyncio.create_task(runner("slow", {}, "k", deadline + 50))
        while clock.now().ms <= deadline + 60:
            await asyncio.to_thread(time.monotonic)
        assert not asking.done()
        may_end.set()
        return await asking

    assert asyncio.run(run()).kind == "applied"


def test_a_sync_tool_that_got_no_thread_in_time_was_never_called() -> None:
    called: list[int] = []

    async def run() -> None:
        clock = SystemClock(0)
        runner = LocalRunner(clock, {}, frozenset())
        with pytest.raises(NotSentByTool):
            await runner._on_thread(lambda: called.append(1), {}, clock.now().ms)

    asyncio.run(run())
    assert called == []


def test_a_frozen_authority_is_no_reason_to_take_a_lease_away() -> None:
    """A gap in the sweep's own ticks of more than half the shortest lease was the authority's silence."""

    async def test(world: World) -> None:
        await world.authority.create_run("r", "agent", "1", "{}")
        await world.authority.grant("r", "w", LEASE_MS, "")
        keeper = Keeper(world.engine, sweep_ms=1_000)
        assert not keeper._has_slept(2_000)
        assert not keeper._has_slept(LEASE_MS // 2)
        assert keeper._has_slept(LEASE_MS // 2 + 1)
        world.clock.advance(LEASE_MS + 1)
        world.clock.begin_grace()
        assert await keeper.sweep() == 0
        world.clock.advance(LEASE_MS)
        assert await keeper.sweep() == 1

    in_world(test)


def test_a_wall_clock_that_is_set_is_told_once_and_moves_no_lease() -> None:
    async def test(world: World) -> None:
        swept = asyncio.Event()

        class Watched(Keeper):
            async def sweep(self) -> int:
                swept.set()
                return await super().sweep()

        keeper = Watched(world.engine, sweep_ms=1)
        with structlog.testing.capture_logs() as logs:
            await keeper.start()
            for _ in range(3):
                swept.clear()
                await swept.wait()
                if not logs:
                    world.clock.wall_ms += 3_600_000
            await keeper.stop()
        assert [entry["event"] for entry in logs] == ["wall_clock_stepped"]

    in_world(test)


def test_a_claim_ends_when_its_leases_hold_enough_and_the_rest_can_be_claimed_next() -> None:
    async def test(world: World) -> None:
        large = '"' + "x" * 1_000_000 + '"'
        for number in range(12):
            await world.authority.create_run(f"r{number}", "agent", "1", large)
        first = await world.authority.claim({"agent": []}, "w", LEASE_MS, 12, 0, "one")
        second = await world.authority.claim({"agent": []}, "w", LEASE_MS, 12, 0, "two")
        assert (len(first), len(second)) == (8, 4)

    in_world(test)
