"""The wire between workers and the authority, and the authority's process with its door.

A request may be slow, lost, held up for minutes, or delivered twice; an answer may be lost; a worker may be cut off.
The worker's side waits as an HTTP client would and then says `AuthorityUnavailable`. The authority's side checks real
tokens and calls the real verbs. When the authority dies, what it was answering is reset or goes silent.
"""

import asyncio
import contextvars
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tidefast.engine.engine import Engine
from tidefast.protocol.answers import JournalPage, LeaseGrant, RunCreated, StepAnswer
from tidefast.protocol.points import Hook
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Refused, Renewed
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.services.authority import Authority
from tidefast.services.gateway import Gateway
from tidefast.services.keeper import Keeper
from tidefast.services.tools import ToolBook
from tidefast.sim.provider import Providers, VirtualSender
from tidefast.sim.virtual import Process, VirtualClock, VirtualLoop
from tidefast.stores.base import Store, StoreUnavailable
from tidefast.wire import tokens

PATIENCE_S = 10.0  # a client's patience beyond the time that it asked the authority to wait
SWEEP_MS = 5_000
BAD_TOKEN = Refused("stale_epoch", "bad_token", {})
Fate = Literal["ok", "slow", "lost", "answer_lost", "twice", "held_up"]
# What becomes of a message, and how often, for verbs that change something; reads and renewals are luckier.
FATES: Mapping[Fate, float] = {"ok": 86, "slow": 4, "lost": 2.5, "answer_lost": 3, "twice": 2.5, "held_up": 2}
LUCKY = frozenset(("renew", "claim", "journal"))


class Instance:
    """One life of the authority over the store: everything but the store is new."""

    def __init__(
        self,
        loop: VirtualLoop,
        store: Store,
        tools: ToolBook,
        providers: Providers,
        wall_ms: Callable[[], int],
        boot: str,
        hook: Hook | None,
    ) -> None:
        self.process = Process(loop, boot)
        self.secret = bytes(32)
        self.clock = VirtualClock(loop, wall_ms, store.identity().mark_ms)
        self.is_open = False
        self._store, self._tools, self._hook = store, tools, hook
        self._providers, self._loop = providers, loop

    async def start(self) -> None:
        """Run inside the process: as `serve` does it."""
        self.engine = Engine(self._store, self.clock, self.process.name, inline=True)
        self.engine.start()
        sender = VirtualSender(self.clock, self._providers, self._loop)
        gateway = Gateway(self.engine, self._tools, sender, None, self._hook)
        self.authority = Authority(self.engine, gateway)
        self.keeper = Keeper(self.engine, SWEEP_MS, gateway.prober)
        await self.keeper.start()
        self.is_open = True

    async def serve(self, verb: str, arguments: Sequence[Any]) -> Any:
        """What the HTTP door does with a request: prove the right, call the verb, mint tokens."""
        call = getattr(self.authority, verb)
        if verb == "claim":
            return [self._minted(grant) for grant in await call(*arguments)]
        if verb == "grant":
            granted = await call(*arguments)
            return granted if isinstance(granted, Refused) else self._minted(granted)
        if verb == "renew":
            rights = [self._right(token) for token in arguments[0]]
            answers = iter(await call([right for right in rights if right is not None]))
            return [BAD_TOKEN if right is None else next(answers) for right in rights]
        if verb not in TOKEN_VERBS:
            return await call(*arguments)
        right = self._right(arguments[0])
        return BAD_TOKEN if right is None else await call(right, *arguments[1:])

    def _right(self, token: str) -> Right | None:
        return tokens.verify(self.secret, self.engine.identity.namespace, token)

    def _minted(self, grant: LeaseGrant) -> LeaseGrant:
        right = Right(grant.run_id, grant.epoch, grant.holder)
        return grant.with_token(tokens.mint(self.secret, self.engine.identity.namespace, right))


TOKEN_VERBS = frozenset(("journal", "release", "apply", "save_result", "compensate", "checkpoint", "complete", "fail"))


