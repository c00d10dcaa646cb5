"""A provider for tests: does what its script says, remembers keys or not, and counts for itself what it did.

A python tool calls it (`bank.call("charge", key=key, cents=500)`, or `await bank.call_async(…)`); a contract of kind
`http` names `bank.url("charge")`, a real socket on the loopback interface that answers while a bench runs. Each effect
is booked with the step in whose name it was caused, whatever key it came under; a call from outside any tool is booked
as an effect that never passed the gateway.
"""

import asyncio
import contextvars
import json
import socket
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from aiohttp import web

from tidefast.protocol.canonical import JSON
from tidefast.protocol.ids import RunId, StepId
from tidefast.sdk.errors import Refused
from tidefast.sim.history import Ledger
from tidefast.testing.faults import Behaviour
from tidefast.testing.loop import VirtualLoop

UNDO_SUFFIX = "~undo"
STEP_HEADER = "Tidefast-Step"
KEY_HEADER = "Idempotency-Key"
BEHAVIOURS: tuple[Behaviour, ...] = ("answer", "commit_and_hang", "commit_and_fail", "hang", "fail", "decline")


class Sending(NamedTuple):
    """The step in whose name a tool runs."""

    run: RunId
    step: StepId
    tool: str


sending: contextvars.ContextVar[Sending | None] = contextvars.ContextVar("tidefast sending", default=None)


class ProviderFailed(Exception):
    """The provider answers 500, or is gone: whether it did what was asked nobody says."""


class Effect(NamedTuple):
    """One thing that the provider did."""

    call: str  # the name it was called by
    key: str
    args: Mapping[str, JSON]
    run: str  # empty, like step and tool, for a call that came from outside any tool
    step: str
    tool: str


class _Plan(NamedTuple):
    """What becomes of one call."""

    behaviour: Behaviour
    answer: JSON


