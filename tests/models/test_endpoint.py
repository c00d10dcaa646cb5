"""The address of the models over real sockets: raw bytes, the stock client, and what a broken answer says."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tests.models.house import House, house, question, run, told
from tests.server.support import NAMESPACE, SECRET, app_of

import tidefast as tf
from tidefast.demo.providers.scripted import Said
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Refused
from tidefast.sdk.heartbeat import LoopHeartbeat
from tidefast.sdk.http import HttpAuthority
from tidefast.server.serve import serve
from tidefast.wire import tokens

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Place(House):
    """A house with a door."""

    url: str

    def headers(self, right: Right, step: str = "plan") -> dict[str, str]:
        return {"Tidefast-Lease": tokens.mint(SECRET, NAMESPACE, right), "Tidefast-Step": step}

    def client(self, right: Right, step: str = "plan", **more: Any) -> openai.AsyncOpenAI:
        """A stock client: base URL and headers are all that is ours."""
        headers = self.headers(right, step)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", default_headers=headers, **more)

    async def post(self, right: Right, body: str, **headers: str) -> tuple[int, Any, bytes]:
        sent = {**self.headers(right), "Content-Type": "application/json", **headers}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/chat/completions", data=body.encode(), headers=sent) as response,
        ):
            return response.status, response.headers, await response.read()


@contextlib.asynccontextmanager
async def place(tmp_path: Path, script: Any = None, **more: Any) -> AsyncIterator[Place]:
    async with house(tmp_path, script, **more) as home:
        home.__class__ = Place
        assert isinstance(home, Place)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        serving = asyncio.ensure_future(serve(app_of(home.authority), "127.0.0.1", 0, ready.set_result, stop))
        home.url = await ready
        try:
            yield home
        finally:
            stop.set()
            await serving


def inside(tmp_path: Path, play: Any, script: Any = None, **more: Any) -> None:
    async def whole() -> None:
        async with place(tmp_path, script, **more) as home, asyncio.timeout(20):
            await play(home)

    run(whole())


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_answer_is_the_upstreams_bytes_and_its_replay_the_same(tmp_path: Path, is_stream: bool) -> None:
    async def play(home: Place) -> None:
        right, body = await home.lease(), question(stream=is_stream, stream_options={"include_usage": True})
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{home.model.url}/chat/completions", data=body) as response,
        ):
            direct = await response.read()
        status, headers, first = await home.post(right, body)
        again, replayed, second = await home.post(right, body)
        assert (status, again) == (200, 200)
        assert first.replace(b"-2", b"-1") == direct.replace(b"-2", b"-1")  # the id that the model numbers
        assert second == first
        assert headers["content-type"] == replayed["content-type"]
        assert ("Tidefast-Replayed" in headers, replayed["Tidefast-Replayed"]) == (False, "true")

    inside(tmp_path, play, lambda r, c: Said("the same words"))


def test_the_stock_client_works_by_base_url_and_headers_alone(tmp_path: Path) -> None:
    async def play(home: Place) -> None:
        right = await home.lease()
        async with home.client(right) as client:
            whole = await client.chat.completions.create(model="small", messages=HELLO)
            assert whole.choices[0].message.content == "w x (0)"
            extra = {"Tidefast-Step": "second"}
            stream = await client.chat.completions.create(
                model="small", messages=HELLO, stream=True, extra_headers=extra
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == "w x (1)"
            with pytest.raises(openai.UnprocessableEntityError) as conflict:
                await client.chat.completions.create(model="small", messages=HELLO, temperature=1.0)
            assert conflict.value.code == "step_conflict"
        assert len(home.model.bill) == 2

    inside(tmp_path, play, told("w x"))


async def to_its_end(stream: Any) -> tuple[list[Any], openai.APIError]:
    """The chunks of a stream that breaks, and what the stock client makes of the break."""
    chunks: list[Any] = []
    try:
        async for chunk in stream:
            chunks.append(chunk)  # noqa: PERF401 - those before the break are wanted
    except openai.APIError as error:
        return chunks, error
    raise AssertionError("it was taken for whole")


@pytest.mark.parametrize("cut_after", [1, 4])
def test_a_stock_client_hears_a_cut_stream_as_an_error_and_never_as_an_end(tmp_path: Path, cut_after: int) -> None:
    async def play(home: Place) -> None:
        async with home.client(await home.lease()) as client:
            stream = await client.chat.completions.create(model="small", messages=HELLO, stream=True)
            chunks, cut = await to_its_end(stream)
            assert cut.code == "in_doubt"
            assert {chunk.choices[0].finish_reason for chunk in chunks} == {None}

    inside(tmp_path, play, told("a b c d e", cut_after=cut_after))


def test_a_lease_that_ends_in_mid_stream_cuts_its_caller_off_while_the_answer_is_finished(tmp_path: Path) -> None:
    async def play(home: Place) -> None:
        old = await home.lease()
        async with home.client(old) as client:
            stream = await client.chat.completions.create(model="small", messages=HELLO, stream=True)
            await stream.__anext__()
            new = await home.lease(holder="w2")
            _, cut = await to_its_end(stream)
            assert cut.code == "stale_epoch"
        async with home.client(new) as client:
            stream = await client.chat.completions.create(model="small", messages=HELLO, stream=True)
            words = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert words == "a b c d e f g h (0)"
        assert len(home.model.bill) == 1

    inside(tmp_path, play, told("a b c d e f g h", pace_s=0.03))


def test_what_is_wrong_before_the_first_piece_has_a_status_of_its_own(tmp_path: Path) -> None:
    async def play(home: Place) -> None:
        old = await home.lease()
        right = await home.lease(holder="w2")

        async def says(right: Right, body: str, **headers: str) -> tuple[int, str]:
            status, _, raw = await home.post(right, body, **headers)
            return status, json.loads(raw)["reason"]

        assert await says(old, "{") == (409, "superseded")
        assert await says(right, "{") == (400, "json_invalid")
        assert await says(right, '{"model": "small", "model": "big"}') == (400, "json_duplicate")
        assert await says(right, question(), **{"Tidefast-Step": ""}) == (400, "field_missing")
        assert await says(right, question(), **{"Tidefast-Step": "a/b"}) == (400, "id_invalid")
        assert await says(right, question(), **{"Tidefast-Wait-Ms": "soon"}) == (400, "field_range")
        assert await says(right, '{"model": "small", "messages": []}') == (422, "args")
        assert await says(right, question(stream=True)) == (429, "budget")
        assert home.model.asked == []

    inside(tmp_path, play, rest="[budgets.run]\ncalls = 0")


def test_a_caller_that_hangs_up_in_mid_stream_is_answered_from_the_journal_when_it_comes_back(tmp_path: Path) -> None:
    async def play(home: Place) -> None:
        right = await home.lease()
        async with home.client(right) as client:
            stream = await client.chat.completions.create(model="small", messages=HELLO, stream=True)
            await stream.__anext__()
            await stream.close()
            again = await client.chat.completions.create(model="small", messages=HELLO, stream=True)
            words = "".join([chunk.choices[0].delta.content or "" async for chunk in again])
        assert (words, len(home.model.bill)) == ("a b c d (0)", 1)

    inside(tmp_path, play, told("a b c d", pace_s=0.02))


def test_the_sdk_asks_over_http_and_waits_as_the_upstream_says(tmp_path: Path) -> None:
    async def play(home: Place) -> None:
        right = await home.lease()
        authority = HttpAuthority(home.url)
        token = home.headers(right)["Tidefast-Lease"]
        try:
            refused = await authority.chat(token, "plan", question(), 1_000)
            assert isinstance(refused, Refused)
            assert (refused.code, refused.facts["retry_after_ms"]) == ("overloaded", 100)
            while isinstance(answer := await authority.chat(token, "plan", question(), 1_000), Refused):
                assert answer.reason == "upstream_busy"  # until what it asked for is over
            assert "there" in answer.receipt_json
            assert (await authority.chat(token, "plan", question(), 1_000)).replayed  # type: ignore[union-attr]
            (budget, *_) = await authority.budgets("", 9)
            assert (budget.name, budget.spent_calls) == ("agent/desk", 1)
        finally:
            await authority.close()

    def script(request: Any, count: int) -> Said:
        return Said("there", status=429 if count == 0 else 200, headers={"retry-after-ms": "100"})

    inside(tmp_path, play, script)


def test_an_agents_stock_client_streams_and_a_lost_lease_is_preempted(tmp_path: Path) -> None:
    app = tf.App()
    caught: list[Any] = []
    passes: list[int] = []

    async def play(home: Place) -> None:
        @app.agent(name="desk", version="1")
        async def desk(run: tf.Run, input: Any) -> str:
            passes.append(run.epoch)
            async with run.openai() as client:
                ask = client.chat.completions.create
                try:
                    await ask(model="small", messages=HELLO)
                except tf.Misuse as misuse:
                    caught.append(misuse)
                named = {"Tidefast-Step": "plan"}
                stream = await ask(model="small", messages=HELLO, stream=True, extra_headers=named)
                words = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                if len(passes) == 1:
                    await home.authority.preempt("r9", "test", "", None)
                    try:
                        await ask(model="small", messages=HELLO, extra_headers={"Tidefast-Step": "later"})
                    except Exception as error:
                        caught.append(error)
            return words

        authority = HttpAuthority(home.url)
        worker = tf.Worker(authority, app, LoopHeartbeat(authority), max_runs=1)
        await authority.create_run("r9", "desk", "1", "null")
        await worker.finish("r9", try_again=True)
        info = await authority.run("r9")
        await authority.close()
        assert not isinstance(info, Refused)
        assert (info.state, info.result_json) == ("completed", '"a b (0)"')
        assert [type(error) for error in caught] == [tf.Misuse, tf.Misuse]
        assert (len(passes), len(home.model.bill)) == (2, 1)

    inside(tmp_path, play, told("a b"))
