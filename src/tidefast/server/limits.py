"""The limits of one connection, in one subclass of uvicorn's httptools protocol.

Request line 8 KiB; 64 headers, 8 KiB each, 32 KiB in all; 5 s from a request's first byte to the end of its headers;
30 s between two pieces of a body, 120 s for all of it. What can't be parsed is answered with a problem and the
connection is closed, because where the next request begins is no longer known. What arrives while the server is behind
(`load.py`) is refused before anything else is done with it. A request already being worked on is answered first: bytes
that come after it must not turn its answer into an error.
"""

import asyncio
import math
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tidefast.server.load import RETRY_AFTER_MS, Load
from tidefast.wire.problem import MEDIA_TYPE, Problem, problem

REQUEST_LINE_MAX = 8 * 1024
HEADER_MAX = 8 * 1024
HEADERS_MAX = 64
HEADERS_BYTES_MAX = 32 * 1024
HEADER_TIME_S = 5.0
BODY_IDLE_S = 30.0
BODY_TIME_S = 120.0
UNREAD_MAX = 4 * 1024 * 1024  # of a refused body that is let pass so that its sender can read the refusal


def _rendered(told: Problem, *, is_last: bool) -> bytes:
    """A problem as the bytes of an answer; the last one closes its connection."""
    body, head = told.to_json(), [STATUS_LINE[told.status], b"content-type: ", MEDIA_TYPE.encode()]
    if told.retry_after_ms:
        head += [b"\r\nretry-after: ", str(math.ceil(told.retry_after_ms / 1000)).encode()]
    if is_last:
        head.append(b"\r\nconnection: close")
    head += [b"\r\ncache-control: no-store\r\ncontent-length: ", str(len(body)).encode(), b"\r\n\r\n", body]
    return b"".join(head)


def _overloaded(reason: str) -> Problem:
    return problem("overloaded", reason, {"retry_after_ms": RETRY_AFTER_MS})


BEHIND, BEHIND_LAST = (_rendered(_overloaded("loop"), is_last=is_last) for is_last in (False, True))


def limited(load: Load) -> type["LimitedProtocol"]:
    """The protocol of a server with this load."""
    return type("LimitedProtocol", (LimitedProtocol,), {"load": load})


class _Over(Exception):
    """A limit was passed inside a callback of the parser."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `_in_headers` and `_in_body` say how far the request that is being read has come."""

    header_time_s = HEADER_TIME_S
    body_idle_s = BODY_IDLE_S
    body_time_s = BODY_TIME_S
    load: Load  # of the server, see `limited`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._told: Problem | None = None
        self._is_dead = False
        self._in_headers = False
        self._in_body = False
        self._begun = 0
        self._head_bytes = 0  # of unfinished headers: the parser itself would gather them without end
        self._bytes_of_headers = 0
        self._unread = 0
        self._body_until = 0.0
        self._has_place = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._has_place = self.load.connect()
        if self._has_place:
            self._arm(self.header_time_s)
        else:
            self._is_dead = True
            transport.write(_rendered(_overloaded("connections"), is_last=True))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._has_place:
            self.load.disconnect()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Begin with a request, or refuse it at once where the server is behind: that must cost next to nothing."""
        if cycle.disconnected:
            self.transport.close()
            return
        if not self.load.is_behind(cycle.scope["path"]):
            super()._start_asgi_task(cycle, app)
            return
        is_last = not cycle.keep_alive or cycle.waiting_for_100_continue
        self.transport.write(BEHIND_LAST if is_last else BEHIND)
        cycle.response_started = cycle.response_complete = True
        if is_last:
            self.transport.close()
        if self.pipeline:
            self.loop.call_soon(
                self.on_response_complete
            )  # not here: each of them may be refused, one inside the other
        else:
            self.on_response_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_dead:
            return
        self._unset_keepalive_if_required()
        if not self._in_headers and not self._in_body:
            self._arm(self.header_time_s)
        begun = self._begun
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self._disarm()
                self._is_dead = True  # what comes now belongs to the socket
                self.handle_websocket_upgrade()
            return  # nothing else is upgraded: the request was handed over and is answered as what it is
        except httptools.HttpParserError as error:
            self._broken(error)
            return
        if self._in_headers:
            self._head_bytes += len(data) if self._begun == begun else 0
            if self._head_bytes > HEADERS_BYTES_MAX + REQUEST_LINE_MAX:
                self._refuse(problem("unsupported", "headers_too_large"))
        elif self._in_body:
            self._arm(min(self.body_idle_s, max(self._body_until - self.loop.time(), 0)))

    # --- the parser's callbacks ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._in_body = True, False
        self._begun += 1
        self._head_bytes = self._bytes_of_headers = self._unread = 0
        self._arm(self.header_time_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > REQUEST_LINE_MAX:
            self._over("request_line_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name) + len(value)
        self._bytes_of_headers += size
        too_many = len(self.headers) >= HEADERS_MAX or self._bytes_of_headers > HEADERS_BYTES_MAX
        if too_many or size > HEADER_MAX:
            self._over("headers_too_large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._told = problem("invalid", "http_invalid")
            raise _Over
        self._in_headers, self._in_body = False, True
        self._body_until = self.loop.time() + self.body_time_s
        self._disarm()
        if self._get_upgrade() == b"websocket":
            from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol  # at first use

            self.ws_protocol_class = WebSocketsSansIOProtocol
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._unread += len(body)
            if self._unread > UNREAD_MAX:
                self._is_dead = True
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._disarm()
        super().on_message_complete()

    # --- ends ----------------------------------------------------------------------------------------------

    def _over(self, reason: str) -> None:
        self._told = problem("unsupported", reason)
        raise _Over

    def _broken(self, error: httptools.HttpParserError) -> None:
        words = str(error)
        is_framing = "Content-Length" in words or "Transfer-Encoding" in words
        told = self._told or problem("invalid", "framing_ambiguous" if is_framing else "http_invalid")
        self._refuse(told)

    def _refuse(self, told: Problem) -> None:
        """Answer with a problem and close; if an earlier request is being answered, only close after that."""
        self._is_dead = True
        self._disarm()
        cycle: RequestResponseCycle | None = self.cycle
        if self._in_body and cycle is not None and self.pipeline:
            cycle.disconnected = True  # the newest; those before it are answered, and when its turn comes it is the end
            return
        if self._in_body and cycle is not None and cycle.response_complete:
            self.transport.close()  # the answer was given
            return
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not self._in_body:
                cycle.keep_alive = False
                return
            cycle.disconnected = True  # its body can't be completed: whoever waits for it is told
            cycle.message_event.set()
        self.transport.write(_rendered(told, is_last=True))
        self.transport.close()

    def _arm(self, delay_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(delay_s, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """Too slow. A connection on which nothing was begun is closed without a word."""
        self._timer = None
        if self._is_dead or self.transport.is_closing():
            return
        if self._in_headers or self._in_body:
            self._refuse(problem("unsupported", "request_late"))
        else:
            self.transport.close()
