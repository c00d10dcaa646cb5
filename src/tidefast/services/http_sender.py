"""Sends one attempt over HTTP and says what it saw. It decides nothing and never raises.

Law 6 lives here: the deadline was fixed before the intent was submitted; it is looked at after connecting, just before
the first byte, by a clock that counts suspension, and what is late is dropped as never sent. Everything that fails
before the first byte is *never sent*; everything after it, short of an answer, is doubt. A request is written once:
aiohttp's silent second try of idempotent methods is refused. Redirects are not followed, the environment's proxies and
netrc are not read, and a credential goes to its contract's own origin only.
"""

import asyncio
import base64
import contextvars
import os
from typing import Any

import aiohttp
import msgspec

from tidefast.engine.clock import Clock
from tidefast.protocol.canonical import CanonicalError, canonical, digest, text_json
from tidefast.protocol.contracts import Contract, Request
from tidefast.protocol.doubt import outcome_of
from tidefast.protocol.events import object_json
from tidefast.protocol.ids import Epoch
from tidefast.services.tools import Outcome

ANSWER_BYTES_MAX = 1_048_576  # beyond it an answer's body is dropped; the effect counts as its status says
EPOCH_HEADER = "Tidefast-Epoch"
STEP_HEADER = "Tidefast-Step"
CONNECTIONS_MAX = 256


class TooLate(Exception):
    """The deadline passed before the first byte: never sent."""


class WrittenTwice(Exception):
    """The client library wanted to write the request a second time; what became of the first is unknown."""


class Departure:
    """One attempt's way out: whether its first byte may have left."""

    def __init__(self, clock: Clock, deadline_ms: int) -> None:
        self._clock = clock
        self._deadline_ms = deadline_ms
        self.has_left = False

    def leave(self) -> None:
        """Called with the connection open and nothing written yet."""
        if self.has_left:
            raise WrittenTwice
        if self._clock.now().ms >= self._deadline_ms:
            raise TooLate
        self.has_left = True


_departure: contextvars.ContextVar[Departure] = contextvars.ContextVar("departure")


class FencedRequest(aiohttp.ClientRequest):
    """A request that asks its `Departure` just before the first byte is written."""

    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        _departure.get().leave()
        return await super().send(conn)


class HttpSender:
    """Holds the connections to the providers of one gateway, and reads their credentials at the moment of sending."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, contract: Contract, request: Request, deadline_ms: int, *, step: str, epoch: Epoch) -> Outcome:
        """One attempt, from connecting to the whole answer. Returns by the deadline, give or take the event loop."""
        departure = Departure(self._clock, deadline_ms)
        _departure.set(departure)
        remaining_ms = deadline_ms - self._clock.now().ms
        if remaining_ms <= 0:
            return Outcome("unsent", reason="deadline")
        try:
            async with asyncio.timeout(remaining_ms / 1_000):
                return await self._exchange(contract, request, step, epoch)
        except TooLate:
            return Outcome("unsent", reason="deadline")
        except (aiohttp.ClientError, WrittenTwice, OSError, TimeoutError, ValueError) as error:
            return Outcome("doubted" if departure.has_left else "unsent", reason=_reason(error))

    async def _exchange(self, contract: Contract, request: Request, step: str, epoch: Epoch) -> Outcome:
        headers = {**request.headers, EPOCH_HEADER: str(epoch), STEP_HEADER: step, "Accept-Encoding": "identity"}
        if contract.credential is not None:
            headers[contract.credential.header] = os.environ[contract.credential.env]
        async with self._open().request(
            request.method,
            request.url,
            headers=headers,
            data=request.body.encode() if request.body else None,
            allow_redirects=False,
        ) as response:
            body, is_whole = await _read(response.content)
            return outcome(contract, response.status, response.content_type, body, is_whole)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX),
                timeout=aiohttp.ClientTimeout(total=None),
                request_class=FencedRequest,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


async def _read(content: aiohttp.StreamReader) -> tuple[bytes, bool]:
    """(the answer's bytes, whether that is all of them): reading stops at the limit."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            return b"", False
    return bytes(body), True


def outcome(contract: Contract, status: int, content_type: str, body: bytes, is_whole: bool) -> Outcome:
    """What an HTTP answer means under a contract, with its receipt."""
    value: Any = None
    body_json, encoding = "null", ""
    if is_whole and body:
        try:
            value = msgspec.json.decode(body)
            body_json = canonical(value)
        except (msgspec.DecodeError, CanonicalError, UnicodeDecodeError):
            value, encoding = None, "base64"
            body_json = text_json(base64.b64encode(body).decode())
    members = {
        "status": str(status),
        "content_type": text_json(content_type[:200]),
        "body": body_json,
        "digest": f'"{digest(body_json)}"',
        "truncated": "false" if is_whole else "true",
    }
    if encoding:
        members["encoding"] = '"base64"'
    kind, reason = outcome_of(contract, status, value)
    return Outcome(kind, object_json(**members), reason)


def _reason(error: BaseException) -> str:
    """The kind of failure, without any text that a provider or a credential could have got into."""
    return f"{type(error).__name__}"
