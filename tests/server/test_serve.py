"""A real server on a real socket: the client end to end, the limits of a connection, and the end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.support import NAMESPACE, OPERATOR_KEY, SECRET, TOKEN, Desk, Spy, app_of, real_authority

from tidefast.protocol.answers import LeaseGrant, StepAnswer
from tidefast.protocol.verdicts import Done, Refused, Renewed
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.sdk.http import HttpAuthority, RequestRefused
from tidefast.server import serve as serving
from tidefast.server.limits import LimitedProtocol
from tidefast.server.serve import ServeRefused, listen, serve
from tidefast.wire.problem import Problem, problem

ROOT = Path(__file__).resolve().parents[2]
APPLY = "/v1/runs/r1/steps/s1"


@contextlib.asynccontextmanager
async def server(authority: Any) -> AsyncIterator[str]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(app_of(authority), "127.0.0.1", 0, ready.set_result, stop))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result()
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def client(url: str, key: str | None = None) -> AsyncIterator[HttpAuthority]:
    authority = HttpAuthority(url, key)
    try:
        yield authority
    finally:
        await authority.close()


def exchange(authority: Any, *pieces: bytes) -> bytes:
    """What the server says to these bytes, up to its closing of the connection."""

    async def main() -> bytes:
        async with server(authority) as url:
            port = int(url.rsplit(":", 1)[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answer = bytearray()

            async def listen_on() -> None:
                with contextlib.suppress(ConnectionError):
                    while chunk := await asyncio.wait_for(reader.read(65_536), 5):
                        answer.extend(chunk)

            listening = asyncio.create_task(listen_on())
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            await listening
            writer.close()
            return bytes(answer)

    return asyncio.run(main())


def says(answer: bytes) -> tuple[int, str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    record = json.loads(body)
    return int(head.split()[1]), record["code"], record["reason"]


def request(method: bytes = b"POST", path: bytes = APPLY.encode(), *headers: bytes, body: bytes = b"") -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


# --- the client -------------------------------------------------------------------------------------------


def test_a_run_from_its_creation_to_its_end_over_http() -> None:
    async def main() -> None:
        desk = Desk()
        async with real_authority(desk) as (authority, _), server(authority) as url, client(url) as http:
            created = await http.create_run("r1", "agent", "1", '{"order":"ö"}')
            again = await http.create_run("r1", "agent", "1", '{"order":"ö"}')
            assert (created.was_new, again.was_new) == (True, False)  # type: ignore[union-attr]
            (grant,) = await http.claim({"agent": ["1"]}, "w1", 15_000, 5, 0, "q1")
            assert grant.input_json == '{"order":"ö"}' and grant.token.startswith("tfl1.")
            assert grant.token not in repr(grant)
            paid = await http.apply(grant.token, "pay", "charge", '{"order":"o1"}', 5_000)
            assert isinstance(paid, StepAnswer) and (paid.state, paid.replayed) == ("committed", False)
            assert json.loads(paid.receipt_json)["body"] == {"id": "ch-o1"}
            replay = await http.apply(grant.token, "pay", "charge", None, 5_000)
            assert isinstance(replay, StepAnswer) and replay.replayed and replay.receipt_json == paid.receipt_json
            assert desk.charged == [paid.key]
            noted = await http.save_result(grant.token, "note", '"text"')
            assert isinstance(noted, StepAnswer) and noted.receipt_json == '"text"'
            assert isinstance(await http.checkpoint(grant.token, 1, '{"stage":"paid"}'), Done)
            page = await http.journal(grant.token, 0)
            assert [entry.step_id for entry in page.entries] == ["pay", "note"]  # type: ignore[union-attr]
            (renewed,) = await http.renew([grant.token])
            assert isinstance(renewed, Renewed)
            undone = await http.compensate(grant.token, "pay", 5_000)
            assert isinstance(undone, StepAnswer) and undone.step_id == "pay~undo"
            assert json.loads(undone.receipt_json)["body"] == {"undone": "ch-o1"}
            stored = await http.step("r1", "pay~undo")
            assert json.loads(stored.intent_json)["args"] == {"charge": "ch-o1"}  # type: ignore[union-attr]
            done = await http.complete(grant.token, '{"ok":true}', ["pay"], [])
            repeated = await http.complete(grant.token, '{"ok":true}', ["pay"], [])
            assert isinstance(done, Done) and isinstance(repeated, Done) and not repeated.was_new
            info = await http.run("r1")
            assert (info.state, json.loads(info.result_json)) == ("completed", {"ok": True})  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_superseded_worker_hears_it_from_every_verb() -> None:
    async def main() -> None:
        async with (
            real_authority(Desk()) as (authority, _),
            server(authority) as url,
            client(url) as http,
            client(url, OPERATOR_KEY) as operator,
        ):
            await http.create_run("r1", "agent", "1", "null")
            old = await http.grant("r1", "w1", 15_000, "q1")
            assert isinstance(old, LeaseGrant)
            moved = await operator.oversee("preempt", "r1", "looking", old.epoch + 1)
            assert isinstance(moved, Refused) and moved.code == "moved"
            assert isinstance(await operator.oversee("preempt", "r1", "looking", old.epoch), Done)
            new = await http.grant("r1", "w2", 15_000, "q2")
            assert isinstance(new, LeaseGrant) and new.epoch == old.epoch + 1
            heard = [
                await http.apply(old.token, "s", "charge", '{"order":"o"}', 0),
                await http.save_result(old.token, "s", "1"),
                await http.compensate(old.token, "s", 0),
                await http.checkpoint(old.token, 99, "1"),
                await http.complete(old.token, "1", [], []),
                await http.fail(old.token, "e"),
                await http.journal(old.token, 0),
                await http.release(old.token, "done", ""),
                *await http.renew([old.token]),
            ]
            for refused in heard:
                assert isinstance(refused, Refused) and refused.code == "stale_epoch", refused
                assert (refused.facts["epoch"], refused.facts["live_epoch"]) == (old.epoch, new.epoch)
                assert refused.facts["holder"] == "w2"

    asyncio.run(main())


def test_reads_for_people() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, _), server(authority) as url, client(url) as http:
            for name in ("r1", "r2"):
                await http.create_run(name, "agent", "1", "null")
            assert [run.run_id for run in await http.runs(None, 10, None)] == ["r1", "r2"]
            assert [run.run_id for run in await http.runs("r1", 10, "claimable")] == ["r2"]
            grant = await http.grant("r1", "w1", 15_000, "q")
            await http.apply(grant.token, "pay", "charge", '{"order":"o1"}', 5_000)  # type: ignore[union-attr]
            (step,) = await http.steps("r1", None, 10)  # type: ignore[misc]
            assert step.attempts[0].state == "applied" and step.state == "committed"
            one = await http.step("r1", "pay")
            assert json.loads(one.intent_json)["args"] == {"order": "o1"}  # type: ignore[union-attr]
            events = await http.events("r1", 1, 10)
            assert [event.seq for event in events] == [2, 3, 4]  # type: ignore[union-attr]
            assert grant.token not in repr(events)  # type: ignore[union-attr]
            assert list(await http.held()) == []
            missing = await http.run("r9")
            assert isinstance(missing, Refused) and (missing.code, missing.reason) == ("not_found", "run_unknown")

    asyncio.run(main())


def test_what_the_client_refuses_or_is_refused_by_itself() -> None:
    async def main() -> None:
        spy = Spy()
        async with server(spy) as url, client(url) as http:
            for refused in (
                await http.run("../held"),
                await http.step("r1", "a/b"),
                await http.oversee("preempt", "r1?x", "", None),
                await http.save_result(TOKEN, "s", '"' + "x" * 1024 * 1024 + '"'),
            ):
                assert isinstance(refused, Refused) and refused.code == "invalid"
            nowhere = await http.apply("tfl1.nonsense", "s", "t", "{}", 0)
            assert nowhere == Refused("stale_epoch", "bad_token")
            assert spy.asked == []
            with pytest.raises(RequestRefused, match="lease_ms"):
                await http.claim({"a": ["1"]}, "w", 1, 1, 0, "q")
            denied = await http.oversee("thaw", "r1", "", None)
            assert isinstance(denied, Refused) and denied.facts["code"] == "unauthenticated"
            assert spy.asked == []
            assert await http.renew([]) == []
        with pytest.raises(ValueError, match="http://HOST:PORT"):
            HttpAuthority("localhost:7411")

    asyncio.run(main())


def test_no_answer_is_unavailable() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
            async with client(f"http://127.0.0.1:{taken.getsockname()[1]}") as http:
                with pytest.raises(AuthorityUnavailable):
                    await http.run("r1")
        async with server(Spy(error=RuntimeError("x"))) as url, client(url) as http:
            with pytest.raises(AuthorityUnavailable, match="status 500"):
                await http.apply(TOKEN, "s", "t", "{}", 0)

    asyncio.run(main())


def of_ours(status: int, told: Problem) -> bytes:
    body = told.to_json()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>",
        of_ours(408, problem("unsupported", "request_late")),
        of_ours(429, problem("unsupported", "too_many")),
        of_ours(503, problem("overloaded", "queue")),
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_an_answer_that_decides_nothing_is_unavailable(answer: bytes) -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main() -> None:
        listener = await asyncio.start_server(odd, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with listener, client(f"http://127.0.0.1:{port}") as http:
            with pytest.raises(AuthorityUnavailable):
                await http.apply(TOKEN, "s", "t", "{}", 0)
            with pytest.raises(AuthorityUnavailable):
                await http.renew([TOKEN])

    asyncio.run(main())


# --- limits of a connection -------------------------------------------------------------------------------

FRAMING = (400, "invalid", "framing_ambiguous")
NOT_HTTP = (400, "invalid", "http_invalid")
HEADERS = (431, "unsupported", "headers_too_large")
LATE = (408, "unsupported", "request_late")
BROKEN: list[tuple[str, bytes, tuple[int, str, str]]] = [
    ("length and chunked", request(b"POST", b"/v1/runs", b"Content-Length: 5", b"Transfer-Encoding: chunked"), FRAMING),
    ("two lengths", request(b"POST", b"/v1/runs", b"Content-Length: 5", b"Content-Length: 6"), FRAMING),
    ("xchunked", request(b"POST", b"/v1/runs", b"Transfer-Encoding: xchunked"), FRAMING),
    ("bad chunk end", request(b"POST", b"/v1/runs", b"Transfer-Encoding: chunked", body=b"1\r\naXX0\r\n"), NOT_HTTP),
    ("folded header", request(b"GET", b"/healthz", b"X: a\r\n b"), NOT_HTTP),
    ("bare line feed", b"GET /healthz HTTP/1.1\nHost: localhost\n\n", NOT_HTTP),
    ("no version", b"GET /healthz\r\n\r\n", NOT_HTTP),
    ("version 0.9", b"GET /healthz HTTP/0.9\r\n\r\n", NOT_HTTP),
    ("version 3.7", b"GET /healthz HTTP/3.7\r\n\r\n", NOT_HTTP),
    ("unknown method", request(b"DEBUG", b"/healthz"), NOT_HTTP),
    ("connect", request(b"CONNECT", b"localhost:1"), NOT_HTTP),
    ("not HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", NOT_HTTP),
    ("65 headers", request(b"GET", b"/healthz", *[b"X: a"] * 64), HEADERS),
    ("a long header", request(b"GET", b"/healthz", b"X: " + b"a" * 8192), HEADERS),
    ("33 KiB", request(b"GET", b"/healthz", *[b"X: " + b"a" * 5000] * 7), HEADERS),
    ("a header without end", b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 400_000, HEADERS),
    ("a long address", request(b"GET", b"/" + b"a" * 8192), (431, "unsupported", "request_line_too_long")),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "told"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_what_breaks_http_is_told_and_the_connection_closed(raw: bytes, told: tuple[int, str, str]) -> None:
    spy = Spy()
    answer = exchange(spy, raw)
    assert says(answer) == told and spy.asked == []
    assert b"connection: close" in answer and b"content-type: application/problem+json" in answer


def test_headers_at_their_limits_are_taken() -> None:
    for extra in ([b"X: a"] * 62, [b"X: " + b"a" * 8191], [b"X: " + b"a" * 7000] * 4):
        answer = exchange(Spy(), request(b"GET", b"/healthz", *extra, b"Connection: close"))
        assert answer.startswith(b"HTTP/1.1 200")
    path = b"/" + b"a" * 8191
    assert exchange(Spy(), request(b"GET", path, b"Connection: close")).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"GET /healthz HT", LATE),
        (b"GET /healthz HTTP/1.1\r\nHost: lo", LATE),
        (request(b"POST", b"/v1/runs", b"Content-Length: 10", body=b"{"), LATE),
        (request(b"POST", b"/v1/runs", b"Content-Length: 10", b"Expect: 100-continue"), LATE),
    ],
)
def test_what_comes_too_slowly_is_told(raw: bytes, told: tuple[int, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "header_time_s", 0.05)
    monkeypatch.setattr(LimitedProtocol, "body_idle_s", 0.05)
    spy = Spy()
    answer = exchange(spy, raw).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert says(answer) == told and spy.asked == []


@pytest.mark.parametrize("raw", [b"", b"\r\n\r\n"])
def test_a_connection_that_asks_nothing_is_closed(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "header_time_s", 0.05)
    assert exchange(Spy(), raw) == b""


def test_a_length_shorter_than_the_body_answers_the_request_and_closes() -> None:
    spy = Spy()
    lease = b"Tidefast-Lease: " + TOKEN.encode()
    raw = request(b"POST", b"/v1/runs/r1/lease/renew", lease, b"Content-Length: 0", body=b"rest GET /v1/held")
    answer = exchange(spy, raw)
    assert answer.count(b"HTTP/1.1") == 1 and answer.startswith(b"HTTP/1.1 200") and spy.asked == ["fence", "renew"]


def test_requests_in_one_piece_are_answered_in_order() -> None:
    one = request(b"GET", b"/healthz")
    answer = exchange(Spy(), one + request(b"GET", b"/v1/held") + request(b"GET", b"/nope", b"Connection: close"))
    assert [part.split()[0] for part in answer.split(b"HTTP/1.1")[1:]] == [b"200", b"200", b"404"]


def test_answers_that_are_due_are_given_before_a_connection_with_a_broken_body_ends() -> None:
    chunked = request(b"POST", b"/v1/runs", b"Transfer-Encoding: chunked", body=b"nonsense\r\n")
    answer = exchange(Spy(), request(b"GET", b"/v1/held") * 5 + chunked)
    assert [part.split()[0] for part in answer.split(b"HTTP/1.1")[1:]] == [b"200"] * 5


def test_a_body_over_the_limit_is_told_though_it_is_still_being_sent() -> None:
    body = b" " * (3 * 1024 * 1024)
    length = b"Content-Length: %d" % len(body)
    follow = request(b"GET", b"/healthz", b"Connection: close")
    answer = exchange(Spy(), request(b"POST", b"/v1/runs", length, body=body), follow)
    assert answer.startswith(b"HTTP/1.1 413") and b"HTTP/1.1 200" in answer
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    head = request(b"POST", b"/v1/runs", b"Transfer-Encoding: chunked", b"Content-Type: application/json")
    answer = exchange(Spy(), head, *[chunk] * 200)
    assert says(answer) == (413, "too_large", "body_too_large")


# --- beginning and end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_without_keys_only_loopback_is_bound(host: str) -> None:
    with pytest.raises(ServeRefused, match="only loopback"):
        listen(host, 0)


def test_a_taken_port_is_named() -> None:
    with listen("localhost", 0) as taken:
        taken.listen()
        with pytest.raises(ServeRefused, match="--port"):
            listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ServeRefused, match="65535"):
        listen("127.0.0.1", 70_000)


def test_a_waiting_claim_ends_when_the_server_does() -> None:
    class Patient(Spy):
        asked_now = asyncio.Event()

        async def claim(self, *args: Any) -> Any:
            self.asked_now.set()
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        authority, stop = Patient(), asyncio.Event()
        ready = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(app_of(authority), "::1", 0, ready.set_result, stop))
        async with client(await ready) as http:
            waiting = asyncio.create_task(http.claim({"a": ["1"]}, "w", 15_000, 1, 30_000, "q"))
            await authority.asked_now.wait()
            stop.set()
            with pytest.raises(AuthorityUnavailable, match="stopping"):
                await waiting
            await task

    asyncio.run(main())


def test_a_caller_that_hangs_up_while_it_waits_is_granted_nothing() -> None:
    async def main() -> None:
        async with real_authority(Desk()) as (authority, engine), server(authority) as url, client(url) as http:
            began, ended, waiting = asyncio.Event(), asyncio.Event(), authority.claim

            async def claim(*args: Any) -> Any:
                began.set()
                try:
                    return await waiting(*args)
                finally:
                    ended.set()

            authority.claim = claim  # type: ignore[method-assign]
            body = json.dumps({"agents": {"a": ["1"]}, "holder": "dead", "wait_ms": 30_000}).encode()
            headers = (b"Content-Type: application/json", b"Content-Length: %d" % len(body))
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
            writer.write(request(b"POST", b"/v1/claims", *headers, body=body))
            await began.wait()
            writer.close()
            await asyncio.wait_for(ended.wait(), 5)
            await http.create_run("r1", "a", "1", "null")
            head = engine.head("r1")  # type: ignore[arg-type]
            assert head is not None and not head.is_live and head.epoch == 0
            (grant,) = await http.claim({"a": ["1"]}, "w2", 15_000, 1, 1_000, "q")
            assert grant.holder == "w2"

    asyncio.run(main())


PROCESS = """
import sys
from tests.server.support import STEP, Spy, app_of
import uvloop
from tidefast.server.serve import serve