class Wire:
    """Carries messages, badly. `instance` is the authority that listens now, None while it is down."""

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        self.instance: Instance | None = None
        self.is_calm = False
        self.cut: set[str] = set()  # names of workers that are cut off
        self.crashes: list[str] = []
        self.on_fate: Callable[[Fate, str, Sequence[Any]], None] = lambda fate, verb, arguments: None
        self.on_double: Callable[[str], None] = lambda verb: None
        self._loop, self._chance = loop, chance
        self._outside = contextvars.Context()
        self._open: dict[asyncio.Future[Any], Instance] = {}

    async def call(self, worker: str, verb: str, *arguments: Any, wait_ms: int = 0) -> Any:
        """A request as its client sees it. Raises `AuthorityUnavailable`."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        fate, chance = self._draw(verb), self._chance
        if fate != "ok":
            self.on_fate(fate, verb, arguments)
        if fate != "lost":
            delay_s = {"ok": 0.02, "slow": 8.0, "held_up": 300.0}.get(fate, 1.0) * chance.uniform(0.1, 1.0)
            self._later(delay_s, self._arrive, worker, verb, arguments, reply, fate == "answer_lost")
        if fate == "twice":
            self._later(chance.uniform(0.1, 120.0) ** 1.2, self._arrive_again, worker, verb, arguments, reply)
        try:
            async with asyncio.timeout(PATIENCE_S + wait_ms / 1_000):
                return await reply
        except TimeoutError:
            raise AuthorityUnavailable("no answer in time") from None

    def _draw(self, verb: str) -> Fate:
        if self.is_calm or (verb in LUCKY and self._chance.random() < 0.7):
            return "ok"
        return self._chance.choices(list(FATES), list(FATES.values()))[0]

    def _later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_later(delay_s, what, *arguments, context=self._outside)

    def _arrive(
        self, worker: str, verb: str, arguments: Sequence[Any], reply: "asyncio.Future[Any]", is_answer_lost: bool
    ) -> None:
        instance = self.instance
        if worker in self.cut:
            return
        if instance is None or not instance.is_open:
            _fail(reply, "connection refused")
            return
        self._open[reply] = instance
        instance.process.spawn(self._serve(instance, worker, verb, arguments, reply, is_answer_lost))

    def _arrive_again(self, worker: str, verb: str, arguments: Sequence[Any], reply: "asyncio.Future[Any]") -> None:
        if self.instance is not None and self.instance.is_open and worker not in self.cut:
            self.on_double(verb if reply.done() else f"{verb}_in_flight")
        self._arrive(worker, verb, arguments, reply, False)

    async def _serve(
        self,
        instance: Instance,
        worker: str,
        verb: str,
        arguments: Sequence[Any],
        reply: "asyncio.Future[Any]",
        is_answer_lost: bool,
    ) -> None:
        try:
            answer = await instance.serve(verb, arguments)
        except StoreUnavailable:
            return
        except Exception:
            self.crashes.append(f"{verb}: {traceback.format_exc()}")
            self._later(0.001, _fail, reply, "500")
            return
        if not is_answer_lost:
            self._later(self._chance.uniform(0.001, 0.02), self._return, worker, reply, answer)

    def _return(self, worker: str, reply: "asyncio.Future[Any]", answer: Any) -> None:
        self._open.pop(reply, None)
        if worker not in self.cut and not reply.done():
            reply.set_result(answer)

    def reset(self, instance: Instance) -> None:
        """The authority has died: its connections are reset, or, some of them, just go silent."""
        for reply, owner in list(self._open.items()):
            if owner is instance:
                del self._open[reply]
                if self._chance.random() < 0.7:
                    self._later(self._chance.uniform(0.01, 0.5), _fail, reply, "connection reset")


def _fail(reply: "asyncio.Future[Any]", why: str) -> None:
    if not reply.done():
        reply.set_exception(AuthorityUnavailable(why))
        reply.exception()  # its client may have gone: then nobody asks


class Line:
    """One worker's line to the authority: the seam that the SDK speaks. `heard` is told each answer that arrived."""

    def __init__(self, wire: Wire, worker: str, heard: Callable[[str, Sequence[Any], Any], None]) -> None:
        self._wire, self._worker, self._heard = wire, worker, heard
        self._names: dict[str, str] = {}

    async def _call(self, verb: str, *arguments: Any, wait_ms: int = 0) -> Any:
        answer = await self._wire.call(self._worker, verb, *arguments, wait_ms=wait_ms)
        self._heard(verb, arguments, answer)
        return answer

    def _name(self, request_id: str) -> str:
        """The SDK draws its request ids from the system's chance; here each gets the name of its place in order."""
        return self._names.setdefault(request_id, f"{self._worker}.{len(self._names)}") if request_id else ""

    async def create_run(
        self, run_id: str | None, agent: str, agent_version: str, input_json: str
    ) -> RunCreated | Refused:
        created: RunCreated | Refused = await self._call("create_run", run_id, agent, agent_version, input_json)
        return created

    async def claim(
        self,
        agents: Mapping[str, Sequence[str]],
        holder: str,
        lease_ms: int,
        max_runs: int,
        wait_ms: int,
        request_id: str,
    ) -> Sequence[LeaseGrant]:
        name = self._name(request_id)
        grants: Sequence[LeaseGrant] = await self._call(
            "claim", agents, holder, lease_ms, max_runs, wait_ms, name, wait_ms=wait_ms
        )
        return grants

    async def grant(self, run_id: str, holder: str, lease_ms: int, request_id: str) -> LeaseGrant | Refused:
        granted: LeaseGrant | Refused = await self._call("grant", run_id, holder, lease_ms, self._name(request_id))
        return granted

    async def journal(self, token: str, after: int) -> JournalPage | Refused:
        page: JournalPage | Refused = await self._call("journal", token, after)
        return page

    async def renew(self, tokens: Sequence[str]) -> Sequence[Renewed | Refused]:
        answers: Sequence[Renewed | Refused] = await self._call("renew", tokens)
        return answers

    async def release(self, token: str, reason: str, detail: str) -> Done | Refused:
        done: Done | Refused = await self._call("release", token, reason, detail)
        return done

    async def apply(
        self, token: str, step_id: str, tool: str, args_json: str | None, wait_ms: int
    ) -> StepAnswer | Refused:
        answer: StepAnswer | Refused = await self._call(
            "apply", token, step_id, tool, args_json, wait_ms, wait_ms=wait_ms
        )
        return answer

    async def chat(self, token: str, step_id: str, body: str, wait_ms: int) -> StepAnswer | Refused:
        answer: StepAnswer | Refused = await self._call("chat", token, step_id, body, wait_ms, wait_ms=wait_ms)
        return answer

    async def save_result(self, token: str, step_id: str, value_json: str) -> StepAnswer | Refused:
        answer: StepAnswer | Refused = await self._call("save_result", token, step_id, value_json)
        return answer

    async def compensate(
        self, token: str, step_id: str, wait_ms: int, given: tuple[str, str] | None = None
    ) -> StepAnswer | Refused:
        answer: StepAnswer | Refused = await self._call("compensate", token, step_id, wait_ms, given, wait_ms=wait_ms)
        return answer

    async def checkpoint(self, token: str, number: int, state_json: str) -> Done | Refused:
        done: Done | Refused = await self._call("checkpoint", token, number, state_json)
        return done

    async def complete(
        self, token: str, result_json: str, asked: Sequence[str], dropped: Sequence[str]
    ) -> Done | Refused:
        # A copy: what the caller changes after it has asked is not on the wire.
        done: Done | Refused = await self._call("complete", token, result_json, tuple(asked), tuple(dropped))
        return done

    async def fail(self, token: str, error: str) -> Done | Refused:
        done: Done | Refused = await self._call("fail", token, error)
        return done