@dataclass(eq=False)
class Provider:
    """`knows_keys`: a call under a key that it remembers is answered as before and does nothing.

    `key_header` is where calls over HTTP carry the key. A refusal is `tidefast.Refused` to a python tool, and the
    status `decline_status` over HTTP.
    """

    knows_keys: bool = True
    key_header: str = KEY_HEADER
    decline_status: int = 402
    effects: list[Effect] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._answers: dict[str, dict[str, JSON]] = {}
        self._script: dict[str, deque[Behaviour]] = {}
        self._by_step: dict[tuple[str, int], Behaviour] = {}
        self._asked: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._loop: VirtualLoop | None = None
        self._let_go = threading.Event()
        self._socket: socket.socket | None = None
        self._is_closed = False
        self.tools: set[str] = set()  # the tools that ever called here: the ones whose effects it can speak of
        self.met: set[tuple[str, int]] = set()  # (step, nth) of the faults that calls met

    # --- what a test says -------------------------------------------------------------------------------------------

    def next(self, call: str, *behaviours: Behaviour) -> None:
        """What becomes of the next calls of this name, in order; after them it answers again."""
        for behaviour in behaviours:
            if behaviour not in BEHAVIOURS:
                raise ValueError(f"no behaviour is called {behaviour!r}; expected one of {', '.join(BEHAVIOURS)}")
        self._script.setdefault(call, deque()).extend(behaviours)

    def plan(self, step: str, nth: int, behaviour: Behaviour) -> None:
        """What becomes of the `nth` call in the name of a step."""
        self._by_step[step, nth] = behaviour

    def forget(self) -> None:
        """It forgets every key, as a provider does when their time is over; what it did stays done."""
        self._answers.clear()

    def url(self, call: str) -> str:
        """Where this provider answers to a name over HTTP."""
        return f"http://127.0.0.1:{self._listening().getsockname()[1]}/{call}"

    # --- what tools say ---------------------------------------------------------------------------------------------

    def call(self, call: str, /, *, key: str = "", **args: JSON) -> dict[str, JSON]:
        """Do what is asked, from a sync tool. Raises `tidefast.Refused` and `ProviderFailed`."""
        plan = self._take(call, key, args, sending.get())
        if plan.behaviour in ("hang", "commit_and_hang"):
            loop, release = self._loop, self._let_go
            if loop is None:
                raise ProviderFailed("nobody would ever answer: a provider hangs only while a bench runs")
            loop.park_thread(release)
            raise ProviderFailed("the test is over")
        return self._answered(plan)

    async def call_async(self, call: str, /, *, key: str = "", **args: JSON) -> dict[str, JSON]:
        """Do what is asked, from an async tool. Raises `tidefast.Refused` and `ProviderFailed`."""
        plan = self._take(call, key, args, sending.get())
        if plan.behaviour in ("hang", "commit_and_hang"):
            await asyncio.get_running_loop().create_future()
        return self._answered(plan)

    @staticmethod
    def _answered(plan: _Plan) -> dict[str, JSON]:
        if plan.behaviour in ("fail", "commit_and_fail"):
            raise ProviderFailed("the provider answered 500")
        if plan.behaviour == "decline":
            raise Refused("declined", {"declined": True})
        return dict(plan.answer) if isinstance(plan.answer, Mapping) else {}

    def _take(self, call: str, key: str, args: Mapping[str, JSON], source: Sending | None) -> _Plan:
        """Decide what becomes of a call, and book its effect."""
        with self._lock:
            if self._is_closed:
                raise ProviderFailed("the test is over")
            self.calls[call] += 1
            behaviour: Behaviour = "answer"
            script = self._script.get(call)
            if script:
                behaviour = script.popleft()
            if source is not None:
                self.tools.add(source.tool)
                self._asked[source.step] += 1
                place = (str(source.step), self._asked[source.step])
                if place in self._by_step:
                    self.met.add(place)
                    behaviour = self._by_step[place]
            if behaviour in ("hang", "fail", "decline"):
                return _Plan(behaviour, None)
            return _Plan(behaviour, self._do(call, key, args, source))

    def _do(self, call: str, key: str, args: Mapping[str, JSON], source: Sending | None) -> dict[str, JSON]:
        known = self._answers.get(f"{call} {key}") if key and self.knows_keys else None
        if known is not None:
            return known
        self._numbers[call] += 1
        answer: dict[str, JSON] = {"id": f"{call}-{self._numbers[call]}", **args}
        run, step, tool = source or ("", "", "")
        self.effects.append(Effect(call, key, dict(args), run, step, tool))
        if key:
            self._answers[f"{call} {key}"] = answer
        return answer

    # --- what a bench says ------------------------------------------------------------------------------------------

    def open(self, loop: VirtualLoop) -> None:
        """A run begins in this loop."""
        self._loop, self._let_go, self._is_closed = loop, threading.Event(), False

    def close(self) -> None:
        """The run is over: nothing is done or counted any more, and what hangs is let go."""
        with self._lock:
            self._is_closed = True
        self._let_go.set()

    def reset(self) -> None:
        """As before its first call; its script stays with what is left of it."""
        self.effects, self.calls = [], Counter()
        self._answers, self._numbers, self._asked = {}, Counter(), Counter()
        self._by_step, self.met = {}, set()

    def count(self, step: str, run: str = "") -> int:
        """How often a step was applied, net of its undo."""
        done = Counter(effect.step for effect in self.effects if not run or effect.run == run)
        return done[step] - done[step + UNDO_SUFFIX]

    def ledger(self) -> Ledger:
        """Its own net count by run and step, for the auditor; it speaks for the tools that have called it."""
        steps: Counter[tuple[RunId, StepId]] = Counter()
        outside: Counter[str] = Counter()
        for effect in self.effects:
            if not effect.step:
                outside[f"{effect.call} (called outside run.tool)"] += 1
                continue
            steps[RunId(effect.run), StepId(effect.step)] += 1
            if effect.step.endswith(UNDO_SUFFIX):
                steps[RunId(effect.run), StepId(effect.step.removesuffix(UNDO_SUFFIX))] -= 1
        return Ledger(outside, steps, frozenset(self.tools))

    # --- over HTTP --------------------------------------------------------------------------------------------------

    def _listening(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            self._socket.bind(("127.0.0.1", 0))
            self._socket.listen()
            weakref.finalize(self, self._socket.close)
        return self._socket

    async def serve(self, tools: Mapping[str, str]) -> web.ServerRunner | None:
        """Answer on the socket until the runner is cleaned up; None if nobody has asked for a url.

        `tools` names the tool of each request that is under way, by the value of its step header.
        """
        if self._socket is None:
            return None

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self._handle(request, tools)

        runner = web.ServerRunner(web.Server(handle, access_log=None))
        await runner.setup()
        await web.SockSite(runner, self._socket.dup()).start()
        return runner

    async def _handle(self, request: web.BaseRequest, tools: Mapping[str, str]) -> web.StreamResponse:
        name = request.headers.get(STEP_HEADER, "")
        run, _, step = name.partition("/")
        source = Sending(RunId(run), StepId(step), tools.get(name, "")) if name else None
        body = await request.text()
        try:
            given = json.loads(body) if body else {}
        except ValueError:
            given = {}
        args = given if isinstance(given, dict) else {}
        plan = self._take(request.path.strip("/"), request.headers.get(self.key_header, ""), args, source)
        if plan.behaviour in ("hang", "commit_and_hang"):
            if self._loop is not None:
                self._loop.parked.add(name)
            await asyncio.get_running_loop().create_future()
        if plan.behaviour in ("fail", "commit_and_fail"):
            return web.json_response({"error": "internal"}, status=500)
        if plan.behaviour == "decline":
            return web.json_response({"declined": True}, status=self.decline_status)
        return web.json_response(plan.answer)
