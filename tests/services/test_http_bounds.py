"""A hostile provider can't make the gateway grow, wait, follow or tell: bombs, stalls, lies, redirects, TLS."""

import asyncio
import gzip
import json
import resource
import zlib
from typing import Any

import pytest
from tests.services.certificates import trust_and_server
from tests.services.test_http_sender import KEY, Provider, answer, body_of, call, saying, told

from tidefast.protocol.contracts import Contract, Credential
from tidefast.services import departure
from tidefast.services.http_sender import ANSWER_BYTES_MAX
from tidefast.services.tools import Outcome

SECRET = "Bearer canary-7f3a"
MIB = 2**20


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_answer_and_nothing_is_fetched(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither elsewhere nor at the same place, and no credential leaves for where it points."""
    monkeypatch.setenv("CHARGE_TOKEN", SECRET)

    async def run() -> tuple[Outcome, int, int]:
        async with Provider(saying(answer(200))) as elsewhere:
            place = f"Location: http://127.0.0.1:{elsewhere.port}/\r\n".encode()
            async with Provider(saying(answer(status, b"", extra=place))) as provider:
                outcome = await call(provider.contract(credential=Credential("Authorization", "CHARGE_TOKEN")))
                return outcome, len(provider.heard), elsewhere.connections

    outcome, asked, followed = asyncio.run(run())
    assert (outcome.kind, outcome.reason, asked, followed) == ("unlisted", f"status_{status}", 1, 0)
    assert "Location" not in outcome.receipt_json and SECRET not in outcome.receipt_json


def test_a_credential_goes_to_its_own_origin_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tools at two providers: each hears its own, whatever the other's is called."""
    monkeypatch.setenv("ONE", "Bearer one")
    monkeypatch.setenv("TWO", "Bearer two")

    async def run() -> list[bytes]:
        async with Provider(saying(answer(201))) as one, Provider(saying(answer(201))) as two:
            for provider, name in ((one, "ONE"), (two, "TWO"), (one, "ONE")):
                await call(provider.contract(credential=Credential("Authorization", name)))
            await call(two.contract())
            return [b"".join(one.heard), b"".join(two.heard)]

    one, two = asyncio.run(run())
    assert b"Bearer one" in one and b"Bearer two" not in one
    assert b"Bearer two" in two and b"Bearer one" not in two
    assert two.count(b"Authorization") == 1, "a tool without a credential sends none"


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY", "NETRC"])
def test_the_environment_can_not_send_a_request_or_a_secret_elsewhere(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "there").write_text("machine 127.0.0.1 login a password canary-of-netrc\n")
    monkeypatch.setenv(name, str(tmp_path / "there") if name == "NETRC" else "http://127.0.0.1:1")

    async def run() -> tuple[str, bytes]:
        async with Provider(saying(answer(201))) as provider:
            return (await call(provider.contract())).kind, provider.heard[0]

    kind, heard = asyncio.run(run())
    assert kind == "applied" and b"Authorization" not in heard


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 201 X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (100 * MIB))
    for _ in range(100):
        writer.write(b"x" * MIB)
        await writer.drain()


def test_an_answer_of_a_hundred_mebibytes_is_cut_and_nothing_grows() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = told(endless)
    assert (outcome.kind, body_of(outcome), json.loads(outcome.receipt_json)["truncated"]) == ("applied", None, True)
    assert len(outcome.receipt_json) < 1_000
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1_024 < 32, "MiB"


