"""The sweep of contents: it takes what nobody names, and nothing that anybody is about to name."""

import asyncio
from collections.abc import Awaitable, Callable

from tests.workspaces.house import House, house
from tests.workspaces.replica import TinyReplica, sha

from tidefast.services.contents import Contents

Test = Callable[[House, Contents], Awaitable[None]]


def play(test: Test) -> None:
    async def whole() -> None:
        async with asyncio.timeout(120), house() as place:
            await test(place, place.parts.gateway.workspaces.contents)

    asyncio.run(whole())


def test_what_stands_or_stood_is_kept_and_an_orphaned_upload_is_removed() -> None:
    async def test(place: House, contents: Contents) -> None:
        replica = await TinyReplica(place.url).dial()
        await place.write("one", "old")
        await place.write("two", "new")
        await contents.write({sha(b"orphan"): b"orphan"})
        assert await contents.sweep(untouched_ms=-1) == 1
        assert await contents.missing([sha(b"old"), sha(b"new"), sha(b"orphan")]) == {sha(b"orphan")}
        await replica.hang_up()

    play(test)


def test_a_content_that_a_receipt_waits_with_outlives_the_sweep() -> None:
    """Applied under a dead run epoch: nothing joined names it yet, and the next holder will."""

    async def test(place: House, contents: Contents) -> None:
        replica = await TinyReplica(place.url).dial()
        await replica.ready.wait()
        replica.is_mute = True
        asked = asyncio.create_task(place.write("one", "waits"))
        receipt = await replica.applied()
        await place.call("POST", "/v1/runs/r1/preempt", {})
        engine = place.parts.engine
        from tidefast.protocol.commands import Preempt
        from tidefast.protocol.ids import RunId, WorkspaceId

        await engine.submit(Preempt(RunId("r1"), "test"))
        await replica.say(receipt)
        await asked
        found = engine.places.find(WorkspaceId("case"))
        assert found is not None and found.head is not None and found.head.open is not None
        assert found.head.open.write_seq and found.head.log_index == 0
        assert await contents.sweep(untouched_ms=-1) == 0
        await place.take(holder="w2")
        status, told = await place.write("one", "waits")
        assert (status, told["state"]) == (200, "committed")
        assert await place.files() == {"f": b"waits"} and replica.index == 1
        await replica.hang_up()

    play(test)


def test_a_pinned_content_is_not_taken_and_a_condemned_one_is_missing() -> None:
    async def test(place: House, contents: Contents) -> None:
        replica = await TinyReplica(place.url).dial()
        await replica.ready.wait()
        await contents.write({sha(b"a"): b"a", sha(b"b"): b"b"})
        with contents.pinned([sha(b"a")]):
            assert await contents.sweep(untouched_ms=-1) == 1
            assert await contents.missing([sha(b"a")]) == set()
        sweeping = asyncio.create_task(contents.sweep(untouched_ms=-1))
        await asyncio.sleep(0)
        with contents.pinned([sha(b"a")]):
            lost = await contents.missing([sha(b"a")])
        assert (await sweeping == 1) == (lost == {sha(b"a")}), "taken and told to be there"
        await replica.hang_up()

    play(test)
