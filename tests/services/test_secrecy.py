"""What a contract calls secret is shown to nobody, wherever it turns up; the stored request alone holds it."""

import asyncio
import json
from typing import Any

import pytest
from tests.services.test_prober import PAY, RUN, House, contract_of

from tidefast.protocol.verdicts import Refused
from tidefast.services.secrecy import MASK, masked
from tidefast.services.tools import Tool, ToolBook

CARD = '4242 "42"/é'
ARGS: dict[str, Any] = {"card": {"number": CARD, "cvc": 7}, "pins": ["12", 98765], "order": "o-1", "none": None}


@pytest.mark.parametrize(
    "data",
    [
        {"args": ARGS},
        {"request": {"body": json.dumps(ARGS), "url": "http://h/"}},
        {"request": {"body": "", "url": "http://h/4242%20%2242%22%2F%C3%A9"}},
        {"request": {"body": "card=4242+%2242%22%2F%C3%A9", "url": "http://h/"}},
        {"receipt": {"body": {"echo": f"charged {CARD}", "pin": 98765}}},
    ],
)
def test_a_secret_is_hidden_at_its_place_and_wherever_its_text_turns_up(data: dict[str, Any]) -> None:
    shown = masked(json.dumps(data), ["card.number", "pins", "nowhere"], ARGS)
    assert not [form for form in ("4242", "98765", "é", "%C3") if form in shown] and MASK in shown
    assert "o-1" in shown or "args" not in data


def test_a_short_secret_is_hidden_at_its_own_place_only_and_nothing_else_is_touched() -> None:
    data = {"args": ARGS, "receipt": {"n": 7, "is": True}, "attempt": 1}
    shown = json.loads(masked(json.dumps(data), ["card.cvc", "pins.0"], ARGS))
    assert shown["args"]["card"] == {"number": CARD, "cvc": MASK} and shown["args"]["pins"] == [MASK, 98765]
    assert (shown["receipt"], shown["attempt"]) == ({"n": 7, "is": True}, 1)
    assert masked('{"a":1}', ["x"], ARGS) == '{"a":1}'


def test_views_of_the_log_and_refusals_hide_it_and_the_stored_request_holds_it() -> None:
    schema = {"type": "object", "properties": {"order": {"type": "string", "maxLength": 12}}}

    async def run() -> None:
        house = House("http://127.0.0.1:1", secret=["order"], args=schema)
        house.open()
        await house.authority.create_run(RUN, "agent", "1", "{}")
        right = await house.take()
        await house.authority.apply(right, PAY, "charge", '{"order":"s3cret-card"}', 0)
        refused = await house.authority.apply(right, PAY, "charge", '{"order":"another-s3cret-card"}', 0)
        events = await house.authority.events(RUN, 0, 100)
        step = await house.authority.step(RUN, PAY)
        assert not isinstance(events, Refused) and not isinstance(step, Refused)
        assert "s3cret" not in repr((events, step, refused)) and MASK in step.intent_json
        stored = house.gateway._bodies.stored_call(RUN, house.engine.step(RUN, PAY).intent_seq)  # type: ignore[union-attr]
        assert "s3cret-card" in repr(stored)
        await house.stop()

    asyncio.run(run())


def test_a_misfit_of_a_secret_argument_is_told_by_its_place() -> None:
    schema = {"type": "object", "properties": {"order": {"type": "integer"}}}
    contract = contract_of("pay", {"kind": "python", "args": schema, "secret": ["order"]})
    tool = ToolBook([contract]).get("pay")
    assert isinstance(tool, Tool) and tool.problem_with({"order": "s3cret"}) == "/order: does not fit the schema"
