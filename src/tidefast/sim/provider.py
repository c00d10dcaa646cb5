"""The providers of a simulation, with a truth of their own: what was applied, for which step, and when.

They keep what their contracts promise and nothing more. One that knows keys forgets them when its time is over, and
then does the same thing again. Requests get lost, answers get lost, a 500 comes after the effect, an answer comes after
the deadline, two requests of one key meet. Each request is looked at as it arrives: its intent must be durable, its key
and its bytes must be those of the step.
"""

import asyncio
import contextvars
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tidefast.engine.clock import Clock
from tidefast.protocol.canonical import JSON, canonical
from tidefast.protocol.contracts import Contract, Request, Undo
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.patterns import Pattern
from tidefast.services.http_sender import HttpSender, outcome
from tidefast.services.tools import Outcome
from tidefast.sim.history import Ledger
from tidefast.sim.virtual import VirtualLoop

KEY_HEADER = "Idempotency-Key"
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
ANSWERS_LATE_S = 5.0


def _tool(name: str, **members: object) -> Contract:
    return Contract(name, "http", url=f"http://{name}.invalid/", **members)  # type: ignore[arg-type]


CHARGE = _tool(
    "charge",
    key=f"header:{KEY_HEADER}",
    key_ttl_ms=6 * HOUR_MS,
    margin_ms=5 * MINUTE_MS,
    timeout_ms=30_000,
    refusals=(Pattern(402),),
    undo=Undo("refund", {"of": "{receipt.body.id}"}),
)
REFUND = _tool(
    "refund",
    key=f"header:{KEY_HEADER}",
    key_ttl_ms=6 * HOUR_MS,
    margin_ms=5 * MINUTE_MS,
    timeout_ms=30_000,
    refusals=(Pattern(410),),
)
SHIP = _tool(  # a short memory, and one try more after a refusal
    "ship",
    key=f"header:{KEY_HEADER}",
    key_ttl_ms=8 * MINUTE_MS,
    margin_ms=MINUTE_MS,
    timeout_ms=60_000,
    refusals=(Pattern(422),),
    retries=1,
    undo=Undo("recall", {"of": "{receipt.body.id}"}),
)
RECALL = _tool(
    "recall", key=f"header:{KEY_HEADER}", key_ttl_ms=6 * HOUR_MS, timeout_ms=60_000, refusals=(Pattern(410),)
)
REPORT = _tool("report", key=f"header:{KEY_HEADER}", key_ttl_ms=12 * HOUR_MS, timeout_ms=3 * MINUTE_MS)
MAIL = _tool("mail", timeout_ms=30_000, refusals=(Pattern(550),))  # knows no keys
READ = _tool("read", effect="none", timeout_ms=20_000)
TOOLS = (CHARGE, REFUND, SHIP, RECALL, REPORT, MAIL, READ)
UNDONE_BY = {"refund": "charge", "recall": "ship"}
REFUSAL_OF = {tool.tool: tool.refusals[0].status for tool in TOOLS if tool.refusals}

# What becomes of a request, and how often. `connect`: it never left; the others leave.
FATES: Mapping[str, float] = {
    "ok": 60,
    "connect": 4,
    "request_lost": 4,
    "answer_lost": 7,
    "answer_late": 5,
    "long": 7,
    "error_before": 3,
    "error_after": 4,
    "throttled": 2,
    "refused": 4,
    "unlisted": 0.7,
    "garbled": 1,
}


class Answer(NamedTuple):
    status: int
    body: bytes


class Arrival(NamedTuple):
    """One request as the provider sees it."""

    contract: Contract
    run_id: RunId
    step_id: StepId
    key: str
    body: str
    fate: str
    epoch: Epoch


@dataclass(slots=True)
class _Memory:
    """What the provider knows of a key: what it answered, and until when it remembers."""

    answer: Answer
    until_ms: int


