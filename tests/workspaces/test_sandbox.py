"""The replica as people start it, against a real server: calls, losses, and that only one replica counts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.replica.shore import HERE
from tests.workspaces.house import House, house

from tidefast.sdk.replica.dial import Dial, Ended
from tidefast.sdk.replica.replica import Replica


@contextlib.asynccontextmanager
async def sandbox(path: Path, at: House) -> AsyncIterator[tuple[Dial, asyncio.Task[None]]]:
    path.mkdir(exist_ok=True)
    replica = Replica(path, "case", HERE)
    dial = Dial(replica, at.url, None)
    running = asyncio.create_task(dial.run())
    try:
        yield dial, running
    finally:
        dial.stop()
        await asyncio.gather(running, return_exceptions=True)
        replica.close()


def result(told: tuple[int, Any]) -> Any:
    status, body = told
    assert status == 200, body
    assert body["state"] == "committed", body
    return body["receipt"]["body"]["result"]


async def test_every_verb_goes_through_the_server_and_is_committed(tmp_path: Path) -> None:
    async with house() as at, sandbox(tmp_path / "ws", at):
        assert result(await at.write("w1", "one\n", "d/a.txt"))["is_new"]
        assert result(await at.apply("r1", "read_file", {"path": "d/a.txt"}))["content"] == "one\n"
        edit = {"path": "d/a.txt", "edits": [{"old_text": "one", "new_text": "two"}]}
        assert result(await at.apply("e1", "edit_file", edit))["replaced"] == 1
        patch = "*** Begin Patch\n*** Add File: b\n+new\n*** End Patch\n"
        assert result(await at.apply("p1", "apply_patch", {"patch": patch})) == {"paths": ["b"]}
        ran = result(await at.apply("c1", "run_command", {"shell": "cat b; echo made > c; exit 4"}))
        assert (ran["exit_code"], ran["stdout"]) == (4, "new\n")
        big = {"argv": ["dd", "if=/dev/urandom", "of=big", "bs=1M", "count=2"]}
        assert result(await at.apply("c2", "run_command", big))["exit_code"] == 0
        result(await at.apply("m1", "make_dir", {"path": "e"}))
        result(await at.apply("m2", "move", {"source": "c", "destination": "e/c"}))
        result(await at.apply("m3", "run_migration", {"path": "db", "sql": "CREATE TABLE t (a)"}))
        result(await at.apply("m4", "delete", {"path": "b"}))
        files = await at.files()
        assert files["d/a.txt"] == b"two\n"
        assert files["e/c"] == b"made\n"
        assert files["big"] == (tmp_path / "ws" / "big").read_bytes()
        assert sorted(files) == ["big", "d/a.txt", "db", "e/c"]
        status, refused = await at.apply("x1", "write_file", {"path": "../x", "content": ""})
        assert (status, refused["code"]) == (422, "step_rejected")


async def test_a_lost_disk_is_made_anew_elsewhere(tmp_path: Path) -> None:
    async with house() as at:
        async with sandbox(tmp_path / "one", at):
            result(await at.write("w1", "kept", "d/f"))
            result(await at.apply("c1", "run_command", {"shell": "for i in $(seq 500); do echo $i > f$i; done"}))
        async with sandbox(tmp_path / "two", at):
            assert result(await at.apply("r1", "read_file", {"path": "d/f"}))["content"] == "kept"
            assert (tmp_path / "two" / "f77").read_text() == "77\n"


async def test_a_second_replica_replaces_the_first_which_ends(tmp_path: Path) -> None:
    async with house() as at, sandbox(tmp_path / "one", at) as (_, first):
        result(await at.write("w1", "1"))
        async with sandbox(tmp_path / "two", at):
            result(await at.write("w2", "2"))
            with pytest.raises(Ended) as ended:
                await first
            assert ended.value.code == "stale_epoch"
            assert await at.files() == {"f": b"2"}
