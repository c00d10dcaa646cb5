"""The other side of the gateway: providers that do what a script says, and count for themselves what they did.

`ScriptedWire` is the product's own HTTP sender with one method replaced: where that one would open a connection, this
one hands the stored request to the provider. Deadlines, the last look before the first byte and the reading of answers
are the product's.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp

from tidefast.engine.clock import Clock
from tidefast.protocol.contracts import Contract, Limits, Probe, Request, Undo
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.patterns import Pattern
from tidefast.services import http_sender
from tidefast.services.departure import departing
from tidefast.services.http_sender import HttpSender
from tidefast.services.tools import Outcome
from tidefast.sim.history import Ledger
from tidefast.sim.scenarios.text import ScriptError

DAY_MS = 86_400_000
TIMEOUT_MS = 30_000
LAG_MS = 10_000
ASK = "ask"  # what a probe is called: its fate is said like that of a tool
KEY_HEADER = "Idempotency-Key"
FATES = ("withhold", "lose", "answer", "commit")
Tell = Callable[[str, str, bool], None]  # (what happened, the same in short, whether the provider speaks)


def contracts() -> dict[str, Contract]:
    """The tools of every scenario: some know a key again, some can be asked, some neither, one only reads."""

    def post(tool: str, **more: Any) -> Contract:
        url = f"https://provider.example/{tool}"
        return Contract(tool, "http", url=url, timeout_ms=TIMEOUT_MS, refusals=(Pattern(402),), **more)

    keyed: dict[str, Any] = {"key": f"header:{KEY_HEADER}", "key_ttl_ms": DAY_MS}
    undo = Undo("refund", {"charge": "{receipt.body.id}"})
    probe = Probe(
        found=Pattern(0, (("data.0.id", "string"),)),
        absent=Pattern(0, (("data", "empty"),)),
        many=Pattern(0, (("data.1.id", "string"),)),
        lag_ms=LAG_MS,
        url="https://provider.example/done",
        receipt="data.0",
    )
    tools = (
        post("wire", probe=probe, probe_tries=2),
        post("card", probe=probe, probe_tries=2, payload_bound=(Pattern(422),), **keyed),
        post("account", ttl_from="completed", **keyed),
        post("news", independent=True),
        post("seat", undo=Undo("vacate", {}), undo_safe_if_absent=True),
        post("vacate", **keyed),
        post("gift", limits=Limits(per_run=1)),
        post("charge", undo=undo, **keyed),
        post("refund", **keyed),
        post("mail"),
        post("lookup", effect="none"),
        post("think", effect="model", retries=1),
    )
    return {contract.tool: contract for contract in tools}


HARMLESS = ("lookup", "think")  # a reading, and an answer that costs money: nothing is done in the world


class Fate(NamedTuple):
    """What becomes of one request: held up before or after the effect, lost on its way, answered with a status."""

    withhold: str = ""  # request | answer
    lose: str = ""  # connection (before the first byte) | request | answer
    status: int = 200
    commits: bool = True

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Fate | None":
        """The fate that a move's options say; None if they say nothing."""
        if not any(name in options for name in FATES):
            return None
        withhold, lose = options.get("withhold", ""), options.get("lose", "")
        if withhold not in ("", "request", "answer") or lose not in ("", "connection", "request", "answer"):
            raise ScriptError("expected withhold=request|answer, lose=connection|request|answer")
        status = int(options.get("answer", options.get("commit", "200")))
        return cls(withhold, lose, status, "commit" in options or 200 <= status <= 299)


class Lost(aiohttp.ClientError):
    """The connection went away."""


class Waiting(NamedTuple):
    """A request or an answer that the script holds up."""

    what: str  # request | answer
    go: "asyncio.Future[bool]"  # True: on its way; False: lost


