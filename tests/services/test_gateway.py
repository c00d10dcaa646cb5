"""The gateway finishes what it began, answers duplicates from the books, and keeps a stale caller out."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.points import Point
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Refused
from tidefast.services import gateway
from tidefast.sim.world import LEASE_MS, TIMEOUT_MS, World
from tidefast.stores.memory import MemoryStore

RUN = RunId("run")
PAY = StepId("pay")
PATIENCE_MS = 60_000
ARGS = '{"cents":500}'


def in_world(test: Callable[[World, Right], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(MemoryStore())
        await world.authority.create_run(RUN, "agent", "1", "{}")
        await test(world, await take(world, "w1"))
        await world.stop()

    asyncio.run(run())


async def take(world: World, holder: str) -> Right:
    grant = await world.authority.grant(RUN, holder, LEASE_MS, "")
    assert not isinstance(grant, Refused), grant
    return Right(grant.run_id, grant.epoch, grant.holder)


async def pay(world: World, right: Right, args: str | None = ARGS, wait_ms: int = PATIENCE_MS) -> StepAnswer | Refused:
    return await world.authority.apply(right, PAY, "charge", args, wait_ms)


def told(answer: object) -> tuple[str, str]:
    assert isinstance(answer, Refused), answer
    return answer.code, answer.reason


def test_a_caller_that_is_cancelled_cancels_no_call() -> None:
    async def test(world: World, right: Right) -> None:
        arrival = world.provider.script("charge", "withhold_answer")
        asking = asyncio.create_task(pay(world, right))
        await arrival.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        world.provider.let_go()
        await world.quiet()
        answer = await pay(world, right)
        assert isinstance(answer, StepAnswer)
        assert (answer.state, answer.replayed) == ("committed", True)
        assert list(world.provider.sends.values()) == [1]

    in_world(test)


def test_a_caller_that_is_cancelled_before_the_flush_leaves_no_intent_unsent() -> None:
    async def test(world: World, right: Right) -> None:
        asking = asyncio.create_task(pay(world, right))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await world.quiet()
        step = world.engine.step(RUN, PAY)
        assert step is None or step.state == "committed"

    in_world(test)


def test_twenty_callers_of_one_step_cause_one_effect_and_hear_one_receipt() -> None:
    async def test(world: World, right: Right) -> None:
        answers = await asyncio.gather(*(pay(world, right) for _ in range(20)))
        receipts = {answer.receipt_json for answer in answers if isinstance(answer, StepAnswer)}
        assert len(receipts) == 1
        assert list(world.provider.sends.values()) == [1]

    in_world(test)


def test_a_caller_without_patience_hears_that_the_step_is_in_flight() -> None:
    async def test(world: World, right: Right) -> None:
        world.provider.script("charge", "withhold_answer")
        assert told(await pay(world, right, wait_ms=0))[0] == "step_in_flight"
        world.provider.let_go()
        await world.quiet()

    in_world(test)


def test_other_arguments_are_refused_and_nothing_is_sent() -> None:
    async def test(world: World, right: Right) -> None:
        await pay(world, right)
        assert told(await pay(world, right, '{"cents":700}')) == ("step_conflict", "other_call")
        assert list(world.provider.sends.values()) == [1]

    in_world(test)


def test_a_caller_whose_words_differ_can_ask_for_the_stored_call() -> None:
    async def test(world: World, right: Right) -> None:
        first = await pay(world, right)
        again = await pay(world, right, None)
        assert isinstance(first, StepAnswer)
        assert isinstance(again, StepAnswer)
        assert again.receipt_json == first.receipt_json

    in_world(test)


def test_a_receipt_that_comes_after_the_takeover_is_joined_by_the_successor_and_not_by_its_own_epoch() -> None:
    async def test(world: World, right: Right) -> None:
        arrival = world.provider.script("charge", "withhold_answer")
        asking = asyncio.create_task(pay(world, right))
        await arrival.wait()
        await world.authority.preempt(RUN, "operator", "", None)
        successor = await take(world, "w2")
        world.provider.let_go()
        assert told(await asking)[0] == "stale_epoch"
        answer = await pay(world, successor)
        assert isinstance(answer, StepAnswer)
        assert (answer.state, answer.epoch, answer.replayed) == ("committed", successor.epoch, True)
        assert list(world.provider.sends.values()) == [1]

    in_world(test)


def test_a_doubt_about_a_provider_without_keys_is_held_and_another_step_waits() -> None:
    async def test(world: World, right: Right) -> None:
        arrival = world.provider.script("mail", "withhold_answer")
        asking = asyncio.create_task(world.authority.apply(right, "mail", "mail", "{}", PATIENCE_MS))
        await arrival.wait()
        await world.restart()
        await world.authority.preempt(RUN, "operator", "", None)
        successor = await take(world, "w2")
        assert told(await world.authority.apply(successor, "mail", "mail", "{}", PATIENCE_MS))[0] == "step_held"
        assert told(await pay(world, successor))[0] == "step_held"
        world.provider.let_go()
        await asyncio.gather(asking, return_exceptions=True)
        assert list(world.provider.sends.values()) == [1]

    in_world(test)


def test_a_stale_caller_with_a_broken_body_hears_that_it_is_stale() -> None:
    async def test(world: World, right: Right) -> None:
        await world.authority.preempt(RUN, "operator", "", None)
        assert told(await world.authority.compensate(right, "nothing", 0))[0] == "stale_epoch"
        assert told(await world.authority.apply(right, "x", "no such tool", "{}", 0))[0] == "stale_epoch"

    in_world(test)


def test_a_tool_without_a_contract_and_an_undo_of_nothing_are_refused() -> None:
    async def test(world: World, right: Right) -> None:
        assert told(await world.authority.apply(right, "x", "nope", "{}", 0)) == ("not_found", "tool_unknown")
        assert told(await world.authority.compensate(right, "nope", 0)) == ("already_decided", "nothing_to_compensate")
        await world.authority.apply(right, "mail", "mail", "{}", PATIENCE_MS)
        assert told(await world.authority.compensate(right, "mail", 0)) == ("invalid", "no_undo")

    in_world(test)


def test_an_undo_takes_its_arguments_from_the_receipt_and_leaves_a_net_effect_of_none() -> None:
    async def test(world: World, right: Right) -> None:
        paid = await pay(world, right)
        assert isinstance(paid, StepAnswer)
        undone = await world.authority.compensate(right, PAY, PATIENCE_MS)
        assert isinstance(undone, StepAnswer)
        assert world.provider.net[paid.key] == 0
        again = await pay(world, right)
        assert isinstance(again, StepAnswer)
        assert (again.state, again.undo) == ("compensated", "pay~undo")

    in_world(test)


@pytest.mark.parametrize("ending", ["complete", "fail"])
def test_no_run_ends_over_an_effect_that_is_still_out(ending: str) -> None:
    async def test(world: World, right: Right) -> None:
        arrival = world.provider.script("charge", "withhold_answer")
        asking = asyncio.create_task(pay(world, right))
        await arrival.wait()
        if ending == "complete":
            answer: object = await world.authority.complete(right, '"done"', [], [])
            assert told(answer) == ("unsettled_effects", "unsettled")
        else:
            answer = await world.authority.fail(right, "no")
            assert isinstance(answer, Done)
            assert answer.state == "failing"
        world.provider.let_go()
        await asking

    in_world(test)


def test_the_points_are_reported_in_order_with_the_step_that_they_belong_to() -> None:
    seen: list[tuple[Point, str]] = []

    async def hook(point: Point, facts: Mapping[str, str | int]) -> None:
        seen.append((point, str(facts["step"])))

    async def test(world: World, right: Right) -> None:
        world.gateway._hook = hook
        await pay(world, right)
        names = ("gateway.before_intent", "gateway.after_intent", "gateway.after_send", "gateway.after_settle")
        assert seen == [(name, "pay") for name in names]

    in_world(test)


def test_a_replay_after_the_deadline_uses_the_stored_request_and_the_same_key() -> None:
    async def test(world: World, right: Right) -> None:
        arrival = world.provider.script("charge", "withhold_request")
        asking = asyncio.create_task(pay(world, right))
        await arrival.wait()
        world.clock.advance(TIMEOUT_MS + 1)
        await world.authority.preempt(RUN, "operator", "", None)
        successor = await take(world, "w2")
        answer = await pay(world, successor)
        assert isinstance(answer, StepAnswer)
        world.provider.let_go()
        await asyncio.gather(asking, return_exceptions=True)
        assert dict(world.provider.sends) == {answer.key: 2}
        assert world.provider.net[answer.key] == 1

    in_world(test)


def test_a_stopping_gateway_waits_for_providers_and_not_for_ever() -> None:
    async def test(world: World, right: Right) -> None:
        await world.gateway.drain()  # nothing is out: at once
        arrival = world.provider.script("charge", "withhold_answer")
        asking = asyncio.create_task(pay(world, right))
        await arrival.wait()
        await world.gateway.drain(0.02)
        step = await world.authority.step(RUN, PAY)
        assert not isinstance(step, Refused) and step.state == "fenced", "what is left then is doubt, by rule"
        world.provider.let_go()
        await world.gateway.drain()
        answer = await asking
        assert isinstance(answer, StepAnswer) and answer.state == "committed"

    in_world(test)


def test_a_caller_without_patience_still_hears_what_is_in_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for as long as a flush may take, and no longer for a provider."""
    monkeypatch.setattr(gateway, "PATIENCE_MIN_MS", 20)

    async def test(world: World, right: Right) -> None:
        arrival = world.provider.script("charge", "withhold_answer")
        assert told(await pay(world, right, wait_ms=0)) == ("step_in_flight", "in_flight")
        await arrival.wait()
        world.provider.let_go()
        await world.quiet()
        answer = await pay(world, right, wait_ms=0)
        assert isinstance(answer, StepAnswer) and answer.replayed
        assert told(await pay(world, right, '{"cents":501}', wait_ms=0)) == ("step_conflict", "other_call")

    in_world(test)