@dataclass
class Truth:
    """What really happened, and what the providers found wrong with what they were sent."""

    net: Counter[str] = field(default_factory=Counter)  # by key
    net_by_step: Counter[tuple[RunId, StepId]] = field(default_factory=Counter)  # where the tool takes no key
    refused: set[tuple[RunId, StepId]] = field(default_factory=set)
    unlisted: set[tuple[RunId, StepId]] = field(default_factory=set)
    sent: int = 0
    applied: int = 0
    replays: int = 0
    collisions: int = 0
    forgotten: int = 0

    def ledger(self) -> Ledger:
        return Ledger(dict(self.net), dict(self.net_by_step))


class Providers:
    """All of them. `fate` draws what becomes of a request; `inspect` looks at it as it arrives."""

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        self.truth = Truth()
        self.is_calm = False
        self.on_fate: Callable[[Arrival], None] = lambda arrival: None
        self.inspect: Callable[[Arrival], None] = lambda arrival: None
        self.on_apply: Callable[[Arrival, int], None] = lambda arrival, net: None
        self._loop, self._chance = loop, chance
        self._memory: dict[str, _Memory] = {}
        self._first_ms: dict[str, int] = {}
        self._bodies: dict[str, str] = {}
        self._under_way: Counter[str] = Counter()
        self._by_id: dict[str, tuple[str, tuple[RunId, StepId]]] = {}
        self._outside = contextvars.Context()  # belongs to no process: a provider is never killed here

    def draw(self, contract: Contract) -> str:
        if self.is_calm:
            return "ok"
        fate = self._chance.choices(list(FATES), list(FATES.values()))[0]
        if fate == "refused" and contract.tool not in REFUSAL_OF:
            return "ok"
        if fate in ("garbled", "unlisted") and (contract.undo is not None or contract.effect == "none"):
            return "ok"  # an undo's arguments come from the body
        return fate

    def receive(self, arrival: Arrival, deadline_s: float) -> "asyncio.Future[Answer]":
        """A request has left the gateway. The future gets its answer, if one ever comes."""
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self.truth.sent += 1
        self.inspect(arrival)
        if arrival.fate == "request_lost":
            return answer
        room, chance = deadline_s - self._loop.time(), self._chance
        share = chance.uniform(0.6, 0.98) if arrival.fate in ("long", "answer_late") else chance.random() ** 3 * 0.4
        self._under_way[arrival.key] += 1
        self._first_ms.setdefault(arrival.key, self._loop.ms())
        lands = self._loop.time() + room * share
        self._loop.call_at(lands, self._land, arrival, answer, deadline_s, context=self._outside)
        return answer

    def _land(self, arrival: Arrival, answer: "asyncio.Future[Answer]", deadline_s: float) -> None:
        said = self._answer(arrival)
        self._under_way[arrival.key] -= 1
        if arrival.fate == "answer_lost" or said is None:
            return
        back_s = self._chance.uniform(0.001, 0.2)
        if arrival.fate == "answer_late":
            back_s = deadline_s - self._loop.time() + self._chance.uniform(0.1, ANSWERS_LATE_S)
        self._loop.call_later(back_s, _give, answer, said, context=self._outside)

    def _answer(self, arrival: Arrival) -> Answer | None:
        """Do it, or not, and say something."""
        fate, place = arrival.fate, (arrival.run_id, arrival.step_id)
        if arrival.contract.effect == "none":
            return Answer(500, b"") if fate.startswith("error") else Answer(200, b'{"balance":7}')
        known = self._remembered(arrival)
        if fate in ("error_before", "throttled"):
            return Answer(500 if fate == "error_before" else 429, b"{}")
        if known is not None:
            self.truth.replays += 1
            return known
        if arrival.contract.dedups and self._under_way[arrival.key] > 1 and self._chance.random() < 0.5:
            self.truth.collisions += 1
            return Answer(409, b'{"error":"running"}')
        if fate == "refused":
            self.truth.refused.add(place)
            return Answer(REFUSAL_OF[arrival.contract.tool], b'{"error":"declined"}')
        if fate == "unlisted":
            self.truth.unlisted.add(place)
            return Answer(418, b'{"error":"teapot"}')
        done = self._apply(arrival)
        if fate == "error_after":
            return Answer(502, b"{}")
        return Answer(200, b"<html>") if fate == "garbled" else done

    def _remembered(self, arrival: Arrival) -> Answer | None:
        memory = self._memory.get(arrival.key) if arrival.contract.dedups else None
        if memory is None:
            return None
        if self._loop.ms() < memory.until_ms:
            return memory.answer
        self.truth.forgotten += 1
        return None

    def _apply(self, arrival: Arrival) -> Answer:
        truth, place = self.truth, (arrival.run_id, arrival.step_id)
        truth.applied += 1
        name = f"{arrival.contract.tool}_{truth.applied}"
        self._by_id[name] = (arrival.key, place)
        if arrival.contract.dedups:
            truth.net[arrival.key] += 1
            net = truth.net[arrival.key]
        else:
            truth.net_by_step[place] += 1
            net = truth.net_by_step[place]
        self.on_apply(arrival, net)
        if arrival.contract.tool in UNDONE_BY:
            self.take_back(str(json.loads(arrival.body)["of"]))
        answer = Answer(200, canonical({"id": name}).encode())
        if arrival.contract.dedups:
            until = self._first_ms[arrival.key] + arrival.contract.key_ttl_ms
            self._memory[arrival.key] = _Memory(answer, until)
        return answer

    def take_back(self, name: str) -> None:
        """Undo the effect that was given this name; a second time changes nothing."""
        found = self._by_id.pop(name, None)
        if found is not None:
            self.truth.net[found[0]] -= 1

    def find(self, run_id: RunId, step_id: StepId, key: str) -> tuple[int, str]:
        """What a person sees who looks: (how often the step is applied, the newest name of it)."""
        place = (run_id, step_id)
        count = self.truth.net[key] + self.truth.net_by_step[place]
        return count, next((name for name, (_, at) in reversed(self._by_id.items()) if at == place), "")

    def take_back_by_hand(self, run_id: RunId, step_id: StepId) -> None:
        place = (run_id, step_id)
        name = next((name for name, (_, at) in self._by_id.items() if at == place), "")
        if name and self.truth.net_by_step[place]:
            self._by_id.pop(name)
            self.truth.net_by_step[place] -= 1
        else:
            self.take_back(name)

    def same_bytes(self, arrival: Arrival) -> bool:
        """Whether all requests of this key had the same body."""
        return (
            self._bodies.setdefault(arrival.key or f"{arrival.run_id}/{arrival.step_id}", arrival.body) == arrival.body
        )


