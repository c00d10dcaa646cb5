"""Agents that ask models: one whole answer per step, and tools that are called as fenced steps."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.models.house import MODEL, config
from tests.sdk.house import House, house

import tidefast as tf
from tidefast.demo.providers.scripted import Said, ScriptedModel
from tidefast.protocol.ids import RunId, StepId
from tidefast.services.model_hop import ModelHop
from tidefast.services.model_sender import ModelSender
from tidefast.services.models import load_models

ASK: list[Any] = [{"role": "user", "content": "refund o-1"}]


class Shop:
    """A card provider that counts, and what a model is told to say turn by turn."""

    def __init__(self, *turns: Said) -> None:
        self.turns = list(turns)
        self.refunded: list[tuple[str, int]] = []
        self.app = tf.App()

        @self.app.tool(effect="external", key_ttl="1h", timeout="5s")
        async def refund(order: str, cents: int, key: str) -> dict[str, Any]:
            """Give money back."""
            if cents > 100:
                raise tf.Refused("too much", {"error": "amount_too_large"})
            self.refunded.append((order, cents))
            return {"id": f"re-{order}"}

        self.refund = refund

    def script(self, request: Any, count: int) -> Said:
        """The answer to a conversation depends on its length alone, whoever asks."""
        said = sum(1 for message in request["messages"] if message["role"] == "assistant")
        return self.turns[min(said, len(self.turns) - 1)]


def asks(*calls: tuple[str, Any]) -> Said:
    return Said(calls=[(name, args if isinstance(args, str) else json.dumps(args)) for name, args in calls])


def play(tmp_path: Path, shop: Shop, story: Callable[[House, ScriptedModel], Any], upstream: str = "") -> None:
    async def whole() -> None:
        model = ScriptedModel(shop.script)
        file = tmp_path / "models.toml"
        file.write_text(config(await model.start(), upstream))
        async with house(shop.app) as home, asyncio.timeout(20):
            engine, gateway = home.authority.engine, home.authority.gateway
            sender = ModelSender(home.clock)
            home.authority.models = ModelHop(engine, gateway, load_models(file), sender)
            try:
                await story(home, model)
            finally:
                await model.close()
                await sender.close()

    asyncio.run(whole())


def agent(shop: Shop) -> Callable[[Any], Any]:
    return shop.app.agent(name="desk", version="1")


def test_a_models_answer_is_paid_for_once_however_often_the_agent_runs(tmp_path: Path) -> None:
    shop = Shop(Said("sunny with rain"))
    passes = []

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> str:
        answer = await run.model("plan", model=MODEL, messages=ASK, temperature=0.5)
        passes.append(answer.text)
        if len(passes) == 1:
            raise RuntimeError("the worker dies")
        return f"{answer.text}, {answer.finish_reason}, {answer.usage}"

    async def story(home: House, model: ScriptedModel) -> None:
        await home.create("desk")
        await home.drive()
        await home.drive()
        assert await home.state() == ("completed", msgspec.json.encode(
            "sunny with rain, stop, Usage(input_tokens=10, output_tokens=3)").decode())  # fmt: skip
        assert (len(model.bill), model.asked[0]["temperature"]) == (1, 0.5)

    play(tmp_path, shop, story)


def test_the_members_of_a_request_keep_their_order(tmp_path: Path) -> None:
    shop = Shop(Said('{"b": 1}'))
    schema = {"type": "object", "properties": {"zeta": {}, "alpha": {}}}

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> Any:
        answer = await run.model("plan", model=MODEL, messages=ASK, response_format=schema)
        return answer.json()

    async def story(home: House, model: ScriptedModel) -> None:
        await home.create("desk")
        await home.drive()
        assert list(model.asked[0]["response_format"]["properties"]) == ["zeta", "alpha"]
        assert await home.state() == ("completed", '{"b":1}')

    play(tmp_path, shop, story)


def test_a_loop_calls_tools_as_steps_named_by_their_place_in_the_answer(tmp_path: Path) -> None:
    shop = Shop(asks(("refund", {"order": "o-1", "cents": 5}), ("refund", {"order": "o-2", "cents": 7})), Said("done"))

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> Any:
        end = await run.agent_loop(MODEL, [shop.refund], messages=ASK, step="plan")
        return [end.text, end.turns, end.calls]

    async def story(home: House, model: ScriptedModel) -> None:
        await home.create("desk")
        await home.drive()
        assert await home.state() == ("completed", '["done",2,2]')
        assert sorted(shop.refunded) == [("o-1", 5), ("o-2", 7)]
        steps = {step.step_id for step in await home.authority.steps("r1", None, 99)}  # type: ignore[union-attr]
        assert steps == {"plan.0", "plan.0~0", "plan.0~1", "plan.1"}
        results = [m for m in model.asked[1]["messages"] if m["role"] == "tool"]
        assert [json.loads(m["content"]) for m in results] == [{"id": "re-o-1"}, {"id": "re-o-2"}]
        assert [m["tool_call_id"] for m in results] == ["call_1_0", "call_1_1"]
        parameters = model.asked[0]["tools"][0]["function"]["parameters"]
        assert (sorted(parameters["properties"]), parameters["required"]) == (["cents", "order"], ["order", "cents"])

    play(tmp_path, shop, story)


def test_a_successor_makes_the_calls_of_the_journaled_answer_and_none_twice(tmp_path: Path) -> None:
    shop = Shop(asks(("refund", {"order": "o-1", "cents": 5})), Said("done"))
    passes = []

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> Any:
        passes.append(1)
        end = await run.agent_loop(MODEL, [shop.refund], messages=ASK)
        if len(passes) < 3:
            raise RuntimeError("the worker dies")
        return end.text

    async def story(home: House, model: ScriptedModel) -> None:
        await home.create("desk")
        for _ in range(3):
            await home.drive()
        assert await home.state() == ("completed", '"done"')
        assert (shop.refunded, len(model.bill)) == ([("o-1", 5)], 2)

    play(tmp_path, shop, story)


def test_what_a_model_may_not_do_is_told_to_it_in_a_sentence(tmp_path: Path) -> None:
    shop = Shop(
        asks(
            ("refund", {"order": "o-1", "cents": 500}),
            ("refund", {"order": "o-1"}),
            ("refund", "{cut"),
            ("refund", "[1]"),
            ("fly", {}),
            ("half", {"cents": "x"}),
            ("half", {"cents": 8}),
        ),
        Said("sorry"),
    )

    def half(cents: int, factor: float = 0.5) -> float:
        """Half of it."""
        return cents * factor

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> Any:
        return (await run.agent_loop(MODEL, [shop.refund, half], messages=ASK)).text

    async def story(home: House, model: ScriptedModel) -> None:
        await home.create("desk")
        await home.drive()
        assert await home.state() == ("completed", '"sorry"')
        told = [m["content"] for m in model.asked[1]["messages"] if m["role"] == "tool"]
        assert told[0].startswith("The tool refund refused this call for good (refused); nothing took effect.")
        assert "amount_too_large" in told[0]
        assert told[1].startswith("The call of refund was not made: missing a required argument: 'cents'")
        assert told[2].startswith("The arguments of refund are no JSON")
        assert told[3] == "The arguments of refund must be a JSON object."
        assert told[4] == "There is no tool fly; there are: refund, half."
        assert told[5].startswith("The call was not made: Expected `int`")
        assert told[6] == "4"
        assert shop.refunded == []

    play(tmp_path, shop, story)


@pytest.mark.parametrize(
    "more,why",
    [({"turns": 2}, "is not done after 2 turns"), ({"calls": 2}, "may make 2 calls"), ({}, "is not done after 16")],
)
def test_a_loop_has_limits(tmp_path: Path, more: Any, why: str) -> None:
    shop = Shop(asks(("refund", {"order": "o-1", "cents": 5})))

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> Any:
        try:
            await run.agent_loop(MODEL, [shop.refund], messages=ASK, **more)
        except tf.Error as error:
            return str(error)

    async def story(home: House, model: ScriptedModel) -> None:
        await home.create("desk")
        await home.drive()
        assert why in (await home.state())[1]

    play(tmp_path, shop, story)


def test_an_answer_cut_at_its_limit_calls_nothing(tmp_path: Path) -> None:
    shop = Shop(Said(calls=[("refund", '{"order": "o-1", "cents": 5')], finish="length"))

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> Any:
        try:
            await run.agent_loop(MODEL, [shop.refund], messages=ASK)
        except tf.Error as error:
            return str(error)

    async def story(home: House, model: ScriptedModel) -> None:
        await home.create("desk")
        await home.drive()
        assert "is cut" in (await home.state())[1]
        assert (shop.refunded, len(model.bill)) == ([], 1)

    play(tmp_path, shop, story)


def test_a_lost_lease_ends_the_loop_and_the_successor_finishes_it(tmp_path: Path) -> None:
    shop = Shop(asks(("refund", {"order": "o-1", "cents": 5})), Said("done", think_s=0.05))
    passes = []

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> Any:
        passes.append(1)
        try:
            return (await run.agent_loop(MODEL, [shop.refund], messages=ASK)).text
        except Exception:
            return "a broad except"

    async def story(home: House, model: ScriptedModel) -> None:
        await home.create("desk")
        first = asyncio.ensure_future(home.drive())
        while len(model.asked) < 2:  # noqa: ASYNC110 - it is another server's state, which has no event of ours
            await asyncio.sleep(0)
        await home.authority.preempt("r1", "test", "", None)
        await first
        await home.drive()
        assert await home.state() == ("completed", '"done"')
        assert (len(passes), len(model.bill), shop.refunded) == (2, 2, [("o-1", 5)])

    play(tmp_path, shop, story)


def test_the_agent_waits_while_the_model_is_away_and_goes_on_when_it_is_there(tmp_path: Path) -> None:
    shop = Shop(Said("there"))
    shop.script = lambda request, count: Said("no", status=429 if count == 0 else 200, headers={  # type: ignore[method-assign]
        "retry-after-ms": "100"
    })  # fmt: skip

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> Any:
        return (await run.model("plan", model=MODEL, messages=ASK)).text

    async def story(home: House, model: ScriptedModel) -> None:
        home.seam.before["chat"] = lambda: home.clock.advance(200)
        await home.create("desk")
        await home.drive()
        assert await home.state() == ("completed", '"no"')
        step = home.authority.engine.step(RunId("r1"), StepId("plan"))
        assert step is None or [a.state for a in step.attempts] == ["unsent", "applied"]

    play(tmp_path, shop, story)


def test_a_call_of_an_answer_can_not_be_made_before_its_answer(tmp_path: Path) -> None:
    shop = Shop(Said("x"))

    @agent(shop)
    async def desk(run: tf.Run, input: Any) -> Any:
        with pytest.raises(tf.Misuse):
            await run.tool("plan~0", shop.refund, order="o-1", cents=1)
        with pytest.raises(tf.Misuse):
            run.openai()
        return "done"

    async def story(home: House, model: ScriptedModel) -> None:
        await home.create("desk")
        await home.drive()
        assert (await home.state(), shop.refunded) == (("completed", '"done"'), [])

    play(tmp_path, shop, story)
