"""A whole authority in this process, over a store in memory: what the SDK's tests run against.

`Seam` speaks the SDK's side of it with tokens, writes down each call, and can be cut off or held up by a test.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tidefast.engine.clock import ManualClock
from tidefast.engine.engine import Engine
from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.canonical import canonical
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Refused
from tidefast.sdk.app import App
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.sdk.lease import LeaseTable, boot_s
from tidefast.sdk.line import Backoff
from tidefast.sdk.passes import Outcome, Pass
from tidefast.services.authority import Authority
from tidefast.services.gateway import Gateway
from tidefast.services.http_sender import HttpSender
from tidefast.services.python_runner import LocalRunner, NotSentByTool, RefusedByTool
from tidefast.services.tools import ToolBook
from tidefast.stores.memory import MemoryStore

AT_ONCE = Backoff(0.0, 0.0)
LEASE_MS = 15_000


class Seam:
    """The SDK's `Authority` over one in this process. `calls` holds (verb, step id or detail) in order."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self.calls: list[tuple[str, str]] = []
        self.is_silent = False
        self.page = 0  # entries of a journal page; 0 for all
        self.before: dict[str, Callable[[], Any]] = {}

    async def claim(self, *args: Any) -> Sequence[LeaseGrant]:
        await self._call("claim", args[-1])
        await asyncio.sleep(0)
        grants = await self._authority.claim(*args[:4], 0, args[5])  # no time passes here, so no poll would end
        return [self._given(grant) for grant in grants]

    async def grant(self, *args: Any) -> LeaseGrant | Refused:
        await self._call("grant", args[0])
        answer = await self._authority.grant(*args)
        return answer if isinstance(answer, Refused) else self._given(answer)

    async def renew(self, tokens: Sequence[str]) -> Any:
        await self._call("renew", "")
        return await self._authority.renew([_right(token) for token in tokens])

    async def journal(self, token: str, after: int) -> Any:
        await self._call("journal", str(after))
        page = await self._authority.journal(_right(token), after)
        if isinstance(page, Refused) or not self.page:
            return page
        entries = page.entries[: self.page]
        return replace(page, entries=entries, next=entries[-1].settled_seq if page.entries[self.page :] else 0)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        method = getattr(self._authority, verb)

        async def call(token: str, *args: Any) -> Any:
            await self._call(verb, str(args[0]) if args else "")
            return await method(_right(token), *args)

        return call

    async def _call(self, verb: str, detail: str) -> None:
        self.calls.append((verb, detail))
        before = self.before.get(verb)
        if before is not None:
            held = before()
            if inspect.isawaitable(held):
                await held
        if self.is_silent:
            raise AuthorityUnavailable("cut off")

    def _given(self, grant: LeaseGrant) -> LeaseGrant:
        grant = grant.with_token(f"{grant.run_id} {grant.epoch} {grant.holder}")
        if self.page and len(grant.journal) > self.page:
            entries = grant.journal[: self.page]
            return replace(grant, journal=entries, journal_next=entries[-1].settled_seq)
        return grant

    def verbs(self, verb: str) -> list[str]:
        return [detail for name, detail in self.calls if name == verb]


def _right(token: str) -> Right:
    run_id, epoch, holder = token.split(" ")
    return Right(run_id, int(epoch), holder)  # type: ignore[arg-type]


class House:
    """One authority with the tools of one app, and the means to drive runs under it."""

    def __init__(self, engine: Engine, clock: ManualClock, app: App) -> None:
        functions = {name: tool.raising(RefusedByTool, NotSentByTool) for name, tool in app.tools.items()}
        takes_key = frozenset(name for name, tool in app.tools.items() if tool.takes_key)
        book = ToolBook(tool.contract for tool in app.tools.values())
        gateway = Gateway(engine, book, HttpSender(clock), LocalRunner(clock, functions, takes_key))
        self.clock, self.app = clock, app
        self.authority = Authority(engine, gateway)
        self.seam = Seam(self.authority)
        self.leases = LeaseTable()
        self.now_s = 0.0  # what the workers' clock says, if a pass is driven by it

    async def create(self, agent: str, input: Any = None, run_id: str = "r1") -> str:
        created = await self.authority.create_run(run_id, agent, "1", canonical(input))
        assert not isinstance(created, Refused), created
        return run_id

    async def grant(self, run_id: str = "r1", holder: str = "w1", request_id: str = "") -> LeaseGrant:
        """A lease, after whatever pause the run takes."""
        self.clock.advance(61_000)
        grant = await self.seam.grant(run_id, holder, LEASE_MS, request_id)
        assert isinstance(grant, LeaseGrant), grant
        return grant

    def begin(self, grant: LeaseGrant, app: App | None = None, **settings: Any) -> Pass:
        settings = {"backoff": AT_ONCE, "clock": boot_s, **settings}
        asked_s = settings["clock"]()
        return Pass(self.seam, app or self.app, grant, asked_s, self.leases, **settings)  # type: ignore[arg-type]

    async def drive(self, run_id: str = "r1", app: App | None = None, **settings: Any) -> Outcome:
        """One pass from grant to release."""
        return await self.begin(await self.grant(run_id), app, **settings).drive()

    async def state(self, run_id: str = "r1") -> tuple[str, Any]:
        """(state, result or error) of a run."""
        info = await self.authority.run(run_id)
        assert not isinstance(info, Refused), info
        return info.state, info.result_json


@asynccontextmanager
async def house(app: App) -> AsyncIterator[House]:
    clock = ManualClock()
    engine = Engine(MemoryStore(), clock)
    engine.start()
    opened = House(engine, clock, app)
    try:
        yield opened
    finally:
        await opened.authority.gateway.drain()
        await engine.stop()


def with_house(app: App, story: Callable[[House], Any]) -> None:
    """Run a test's story in a house of its own."""

    async def told() -> None:
        async with house(app) as opened, asyncio.timeout(15):
            await story(opened)

    asyncio.run(told())
