"""Sends one attempt over HTTP and says what it saw. It decides nothing and never raises.

Law 6 lives here: the deadline was fixed before the intent was submitted; it is looked at after connecting, just before
the first byte, by a clock that counts suspension, and what is late is dropped as never sent. Everything that fails
before the first byte is *never sent*; everything after it, short of an answer, is doubt. A request is written once:
aiohttp's silent second try of idempotent methods is refused. Redirects are not followed, the environment's proxies and
netrc are not read, and a credential goes to its contract's own origin only. A provider that says it back, as some do in
an error, is not believed to have meant it for the log: the receipt has a mark in its place.
"""

import asyncio
import base64
import importlib
import json
import os
import urllib.parse
from typing import TYPE_CHECKING, Any

import msgspec

from tidefast.engine.clock import Clock
from tidefast.protocol.canonical import CanonicalError, canonical, digest, text_json
from tidefast.protocol.contracts import Contract, Request
from tidefast.protocol.doubt import outcome_of
from tidefast.protocol.events import object_json
from tidefast.protocol.ids import Epoch
from tidefast.services.tools import Outcome, fits_header

if TYPE_CHECKING:
    import aiohttp

ANSWER_BYTES_MAX = 1_048_576  # beyond it an answer's body is dropped; the effect counts as its status says
EPOCH_HEADER = "Tidefast-Epoch"
STEP_HEADER = "Tidefast-Step"
MASK = b"(credential)"
WORD_LEAST = 8  # a shorter word of a credential is no secret, and would be found in anything


class HttpSender:
    """Holds the connections to the providers of one gateway, and reads their credentials at the moment of sending."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether a doubt could be replayed

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def warm(self) -> None:
        """Import the HTTP client on another thread, so that the first attempt needn't."""
        await asyncio.to_thread(importlib.import_module, "tidefast.services.departure")

    async def send(self, contract: Contract, request: Request, deadline_ms: int, *, step: str, epoch: Epoch) -> Outcome:
        """One attempt, from connecting to the whole answer. Returns by the deadline, give or take the event loop."""
        from tidefast.services.departure import Departure, TooLate, departing

        departure = Departure(self._clock, deadline_ms)
        departing.set(departure)
        remaining_ms = deadline_ms - self._clock.now().ms
        if remaining_ms <= 0:
            return Outcome("unsent", reason="deadline")
        try:
            async with asyncio.timeout(remaining_ms / 1_000):
                return await self._exchange(contract, request, step, epoch)
        except TooLate:
            return Outcome("unsent", reason="deadline")
        except Exception as error:  # whatever it was: before the first byte nothing happened, after it nobody knows
            return Outcome("doubted" if departure.has_left else "unsent", reason=type(error).__name__)

    async def _exchange(self, contract: Contract, request: Request, step: str, epoch: Epoch) -> Outcome:
        from tidefast.services.departure import open_session, read_bounded

        headers = {**request.headers, EPOCH_HEADER: str(epoch), STEP_HEADER: step, "Accept-Encoding": "identity"}
        if contract.credential is not None:
            headers[contract.credential.header] = os.environ[contract.credential.env]
        if not all(fits_header(value) for value in headers.values()):
            raise ValueError("a header's value can't be sent")  # said before anything leaves: never sent
        session = self._sessions.get(contract.dedups)
        if session is None:
            session = self._sessions[contract.dedups] = open_session(keeps_connections=contract.dedups)
        async with session.request(
            request.method,
            request.url,
            headers=headers,
            data=request.body.encode() if request.body else None,
            allow_redirects=False,
        ) as response:
            body, is_whole = await read_bounded(response.content, ANSWER_BYTES_MAX)
            if contract.credential is not None:
                body = masked(body, headers[contract.credential.header])
            return outcome(contract, response.status, response.content_type, body, is_whole)


def masked(body: bytes, credential: str) -> bytes:
    """An answer without the credential that it may have said back: whole, or its last word (`Bearer WORD`)."""
    for secret in (credential, credential.rpartition(" ")[2]):
        for spelled in {secret, json.dumps(secret)[1:-1], urllib.parse.quote(secret, safe="")}:
            if len(spelled) >= WORD_LEAST:
                body = body.replace(spelled.encode(), MASK)
    return body


def outcome(contract: Contract, status: int, content_type: str, body: bytes, is_whole: bool) -> Outcome:
    """What an HTTP answer means under a contract, with its receipt."""
    value: Any = None
    body_json, encoding = "null", ""
    if is_whole and body:
        try:
            value = msgspec.json.decode(body)
            body_json = canonical(value)
        except (msgspec.DecodeError, CanonicalError, UnicodeDecodeError, RecursionError):
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
    kind, reason = outcome_of(contract, status, value, is_whole)
    return Outcome(kind, object_json(**members), reason)
