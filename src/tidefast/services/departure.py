"""The moment a request leaves: the last look at the deadline, just before its first byte.

Apart from `http_sender` because the HTTP client takes a fifth of a second to import, and a server should be ready
before anybody needs it.
"""

import contextvars
from typing import Any

import aiohttp

from tidefast.engine.clock import Clock

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


departing: contextvars.ContextVar[Departure] = contextvars.ContextVar("departure")


class FencedRequest(aiohttp.ClientRequest):
    """A request that asks its `Departure` just before the first byte is written."""

    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        departing.get().leave()
        return await super().send(conn)


def open_session(*, keeps_connections: bool) -> aiohttp.ClientSession:
    """A session that reads no proxies, no netrc and no cookies, and whose requests ask their `Departure`.

    A provider may close a kept connection in the moment it is used again, which is doubt; who can't replay gets a fresh
    connection for each request.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, force_close=not keeps_connections),
        timeout=aiohttp.ClientTimeout(total=None),
        request_class=FencedRequest,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def read_bounded(content: aiohttp.StreamReader, limit: int) -> tuple[bytes, bool]:
    """(the answer's bytes, whether that is all of them): reading stops beyond the limit."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > limit:
            return b"", False
    return bytes(body), True
