"""Limits of tools: counted before anything is sent, once a step, and given back by what was finally refused."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.services.test_prober import RUN, House, contract_of

from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.budget import Budget
from tidefast.protocol.canonical import canonical
from tidefast.protocol.ids import RunId
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Refused
from tidefast.services.python_runner import LocalRunner, NotSentByTool, RefusedByTool

Story = Callable[[House, Right, list[str]], Awaitable[None]]


def shop(limits: dict[str, Any], story: Story) -> None:
    """A house with one tool, `send`, under these limits; the text says what becomes of a call."""
    sent: list[str] = []

    async def send(to: str, text: str, cents: int = 0) -> None:
        sent.append(to)
        if text == "refuse":
            raise RefusedByTool("no")
        if text == "cut":
            raise OSError("the line was cut")
        if text == "later":
            raise NotSentByTool("nothing has left")

    async def run() -> None:
        house = House("http://127.0.0.1:1")
        house.contracts = [contract_of("send", {"kind": "python", "limits": limits})]
        house.open(python=LocalRunner(house.clock, {"send": send}, frozenset()))
        await house.authority.create_run(RUN, "agent", "1", "{}")
        await story(house, await house.take(), sent)
        await house.stop()

    asyncio.run(run())


async def told(house: House, right: Right, step: str, text: str = "hello", **args: Any) -> str:
    """What a call came to: a state, or code and reason of the refusal with the budget that was full."""
    call = {"to": "anna", "text": text, **args}
    answer = await house.authority.apply(right, step, "send", canonical(call), 0)
    if isinstance(answer, StepAnswer):
        return answer.state
    return f"{answer.code} {answer.reason} {answer.facts.get('budget', '')}".strip()


def test_what_a_run_may_do_is_counted_by_steps_and_a_refused_step_gives_its_place_back() -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        assert await told(house, right, "a", "refuse") == "step_rejected refused"
        assert await told(house, right, "b") == "committed"
        assert await told(house, right, "b") == "committed", "asked again, it takes no second place"
        assert await told(house, right, "c") == "committed"
        assert await told(house, right, "d") == "limit_reached tool tool/r/send"
        assert sent == ["anna"] * 3 and house.engine.step(RUN, "d") is None  # type: ignore[arg-type]

    shop({"per_run": 2}, story)


def test_one_mail_per_person_and_run() -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        assert await told(house, right, "a", to="anna") == "committed"
        assert (await told(house, right, "b", to="anna")).startswith("limit_reached tool tool/r/send/")
        assert await told(house, right, "c", to="bert") == "committed"

    shop({"per_run": 1, "by": "args.to"}, story)


def test_a_doubt_keeps_its_place_and_another_run_has_places_of_its_own() -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        assert (await told(house, right, "a", "cut")).startswith("in_doubt")
        assert (await told(house, right, "b")).startswith("limit_reached")
        await house.authority.create_run("r2", "agent", "1", "{}")
        grant = await house.authority.grant("r2", "w", 600_000, "")
        other = Right(RunId("r2"), grant.epoch, "w")  # type: ignore[union-attr]
        assert await told(house, other, "a") == "committed"

    shop({"per_run": 1}, story)


def test_what_may_be_spent_is_added_up_before_it_is_sent() -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        assert await told(house, right, "a", cents=300) == "committed"
        assert (await told(house, right, "b", cents=201)).startswith("limit_reached")
        assert await told(house, right, "c", cents=200) == "committed"
        assert await told(house, right, "d", cents="7") == "invalid args"
        assert await told(house, right, "e", cents=-1) == "invalid args"
        day = house.engine.budget(f"day/{house.clock.ms // 86_400_000}/send")
        assert (day.spent.calls, day.spent.micros, day.open) == (2, 500_000_000, ())
        house.clock.advance(86_400_000)
        assert await told(house, await house.take(), "f", cents=500) == "committed"

    shop({"spend": "args.cents", "spend_per_day": 500}, story)


def test_many_at_once_are_let_in_one_by_one() -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        answers = await asyncio.gather(*(told(house, right, f"s{n}", cents=2) for n in range(4)))
        assert sorted(answers) == ["committed", "committed", *["limit_reached tool tool/r/send"] * 2]

    shop({"spend": "args.cents", "spend_per_run": 5}, story)


def test_a_minute_that_is_full_is_waited_for_and_slides() -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        assert [await told(house, right, step) for step in ("a", "b", "c")][1:] == ["committed", "step_pending limit"]
        house.clock.advance(59_999)
        assert await told(house, right, "c") == "step_pending limit"
        house.clock.advance(1)
        assert await told(house, right, "c") == "committed"

    shop({"per_minute": 2}, story)


def test_what_never_left_keeps_its_place_for_the_next_attempt_and_takes_no_other() -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        assert (await told(house, right, "a", "later")).startswith("step_pending not_sent")
        assert (await told(house, right, "a", "later")).startswith("step_pending not_sent")
        assert len(house.engine.budget("tool/r/send").open) == 1

    shop({"per_run": 1}, story)


def test_a_caller_that_is_stale_hears_that_and_no_place_is_taken() -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        await house.take()
        assert (await told(house, right, "a")).startswith("stale_epoch")
        assert house.engine.budget("tool/r/send").committed == Budget("").committed
        assert (await told(house, right, "b")).startswith("stale_epoch")

    shop({"per_run": 1}, story)


def test_a_stored_call_takes_no_place() -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        answer = await house.authority.apply(right, "a", "send", None, 0)
        assert isinstance(answer, Refused) and answer.code == "not_found"

    shop({"per_run": 1}, story)


@pytest.mark.parametrize("limits", [{"per_run": 1, "by": "args.nobody"}])
def test_a_limit_needs_the_argument_that_it_counts_by(limits: dict[str, Any]) -> None:
    async def story(house: House, right: Right, sent: list[str]) -> None:
        assert await told(house, right, "a") == "invalid args" and not sent

    shop(limits, story)
