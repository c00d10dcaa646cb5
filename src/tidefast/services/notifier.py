"""Sends notices to a webhook: signed, retried with growing pauses, never on the path of a step.

The store keeps each notice from the transaction of its event until the receiver has answered 2xx, so a crash sends it
again and never loses it: at least once, always under the same id and with the same bytes. The signature is the one of
the Standard Webhooks specification (standardwebhooks.com): base64 of HMAC-SHA256 over `id.timestamp.body`.
"""

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Mapping

import aiohttp
import structlog

from tidefast.engine.engine import Engine
from tidefast.protocol.notices import Notice

AT_ONCE = 8
LOOK_MS = 1_000
TIMEOUT_S = 10.0
PAUSE_FIRST_MS, PAUSE_MOST_MS = 1_000, 3_600_000
TRIES_MAX = 100  # about four days
log = structlog.get_logger("tidefast.notifier")


def sign(secret: bytes, notice_id: str, timestamp: int, body: str) -> str:
    """The value of `webhook-signature` for one sending."""
    signed = hmac.new(secret, f"{notice_id}.{timestamp}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode()}"


def headers(secret: bytes, notice: Notice, timestamp: int) -> Mapping[str, str]:
    """What stands above the body of one sending."""
    return {
        "Content-Type": "application/json",
        "webhook-id": notice.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(secret, notice.id, timestamp, notice.body),
    }


class Notifier:
    """Sends what the store holds to one address, until it is stopped."""

    def __init__(self, engine: Engine, url: str, secret: bytes, *, look_ms: int = LOOK_MS) -> None:
        self._engine, self._url, self._secret, self._look_ms = engine, url, secret, look_ms
        self._task: asyncio.Task[None] | None = None
        engine.keeps_notices = True

    def start(self) -> None:
        self._task = asyncio.create_task(self._send_on())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send_on(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()) as http:
            while True:
                if not await self.send_due(http):
                    await self._engine.wait_for_notice(self._look_ms)

    async def send_due(self, http: aiohttp.ClientSession) -> int:
        """Send what is due now, several at a time. Returns how many were."""
        due = self._engine.store.notices(self._engine.clock.now().ms, AT_ONCE)
        await asyncio.gather(*(self._send(http, notice) for notice in due))
        if due:
            await self._engine.booked()
        return len(due)

    async def _send(self, http: aiohttp.ClientSession, notice: Notice) -> None:
        """One sending; what became of it is booked."""
        timestamp = self._engine.clock.now().wall_ms // 1_000
        sent = headers(self._secret, notice, timestamp)
        try:
            async with http.post(self._url, data=notice.body.encode(), headers=sent, allow_redirects=False) as answer:
                told = "" if 200 <= answer.status <= 299 else f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            told = type(error).__name__
        if not told:
            self._engine.book_notice(notice.id, None)
            return
        tries = notice.tries + 1
        if tries >= TRIES_MAX:
            log.error("notice_given_up", notice=notice.id, tries=tries, why=told, body=notice.body)
            self._engine.book_notice(notice.id, None)
            return
        pause_ms = min(PAUSE_FIRST_MS << min(tries - 1, 20), PAUSE_MOST_MS)
        log.warning("notice_not_taken", notice=notice.id, tries=tries, why=told, again_in_ms=pause_ms)
        due_ms = self._engine.clock.now().ms + pause_ms
        self._engine.book_notice(notice.id, notice._replace(tries=tries, due_ms=due_ms))
