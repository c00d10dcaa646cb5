"""Workers: many runs at once, failing grants, and going away in good order."""

import asyncio
import os
import signal
from typing import Any

import pytest
from tests.sdk.house import AT_ONCE, LEASE_MS, House, with_house

import tidefast as tf
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Refused
from tidefast.sdk.heartbeat import LoopHeartbeat


def worker(house: House, **settings: Any) -> tf.Worker:
    settings = {"backoff": AT_ONCE, "lease_ms": LEASE_MS, **settings}
    return tf.Worker(house.seam, house.app, LoopHeartbeat(house.seam), **settings)  # type: ignore[arg-type]


def test_many_runs_are_driven_at_once_up_to_the_limit() -> None:
    app, inside, most, ended = tf.App(), [0], [0], []
    workers: list[tf.Worker] = []

    @app.agent
    async def agent(run: tf.Run, number: int) -> int:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        await run.step("a", lambda: number)
        inside[0] -= 1
        ended.append(number)
        if len(ended) == 30:
            workers[0].stop()
        return number

    async def story(house: House) -> None:
        for number in range(30):
            await house.create("agent", number, run_id=f"r{number}")
        workers.append(worker(house, max_runs=8))
        await workers[0].run()
        for number in range(30):
            assert await house.state(f"r{number}") == ("completed", str(number))

    with_house(app, story)
    assert 1 < most[0] <= 8


def test_sigterm_releases_the_lease_after_the_intent_in_flight_has_settled() -> None:
    app, trace = tf.App(), []
    gate: list[asyncio.Event] = []

    @app.tool
    async def charge() -> str:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # or the test would end the tests
        os.kill(os.getpid(), signal.SIGTERM)
        await gate[0].wait()
        trace.append("settled")
        return "paid"

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        trace.append(await run.tool("pay", "charge"))
        await run.step("next", lambda: trace.append("must not run"))

    async def story(house: House) -> None:
        gate.append(asyncio.Event())
        house.seam.before["release"] = lambda: trace.append("released")
        await house.create("agent")
        running = worker(house)
        driven = asyncio.create_task(running.run(handle_signals=True))
        await running._stopping.wait()
        assert trace == []
        gate[0].set()
        await driven
        step = await house.authority.step("r1", "pay")
        assert not isinstance(step, Refused) and step.state == "committed"
        assert (await house.state())[0] == "claimable"

    with_house(app, story)
    assert trace[0] == "settled" and trace[-1] == "released" and "must not run" not in trace


def test_a_stop_ends_an_agent_that_waits_for_something_else() -> None:
    app = tf.App()
    started: list[asyncio.Event] = []

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        started[0].set()
        await asyncio.Event().wait()

    async def story(house: House) -> None:
        started.append(asyncio.Event())
        await house.create("agent")
        running = worker(house)
        driven = asyncio.create_task(running.run())
        await started[0].wait()
        running.stop()
        await driven
        assert (await house.state())[0] == "claimable"

    with_house(app, story)


def test_a_failing_run_is_settled_without_its_agent_and_then_ends() -> None:
    app, sent = tf.App(), []

    @app.tool(key_ttl="24h")
    def charge(key: str) -> str:
        sent.append(key)
        if len(sent) == 1:
            raise RuntimeError("lost answer")
        return "paid"

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        raise AssertionError("no agent code for a failing run")

    async def story(house: House) -> None:
        await house.create("agent")
        grant = await house.grant()
        right = Right(grant.run_id, grant.epoch, grant.holder)
        doubt = await house.authority.apply(right, "pay", "charge", "{}", 1_000)
        assert isinstance(doubt, Refused) and doubt.code == "in_doubt"
        await house.authority.fail(right, "no such order")
        await house.authority.release(right, "done", "")
        assert await house.drive() == "failed"
        assert (await house.state())[0] == "failed"
        step = await house.authority.step("r1", "pay")
        assert not isinstance(step, Refused) and step.state == "committed"

    with_house(app, story)
    assert sent[0] == sent[1]


