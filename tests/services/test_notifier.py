"""Notices over HTTP: signed, told again until they are taken, kept over a crash, and never in a step's way."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from tidefast.protocol.records import Right
from tidefast.services.notifier import Notifier
from tidefast.sim.world import LEASE_MS, World
from tidefast.stores.base import Store
from tidefast.stores.memory import MemoryStore
from tidefast.stores.sqlite import SqliteStore

SECRET = bytes(range(32))


class Receiver:
    """A webhook that answers what it is told to."""

    def __init__(self) -> None:
        self.heard: list[tuple[dict[str, str], str]] = []
        self.statuses: list[int] = []
        self.url = ""

    async def __aenter__(self) -> "Receiver":
        app = web.Application()
        app.router.add_post("/hook", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/hook"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.heard.append((dict(request.headers), await request.text()))
        return web.Response(status=self.statuses.pop(0) if self.statuses else 204)

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.heard]


def story(tell: Callable[[World, Receiver], Awaitable[None]], store: Store | None = None) -> None:
    async def run() -> None:
        world = World(store or MemoryStore())
        async with Receiver() as receiver:
            await tell(world, receiver)
        await world.stop()

    asyncio.run(run())


async def send(world: World, receiver: Receiver) -> int:
    """One look of a notifier: how many notices were due."""
    async with aiohttp.ClientSession() as http:
        sending = asyncio.create_task(Notifier(world.engine, receiver.url, SECRET).send_due(http))
        return await sending


async def failed(world: World, run: str, why: str = "no stock") -> None:
    await world.authority.create_run(run, "agent", "1", "{}")
    grant = await world.authority.grant(run, "w1", LEASE_MS, "")
    await world.authority.fail(Right(grant.run_id, grant.epoch, "w1"), why)  # type: ignore[union-attr]


def test_a_notice_is_signed_over_id_time_and_body_and_told_no_more_once_it_is_taken() -> None:
    async def tell(world: World, receiver: Receiver) -> None:
        world.engine.keeps_notices = True
        await failed(world, "r1")
        assert await send(world, receiver) == 1
        assert await send(world, receiver) == 0
        ((headers, body),) = receiver.heard
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{body}".encode()
        right = base64.b64encode(hmac.new(SECRET, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{right}"
        assert json.loads(body)["data"]["run"] == "r1" and json.loads(body)["type"] == "run.failed"

    story(tell)


def test_what_is_not_taken_is_told_again_later_under_the_same_id_with_the_same_bytes() -> None:
    async def tell(world: World, receiver: Receiver) -> None:
        world.engine.keeps_notices = True
        receiver.statuses = [500, 301]
        await failed(world, "r1")
        pauses = []
        while await send(world, receiver) or len(receiver.heard) < 3:
            world.clock.advance(500)
            pauses.append(len(receiver.heard))
        assert len(set(receiver.ids)) == 1 and len({body for _, body in receiver.heard}) == 1
        assert len(receiver.heard) == 3 and len(pauses) > 5, "each time it waits longer"

    story(tell)


def test_a_crash_neither_loses_a_notice_nor_makes_one_up() -> None:
    async def tell(world: World, receiver: Receiver) -> None:
        world.engine.keeps_notices = True
        await failed(world, "r1")
        await world.restart()
        world.engine.keeps_notices = True
        await failed(world, "r2")
        receiver.statuses = [204, 500]
        await send(world, receiver)
        await world.restart()
        world.clock.advance(2_000)
        await send(world, receiver)
        assert len(receiver.heard) == 3 and len(set(receiver.ids)) == 2

    story(tell)


def test_a_notice_in_a_file_survives_its_process(tmp_path: object) -> None:
    path = f"{tmp_path}/s.db"

    async def tell(world: World, receiver: Receiver) -> None:
        world.engine.keeps_notices = True
        await failed(world, "r1")

    first = SqliteStore.open(path, create=True)
    story(tell, first)
    first.close()
    second = SqliteStore.open(path, create=False)

    async def told(world: World, receiver: Receiver) -> None:
        assert await send(world, receiver) == 1
        assert world.engine.store.notices(2**53, 9) == []

    story(told, second)
    second.close()


def test_a_webhook_that_hangs_holds_up_no_step() -> None:
    async def tell(world: World, receiver: Receiver) -> None:
        callers: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda _, writer: callers.append(writer), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        notifier = Notifier(world.engine, f"http://127.0.0.1:{port}/", SECRET, look_ms=1)
        notifier.start()
        await failed(world, "r1")
        await world.authority.create_run("r2", "agent", "1", "{}")
        grant = await world.authority.grant("r2", "w1", LEASE_MS, "")
        right = Right(grant.run_id, grant.epoch, "w1")  # type: ignore[union-attr]
        assert (await world.authority.apply(right, "pay", "charge", "{}", 1_000)).state == "committed"  # type: ignore[union-attr]
        await notifier.stop()
        for caller in callers:
            caller.close()
        silent.close()

    story(tell)


def test_nobody_is_told_and_nothing_is_kept_where_no_webhook_is_named() -> None:
    async def tell(world: World, receiver: Receiver) -> None:
        await failed(world, "r1")
        assert world.engine.store.notices(2**53, 9) == []

    story(tell)
