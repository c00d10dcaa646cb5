"""The bench strikes where it is told to, in virtual time, and tells what came of it."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from tests.testing import shop

import tidefast as tf
from tidefast.services.tools import ConfigError
from tidefast.testing import Bench, Fault, Faults, ManualClock, Provider, Result, Stuck, Unlawful

TICKET = {"order": "o-7"}
VIRTUAL_S = 3.0  # of the bench's clock: nobody waits


def kinds(result: Result) -> list[str]:
    return [event.kind for event in result.events]


def test_a_run_without_faults_says_what_it_did() -> None:
    bank = Provider()
    result = Bench(shop.good(bank), provider=bank).run("buy", TICKET).assert_completed()
    assert (result.result, result.effects, result.passes) == ("charge-1", {"pay": 1}, 1)
    assert bank.count("pay") == 1 and bank.calls["charge"] == 1


def test_a_killed_worker_is_replaced_after_its_lease() -> None:
    bank, clock = Provider(), ManualClock()
    began = clock.ms
    bench = Bench(shop.good(bank), provider=bank, clock=clock)
    result = bench.run("buy", TICKET, faults=Faults().kill_worker("pay", "sdk.after_apply")).assert_completed()
    assert result.passes == 2 and "lease_lapsed" in kinds(result) and bank.calls["charge"] == 1
    assert clock.ms - began >= bench.lease_ms


def test_a_killed_worker_takes_no_further_step() -> None:
    went_on: list[int] = []
    app = shop.good(bank := Provider())

    @app.agent
    async def after(run: tf.Run, ticket: Mapping[str, Any]) -> str:
        async def beside() -> None:
            await asyncio.sleep(VIRTUAL_S)
            went_on.append(run.epoch)

        task = asyncio.create_task(beside())
        await run.tool("pay", "charge", order=ticket["order"])
        await task
        return "done"

    result = Bench(app, provider=bank).run("after", TICKET, faults=Faults().kill_worker("pay", "gateway.after_send"))
    assert result.assert_completed().passes == 2 and went_on == [2]


def test_a_frozen_worker_wakes_up_stale_and_changes_nothing() -> None:
    bank, heard = Provider(), list[str]()
    app = shop.good(bank)

    @app.agent
    async def slow(run: tf.Run, ticket: Mapping[str, Any]) -> str:
        try:
            await run.tool("pay", "charge", order=ticket["order"])
        except tf.Preempted as lost:
            heard.append(lost.run_id)
            raise
        return str(run.epoch)

    result = Bench(app, provider=bank).run("slow", TICKET, faults=Faults().freeze_worker("pay", "sdk.before_apply"))
    assert result.assert_completed().result == "2" and result.effects == {"pay": 1} and heard == ["run-1"]


def test_a_late_answer_is_joined_by_the_next_holder() -> None:
    bank = Provider()
    result = Bench(shop.good(bank), provider=bank).run("buy", TICKET, faults=Faults().late_answer("pay"))
    assert result.assert_completed().effects == {"pay": 1} and bank.calls["charge"] == 1
    assert "step_applied" in kinds(result) and "lease_preempted" in kinds(result)


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_killed_authority_starts_again_over_its_store(store: Any) -> None:
    bank = Provider()
    faults = Faults().kill_authority("pay", "gateway.after_send")
    result = Bench(shop.good(bank), provider=bank, store=store).run("buy", TICKET, faults=faults).assert_completed()
    assert bank.calls["charge"] == 2 and result.effects == {"pay": 1} and "step_doubted" in kinds(result)


def test_several_faults_strike_one_run() -> None:
    bank = Provider()
    faults = Faults().commit_and_hang("pay").kill_worker("pay", "gateway.after_intent", nth=2)
    faults = faults.kill_authority("checkpoint 1", "sdk.before_checkpoint")
    result = Bench(shop.good(bank), provider=bank).run("buy", TICKET, faults=faults).assert_completed()
    assert len(result.struck) == 3 and result.effects == {"pay": 1}


def test_a_refusal_fails_the_run_as_the_agent_says() -> None:
    bank = Provider()
    bank.next("charge", "decline")
    result = Bench(shop.good(bank), provider=bank).run("decline", TICKET).assert_lawful()
    assert (result.state, result.effects) == ("failed", {}) and "no money" in result.error
    with pytest.raises(Unlawful, match="is failed, not completed"):
        result.assert_completed()


def test_a_forgotten_key_is_told_by_the_count() -> None:
    bank = Provider()

    class Forgetful(Provider):
        def call(self, call: str, /, *, key: str = "", **args: Any) -> Any:
            self.forget()
            return super().call(call, key=key, **args)

    bank = Forgetful()
    result = Bench(shop.good(bank), provider=bank).run("buy", TICKET, faults=Faults().commit_and_fail("pay"))
    with pytest.raises(Unlawful, match="double_apply"):
        result.assert_lawful()


def test_what_is_held_says_why() -> None:
    bank = Provider()
    bank.next("mail", "commit_and_hang")
    result = Bench(shop.good(bank), provider=bank).run("tell", "anna").assert_lawful()
    assert result.state == "held" and list(result.held) == ["tell"]
    assert "held: step tell" in result.story()


def test_a_sync_tool_that_hangs_costs_no_real_time() -> None:
    bank = Provider()
    bank.next("charge", "hang", "hang")
    clock = ManualClock()
    began = clock.ms
    result = Bench(shop.good(bank), provider=bank, clock=clock).run("buy", TICKET).assert_completed()
    assert clock.ms - began >= 60_000 and bank.calls["charge"] == 3 and result.effects == {"pay": 1}


def test_a_tool_that_blocks_its_thread_counts_as_hanging_after_a_while() -> None:
    app, gate = tf.App(), threading.Event()

    @app.tool
    def blocks() -> None:
        gate.wait()

    @app.agent
    async def waits(run: tf.Run, _: object) -> None:
        await run.tool("block", "blocks")

    try:
        result = Bench(app, patience_s=0.05).run("waits")
    finally:
        gate.set()
    assert result.state == "held"


def test_an_agent_that_waits_for_nothing_is_told_so() -> None:
    app = tf.App()

    @app.agent
    async def waits(run: tf.Run, _: object) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match="did not come to rest"):
        Bench(app).run("waits")


def test_the_log_is_the_same_every_time() -> None:
    logs = []
    for _ in range(2):
        bank = Provider()
        faults = Faults().freeze_worker("pay", "gateway.after_send")
        result = Bench(shop.good(bank), provider=bank).run("buy", TICKET, faults=faults)
        logs.append([(event.seq, event.at_ms, event.kind, event.epoch, event.step_id) for event in result.events])
    assert logs[0] == logs[1]


def test_an_agent_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no agent gone; it has buy"):
        Bench(shop.good(Provider())).run("gone")


def test_a_contract_with_faults_is_refused_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"tools\.a\.kind"):
        Bench(tf.App(), tools={"a": {"kind": "pigeon"}})


@pytest.mark.parametrize(
    "fault",
    [
        Fault("preempt", "pay"),
        Fault("commit_and_hang", "pay", "sdk.after_apply"),
        Fault("kill_worker", "pay", "sdk.nowhere"),  # type: ignore[arg-type]
        Fault("late_answer", "pay", "sdk.after_apply"),
        Fault("kill_worker", "pay", "sdk.after_apply", 0),
        Fault("meteor", "pay", "sdk.after_apply"),  # type: ignore[arg-type]
    ],
)
def test_a_fault_that_can_not_strike_is_refused(fault: Fault) -> None:
    with pytest.raises(ValueError):
        Faults(fault)
    with pytest.raises(ValueError):
        Provider().next("charge", "explode")  # type: ignore[arg-type]