def test_fail_settles_what_is_open_first() -> None:
    app, sent = tf.App(), []

    @app.tool(key_ttl="24h")
    def charge(key: str) -> str:
        sent.append(key)
        if len(sent) == 1:
            raise RuntimeError("lost answer")
        return "paid"

    house_of: list[House] = []

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        token = house_of[0].leases.believed()[0].token
        await house_of[0].seam.apply(token, "pay", "charge", "{}", 1_000)
        raise tf.Fail("no such order")

    async def story(house: House) -> None:
        house_of.append(house)
        await house.create("agent")
        assert await house.drive() == "failed"
        assert await house.state() == ("failed", '"no such order"')

    with_house(app, story)
    assert len(sent) == 2


def test_a_held_step_ends_the_pass_and_the_lease_is_given_back() -> None:
    app, after = tf.App(), []

    @app.tool
    def send_mail() -> None:
        raise RuntimeError("no key, so nobody can tell")

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        try:
            await run.tool("mail", "send_mail")
        except Exception:
            after.append("swallowed")

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "held"
        info = await house.authority.run("r1")
        assert not isinstance(info, Refused) and (info.state, info.held) == ("held", ("mail",))

    with_house(app, story)
    assert after == []


def test_finish_drives_one_run_through_its_passes() -> None:
    app, passes = tf.App(), []

    @app.agent
    async def agent(run: tf.Run, _: None) -> int:
        passes.append(1)
        await run.step(f"s{len(passes)}", int)
        if len(passes) < 3:
            raise RuntimeError("again")
        return len(passes)

    async def story(house: House) -> None:
        await house.create("agent")
        house.seam.before["grant"] = lambda: house.clock.advance(61_000)
        assert await worker(house).finish("r1") == "completed"
        with pytest.raises(tf.Error, match="run_ended"):
            await worker(house).finish("r1")
        house.seam.is_silent = True
        with pytest.raises(tf.Unavailable, match="start the authority"):
            await worker(house).finish("r1")

    with_house(app, story)


def test_an_authority_that_is_away_is_asked_again_under_the_same_request() -> None:
    app = tf.App()

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        running[0].stop()

    running: list[tf.Worker] = []

    async def story(house: House) -> None:
        await house.create("agent")
        house.seam.is_silent = True
        house.seam.before["claim"] = lambda: setattr(house.seam, "is_silent", len(house.seam.verbs("claim")) < 3)
        running.append(worker(house))
        await running[0].run()
        first = house.seam.verbs("claim")[:3]
        assert len(first) == 3 and len(set(first)) == 1
        assert (await house.state())[0] in ("completed", "claimable")

    with_house(app, story)


@pytest.mark.parametrize("settings", [{"lease_ms": 10}, {"lease_ms": 10**9}, {"max_runs": 0}])
def test_settings_out_of_range_are_misuse(settings: dict[str, int]) -> None:
    async def story(house: House) -> None:
        with pytest.raises(tf.Misuse, match="out of range"):
            worker(house, **settings)
        with pytest.raises(tf.Misuse, match="no agents"):
            await worker(house).run()

    with_house(tf.App(), story)


def test_the_points_are_reported_with_run_step_epoch_and_holder() -> None:
    app, points = tf.App(), []

    @app.tool(key_ttl="24h", undo={"tool": "charge"})
    def charge(key: str) -> None:
        return

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        await run.tool("pay", charge)
        await run.checkpoint(1)

    async def hook(point: str, facts: Any) -> None:
        points.append((point, facts["run"], facts["step"], facts["holder"]))
        assert facts["epoch"] > 0

    async def story(house: House) -> None:
        await house.create("agent")
        await house.drive(hook=hook)

    with_house(app, story)
    assert points == [
        ("sdk.before_apply", "r1", "pay", "w1"),
        ("sdk.after_apply", "r1", "pay", "w1"),
        ("sdk.before_checkpoint", "r1", "", "w1"),
        ("sdk.after_checkpoint", "r1", "", "w1"),
    ]
