"""A workspace's calls through a real server: joined under two live epochs, gone with the disk that did them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.workspaces.house import House, house
from tests.workspaces.replica import TinyReplica

from tidefast.sim.audit import audit

Test = Callable[[House], Awaitable[None]]


def play(test: Test, path: Path | None = None) -> None:
    async def whole() -> None:
        async with asyncio.timeout(120), house(path) as place:
            await test(place)
            report = audit(place.parts.store)
            assert report.is_ok and report.workspaces == 1, report.violations

    asyncio.run(whole())


@pytest.mark.parametrize("inline", [True, False])
def test_a_write_is_committed_and_seen_by_everybody(tmp_path: Path, inline: bool) -> None:
    async def test(place: House) -> None:
        replica = await TinyReplica(place.url, inline=inline).dial()
        status, told = await place.write("one", "hello")
        assert (status, told["state"]) == (200, "committed"), told
        assert told["receipt"]["body"]["write"]["index"] == 1
        assert await place.files() == {"f": b"hello"}
        status, told = await place.apply("look", "read_file", {"path": "f"})
        assert told["receipt"]["body"] == {"result": {"content": "hello"}}
        assert replica.index == 1 and replica.ahead is None
        await replica.hang_up()

    play(test, tmp_path / "s.db")


def test_the_late_200_commits_nothing_and_the_agents_one_await_ends_with_the_next_replicas_receipt() -> None:
    """The first article's counterexample: accepted, then reclaimed with its files."""

    async def test(place: House) -> None:
        first = await TinyReplica(place.url, boot_id="one").dial()
        await first.ready.wait()
        first.is_mute = True
        asked = asyncio.create_task(place.write("one", "hello"))
        await first.began.wait()
        late = await first.applied()
        second = await TinyReplica(place.url, boot_id="two").dial()
        await first.say(late)
        status, told = await asked
        assert (status, told["state"]) == (200, "committed")
        assert told["receipt"]["body"]["write"]["epoch"] == second.epoch == first.epoch + 1
        assert second.done == [("r1", "one", 2)] and second.files == {"f": b"hello"}
        assert await place.files() == {"f": b"hello"}
        _, log = await place.call("GET", "/v1/workspaces/case/log")
        assert [write["log_index"] for write in log["writes"]] == [1]
        for replica in (first, second):
            await replica.hang_up()

    play(test)


def test_a_socket_that_comes_back_within_the_lease_goes_on_under_its_epoch_and_is_asked_first() -> None:
    async def test(place: House) -> None:
        replica = await TinyReplica(place.url).dial()
        await replica.ready.wait()
        replica.is_mute = True
        asked = asyncio.create_task(place.write("one", "hello"))
        await replica.applied()
        await replica.hang_up()
        replica.is_mute = False
        await replica.dial()
        status, told = await asked
        assert (status, told["state"]) == (200, "committed")
        assert replica.grants[-1].is_resumed and replica.grants[-1].epoch == replica.grants[0].epoch
        assert replica.done == [("r1", "one", 1)], "what the journal has is not done twice"
        await replica.hang_up()

    play(test)


def test_a_fork_with_the_same_boot_id_and_an_older_token_is_a_new_generation() -> None:
    async def test(place: House) -> None:
        original = await TinyReplica(place.url).dial()
        await original.ready.wait()
        fork = TinyReplica(place.url)
        fork.epoch, fork.index, fork.chain, fork.token = original.epoch, original.index, original.chain, original.token
        await original.hang_up()
        await original.dial()
        await original.ready.wait()
        await place.write("one", "hello")
        await fork.dial()
        await fork.ready.wait()
        assert not fork.grants[0].is_resumed and fork.epoch == original.epoch + 1
        assert fork.grants[0].plan == "rollback" and fork.files == {"f": b"hello"}
        await original.ended.wait()
        for replica in (original, fork):
            await replica.hang_up()

    play(test)


def test_what_a_lost_replica_had_accepted_is_nowhere_and_what_was_joined_is_rebuilt() -> None:
    async def test(place: House) -> None:
        first = await TinyReplica(place.url, boot_id="one").dial()
        await place.write("one", "kept")
        first.is_mute = True
        asked = asyncio.create_task(place.write("two", "accepted", "g"))
        await first.applied()
        await first.hang_up()
        second = TinyReplica(place.url, boot_id="two")
        await second.dial()
        await second.ready.wait()
        assert second.grants[0].plan == "fetch_all"
        status, _ = await asked
        assert status == 200 and second.files == {"f": b"kept", "g": b"accepted"}
        assert second.done == [("r1", "two", 2)]
        await second.hang_up()

    play(test)


