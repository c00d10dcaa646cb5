"""Probes against a real provider over a real socket: what is asked, when, with what, and what the run hears."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import web

from tidefast.engine.clock import ManualClock
from tidefast.engine.engine import Engine
from tidefast.protocol.answers import LeaseGrant, StepAnswer
from tidefast.protocol.contract_table import parse_contract
from tidefast.protocol.contracts import Contract
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Refused
from tidefast.services.authority import Authority
from tidefast.services.gateway import Gateway
from tidefast.services.http_sender import HttpSender
from tidefast.services.python_runner import LocalRunner
from tidefast.services.tools import ToolBook
from tidefast.stores.memory import MemoryStore

RUN, PAY = RunId("r"), StepId("pay")
ARGS = '{"order":"o 1"}'
PAST_LAG_MS = 40_000 + 1


class House:
    """A shop without keys: it books a charge, then answers 502; its list is what a probe reads."""

    def __init__(self, origin: str, **more: Any) -> None:
        self.clock = ManualClock()
        self.engine = Engine(MemoryStore(), self.clock, inline=True)
        self.http = HttpSender(self.clock)
        probe = {
            "url": f"{origin}/charges?order={{args.order}}",
            "found": {"data.0.order": "{args.order}"},
            "absent": {"data": "empty"},
            "many": {"data.1.id": "any"},
            "lag": "10s",
            "receipt": "data.0",
        }
        table = {"kind": "http", "url": f"{origin}/charges", "timeout": "30s", "probe": probe, "probe_tries": 2, **more}
        self.contracts = [contract_of("charge", table)]
        self.seen: list[str] = []

    def open(self, *others: Contract, python: LocalRunner | None = None) -> None:
        book = ToolBook([*self.contracts, *others])
        self.gateway = Gateway(self.engine, book, self.http, python)
        self.authority = Authority(self.engine, self.gateway)
        self.engine.start()

    async def take(self) -> Right:
        self.clock.advance(60_000)
        await self.authority.preempt(RUN, "ops", "", None)
        grant = await self.authority.grant(RUN, "w", 600_000, "")
        assert isinstance(grant, LeaseGrant), grant
        return Right(grant.run_id, grant.epoch, grant.holder)

    async def doubtful(self) -> Right:
        """A run whose only step is in doubt."""
        await self.authority.create_run(RUN, "agent", "1", "{}")
        right = await self.take()
        told = await self.authority.apply(right, PAY, "charge", ARGS, 0)
        assert isinstance(told, Refused) and told.code == "in_doubt", told
        return right

    async def swept(self) -> None:
        self.gateway.prober.sweep()
        while asking := list(self.gateway.prober._asking.values()):
            await asyncio.gather(*asking)

    def state(self) -> str:
        step = self.engine.step(RUN, PAY)
        return "" if step is None else step.state

    async def stop(self) -> None:
        await self.gateway.prober.stop()
        await self.engine.stop()
        await self.http.close()


def contract_of(tool: str, table: dict[str, Any]) -> Contract:
    contract, problems = parse_contract(tool, table)
    assert contract is not None, problems
    return contract


@asynccontextmanager
async def shop(charges: list[dict[str, Any]], seen: list[web.Request]) -> AsyncIterator[str]:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(cast(web.Request, request))
        if request.method == "POST" and "404" in await request.text():
            return web.json_response({"error": "no such"}, status=404)
        if request.method == "POST":
            return web.json_response({"error": "bad gateway"}, status=502)
        wanted = request.query.get("order")
        return web.json_response({"data": [charge for charge in charges if charge["order"] == wanted]})

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


Test = Callable[[House, list[web.Request]], Awaitable[None]]


def in_house(charges: list[dict[str, Any]], test: Test, **more: Any) -> None:
    async def run() -> None:
        seen: list[web.Request] = []
        async with shop(charges, seen) as origin:
            house = House(origin, **more)
            house.open()
            await test(house, seen)
            await house.stop()

    asyncio.run(run())


CHARGED = [{"id": "ch_1", "order": "o 1", "cents": 500}]


def test_the_sweep_asks_after_deadline_and_lag_and_the_next_holder_joins_what_was_found() -> None:
    async def test(house: House, seen: list[web.Request]) -> None:
        await house.doubtful()
        await house.swept()
        assert [request.method for request in seen] == ["POST"], "too early to ask"
        house.clock.advance(PAST_LAG_MS)
        await house.swept()
        assert [request.method for request in seen] == ["POST", "GET"] and house.state() == "applied"
        answer = await house.authority.apply(await house.take(), PAY, "charge", ARGS, 0)
        assert isinstance(answer, StepAnswer) and answer.state == "committed"
        assert '"body":{"cents":500,"id":"ch_1","order":"o 1"}' in answer.receipt_json and len(seen) == 2

    in_house(CHARGED, test)


def test_a_live_holder_that_asks_has_the_provider_asked_and_hears_the_receipt_in_the_same_call() -> None:
    async def test(house: House, seen: list[web.Request]) -> None:
        right = await house.doubtful()
        told = await house.authority.apply(right, PAY, "charge", ARGS, 0)
        assert isinstance(told, Refused) and (told.code, told.reason) == ("in_doubt", "probe")
        house.clock.advance(PAST_LAG_MS)
        answer = await house.authority.apply(right, PAY, "charge", ARGS, 1_000)
        assert isinstance(answer, StepAnswer) and answer.state == "committed"

    in_house(CHARGED, test)


def test_what_is_absent_is_sent_again_and_only_then() -> None:
    async def test(house: House, seen: list[web.Request]) -> None:
        right = await house.doubtful()
        house.clock.advance(PAST_LAG_MS)
        await house.swept()
        assert house.state() == "pending"
        await house.authority.apply(right, PAY, "charge", ARGS, 0)
        assert [request.method for request in seen] == ["POST", "GET", "POST"]

    in_house([], test)


def test_a_held_step_tells_how_long_what_comes_next_and_which_line_would_list_the_answer() -> None:
    async def test(house: House, seen: list[web.Request]) -> None:
        await house.authority.create_run(RUN, "agent", "1", "{}")
        right = await house.take()
        told = await house.authority.apply(right, PAY, "charge", '{"order":"o 404"}', 0)
        assert isinstance(told, Refused) and told.facts["refusals_line"] == '{ status = 404, "error" = "no such" }'
        house.clock.advance(5_000)
        held = (await house.authority.held())[0]
        assert held.refusals_line == told.facts["refusals_line"] and held.next_move == "probe"
        assert held.now_ms - held.doubt_since_ms == 5_000 and held.next_at_ms == held.doubt_since_ms + 40_001

    in_house([], test)


def test_many_effects_freeze_the_run() -> None:
    async def test(house: House, seen: list[web.Request]) -> None:
        right = await house.doubtful()
        house.clock.advance(PAST_LAG_MS)
        told = await house.authority.apply(right, PAY, "charge", ARGS, 1_000)
        assert isinstance(told, Refused) and (told.code, told.reason) == ("run_frozen", "diverged")

    in_house(CHARGED * 2, test)


def test_unclear_answers_end_in_a_hold_and_the_questions_go_on_until_one_is_clear() -> None:
    charges: list[dict[str, Any]] = [{"id": "ch_1", "order": "o 1", "cents": 500}]

    async def test(house: House, seen: list[web.Request]) -> None:
        await house.doubtful()
        house.clock.advance(PAST_LAG_MS)
        for state in ("in_doubt", "held", "held"):
            await house.swept()
            assert house.state() == state
            house.clock.advance(300_000)
        charges[0]["reference"] = "o 1"
        await house.swept()
        assert house.state() == "applied"

    probe = {"found": {"data.0.reference": "{args.order}"}, "lag": "10s"}

    async def run() -> None:
        seen: list[web.Request] = []
        async with shop(charges, seen) as origin:
            house = House(origin, probe={**probe, "url": f"{origin}/charges?order={{args.order}}"})
            house.open()
            await test(house, seen)
            await house.stop()

    asyncio.run(run())


def test_the_credential_goes_along_and_nothing_is_asked_at_another_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_AUTH", "Bearer s3cret")

    async def test(house: House, seen: list[web.Request]) -> None:
        await house.doubtful()
        house.clock.advance(PAST_LAG_MS)
        moved = house.contracts[0]._replace(key_scope="another account")
        book, house.gateway.prober._tools = house.gateway.prober._tools, ToolBook([moved])
        await house.swept()
        assert len(seen) == 1, "another account knows nothing of this charge"
        house.gateway.prober._tools = book
        house.clock.advance(60_000)
        await house.swept()
        assert seen[-1].headers["X-Auth"] == "Bearer s3cret" and house.state() == "applied"

    in_house(CHARGED, test, credential={"header": "X-Auth", "env": "SHOP_AUTH"})


def test_a_python_tool_is_asked_about_by_another_one_that_only_reads() -> None:
    ledger: dict[str, int] = {}

    async def charge(order: str) -> None:
        ledger[order] = 500
        raise OSError("the line was cut")

    async def look(order: str) -> dict[str, Any]:
        return {"cents": ledger.get(order)}

    async def run() -> None:
        house = House("http://127.0.0.1:1")
        probe = {"tool": "look", "args": {"order": "{args.order}"}, "lag": "0s"}
        probe |= {"found": {"cents": "integer"}, "absent": {"cents": "null"}}
        house.contracts = [contract_of("charge", {"kind": "python", "probe": probe})]
        functions = {"charge": charge, "look": look}
        reader = contract_of("look", {"kind": "python", "effect": "none"})
        house.open(reader, python=LocalRunner(house.clock, functions, frozenset()))
        right = await house.doubtful()
        house.clock.advance(PAST_LAG_MS)
        answer = await house.authority.apply(right, PAY, "charge", ARGS, 1_000)
        assert isinstance(answer, StepAnswer) and '"cents":500' in answer.receipt_json
        await house.stop()

    asyncio.run(run())


def test_a_provider_that_can_not_be_reached_is_unclear() -> None:
    async def run() -> None:
        house = House("http://127.0.0.1:1", retries=0)
        house.open()
        await house.authority.create_run(RUN, "agent", "1", "{}")
        right = await house.take()
        house.gateway._http = cast(Any, Dropping())
        await house.authority.apply(right, PAY, "charge", ARGS, 0)
        house.clock.advance(PAST_LAG_MS)
        await house.swept()
        step = house.engine.step(RUN, PAY)
        assert step is not None and (step.state, step.probes) == ("in_doubt", 1)
        await house.stop()

    asyncio.run(run())


class Dropping:
    """A line that is cut after the request has left."""

    async def send(self, *args: Any, **more: Any) -> Any:
        from tidefast.services.tools import Outcome

        return Outcome("doubted", reason="ServerDisconnectedError")