class Provider:
    """All providers of a scenario. Counts effects net of undos, and requests that reached it."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.next: dict[str, Fate] = {}
        self.always: dict[str, Fate] = {}
        self.waiting: dict[str, Waiting] = {}
        self.sends: Counter[tuple[str, str]] = Counter()
        self.net: Counter[tuple[str, str]] = Counter()
        self.seen: dict[tuple[str, str], set[tuple[str, str]]] = {}
        self.ignores_keys: set[str] = set()
        self.shows: dict[str, int] = {}  # by tool: how many effects a probe is told of, whatever is true
        self._memory: dict[str, tuple[int, str]] = {}
        self._effects: dict[str, tuple[str, str]] = {}

    def forget(self) -> None:
        """The time for which keys are remembered is over."""
        self._memory.clear()

    def release(self, step: str, what: str, *, arrives: bool) -> None:
        """Let what is held up go on, or lose it."""
        waiting = self.waiting.get(step)
        if waiting is None or waiting.what != what:
            raise ScriptError(f"no {what} of {step} is held up")
        del self.waiting[step]
        waiting.go.set_result(arrives)

    def ledger(self) -> Ledger:
        """The provider's own word, for the auditor."""
        return Ledger(steps={(RunId(run), StepId(step)): count for (run, step), count in self.net.items()})

    async def serve(self, tool: str, step: tuple[str, str], key: str, body: str, leave: Callable[[], None]) -> bytes:
        """One request, from connecting to its answer. Raises `Lost`; the first byte leaves when `leave` is called."""
        fate = self.next.pop(tool, None) or self.always.get(tool) or Fate()
        name = step[1]
        if fate.lose == "connection":
            self._tell(f"{name}: no connection for {tool}", "no connection", False)
            raise Lost
        leave()
        if fate.lose == "request" or (fate.withhold == "request" and not await self._hold(name, "request", tool)):
            self._tell(f"{name}: {tool} request is lost on the way", "lost on the way", False)
            raise Lost
        if tool == ASK:
            return await self._say(step, fate)
        self.sends[step] += 1
        self.seen.setdefault(step, set()).add((key, body))
        answer = self._answer(tool, step, key, body, fate)
        if fate.lose == "answer" or (fate.withhold == "answer" and not await self._hold(name, "answer", tool)):
            self._tell(f"{name}: the answer is lost", "answer lost", True)
            raise Lost
        self._tell(f"{name}: answers {answer[0]}", str(answer[0]), True)
        return json.dumps(answer).encode()

    async def _say(self, step: tuple[str, str], fate: Fate) -> bytes:
        """What it says when it is asked about a step: what is true then, however late it is heard."""
        name = step[1]
        count = self.shows.get(name, self.net[step])
        if fate.withhold == "answer" and not await self._hold(name, "answer", ASK):
            self._tell(f"{name}: the answer is lost", "answer lost", True)
            raise Lost
        said = f"says {count}" if fate.status == 200 else f"answers {fate.status}"
        self._tell(f"{name}: asked whether it happened, {said}", f"asked: {said}", True)
        data = [{"id": f"{name}_{place + 1}"} for place in range(count)]
        return json.dumps([fate.status, {"data": data} if fate.status == 200 else None]).encode()

    async def _hold(self, step: str, what: str, tool: str) -> bool:
        told = f"{tool} on its way" if what == "request" else "answer held up"
        self._tell(f"{step}: {tool} {what} is held up", told, what == "answer")
        self.waiting[step] = Waiting(what, asyncio.get_running_loop().create_future())
        return await self.waiting[step].go

    def _answer(self, tool: str, step: tuple[str, str], key: str, body: str, fate: Fate) -> tuple[int, str]:
        """Have the effect, unless the key is known or the fate says otherwise; the answer is remembered by its key."""
        name, knows = step[1], bool(key) and tool not in self.ignores_keys
        if knows and key in self._memory:
            self._tell(f"{name}: {tool} arrives, its key is known: nothing is done again", f"{tool}: key known", False)
            return self._memory[key]
        if not fate.commits:
            self._tell(f"{name}: {tool} arrives and is not done", f"{tool}: NOT done", False)
            return fate.status, ""
        self._effects[receipt := f"{tool}_{len(self._effects) + 1}"] = step
        if tool not in HARMLESS:
            self.net[step] += 1
        if tool == "refund":
            self.net[self._effects[json.loads(body)["charge"]]] -= 1
        if tool == "vacate":  # of a seat that was never taken, nothing happens
            target = (step[0], name.removesuffix("~undo"))
            self.net[target] = max(self.net[target] - 1, 0)
        if knows:
            self._memory[key] = (200, receipt)
        done = f"arrives and is done ({self.net[step]})" if tool not in HARMLESS else "is answered"
        self._tell(f"{name}: {tool} {done}", f"{tool}: {'DONE' if tool not in HARMLESS else 'read'}", False)
        return fate.status, receipt


class ScriptedWire(HttpSender):
    """The product's sender over a scripted network. With `epoch_in_key` it makes the mistake of that name."""

    def __init__(self, clock: Clock, provider: Provider, *, epoch_in_key: bool = False) -> None:
        super().__init__(clock)
        self._provider = provider
        self._epoch_in_key = epoch_in_key

    async def _exchange(self, contract: Contract, request: Request, step: str, epoch: Epoch) -> Outcome:
        run, _, name = step.partition("/")
        key = request.headers.get(KEY_HEADER, "")
        if key and self._epoch_in_key:
            key = f"{key}-{epoch}"
        leave = departing.get().leave
        tool = ASK if request.method == "GET" else contract.tool
        serving = asyncio.ensure_future(self._provider.serve(tool, (run, name), key, request.body, leave))
        answer = await asyncio.shield(serving)  # no timeout of ours recalls what is on the wire
        status, receipt = json.loads(answer)
        if isinstance(receipt, dict):
            body = json.dumps(receipt).encode()
        else:
            body = json.dumps({"id": receipt}).encode() if receipt else b"{}"
        return http_sender.outcome(contract, status, "application/json", body, True)
