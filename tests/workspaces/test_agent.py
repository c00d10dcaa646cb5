"""An agent's workspace: each call a step, one await, the same answers in the next pass."""

import asyncio
from typing import Any

from tests.workspaces.house import House, house
from tests.workspaces.replica import TinyReplica

import tidefast as tf
from tidefast.sdk.heartbeat import ThreadHeartbeat
from tidefast.sdk.http import HttpAuthority
from tidefast.sdk.worker import Worker

app = tf.App()
PASSES: list[str] = []


@app.agent
async def case(run: tf.Run, input: Any) -> Any:
    files = run.workspace("case")
    PASSES.append("begun")
    made = await files.write_file("plan", "plan.md", "1. look")
    read = await files.read_file("look", "plan.md")
    if len(PASSES) == 1:
        await files.write_file("more", "plan.md", "2. act")
        raise RuntimeError("the first worker dies here")
    await files.write_file("more", "plan.md", "2. act")
    return [made["path"], read["content"]]


def test_a_second_pass_reads_what_the_first_one_read_and_writes_nothing_again() -> None:
    async def whole(place: House) -> None:
        replica = await TinyReplica(place.url).dial()
        await place.call("POST", "/v1/runs", {"run_id": "r9", "agent": "case", "input": None})
        authority = HttpAuthority(place.url)
        worker = Worker(authority, app, ThreadHeartbeat(lambda: HttpAuthority(place.url)))
        working = asyncio.create_task(worker.run())
        while (told := (await place.call("GET", "/v1/runs/r9"))[1])["state"] != "completed":
            await place.parts.engine.wait_for_change(None, 1_000)
        assert told["result"] == ["plan.md", "1. look"]
        assert [step for _, step, _ in replica.done] == ["plan", "more"]
        assert len(PASSES) == 2
        worker.stop()
        await working
        await authority.close()
        await replica.hang_up()

    async def bounded() -> None:
        async with asyncio.timeout(120), house() as place:
            await whole(place)

    asyncio.run(bounded())
