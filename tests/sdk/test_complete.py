"""A completion names what the journal answered, and fits one call however much that is."""

from typing import Any

import pytest
from tests.sdk.house import House, with_house

import tidefast as tf
from tidefast.protocol.canonical import BODY_BYTES_MAX
from tidefast.wire import messages as m


def shop() -> tf.App:
    app = tf.App()

    @app.tool(key_ttl="24h")
    async def charge(order: str, key: str) -> str:
        return order

    @app.tool(effect="none")
    async def look() -> int:
        return 1

    return app


@pytest.mark.parametrize(
    ("effects", "looks", "length", "lists", "checkpoints"),
    [
        (3, 30, 10, [33], 0),  # everything fits
        (3, 60, BODY_BYTES_MAX - 5_000, [0, 3], 0),  # only what the books miss fits
        (60, 1, BODY_BYTES_MAX - 5_000, [0, 0], 1),
        (60, 1, BODY_BYTES_MAX - 12_000, [61], 0),
    ],
)
def test_a_completion_never_outgrows_one_call(
    effects: int, looks: int, length: int, lists: list[int], checkpoints: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, passes = shop(), []

    @app.agent
    async def agent(run: tf.Run, _: None) -> str:
        passes.append(1)
        for place in range(effects):
            await run.tool(f"{'e' * 100}-{place}", "charge", order="o")
        for place in range(looks):
            await run.tool(f"{'l' * 100}-{place}", "look")
        if len(passes) == 1:
            raise RuntimeError("dies before the end")
        return "x" * length

    async def story(house: House) -> None:
        seen: list[int] = []
        complete = house.authority.complete

        async def measured(right: Any, result: str, asked: Any, dropped: Any) -> Any:
            body = m.encode(m.Complete(result=result, asked=sorted(asked), dropped=sorted(dropped)))
            assert len(body) <= BODY_BYTES_MAX
            seen.append(len(asked))
            return await complete(right, result, asked, dropped)

        monkeypatch.setattr(house.authority, "complete", measured)
        await house.create("agent")
        await house.drive()
        assert await house.drive() == "completed"
        assert (seen, len(house.seam.verbs("checkpoint"))) == (lists, checkpoints)

    with_house(app, story)


def test_a_forgotten_step_is_named_though_the_first_list_was_left_out() -> None:
    app, passes, told = shop(), [], []

    @app.agent
    async def agent(run: tf.Run, _: None) -> str:
        passes.append(1)
        for place in range(60):
            if len(passes) == 1 or place != 7:
                await run.tool(f"{'e' * 100}-{place}", "charge", order="o")
        if len(passes) == 1:
            raise RuntimeError("a deploy drops a step")
        return "x" * (BODY_BYTES_MAX - 5_000)

    async def story(house: House) -> None:
        await house.create("agent")
        await house.drive()
        assert await house.drive() == "error"
        told.extend(event.data_json for event in await house.authority.events("r1", 0, 999))  # type: ignore[union-attr]
        assert house.seam.verbs("checkpoint") == []

    with_house(app, story)
    assert told[-1].count("eeee-7") >= 1 and "eeee-8" not in told[-1]
