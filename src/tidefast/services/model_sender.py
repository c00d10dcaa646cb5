"""Sends one asking to an upstream and says what it saw. It decides nothing and never raises.

Before the first byte a failure means *never sent*; after it, short of a whole answer, *doubted*: a cut stream is not an
answer, and what it has cost is unknown. An upstream that turned the call away before asking any model has not billed
it, so that this too is *never sent*. Redirects are not followed, and a credential goes to its upstream only.
"""

import asyncio
import base64
import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tidefast.engine.clock import Clock
from tidefast.protocol.canonical import CanonicalError, canonical, digest, text_json
from tidefast.protocol.chat import ChatCall, Fold, Usage, unfinished, usage_of
from tidefast.protocol.commands import OutcomeKind
from tidefast.protocol.events import object_json
from tidefast.services.http_sender import EPOCH_HEADER, STEP_HEADER
from tidefast.services.models import REFUSALS, UNBILLED, Settings

if TYPE_CHECKING:
    import aiohttp

ANSWER_BYTES_MAX = 16 * 1_048_576
EVENT_STREAM = "text/event-stream"
END_S = 0.05  # how long the end of a connection's answer is waited for after its last event
BUSY_MS = 1_000  # how long an upstream that says "too many" is left alone if it doesn't say

Listener = Callable[[bytes, bool], None]  # (an event's bytes, whether it belongs to the answer's end)


class Question(NamedTuple):
    """What is asked, and in whose name: the step as RUN/STEP, so that the upstream's own log can be matched."""

    body: str
    step: str
    epoch: int


class Heard(NamedTuple):
    """What became of one asking. `busy_ms`: the upstream asked to be left alone for so long."""

    kind: OutcomeKind
    reason: str = ""
    receipt_json: str = "null"
    usage: Usage | None = None
    busy_ms: int = 0


class ModelSender:
    """Holds the connections to all upstreams of one gateway."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(
        self, settings: Settings, call: ChatCall, question: "Question", deadline_ms: int, listener: Listener
    ) -> Heard:
        """One asking, from connecting to the end of the answer. Returns by the deadline, give or take the loop.

        Only a stream has a first token that can be waited for; an answer in one piece has the deadline alone.
        """
        from tidefast.services.departure import Departure, TooLate, departing

        departure = Departure(self._clock, deadline_ms)
        departing.set(departure)
        remaining_ms = deadline_ms - self._clock.now().ms
        if remaining_ms <= 0:
            return Heard("unsent", "deadline")
        reading = _Reading(settings, call.wants_usage, listener)
        first_ms = settings.first_token_ms if call.is_stream else remaining_ms
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + remaining_ms / 1_000
        try:
            async with asyncio.timeout(min(remaining_ms, first_ms) / 1_000) as limit:
                return await self._exchange(settings, question, reading, lambda: limit.reschedule(ends_at))
        except TooLate:
            return Heard("unsent", "deadline")
        except TimeoutError:
            reason = "timeout" if reading.has_begun else "first_token"
        except Exception as error:  # whatever it was: before the first byte nothing happened, after it nobody knows
            reason = "stream_cut" if reading.has_begun else type(error).__name__
        return Heard("doubted" if departure.has_left else "unsent", reason, usage=reading.usage)

    async def _exchange(
        self, settings: Settings, question: "Question", reading: "_Reading", begun: Callable[[], None]
    ) -> Heard:
        headers = {EPOCH_HEADER: str(question.epoch), STEP_HEADER: question.step, **_headers(settings)}
        async with self._open().post(
            settings.url, data=question.body.encode(), headers=headers, allow_redirects=False
        ) as response:
            reading.status, reading.content_type = response.status, response.content_type
            reading.retry_after = response.headers.get("retry-after-ms", ""), response.headers.get("retry-after", "")
            async for data in response.content.iter_any():
                if not reading.has_begun:
                    begun()
                if not reading.take(data):
                    break
            await _to_its_end(response.content)
            return reading.outcome()

    def _open(self) -> "aiohttp.ClientSession":
        from tidefast.services.departure import open_session

        if self._session is None:
            self._session = open_session(keeps_connections=True)
        return self._session


async def _to_its_end(content: "aiohttp.StreamReader") -> None:
    """The rest of a stream whose answer is whole, so that its connection can be used again; not waited for long."""
    try:
        async with asyncio.timeout(END_S):
            await content.readany()
    except TimeoutError:
        return


def _headers(settings: Settings) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    credential = settings.table.credential
    if credential is not None:
        value = os.environ[credential.env]
        headers[credential.header or "Authorization"] = value if credential.header else f"Bearer {value}"
    return headers


class _Reading:
    """One answer while it is read."""

    def __init__(self, settings: Settings, wants_usage: bool, listener: Listener) -> None:
        self.status = 0
        self.content_type = ""
        self.retry_after = ("", "")
        self.has_begun = False
        self._settings = settings
        self._wants_usage = wants_usage
        self._listener = listener
        self._fold = Fold()
        self._raw = bytearray()
        self._is_too_large = False

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.content_type == EVENT_STREAM

    @property
    def usage(self) -> Usage | None:
        return self._fold.usage

    def take(self, data: bytes) -> bool:
        """The next bytes; False if reading on has no point."""
        self.has_begun = True
        if len(self._raw) + len(data) > ANSWER_BYTES_MAX:
            self._is_too_large = True
            return False
        if not self.is_stream:
            self._raw += data
            return True
        for event in self._fold.feed(data):
            if event.is_usage and not self._wants_usage:
                continue  # asked for by the gateway, not by the caller
            self._raw += event.raw
            self._listener(event.raw, event.is_end)
        return not self._fold.is_done and not self._fold.fault

    def outcome(self) -> Heard:
        if self._is_too_large:
            return Heard("doubted", "answer_too_large", usage=self.usage)
        if self.status in UNBILLED or self.status in self._settings.table.unbilled:
            return Heard("unsent", f"status_{self.status}", busy_ms=_busy_ms(self.retry_after))
        raw = bytes(self._raw)
        if self.status in REFUSALS:
            body = _decoded(raw)
            return Heard("refused", f"status_{self.status}", self._receipt(raw, body))
        if self.status != 200:
            return Heard("doubted", f"status_{self.status}")
        if self.is_stream:
            body, why, usage = self._fold.body(), self._fold.unfinished(), self.usage
        else:
            body = _decoded(raw)
            why, usage = unfinished(body), usage_of(body)
        if not why:
            try:
                return Heard("applied", "", self._receipt(raw, body), usage)
            except CanonicalError:
                why = "answer_unreadable"
        return Heard("doubted", why, usage=usage)

    def _receipt(self, raw: bytes, body: Any) -> str:
        """The answer as the log keeps it: folded for reading, and its bytes for replaying them."""
        body_json = canonical(body)
        return object_json(
            status=str(self.status),
            content_type=text_json(self.content_type[:200]),
            body=body_json,
            digest=f'"{digest(body_json)}"',
            raw=f'"{base64.b64encode(zlib.compress(raw, 6)).decode()}"',
            truncated="false",
        )


def raw_answer(receipt: Any) -> bytes:
    """The bytes of a journaled answer, as they came."""
    return zlib.decompress(base64.b64decode(receipt["raw"]))


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _busy_ms(retry_after: tuple[str, str]) -> int:
    """When an upstream wants to be asked again, from either header; a date, which needs equal clocks, isn't read."""
    for text, unit in zip(retry_after, (1, 1_000), strict=True):
        try:
            return int(float(text) * unit)
        except (ValueError, OverflowError):
            continue
    return BUSY_MS