@pytest.mark.parametrize(
    ("encoding", "bomb"), [(b"gzip", gzip.compress(b"0" * (64 * MIB))), (b"deflate", zlib.compress(b"0" * (64 * MIB)))]
)
def test_a_bomb_is_not_unpacked_beyond_the_limit(encoding: bytes, bomb: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = told(saying(answer(201, bomb, extra=b"Content-Encoding: %s\r\n" % encoding)))
    assert outcome.kind == "applied" and len(outcome.receipt_json) < 2 * ANSWER_BYTES_MAX
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1_024 < 32, "MiB"


HEAD = b"HTTP/1.1 201 X\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "said",
    [
        HEAD + b"Content-Length: 90\r\n\r\n{}",  # too few bytes
        HEAD + b"Content-Length: -1\r\n\r\n{}",
        HEAD + b"Content-Length: 1e3\r\n\r\n{}",
        HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",  # the last chunk is missing
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        HEAD + b"X: " + b"y" * 200_000 + b"\r\n\r\n{}",
        b"HTTP/1.1 2\r\n\r\n",
        b"HTTP/1.1 20x OK\r\n\r\n",
        b"HTTP/9.9 201 X\r\n\r\n{",
    ],
    ids=lambda said: repr(said[48:100]),
)
def test_an_answer_that_lies_about_itself_is_doubt(said: bytes) -> None:
    outcome = told(saying(said, close=True))
    assert outcome.kind == "doubted" and outcome.receipt_json == "null"


def test_more_bytes_than_were_announced_are_no_second_answer() -> None:
    outcome = told(saying(HEAD + b"Content-Length: 2\r\n\r\n{}HTTP/1.1 500 X\r\n\r\n", close=True))
    assert (outcome.kind, body_of(outcome)) == ("applied", {})


async def stalling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Content-Length: 10\r\n\r\n{")
    await reader.read()


async def has_gone(reader: asyncio.StreamReader, within_s: float) -> bool:
    """Whether the caller gives up within this time."""
    try:
        async with asyncio.timeout(within_s):
            await reader.read()
    except TimeoutError:
        return False
    return True


async def dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Content-Length: 100000\r\n\r\n")
    while not await has_gone(reader, 0.01):
        writer.write(b" ")
        await writer.drain()


async def informing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not await has_gone(reader, 0.001):
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        await writer.drain()


@pytest.mark.parametrize("talk", [stalling, dripping, informing])
def test_an_answer_that_never_comes_to_its_end_is_doubt_at_the_deadline(talk: Any) -> None:
    outcome = told(talk, timeout_ms=200)
    assert (outcome.kind, outcome.reason) == ("doubted", "TimeoutError")


def test_a_cookie_is_not_kept_for_the_next_call() -> None:
    async def run() -> list[bytes]:
        async with Provider(saying(answer(201, extra=b"Set-Cookie: session=canary\r\n"))) as provider:
            contract = provider.contract()
            for _ in range(2):
                await call(contract)
            return provider.heard

    assert not [head for head in asyncio.run(run()) if b"Cookie" in head]


@pytest.mark.parametrize("address", ["127.0.0.9", "127.0.0.1"])
def test_a_certificate_for_another_name_means_that_nothing_was_sent(address: str) -> None:
    """Nor is one believed that nobody has signed: neither request nor credential leaves."""

    async def run() -> tuple[Outcome, int]:
        heard: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(100))
            writer.close()

        _, context = trust_and_server(address)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            contract = Contract("charge", "http", url=f"https://127.0.0.1:{port}/", key="header:K", key_ttl_ms=10**8)
            return await call(contract), len([head for head in heard if head])

    outcome, heard = asyncio.run(run())
    assert (outcome.kind, heard) == ("unsent", 0) and "Certificate" in outcome.reason


def test_the_key_of_the_provider_is_in_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong, its name is the kind of failure and no text."""
    monkeypatch.setenv("CHARGE_TOKEN", SECRET)
    credential = Credential("Authorization", "CHARGE_TOKEN")
    for talk in (saying(b"", close=True), saying(HEAD + b"Content-Length: x\r\n\r\n", close=True), stalling):
        outcome = told(talk, timeout_ms=100, credential=credential)
        assert "canary" not in f"{outcome}" and KEY not in outcome.reason


def test_connections_are_bounded() -> None:
    async def run() -> int | None:
        session = departure.open_session(keeps_connections=True)
        try:
            return session.connector.limit if session.connector is not None else None
        finally:
            await session.close()

    assert asyncio.run(run()) == departure.CONNECTIONS_MAX
