"""A small world around a real authority: a store, an engine, a gateway, and a provider that keeps its own count.

Everything is the product's own code but the clock, which moves when told to, and the provider, which does what a script
says: commit and withhold its answer, take the request and never commit it, or answer at once. `restart` is the death of
the authority: memory is gone, the store stays. A second world with the same provider is what a restore looks like.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tidefast.engine.clock import ManualClock
from tidefast.engine.engine import Engine
from tidefast.protocol.canonical import JSON
from tidefast.protocol.contracts import PYTHON_KEY, Contract, Undo
from tidefast.protocol.ids import RunId, StepId
from tidefast.services.authority import Authority
from tidefast.services.gateway import Gateway
from tidefast.services.http_sender import HttpSender
from tidefast.services.keeper import Keeper
from tidefast.services.python_runner import python_receipt
from tidefast.services.tools import Outcome, ToolBook
from tidefast.sim.history import Ledger
from tidefast.stores.base import Store, StoreUnavailable

Script = Literal["answer", "withhold_answer", "withhold_request"]
TURNS = 40  # loop turns without work after which nothing more will happen by itself
LEASE_MS = 15_000
TIMEOUT_MS = 30_000
DAY_MS = 86_400_000

CHARGE = Contract(
    "charge",
    "python",
    key=PYTHON_KEY,
    key_ttl_ms=DAY_MS,
    timeout_ms=TIMEOUT_MS,
    undo=Undo("refund", {"charge": "{receipt.body.id}"}),
)
REFUND = Contract("refund", "python", key=PYTHON_KEY, key_ttl_ms=DAY_MS, timeout_ms=TIMEOUT_MS)
MAIL = Contract("mail", "python", timeout_ms=TIMEOUT_MS)


@dataclass(eq=False)
class Call:
    """One request that the provider holds on to."""

    tool: str
    key: str
    args: Mapping[str, JSON]
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedProvider:
    """Counts by itself what it did. Charges and refunds know a key again; mails don't."""

    def __init__(self) -> None:
        self.sends: Counter[str] = Counter()
        self.net: Counter[str] = Counter()
        self.held: dict[str, Call] = {}
        self._script: dict[str, Script] = {}
        self._arrival: dict[str, asyncio.Event] = {}

    def script(self, tool: str, what: Script) -> asyncio.Event:
        """What becomes of the next call of a tool. The event is set when that call is where the script wants it."""
        self._script[tool] = what
        self._arrival[tool] = asyncio.Event()
        return self._arrival[tool]

    def let_go(self) -> None:
        """Every withheld request and answer goes on its way."""
        for call in self.held.values():
            call.may_go_on.set()
        self.held.clear()

    async def __call__(self, tool: str, args: Mapping[str, JSON], key: str, deadline_ms: int) -> Outcome:
        what, arrival = self._script.pop(tool, "answer"), self._arrival.pop(tool, None)
        call = Call(tool, key, args)
        if what != "answer":
            self.held[key] = call
        if what == "withhold_request":
            _announce(arrival)
            await call.may_go_on.wait()
        receipt = self.apply(call)
        if what == "withhold_answer":
            _announce(arrival)
            await call.may_go_on.wait()
        return Outcome("applied", receipt)

    def apply(self, call: Call) -> str:
        """The effect, and the receipt that the provider gives for it."""
        self.sends[call.key] += 1
        if call.tool == "mail" or not self.net[call.key]:
            self.net[call.key] += 1
            if call.tool == "refund":
                self.net[str(call.args["charge"]).removeprefix("ch_")] -= 1
        return python_receipt({"id": f"ch_{call.key}"})

    def ledger(self) -> Ledger:
        return Ledger(keys=dict(self.net))


def _announce(arrival: asyncio.Event | None) -> None:
    if arrival is not None:
        arrival.set()


class World:
    """One authority over one store, and the provider that it calls."""

    def __init__(
        self, store: Store, clock: ManualClock | None = None, provider: ScriptedProvider | None = None
    ) -> None:
        self.store = store
        self.clock = clock or ManualClock()
        self.provider = provider or ScriptedProvider()
        self.boots = 0
        self._tools = ToolBook((CHARGE, REFUND, MAIL))
        self._start()

    def _start(self) -> None:
        self.boots += 1
        self.engine = Engine(self.store, self.clock, f"boot-{self.boots}", inline=True)
        self.engine.start()
        self.gateway = Gateway(self.engine, self._tools, HttpSender(self.clock), self.provider)
        self.authority = Authority(self.engine, self.gateway)
        self.keeper = Keeper(self.engine, prober=self.gateway.prober)

    async def restart(self) -> None:
        """The authority dies: what it had in memory and on the wire is lost to it. A new one takes the store over."""
        await self.quiet()
        self.engine.failure = StoreUnavailable("the process was killed")
        self._start()
        await self.keeper.take_over()

    async def quiet(self) -> None:
        """Return when nothing more will happen by itself."""
        turns = 0
        while turns < TURNS:
            await asyncio.sleep(0)
            turns = turns + 1 if self.engine.is_idle else 0

    async def stop(self) -> None:
        self.provider.let_go()
        await self.quiet()
        await self.engine.stop()

    def count(self, run_id: RunId, step_id: StepId) -> int:
        """How often the provider applied this step, net of undos."""
        step = self.engine.step(run_id, step_id)
        return 0 if step is None else self.provider.net[step.key]
