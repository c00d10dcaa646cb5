"""What the gateway's HTTP sender makes of a provider that does everything wrong. Real sockets, no sleeps."""

import asyncio
import gzip
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tidefast.engine.clock import ManualClock, SystemClock
from tidefast.protocol.contracts import Contract, Credential, Request, render_request
from tidefast.protocol.ids import Epoch
from tidefast.protocol.patterns import Pattern
from tidefast.services import http_sender
from tidefast.services.http_sender import HttpSender
from tidefast.services.tools import ConfigError, Outcome, ToolBook

KEY = "0" * 32
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Provider:
    """A server on loopback that says exactly the bytes it is told to say, and remembers what it heard."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.heard: list[bytes] = []
        self.connections = 0

    async def __aenter__(self) -> "Provider":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heard.append(head)
                await self._talk(reader, writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def contract(self, **more: Any) -> Contract:
        fields: dict[str, Any] = {"url": f"http://127.0.0.1:{self.port}/charges", "key": "header:Idempotency-Key"}
        return Contract("charge", "http", **{**fields, "key_ttl_ms": 10**8, **more})


def saying(answer: bytes, *, close: bool = False) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        if close:
            writer.close()

    return talk


def answer(status: int, body: bytes = b"{}", kind: bytes = b"application/json", extra: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n" % (status, kind, len(body), extra)
    return head + body


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the caller gives up


async def call(contract: Contract, timeout_ms: int = 5_000) -> Outcome:
    clock = SystemClock(0)
    sender = HttpSender(clock)
    try:
        request = render_request(contract, {"order": "o-1", "cents": 500}, KEY)
        deadline = clock.now().ms + timeout_ms
        return await sender.send(contract, request, deadline, step="run/pay", epoch=Epoch(7))
    finally:
        await sender.close()


def told(talk: Talk, timeout_ms: int = 5_000, **more: Any) -> Outcome:
    async def run() -> Outcome:
        async with Provider(talk) as provider:
            return await call(provider.contract(**more), timeout_ms)

    return asyncio.run(run())


def body_of(outcome: Outcome) -> Any:
    return json.loads(outcome.receipt_json)["body"]


@pytest.mark.parametrize(
    ("said", "kind", "reason"),
    [
        (answer(201, b'{"id":"ch_1"}'), "applied", ""),
        (answer(204, b""), "applied", ""),
        (answer(402, b'{"error":{"code":"declined"}}'), "refused", "status_402"),
        (answer(400, b'{"error":{"code":"other"}}'), "unlisted", "status_400"),
        (answer(302, b"", extra=b"Location: http://127.0.0.1:1/\r\n"), "unlisted", "status_302"),
        (answer(307, b"", extra=b"Location: http://127.0.0.1:1/\r\n"), "unlisted", "status_307"),
        (answer(409), "doubted", "status_409"),
        (answer(429), "doubted", "status_429"),
        (answer(500), "doubted", "status_500"),
        (answer(503), "doubted", "status_503"),
    ],
)
def test_an_answer_means_what_the_contract_says(said: bytes, kind: str, reason: str) -> None:
    outcome = told(saying(said), refusals=(Pattern(402), Pattern(400, (("error.code", "declined"),))))
    assert (outcome.kind, outcome.reason) == (kind, reason)


@pytest.mark.parametrize(
    "talk",
    [
        saying(b"", close=True),
        saying(b"HTTP/1.1 201 Cr", close=True),
        saying(b"HTTP/1.1 201 X\r\nContent-Length: 90\r\n\r\n{", close=True),
        saying(b"HTTP/1.1 201 X\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", close=True),
        saying(b"not http at all\r\n\r\n", close=True),
    ],
)
def test_half_an_answer_is_doubt_and_not_failure(talk: Talk) -> None:
    assert told(talk).kind == "doubted"


def test_no_answer_by_the_deadline_is_doubt() -> None:
    assert told(silence, timeout_ms=50).kind == "doubted"


def test_a_provider_that_nobody_listens_for_was_never_sent_anything() -> None:
    async def run() -> Outcome:
        async with Provider(silence) as provider:
            port = provider.port
        return await call(Contract("charge", "http", url=f"http://127.0.0.1:{port}/"))

    assert asyncio.run(run()).kind == "unsent"


def test_a_name_that_does_not_resolve_was_never_sent_anything() -> None:
    assert asyncio.run(call(Contract("charge", "http", url="http://nowhere.invalid/"))).kind == "unsent"


def test_a_deadline_that_has_passed_is_dropped_before_anything_leaves() -> None:
    assert told(saying(answer(201)), timeout_ms=0) == Outcome("unsent", reason="deadline")


def test_a_deadline_that_passes_while_connecting_is_looked_at_before_the_first_byte() -> None:
    async def run() -> tuple[Outcome, list[bytes]]:
        async with Provider(saying(answer(201))) as provider:
            contract = provider.contract()
            clock = Suspended()
            sender = HttpSender(clock)
            request = render_request(contract, {}, KEY)
            outcome = await sender.send(contract, request, clock.ms + 5_000, step="run/pay", epoch=Epoch(7))
            await sender.close()
            return outcome, provider.heard

    assert asyncio.run(run()) == (Outcome("unsent", reason="deadline"), [])


class Suspended(ManualClock):
    """A host that is suspended between the second and the third look at the clock."""

    looks = 0

    def now(self):  # type: ignore[no-untyped-def]
        self.looks += 1
        if self.looks == 2:
            self.advance(60_000)
        return super().now()


def test_an_idempotent_method_is_not_written_again_when_a_kept_connection_dies() -> None:
    """The client library would silently try once more; whoever counts requests must be the gateway."""

    async def run() -> tuple[list[str], int]:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(provider.heard) == 1:
                writer.write(answer(200))
                await writer.drain()
            else:
                writer.close()

        async with Provider(talk) as provider:
            contract = provider.contract(method="PUT")
            clock = SystemClock(0)
            sender = HttpSender(clock)
            request = render_request(contract, {}, KEY)
            kinds = [
                (await sender.send(contract, request, clock.now().ms + 5_000, step="r/s", epoch=Epoch(1))).kind
                for _ in range(2)
            ]
            await sender.close()
            return kinds, len(provider.heard)

    assert asyncio.run(run()) == (["applied", "doubted"], 2)


def test_an_answer_that_never_ends_is_cut_and_counts_as_its_status_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_sender, "ANSWER_BYTES_MAX", 1_000)
    outcome = told(saying(answer(201, b'"' + b"x" * 5_000 + b'"')))
    assert (outcome.kind, body_of(outcome), json.loads(outcome.receipt_json)["truncated"]) == ("applied", None, True)


def test_a_compressed_bomb_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_sender, "ANSWER_BYTES_MAX", 100_000)
    bomb = gzip.compress(b"0" * 50_000_000)
    outcome = told(saying(answer(201, bomb, extra=b"Content-Encoding: gzip\r\n")))
    assert (outcome.kind, body_of(outcome)) == ("applied", None)


@pytest.mark.parametrize("body", [b"<html>", b"\xff\xfe", b"NaN", b'{"a":1e999}', b"[" * 200_000, b'"\\ud800"'])
def test_a_body_that_is_no_json_is_kept_as_bytes(body: bytes) -> None:
    outcome = told(saying(answer(200, body)))
    receipt = json.loads(outcome.receipt_json)
    assert outcome.kind == "applied"
    assert receipt.get("encoding") == "base64" or receipt["body"] is None


def test_the_request_carries_key_epoch_and_credential_and_nothing_else_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARGE_TOKEN", "Bearer s3cret")

    async def run() -> bytes:
        async with Provider(saying(answer(201))) as provider:
            await call(provider.contract(credential=Credential("Authorization", "CHARGE_TOKEN")))
            return provider.heard[0]

    head = asyncio.run(run()).decode()
    assert f"Idempotency-Key: {KEY}\r\n" in head
    assert "Tidefast-Epoch: 7\r\n" in head
    assert "Authorization: Bearer s3cret\r\n" in head
    assert "Tidefast-Lease" not in head


def test_a_credential_that_is_gone_means_that_nothing_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHARGE_TOKEN", raising=False)
    assert told(saying(answer(201)), credential=Credential("Authorization", "CHARGE_TOKEN")).kind == "unsent"


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert told(saying(answer(201))).kind == "applied"


def test_the_stored_request_is_what_is_sent() -> None:
    request = render_request(Contract("charge", "http", url="http://h/"), {"b": 1, "a": "ü"}, KEY)
    assert request == Request("POST", "http://h/", {"Content-Type": "application/json"}, '{"a":"ü","b":1}')


@pytest.mark.parametrize("value", ["Bearer x\n", " Bearer x", "Bearer \x00", "Bearer ü"])
def test_a_credential_that_no_header_can_carry_is_told_at_the_start_and_never_sent(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    credential = Credential("Authorization", "CHARGE_TOKEN")
    monkeypatch.setattr("os.environ", {**os.environ, "CHARGE_TOKEN": value})
    with pytest.raises(ConfigError, match="CHARGE_TOKEN"):
        ToolBook([Contract("charge", "http", url="http://h/", credential=credential)])
    assert told(saying(answer(201)), credential=credential).kind == "unsent"


@pytest.mark.parametrize(("more", "connections"), [({}, 1), ({"key": "none", "key_ttl_ms": 0}, 2)])
def test_who_can_not_replay_gets_a_fresh_connection_for_each_request(more: dict[str, Any], connections: int) -> None:
    """A kept connection may be closed in the moment it is used again: harmless with a key, a doubt to hold without."""

    async def run() -> int:
        async with Provider(saying(answer(201))) as provider:
            contract = provider.contract(**more)
            clock = SystemClock(0)
            sender = HttpSender(clock)
            for _ in range(2):
                request = render_request(contract, {}, KEY)
                await sender.send(contract, request, clock.now().ms + 5_000, step="r/s", epoch=Epoch(1))
            await sender.close()
            return provider.connections

    assert asyncio.run(run()) == connections
