"""A run's events as server-sent events.

Each event is one message whose id is its seq, so that a client which reconnects with `Last-Event-ID` misses none and
hears none twice. A stream says something at least every `KEEP_ALIVE_S`, and ends with the run, with the server, with
the caller's key, or when the caller takes nothing for `SEND_S`. Whoever comes back to an ended run of which it has
heard everything is told 204, which makes a browser stop asking.
"""

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import Receive, Scope, Send

from tidefast.protocol.answers import EventInfo
from tidefast.protocol.verdicts import Refused
from tidefast.server.bodies import without_bodies
from tidefast.server.door import hung_up
from tidefast.server.verbs import Call
from tidefast.wire.answers import encode, spell

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE_S = 15.0
SEND_S = 30.0
PAGE = 50


class EventStream:
    """One stream, as an ASGI application. `is_welcome` says whether the caller may still hear it."""

    def __init__(self, call: Call, after: int, stopping: asyncio.Event, is_welcome: Callable[[], bool]) -> None:
        self._call, self._after = call, after
        self._stopping, self._is_welcome = stopping, is_welcome
        self.status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = await self._events()
        if not found and await self._call.authority.has_ended(self._call.run):
            self.status = 204
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        ended = [asyncio.ensure_future(waiting) for waiting in (hung_up(receive), self._stopping.wait())]
        telling = asyncio.ensure_future(self._tell(found, send))
        try:
            await asyncio.wait((*ended, telling), return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
            if not ended[0].done():
                await self._say(send, b"", more=False)
        except TimeoutError:
            return  # the server closes a connection whose answer was left unfinished
        finally:
            for waiting in (*ended, telling):
                waiting.cancel()

    async def _tell(self, found: Sequence[EventInfo], send: Send) -> None:
        """Tell events as they become durable, until the run has ended or the caller may hear no more."""
        authority, run = self._call.authority, self._call.run
        await self._say(send, b": tidefast\n\n")
        while self._is_welcome():
            if found:
                for event in found:
                    await self._say(send, self._spelled(event))
                    self._after = event.seq
            found = await self._events()
            if not found:
                if await authority.has_ended(run):
                    return
                await authority.changed(run, int(KEEP_ALIVE_S * 1_000))
                found = await self._events()
                if not found:
                    await self._say(send, b": still here\n\n")

    async def _events(self) -> Sequence[EventInfo]:
        found = await self._call.authority.events(self._call.run, self._after, PAGE)
        return () if isinstance(found, Refused) else found

    def _spelled(self, event: EventInfo) -> bytes:
        shown = event if self._call.caller.bodies else without_bodies(event)
        return b"id: %d\ndata: %s\n\n" % (event.seq, encode(spell(shown)))

    async def _say(self, send: Send, text: bytes, *, more: bool = True) -> None:
        """Say something to a caller that takes it in time. Raises `TimeoutError` for one that doesn't."""
        async with asyncio.timeout(SEND_S):
            await send({"type": "http.response.body", "body": text, "more_body": more})