def _give(answer: "asyncio.Future[Answer]", said: Answer) -> None:
    if not answer.done():
        answer.set_result(said)


class VirtualSender(HttpSender):
    """The gateway's way out, in the place of the HTTP client: the same order of looks, another wire."""

    def __init__(self, clock: Clock, providers: Providers, loop: VirtualLoop) -> None:
        super().__init__(clock)
        self._providers, self._loop = providers, loop

    async def send(self, contract: Contract, request: Request, deadline_ms: int, *, step: str, epoch: Epoch) -> Outcome:
        run_id, _, step_id = step.partition("/")
        fate = self._providers.draw(contract)
        key = request.headers.get(KEY_HEADER, "")
        arrival = Arrival(contract, RunId(run_id), StepId(step_id), key, request.body, fate, epoch)
        self._providers.on_fate(arrival)
        remaining_s = (deadline_ms - self._clock.now().ms) / 1_000
        deadline_s = self._loop.time() + remaining_s
        if remaining_s <= 0:
            return Outcome("unsent", reason="deadline")
        await asyncio.sleep(0.002)  # connecting
        if fate == "connect":
            return Outcome("unsent", reason="ConnectError")
        if self._clock.now().ms >= deadline_ms:
            return Outcome("unsent", reason="deadline")
        answer = self._providers.receive(arrival, deadline_s)
        try:
            async with asyncio.timeout_at(deadline_s):
                status, body = await answer
        except TimeoutError:
            return Outcome("doubted", reason="TimeoutError")
        return outcome(contract, status, "application/json", body, is_whole=True)


def told_receipt(name: str) -> Mapping[str, JSON]:
    """The receipt that a person writes down after a look."""
    return {"body": {"id": name}}