def test_without_a_replica_a_call_says_so_when_its_patience_ends_and_goes_on_once_there_is_one() -> None:
    async def test(place: House) -> None:
        status, told = await place.write("one", "hello", wait_ms=50)
        assert (status, told["code"], told["reason"]) == (503, "no_replica", "none")
        asked = asyncio.create_task(place.write("one", "hello"))
        replica = await TinyReplica(place.url).dial()
        assert (await asked)[0] == 200
        await replica.hang_up()

    play(test)


def test_while_one_runs_write_is_open_anothers_waits_and_both_are_committed_in_turn() -> None:
    async def test(place: House) -> None:
        replica = await TinyReplica(place.url).dial()
        await replica.ready.wait()
        replica.is_mute = True
        first = asyncio.create_task(place.write("one", "a", run="r1"))
        held = await replica.applied()
        status, told = await place.write("one", "b", run="r2", wait_ms=50)
        assert (status, told["code"], told["reason"]) == (409, "step_pending", "replica")
        assert told["facts"]["run"] == "r1"
        second = asyncio.create_task(place.write("one", "b", run="r2"))
        replica.is_mute = False
        await replica.say(held)
        assert [(await asked)[0] for asked in (first, second)] == [200, 200]
        assert await place.files() == {"f": b"b"}
        await replica.hang_up()

    play(test)


def test_a_refused_call_is_rejected_and_leaves_no_write() -> None:
    async def test(place: House) -> None:
        replica = await TinyReplica(place.url).dial()
        status, told = await place.write("one", "x", "refused")
        assert (status, told["code"]) == (422, "step_rejected")
        assert told["facts"]["receipt"]["body"]["code"] == "conflict"
        status, _ = await place.write("two", "x")
        assert status == 200 and (await place.files()) == {"f": b"x"}
        await replica.hang_up()

    play(test)


def test_a_receipt_that_does_not_follow_the_log_ends_the_replica_that_made_it() -> None:
    async def test(place: House) -> None:
        liar = await TinyReplica(place.url, boot_id="liar").dial()
        await liar.ready.wait()
        liar.is_mute = True
        asked = asyncio.create_task(place.write("one", "x"))
        receipt = await liar.applied()
        receipt.chain = "0" * 64
        await liar.say(receipt)
        await liar.ended.wait()
        honest = await TinyReplica(place.url, boot_id="honest").dial()
        assert (await asked)[0] == 200
        assert await place.files() == {"f": b"x"} and honest.index == 1
        for replica in (liar, honest):
            await replica.hang_up()

    play(test)


def test_an_escaping_command_whose_replica_is_lost_is_held_and_never_run_again() -> None:
    async def test(place: House) -> None:
        first = await TinyReplica(place.url, boot_id="one").dial()
        await first.ready.wait()
        first.is_mute = True
        args = {"shell": "deploy", "escapes": True}
        asked = asyncio.create_task(place.apply("deploy", "run_command", args))
        await first.applied()
        second = await TinyReplica(place.url, boot_id="two").dial()
        status, told = await asked
        assert (status, told["code"]) == (409, "step_held"), told
        await second.ready.wait()
        assert second.done == []
        for replica in (first, second):
            await replica.hang_up()

    play(test)


def test_what_was_open_when_the_authority_died_is_asked_of_the_journal(tmp_path: Path) -> None:
    async def first_life(place: House) -> None:
        replica = await TinyReplica(place.url).dial()
        await place.write("one", "kept")
        await replica.hang_up()

    play(first_life, tmp_path / "s.db")

    async def second_life(place: House) -> None:
        assert await place.files() == {"f": b"kept"}
        replica = await TinyReplica(place.url).dial()
        await replica.ready.wait()
        assert replica.epoch > 1 and replica.files == {"f": b"kept"}
        await replica.hang_up()

    play(second_life, tmp_path / "s.db")


def test_what_was_committed_can_be_listed_compared_and_taken_home() -> None:
    async def test(place: House) -> None:
        import io
        import tarfile

        replica = await TinyReplica(place.url).dial()
        for step, content, path in (("a", "1", "f"), ("b", "2", "f"), ("c", "3", "g")):
            await place.write(step, content, path)
        _, diff = await place.call("GET", "/v1/workspaces/case/diff?since=1")
        assert [(change["path"], change["how"]) for change in diff["changes"]] == [("f", "changed"), ("g", "added")]
        _, old = await place.call("GET", "/v1/workspaces/case/files/f?index=1")
        assert old == b"1"
        _, raw = await place.call("GET", "/v1/workspaces/case/tar")
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            found = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
        assert found == {"f": b"2", "g": b"3"}
        _, told = await place.call("GET", "/v1/workspaces/case")
        assert (told["log_index"], told["is_ready"], told["open"]) == (3, True, None)
        assert (await place.call("GET", "/v1/workspaces/nobody"))[0] == 404
        assert (await place.call("GET", "/v1/workspaces/case/files/f?index=9"))[0] == 404
        await replica.hang_up()

    play(test)
