"""A run's events as they happen: nothing missed, nothing twice, and an end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.server.support import Desk, Spy, app_of, credentials, real_authority
from tests.server.test_serve import server

from tidefast.protocol.ids import Epoch, RunId
from tidefast.protocol.records import Right
from tidefast.server import load, stream
from tidefast.server.access import Caller, key_digest
from tidefast.server.app import build_app
from tidefast.server.serve import serve

EVENTS = "/v1/runs/r1/events"
SSE = {"Accept": "text/event-stream"}


class Heard:
    """One stream, read message by message."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def message(self) -> tuple[int, dict[str, Any]] | None:
        """The next event, past the comments; None at the end."""
        fields: dict[str, str] = {}
        async for line in self.response.content:
            text = line.decode().rstrip("\n")
            if not text and "data" in fields:
                return int(fields["id"]), json.loads(fields["data"])
            name, _, value = text.partition(": ")
            if name:
                fields[name] = value
        return None

    async def rest(self) -> list[int]:
        found = []
        while (told := await self.message()) is not None:
            found.append(told[0])
        return found


@asynccontextmanager
async def listening(url: str, headers: dict[str, str] | None = None, path: str = EVENTS) -> AsyncIterator[Heard]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
        session.get(url + path, headers={**SSE, **(headers or {})}) as response,
    ):
        yield Heard(response)


async def started(authority: Any) -> Right:
    await authority.create_run("r1", "a", "1", '{"card":"4242"}')
    granted = await authority.grant("r1", "w1", 15_000, "q")
    return Right(RunId("r1"), Epoch(granted.epoch), "w1")


def test_a_stream_tells_each_event_when_it_is_durable_and_ends_with_the_run() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _), server(authority) as url:
            right = await started(authority)
            async with listening(url) as heard:
                assert heard.response.headers["Content-Type"] == "text/event-stream"
                first, second = await heard.message(), await heard.message()
                assert first is not None and second is not None
                assert [(seq, event["kind"]) for seq, event in (first, second)] == [
                    (1, "run_created"),
                    (2, "lease_granted"),
                ]
                assert first[1]["data"]["input"] == {"card": "4242"} and first[1]["seq"] == 1
                await authority.save_result(right, "s1", "1")
                third = await heard.message()
                assert third is not None and third[1]["kind"] == "step_result"
                await authority.complete(right, "1", [], [])
                assert await heard.rest() == [4]

    asyncio.run(main())


def test_a_client_that_comes_back_misses_nothing_and_hears_nothing_twice() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _), server(authority) as url:
            right = await started(authority)
            seqs: list[int] = []
            for number in range(5):
                await authority.checkpoint(right, number + 1, "1")
                after = {"Last-Event-ID": str(seqs[-1])} if seqs else {}
                async with listening(url, after) as heard:
                    told = await heard.message()
                    assert told is not None
                    seqs.append(told[0])
            assert seqs == [1, 2, 3, 4, 5]
            await authority.complete(right, "1", [], [])
            async with listening(url, path=f"{EVENTS}?after=5") as heard:
                assert await heard.rest() == [6, 7, 8]
            async with listening(url, {"Last-Event-ID": "8"}) as heard:
                assert heard.response.status == 204 and await heard.rest() == []
            async with listening(url, {"Last-Event-ID": "8", "Accept": "*/*"}) as heard:
                assert heard.response.status == 200  # no stream was asked for: a page as ever
                assert [event["seq"] for event in (await heard.response.json())["events"]] == list(range(1, 9))

    asyncio.run(main())


@pytest.mark.parametrize("last", ["x", "-1", "1.0", "9" * 17, "1 2", "٣"])
def test_an_id_that_is_none_is_refused(last: str) -> None:
    async def main() -> None:
        async with server(Spy()) as url, listening(url, {"Last-Event-ID": last}) as heard:
            told = json.loads(await heard.response.read())
            assert (heard.response.status, told["code"], told["reason"]) == (400, "invalid", "query_invalid")

    asyncio.run(main())


def test_a_stream_of_a_run_that_is_not_there_is_refused() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _), server(authority) as url, listening(url) as heard:
            assert heard.response.status == 404
            assert (await heard.response.json(content_type=None))["reason"] == "run_unknown"

    asyncio.run(main())


def test_streams_end_when_the_server_does() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _):
            await started(authority)
            stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
            task = asyncio.create_task(serve(app_of(authority), "127.0.0.1", 0, ready.set_result, stop))
            async with listening(await ready) as heard:
                await heard.message()
                stop.set()
                assert await heard.rest() == [2]
            await task

    asyncio.run(main())


def test_a_stream_says_that_it_is_there_and_ends_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.02)

    async def main() -> None:
        held = credentials({key_digest("tfk1.r"): Caller("r", "reader", bodies=False)})
        async with real_authority(Desk()) as (authority, _):
            await started(authority)
            stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
            task = asyncio.create_task(serve(build_app(authority, held), "127.0.0.1", 0, ready.set_result, stop))
            async with listening(await ready, {"Authorization": "Bearer tfk1.r"}) as heard:
                told = await heard.message()
                assert told is not None and "4242" not in json.dumps(told[1])
                await heard.message()
                assert await heard.response.content.readuntil(b"still here\n\n") == b": still here\n\n"
                held.replace(credentials({}))
                assert await heard.rest() == []
            stop.set()
            await task

    asyncio.run(main())


def test_a_caller_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SEND_S", 0.05)
    tell = stream.EventStream.__call__

    async def main() -> None:
        ended = asyncio.Event()

        async def watched(*args: Any) -> None:
            await tell(*args)
            ended.set()

        monkeypatch.setattr(stream.EventStream, "__call__", watched)
        async with real_authority(Desk()) as (authority, _):
            right = await started(authority)
            for number in range(12):
                await authority.save_result(right, f"s{number}", json.dumps("x" * 900_000))
            stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
            task = asyncio.create_task(serve(app_of(authority), "127.0.0.1", 0, ready.set_result, stop))
            reader, writer = await asyncio.open_connection("127.0.0.1", int((await ready).rsplit(":", 1)[1]), limit=1)
            writer.write(f"GET {EVENTS} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode())
            await reader.read(1)
            await ended.wait()
            read = 0
            try:
                while piece := await reader.read(1_000_000):
                    read += len(piece)
            except ConnectionError:
                read = min(read, 9_000_000)
            assert read < 10_000_000  # what lay in the buffers, and then the end
            writer.close()
            stop.set()
            await task

    asyncio.run(main())


@pytest.mark.parametrize("places", [0, 1, 2])
def test_streams_and_long_polls_share_a_callers_places(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "WAITS_PER_CALLER", places)

    async def main() -> None:
        async with real_authority(Desk()) as (authority, _), server(authority) as url:
            await started(authority)
            await authority.create_run("r2", "b", "1", "null")
            claim = {"agents": {"b": ["1"]}, "holder": "w", "wait_ms": 50}
            async with listening(url) as heard:
                if places == 0:
                    assert heard.response.status == 503 and heard.response.headers["Retry-After"] == "1"
                    told = await heard.response.json(content_type=None)
                    assert (told["code"], told["reason"], told["retry_after_ms"]) == ("overloaded", "waits", 500)
                    return
                await heard.message()
                async with aiohttp.ClientSession() as session:
                    async with session.post(f"{url}/v1/claims", json=claim) as answer:
                        assert answer.status == (200 if places == 2 else 503)
                    async with session.post(f"{url}/v1/claims", json={**claim, "wait_ms": 0, "max": 1}) as answer:
                        assert answer.status == 200  # what doesn't wait needs no place

    asyncio.run(main())
