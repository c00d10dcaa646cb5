"""Runs that end without a worker: after one lease the authority takes the lease and brings them to their end."""

import asyncio
from collections.abc import Awaitable, Callable

from tidefast.protocol.answers import RunInfo
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.records import Right
from tidefast.services.closer import HOLDER, Closer
from tidefast.sim.world import LEASE_MS, World
from tidefast.stores.memory import MemoryStore

RUN = RunId("r1")


def in_world(test: Callable[[World, Closer], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(MemoryStore())
        closer = Closer(world.authority, LEASE_MS)
        await test(world, closer)
        await closer.stop()
        await world.stop()

    asyncio.run(run())


async def paid(world: World, *steps: str) -> Right:
    await world.authority.create_run(RUN, "agent", "1", "{}")
    await world.authority.grant(RUN, "w1", LEASE_MS, "")
    right = Right(RUN, world.engine.head(RUN).epoch, "w1")  # type: ignore[union-attr]
    for step in steps:
        await world.authority.apply(right, step, "charge", "{}", 1_000)
    return right


async def state(world: World) -> tuple[str, str]:
    info = await world.authority.run(RUN)
    assert isinstance(info, RunInfo)
    return info.state, info.holder


def test_a_cancelled_run_that_no_worker_takes_is_undone_and_ended_by_the_authority_after_one_lease() -> None:
    async def test(world: World, closer: Closer) -> None:
        await paid(world, "flight", "hotel")
        await world.authority.oversee("cancel", RUN, "ann", "", None)
        assert closer.look() == [], "workers come first"
        world.clock.advance(LEASE_MS - 1)
        assert closer.look() == []
        world.clock.advance(1)
        assert closer.look() == [RUN] and closer.look() == []
        await world.quiet()
        assert await state(world) == ("cancelled", HOLDER)
        assert world.count(RUN, StepId("flight")) == world.count(RUN, StepId("hotel")) == 0

    in_world(test)


def test_a_failing_run_whose_worker_has_died_is_ended_with_its_own_error() -> None:
    async def test(world: World, closer: Closer) -> None:
        right = await paid(world, "flight")
        await world.authority.fail(right, "no seats")
        world.clock.advance(LEASE_MS + 1)
        await world.keeper.sweep()
        world.clock.advance(LEASE_MS)
        assert closer.look() == [RUN]
        await world.quiet()
        info = await world.authority.run(RUN)
        assert isinstance(info, RunInfo) and (info.state, info.result_json) == ("failed", '"no seats"')

    in_world(test)


def test_what_waits_for_a_person_gets_its_lease_back_and_is_taken_up_again_later() -> None:
    async def test(world: World, closer: Closer) -> None:
        right = await paid(world)
        arrived = world.provider.script("mail", "withhold_answer")
        sending = asyncio.create_task(world.authority.apply(right, "note", "mail", "{}", 1_000))
        await arrived.wait()
        await world.authority.oversee("cancel", RUN, "ann", "", None)
        world.clock.advance(2 * LEASE_MS + 1)
        assert closer.look() == [RUN]
        await world.quiet()
        assert await state(world) == ("held", HOLDER), "nobody knows whether the mail went out"
        assert closer.look() == []
        world.provider.let_go()
        await sending
        world.clock.advance(LEASE_MS)
        assert closer.look() == [RUN]
        await world.quiet()
        assert await state(world) == ("cancelled", HOLDER)

    in_world(test)


def test_an_authority_that_stops_gives_the_lease_of_an_unfinished_ending_back() -> None:
    async def test(world: World, closer: Closer) -> None:
        await paid(world, "flight")
        await world.authority.oversee("cancel", RUN, "ann", "", None)
        world.clock.advance(LEASE_MS)
        arrived = world.provider.script("refund", "withhold_answer")
        assert closer.look() == [RUN]
        await arrived.wait()
        await closer.stop()
        assert (await state(world))[0] == "cancelling"

    in_world(test)


def test_a_paused_ending_is_left_alone_until_it_is_resumed() -> None:
    async def test(world: World, closer: Closer) -> None:
        await paid(world, "flight")
        await world.authority.oversee("cancel", RUN, "ann", "", None)
        await world.authority.oversee("pause", RUN, "ann", "", None)
        world.clock.advance(10 * LEASE_MS)
        assert closer.look() == []
        await world.authority.oversee("resume", RUN, "ann", "", None)
        assert closer.look() == [RUN]
        await world.quiet()
        assert (await state(world))[0] == "cancelled"

    in_world(test)
