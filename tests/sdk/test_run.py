"""What an agent sees of its run: answers from the journal, drift, checkpoints, branches, misuse."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.sdk.house import House, with_house

import tidefast as tf


class Shop:
    """An app whose tools count, fail and wait as a test wants."""

    def __init__(self, **options: Any) -> None:
        self.app = tf.App(**options)
        self.sent: list[tuple[str, Any]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.arrived: asyncio.Event | None = None
        self.faults: list[Exception] = []

        @self.app.tool(key_ttl="24h", undo={"tool": "give_back", "args": {"charge": "{receipt.body.id}"}})
        async def charge(order: str, key: str, cents: float = 0) -> dict[str, Any]:
            self.sent.append(("charge", order))
            if self.arrived is not None:
                self.arrived.set()
            if order in self.gates:
                await self.gates[order].wait()
            if self.faults:
                raise self.faults.pop(0)
            return {"id": f"ch-{order}"}

        @self.app.tool(key_ttl="24h")
        def give_back(charge: str, key: str) -> str:
            self.sent.append(("give_back", charge))
            return "done"

    def agent(self, function: Any) -> Any:
        return self.app.agent(name="agent", dropped=())(function)


def test_finished_steps_answer_from_the_journal_and_nothing_is_asked() -> None:
    shop, computed, passes = Shop(), [], []

    @shop.agent
    async def agent(run: tf.Run, order: str) -> Any:
        paid = await run.tool("pay", "charge", order=order, cents=12.5)
        note = await run.step("note", lambda: computed.append(1) or ("a", 1))
        passes.append((paid, note))
        if len(passes) == 1:
            raise RuntimeError("dies before the end")
        return paid["id"]

    async def story(house: House) -> None:
        await house.create("agent", "o1")
        assert await house.drive() == "error"
        house.seam.calls.clear()
        assert await house.drive() == "completed"
        assert [verb for verb, _ in house.seam.calls] == ["grant", "complete"]
        assert await house.state() == ("completed", '"ch-o1"')

    with_house(shop.app, story)
    assert passes == [({"id": "ch-o1"}, ["a", 1])] * 2
    assert (shop.sent, computed) == ([("charge", "o1")], [1])


def test_pages_of_the_journal_are_fetched_once_a_step_is_not_at_hand() -> None:
    shop, seen = Shop(), []

    @shop.agent
    async def agent(run: tf.Run, count: int) -> int:
        for place in range(count):
            await run.step(f"s{place}", int)
        seen.append(count)
        if len(seen) == 1:
            raise RuntimeError("again")
        return await run.step("last", lambda: 7)

    async def story(house: House) -> None:
        await house.create("agent", 7)
        await house.drive()
        house.seam.page = 3
        house.seam.calls.clear()
        assert await house.drive() == "completed"
        assert len(house.seam.verbs("journal")) == 2
        assert house.seam.verbs("save_result") == ["last"]

    with_house(shop.app, story)


@pytest.mark.parametrize(
    ("on_drift", "outcome", "state"), [("freeze", "drift", "frozen"), ("stored", "completed", "completed")]
)
@pytest.mark.parametrize("where", ["journal", "books"])
def test_another_call_under_a_stored_id_is_drift(on_drift: Any, outcome: str, state: str, where: str) -> None:
    shop, orders, told = Shop(on_drift=on_drift), iter(["o1", "o2"]), []

    @shop.agent
    async def agent(run: tf.Run, _: None) -> Any:
        order = next(orders)
        answer = await run.tool("pay", "charge", order=order)
        told.append(answer)
        if order == "o1":
            raise RuntimeError("again")
        return answer["id"]

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "error"
        grant = await house.grant()
        if where == "books":  # the worker's journal lacks the step, the authority's books don't
            grant = replace(grant, journal=())
        assert await house.begin(grant).drive() == outcome
        assert (await house.state())[0] == state

    with_house(shop.app, story)
    assert shop.sent == [("charge", "o1")]
    assert told == [{"id": "ch-o1"}] * (2 if on_drift == "stored" else 1)


def test_a_local_step_is_not_answered_with_a_tools_receipt() -> None:
    shop, passes = Shop(on_drift="stored"), []

    @shop.agent
    async def agent(run: tf.Run, _: None) -> None:
        passes.append(1)
        if len(passes) == 1:
            await run.tool("a", "charge", order="o1")
            raise RuntimeError("again")
        await run.step("a", int)

    async def story(house: House) -> None:
        await house.create("agent")
        await house.drive()
        assert await house.drive() == "drift"

    with_house(shop.app, story)


def test_a_refusal_is_an_exception_with_its_receipt_now_and_from_the_journal() -> None:
    shop, seen = Shop(), []
    shop.faults = [tf.Refused("card declined")]

    @shop.agent
    async def agent(run: tf.Run, _: None) -> str:
        try:
            await run.tool("pay", "charge", order="o1")
        except tf.Rejected as rejected:
            seen.append((rejected.step_id, rejected.body))
        if len(seen) == 1:
            raise RuntimeError("again")
        return "refused"

    async def story(house: House) -> None:
        await house.create("agent")
        await house.drive()
        assert await house.drive() == "completed"

    with_house(shop.app, story)
    assert seen == [("pay", {"refused": "card declined"})] * 2
    assert len(shop.sent) == 1


def test_doubt_and_not_sent_are_waited_out_under_one_key() -> None:
    shop = Shop()
    shop.faults = [RuntimeError("lost answer"), tf.NotSent("no route")]

    @shop.agent
    async def agent(run: tf.Run, _: None) -> str:
        return str((await run.tool("pay", "charge", order="o1"))["id"])

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "completed"

    with_house(shop.app, story)
    assert len(shop.sent) == 3


def test_an_undo_is_a_step_that_later_passes_find_done() -> None:
    shop, answers = Shop(), []

    @shop.agent
    async def agent(run: tf.Run, _: None) -> None:
        await run.tool("pay", "charge", order="o1")
        answers.append(await run.compensate("pay"))
        if len(answers) == 1:
            raise RuntimeError("again")

    async def story(house: House) -> None:
        await house.create("agent")
        await house.drive()
        assert await house.drive() == "completed"

    with_house(shop.app, story)
    assert answers == ["done", "done"]
    assert shop.sent == [("charge", "o1"), ("give_back", "ch-o1")]


# --- checkpoints ----------------------------------------------------------------------------------------


def test_a_pass_from_the_top_sends_only_the_checkpoints_that_are_not_stored() -> None:
    shop, passes = Shop(), []

    @shop.agent
    async def agent(run: tf.Run, _: None) -> None:
        passes.append(1)
        for number in range(len(passes) + 1):
            await run.checkpoint({"at": number})
        if len(passes) == 1:
            raise RuntimeError("again")

    async def story(house: House) -> None:
        await house.create("agent")
        await house.drive()
        assert house.seam.verbs("checkpoint") == ["1", "2"]
        await house.drive()
        assert house.seam.verbs("checkpoint") == ["1", "2", "3"]

    with_house(shop.app, story)


def test_a_pass_that_reads_its_state_goes_on_from_the_stored_number() -> None:
    shop, states = Shop(), []

    @shop.agent
    async def agent(run: tf.Run, _: None) -> None:
        states.append(run.state)
        await run.checkpoint({"round": len(states)})
        assert run.state == {"round": len(states)}
        await run.checkpoint({"round": len(states), "more": True})
        if len(states) == 1:
            raise RuntimeError("again")

    async def story(house: House) -> None:
        await house.create("agent")
        await house.drive()
        await house.drive()
        assert house.seam.verbs("checkpoint") == ["1", "2", "3", "4"]

    with_house(shop.app, story)
    assert states == [None, {"round": 1, "more": True}]


def test_a_checkpoint_waits_for_the_effects_of_parallel_branches() -> None:
    shop = Shop()

    @shop.agent
    async def agent(run: tf.Run, _: None) -> list[Any]:
        gate, shop.arrived = asyncio.Event(), asyncio.Event()
        shop.gates["o1"] = gate
        paying = asyncio.create_task(run.tool("pay", "charge", order="o1"))
        await shop.arrived.wait()
        saving = asyncio.create_task(run.checkpoint({"paid": True}))
        await asyncio.wait((saving,), timeout=0)
        await run.step("mark", lambda: None)  # a round trip later it still waits
        assert not saving.done()
        gate.set()
        await saving
        return [paying.done(), (await paying)["id"]]

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "completed"
        assert await house.state() == ("completed", '[true,"ch-o1"]')

    with_house(shop.app, story)


def test_parallel_branches_of_one_run_all_commit() -> None:
    shop = Shop()

    @shop.agent
    async def agent(run: tf.Run, _: None) -> list[str]:
        orders = [f"o{place}" for place in range(8)]
        paid = await asyncio.gather(*(run.tool(f"pay-{order}", "charge", order=order) for order in orders))
        return [each["id"] for each in paid]

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "completed"

    with_house(shop.app, story)
    assert len(shop.sent) == 8


def test_a_checkpoint_first_settles_what_an_earlier_pass_left_in_doubt() -> None:
    shop, passes = Shop(), []

    @shop.agent
    async def agent(run: tf.Run, _: None) -> None:
        passes.append(1)
        if len(passes) == 1:
            shop.gates["o1"], shop.arrived = asyncio.Event(), asyncio.Event()
            paying = asyncio.create_task(run.tool("pay", "charge", order="o1"))
            await shop.arrived.wait()
            paying.cancel()  # the agent hangs up; the effect goes on and its answer is lost
            shop.faults = [RuntimeError("lost answer")]
            shop.gates.pop("o1").set()
            await asyncio.wait((paying,))
            raise RuntimeError("again")
        await run.checkpoint("after")
        await run.tool("pay", "charge", order="o1")

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "error"
        await house.authority.gateway.drain()
        assert await house.drive() == "completed"
        assert house.seam.calls[-5:-1] == [
            ("checkpoint", "1"),
            ("apply", "pay"),
            ("checkpoint", "1"),
            ("apply", "pay"),
        ]

    with_house(shop.app, story)
    assert len(shop.sent) == 2


# --- the end of a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [(), ("pay",)])
def test_a_run_does_not_complete_over_a_step_that_its_code_forgot(dropped: tuple[str, ...]) -> None:
    shop, passes = Shop(), []

    @shop.app.agent(name="agent", dropped=dropped)
    async def agent(run: tf.Run, _: None) -> None:
        passes.append(1)
        if len(passes) == 1:
            await run.tool("pay", "charge", order="o1")
            raise RuntimeError("a deploy renames the step")

    async def story(house: House) -> None:
        await house.create("agent")
        await house.drive()
        assert await house.drive() == ("completed" if dropped else "error")
        events = await house.authority.events("r1", 0, 100)
        told = "".join(event.data_json for event in events)  # type: ignore[union-attr]
        assert ("dropped=['pay']" in told) is not bool(dropped)

    with_house(shop.app, story)


def test_fail_ends_the_run_also_from_inside_a_task_group() -> None:
    shop = Shop()

    @shop.agent
    async def agent(run: tf.Run, _: None) -> None:
        async def branch() -> None:
            raise tf.Fail("no such order")

        async with asyncio.TaskGroup() as group:
            group.create_task(branch())

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "failed"
        assert await house.state() == ("failed", '"no such order"')

    with_house(shop.app, story)


def test_a_branch_that_the_agent_left_behind_can_do_nothing_after_its_return() -> None:
    shop, left = Shop(), []

    @shop.agent
    async def agent(run: tf.Run, _: None) -> None:
        async def late() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await run.tool("pay", "charge", order="o1")

        left.append(asyncio.create_task(late()))

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "completed"
        (raised,) = await asyncio.gather(*left, return_exceptions=True)
        assert type(raised).__name__ == "PassEnded"

    with_house(shop.app, story)
    assert shop.sent == []


# --- misuse ---------------------------------------------------------------------------------------------


async def _twice(run: tf.Run) -> None:
    await run.step("a", int)
    await run.step("a", int)


async def _undo_twice(run: tf.Run) -> None:
    await run.tool("a", "charge", order="o1")
    await run.compensate("a")
    await run.compensate("a")


MISUSES: list[tuple[Any, str]] = [
    (_twice, "asked for twice"),
    (_undo_twice, "asked for twice"),
    (lambda run: run.step("a b", int), "can't be the id"),
    (lambda run: run.step("a~undo", int), "can't be the id"),
    (lambda run: run.compensate("a~b"), "can't be the id"),
    (lambda run: run.tool("a", "charge", order={1, 2}), "not JSON"),
    (lambda run: run.tool("a", "charge", order=float("nan")), "not JSON"),
    (lambda run: run.tool("a", "charge", order=2**60), "not JSON"),
    (lambda run: run.step("a", object), "not JSON"),
    (lambda run: run.checkpoint(object()), "not JSON"),
    (lambda run: run.tool("a", "no_such_tool"), "not_found"),
    (lambda run: run.tool("a", "charge", ordr="o1"), "missing a required argument: 'order'. call it as charge"),
    (lambda run: run.tool("a", "charge", order="o1", sents=1), "unexpected keyword argument 'sents'"),
    (lambda run: run.tool("a", "charge", order="o1", key="mine"), "unexpected keyword argument 'key'"),
    (lambda run: run.compensate("never"), "nothing_to_compensate"),
]


@pytest.mark.parametrize(("misuse", "said"), MISUSES)
def test_misuse_is_said_and_sends_nothing(misuse: Any, said: str) -> None:
    shop, raised = Shop(), []

    @shop.agent
    async def agent(run: tf.Run, _: None) -> None:
        with pytest.raises(tf.Misuse, match=said) as caught:
            await misuse(run)
        raised.append(caught.value)
        raise caught.value

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "error"
        assert (await house.state())[0] == "claimable"

    with_house(shop.app, story)
    assert raised[0].what and raised[0].why


def test_a_local_step_whose_function_raised_can_be_tried_again_in_the_same_pass() -> None:
    shop, faults = Shop(), [ValueError("once"), TimeoutError()]

    async def flaky() -> Any:
        if len(faults) == 2:
            raise faults.pop()
        return faults.pop() if faults else 7  # an exception is no JSON value

    @shop.agent
    async def agent(run: tf.Run, _: None) -> int:
        for error in (TimeoutError, tf.Misuse):
            with pytest.raises(error):
                await run.step("x", flaky)
        got = await run.step("x", flaky)
        with pytest.raises(tf.Misuse, match="asked for twice"):
            await run.step("x", flaky)
        return int(got)

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "completed"
        assert house.seam.verbs("save_result") == ["x"]
        assert await house.state() == ("completed", "7")

    with_house(shop.app, story)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_call_that_does_not_fit_its_function_leaves_no_trace_and_its_id_free(is_named: bool) -> None:
    shop, noted = Shop(), []

    @shop.app.tool
    def note(text: str) -> str:
        noted.append(text)
        return text

    @shop.agent
    async def agent(run: tf.Run, _: None) -> str:
        with pytest.raises(tf.Misuse, match="missing a required argument: 'text'"):
            await run.tool("n", "note" if is_named else note, txet="hello")
        return str(await run.tool("n", note, text="hello"))

    async def story(house: House) -> None:
        await house.create("agent")
        assert await house.drive() == "completed"
        assert house.seam.verbs("apply") == ["n"]

    with_house(shop.app, story)
    assert noted == ["hello"]


def test_a_result_that_is_no_json_and_an_input_that_does_not_fit_release_the_lease() -> None:
    shop = Shop()

    @shop.app.agent
    async def returns_a_set(run: tf.Run, _: None) -> Any:
        return {1}

    @shop.app.agent
    async def wants_a_number(run: tf.Run, number: int) -> int:
        return number

    async def story(house: House) -> None:
        for agent in ("returns_a_set", "wants_a_number", "nobody"):
            await house.create(agent, "text", run_id=agent)
            assert await house.drive(agent) == "error"
            assert (await house.state(agent))[0] == "claimable"

    with_house(shop.app, story)


def test_thousands_of_finished_steps_are_passed_without_a_call() -> None:
    shop, passes = Shop(), []

    @shop.agent
    async def agent(run: tf.Run, _: None) -> int:
        passes.append(1)
        for place in range(2_000):
            await run.step(f"s{place}", int)
        if len(passes) == 1:
            raise RuntimeError("again")
        return place

    async def story(house: House) -> None:
        await house.create("agent")
        await house.drive()
        house.seam.calls.clear()
        assert await house.drive() == "completed"
        assert len(house.seam.calls) == 2

    with_house(shop.app, story)