class Slow(Spy):
    async def apply(self, *args):
        print("in flight", flush=True)
        await app.state.stopping.wait()
        return STEP

app = app_of(Slow())
uvloop.run(serve(app, "127.0.0.1", 0, lambda url: print(url, flush=True)))
print("returned", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_is_in_flight_be_answered(number: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    process = subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        async def main() -> None:
            async with client(url) as http:
                asking = asyncio.create_task(http.apply(TOKEN, "s1", "t", "{}", 1_000))
                line = await asyncio.to_thread(process.stdout.readline)  # type: ignore[union-attr]
                assert line == "in flight\n"
                process.send_signal(number)
                answer = await asking
                assert isinstance(answer, StepAnswer) and answer.receipt_json == '{"body":1}'
                with pytest.raises(AuthorityUnavailable):
                    await http.run("r1")

        asyncio.run(main())
        assert process.stdout.readline() == "returned\n"
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def test_starting_imports_neither_the_log_nor_the_client() -> None:
    unwanted = "[name for name in ('structlog', 'aiohttp', 'rich') if name in sys.modules]"
    code = f"import sys, tidefast.server.serve, tidefast.server.app; print({unwanted})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_the_listening_socket_is_a_tcp_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
    assert (serving.GRACE_S, SECRET != NAMESPACE) == (10, True)
