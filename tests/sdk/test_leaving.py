"""An agent that tries to end the process, one pass and no more, and what a call can carry."""

import asyncio
import sys
from typing import Any

import pytest
from tests.sdk.house import House, with_house
from tests.sdk.test_worker import worker

import tidefast as tf
from tidefast.protocol.canonical import BODY_BYTES_MAX, CanonicalError
from tidefast.sdk.run import ENVELOPE_BYTES, within_limit


@pytest.mark.parametrize("leaving", [SystemExit(3), KeyboardInterrupt()])
def test_an_agent_that_ends_the_process_ends_its_own_pass_only(leaving: BaseException) -> None:
    app, tries = tf.App(), [0]
    workers: list[tf.Worker] = []

    @app.agent
    async def leaves(run: tf.Run, _: None) -> str:
        tries[0] += 1
        if tries[0] == 1:
            raise leaving
        workers[0].stop()
        return "stayed"

    @app.agent
    async def works(run: tf.Run, number: int) -> int:
        return number

    async def story(house: House) -> None:
        await house.create("leaves", None, run_id="r0")
        for number in range(1, 4):
            await house.create("works", number, run_id=f"r{number}")
        workers.append(worker(house))
        await workers[0].run()
        assert tries == [2], "its lease was given back, and it was tried again"
        for number in range(1, 4):
            assert await house.state(f"r{number}") == ("completed", str(number))

    with_house(app, story)


def test_a_library_that_calls_exit_inside_a_tool_is_doubt_and_no_end() -> None:
    app = tf.App()

    @app.tool
    async def charge() -> None:
        sys.exit("out of here")

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        await run.tool("pay", charge)

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "held"
        step = await house.authority.step("r1", "pay")
        assert step.state == "held" and step.attempts[-1].state == "doubted"  # type: ignore[union-attr]

    with_house(app, story)


def test_one_pass_is_driven_where_no_other_is_wanted_and_the_run_can_go_on() -> None:
    app, tries = tf.App(), [0]

    @app.agent
    async def agent(run: tf.Run, _: None) -> int:
        tries[0] += 1
        if tries[0] == 1:
            raise RuntimeError("the first pass breaks")
        return tries[0]

    async def story(house: House) -> None:
        await house.create("agent")
        assert await worker(house).finish("r1", try_again=False) == "error"
        assert tries == [1] and (await house.state())[0] == "claimable"
        house.clock.advance(61_000)
        assert await worker(house).finish("r1", try_again=False) == "completed"
        assert await house.state() == ("completed", "2")

    with_house(app, story)


MOST = BODY_BYTES_MAX - ENVELOPE_BYTES


@pytest.mark.parametrize(
    ("text", "fits"), [("x" * MOST, True), ("x" * (MOST + 1), False), ("ü" * (MOST // 2 + 1), False)]
)
def test_what_a_call_can_carry_is_counted_in_bytes(text: str, fits: bool) -> None:
    if fits:
        assert within_limit(text) == text
        return
    with pytest.raises(CanonicalError, match="can be stored"):
        within_limit(text)


@pytest.mark.parametrize("part", ["args", "value", "state", "result"])
def test_too_much_is_told_before_anything_is_sent(part: str) -> None:
    app, said, much = tf.App(), [], "x" * BODY_BYTES_MAX

    @app.tool
    async def charge(order: str) -> None:
        said.append("must not be called")

    @app.agent
    async def agent(run: tf.Run, _: None) -> Any:
        try:
            if part == "args":
                await run.tool("pay", charge, order=much)
            elif part == "value":
                await run.step("note", lambda: much)
            elif part == "state":
                await run.checkpoint(much)
        except tf.Misuse as misuse:
            said.append(str(misuse))
        return much if part == "result" else None

    async def story(house: House) -> None:
        await house.create("agent")
        outcome = await house.drive()
        asked = [verb for verb, _ in house.seam.calls]
        assert not {"apply", "save_result", "checkpoint"} & set(asked)
        if part == "result":
            assert outcome == "error" and "complete" not in asked
        else:
            assert outcome == "completed" and len(said) == 1 and "can be stored" in said[0]

    with_house(app, story)


def test_a_pass_that_is_cancelled_from_outside_is_no_wish_to_leave() -> None:
    """The containment takes `SystemExit` and `KeyboardInterrupt` only."""
    from tidefast.sdk.passes import _contained

    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(_contained(cancelled()))
