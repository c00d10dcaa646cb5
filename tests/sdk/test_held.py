"""A step of an independent tool that is held: the agent hears of it and goes on, and only the run's end waits."""

import asyncio
from typing import Any

import pytest
from tests.sdk.house import House, with_house

import tidefast as tf
from tidefast.protocol.ids import StepId


def shop(caught: bool) -> tuple[tf.App, list[str]]:
    app, done = tf.App(), []

    @app.tool(independent=True)
    async def post(text: str) -> None:
        done.append(text)
        raise OSError("the line was cut")

    @app.tool
    async def pay(cents: int) -> int:
        done.append("pay")
        return cents

    @app.agent
    async def sell(run: tf.Run, _: Any) -> int:
        try:
            await run.tool("news", "post", text="sold")
        except tf.Held as held:
            done.append(f"{held.step_id} {held.reason}")
            if not caught:
                raise
        except tf.Rejected as rejected:
            done.append(f"{rejected.step_id} {rejected.reason}")
        paid: int = await run.tool("pay", "pay", cents=5)
        return paid

    return app, done


def test_the_other_steps_go_on_and_the_run_ends_once_a_person_has_spoken() -> None:
    app, done = shop(caught=True)

    async def story(house: House) -> None:
        await house.create("sell")
        assert await house.drive() == "held"
        assert done == ["sold", "news no_key", "pay"]
        assert (await house.state())[0] == "held", "nothing is left to do but to wait for a person"
        house.clock.advance(60_000)
        now = house.clock.now().ms
        await house.authority.resolve("r1", "news", "refused", "ops", "not posted", "null", now, None)
        assert (await house.state())[0] == "claimable"

        assert await house.drive() == "completed" and done.count("pay") == 1
        assert done[-1] == "news resolved:refused"

    with_house(app, story)


def test_an_agent_that_lets_it_through_gives_the_lease_back_as_held() -> None:
    app, done = shop(caught=False)

    async def story(house: House) -> None:
        await house.create("sell")
        assert await house.drive() == "held" and "pay" not in done
        assert (await house.state())[0] == "held"

    with_house(app, story)


def test_a_checkpoint_waits_for_it_like_the_end() -> None:
    app, _ = shop(caught=True)

    @app.agent
    async def careful(run: tf.Run, _: Any) -> None:
        with pytest.raises(tf.Held):
            await run.tool("news", "post", text="sold")
        await run.checkpoint({"stage": "told"})

    async def story(house: House) -> None:
        await house.create("careful")
        assert await house.drive() == "held"

    with_house(app, story)


def test_what_must_hold_first_is_asked_before_the_first_sending_and_what_does_not_hold_rejects_the_step() -> None:
    app, done = tf.App(), []
    account: dict[str, Any] = {}
    asked_twice = asyncio.Event()

    @app.tool(effect="none")
    async def balance(account_id: str) -> dict[str, Any]:
        done.append(f"look {account_id}")
        if len(done) == 2:
            asked_twice.set()
        if not account:
            raise OSError("nobody answers")
        return dict(account)

    @app.tool(
        require={"tool": balance, "args": {"account_id": "{args.account}"}, "match": {"open": True}},
        key_ttl="24h",
    )
    async def pay(account: str, key: str) -> str:
        done.append("pay")
        if done.count("pay") == 1:
            raise OSError("the line was cut")
        return "paid"

    @app.agent
    async def sell(run: tf.Run, step: str) -> Any:
        try:
            return await run.tool(step, "pay", account="a1")
        except tf.Rejected as rejected:
            return [rejected.reason, rejected.body]

    async def story(house: House) -> None:
        await house.create("sell", "first")
        driving = asyncio.create_task(house.drive())
        await asked_twice.wait()
        assert set(done) == {"look a1"}, "while nobody can say, nothing is sent"
        account["open"] = False
        assert await driving == "completed"
        told = {"answer": {"open": False}, "precondition": "balance"}
        assert (await house.state())[1].startswith('["precondition",') and str(told["precondition"]) in (
            await house.state()
        )[1]
        assert "pay" not in done
        account["open"] = True
        done.clear()
        await house.create("sell", "second", "r2")
        assert await house.drive("r2") == "completed"
        assert done == ["look a1", "pay", "pay"], "a replay doesn't ask again"
        step = house.authority.engine.step("r1", StepId("first"))  # type: ignore[arg-type]
        assert step is not None and (step.state, step.reason) == ("rejected", "precondition")

    with_house(app, story)
