"""Hands one mail to a mail server, and judges every moment of the conversation. It decides nothing and never raises.

Between DATA and the final dot a server holds nothing: whatever goes wrong before it, the mail was *never sent*, or was
*refused* by the server's own code. The dot is the moment of departure: the deadline is looked at just before it, by a
clock that counts suspension. After it the reply decides, and no reply is doubt.

| moment                                  | 4xx                    | 5xx        | no reply, nonsense |
|-----------------------------------------|------------------------|------------|--------------------|
| connect, greeting, EHLO, STARTTLS, AUTH | never sent             | never sent | never sent         |
| MAIL, RCPT, DATA                        | never sent             | refused    | never sent         |
| the message, up to its dot              | never sent             | never sent | never sent         |
| after the dot (2xx: applied)            | never sent; 421: doubt | refused    | doubt              |

A 5xx of the session (a password, a certificate) says nothing about the mail, so it isn't refused for good. Nor do 530,
535 and 538 at MAIL, which ask for a login or TLS. 421 closes a channel and needn't be an answer to the message.
"""

import asyncio
import base64
import contextlib
import os
import re
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from email.utils import formatdate
from typing import NamedTuple

from tidefast.engine.clock import Clock
from tidefast.protocol.canonical import canonical, digest, text_json
from tidefast.protocol.commands import OutcomeKind
from tidefast.protocol.contracts import SMTP_PORTS, Contract, Request
from tidefast.protocol.events import object_json
from tidefast.protocol.mail import FROM, ID, TO
from tidefast.services.tools import Outcome

CONNECTIONS_MAX = 32
REPLY_LINES_MAX = 64
REPLY_LINE_MAX = 2_048  # RFC 5321 asks for 512
REPLY_TEXT_MAX = 1_000  # of what is kept of a reply
SESSION_CODES = frozenset((530, 535, 538))  # log in first, wrong password, needs TLS
CLOSING = 421
_REPLY = re.compile(rb"([2-5][0-9][0-9])(?:([ -])(.*))?")


class Reply(NamedTuple):
    """What the server said: the code that decides, and the text for people."""

    code: int
    lines: tuple[str, ...]


class NotTaken(Exception):
    """The conversation ended before the dot: never sent, or refused by the server's code."""

    def __init__(self, kind: OutcomeKind, reason: str, reply: Reply | None = None) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.reply = kind, reason, reply


class SmtpSender:
    """Talks to the mail servers of one gateway. Each mail has a connection of its own."""

    def __init__(self, clock: Clock, trust: ssl.SSLContext | None = None) -> None:
        """`trust`: whose certificates are believed; the system's if None."""
        self._clock = clock
        self._trust = trust
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)

    async def send(self, contract: Contract, request: Request, deadline_ms: int) -> Outcome:
        """One attempt. Returns by the deadline, give or take the event loop."""
        remaining_ms = deadline_ms - self._clock.now().ms
        if remaining_ms <= 0:
            return Outcome("unsent", reason="deadline")
        departure = Departure(self._clock, deadline_ms)
        try:
            async with asyncio.timeout(remaining_ms / 1_000), self._slots, self._connected(contract) as talk:
                await self._open(talk, contract)
                await talk.envelope(request)
                reply = await talk.message(request.body, departure)
                return _after_dot(reply, request)
        except NotTaken as end:
            return Outcome(end.kind, _receipt(end.reply, request), end.reason)
        except Exception as error:  # whatever it was: before the dot nothing happened, after it nobody knows
            return Outcome("doubted" if departure.has_left else "unsent", reason=type(error).__name__)

    @contextlib.asynccontextmanager
    async def _connected(self, contract: Contract) -> AsyncIterator["Talk"]:
        parts = urllib.parse.urlsplit(contract.url)
        host, port = parts.hostname or "", parts.port or SMTP_PORTS[contract.tls]
        secured = {"ssl": self._context(), "server_hostname": host} if contract.tls == "tls" else {}
        reader, writer = await asyncio.open_connection(host, port, limit=REPLY_LINE_MAX, **secured)  # type: ignore[arg-type]
        talk = Talk(reader, writer, host)
        try:
            yield talk
            writer.write(b"QUIT\r\n")  # good manners; the reply is of no use to anybody
            writer.close()
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    async def _open(self, talk: "Talk", contract: Contract) -> None:
        """Greeting, EHLO, STARTTLS and AUTH: nothing of the mail."""
        await talk.hear("greeting", 220)
        await talk.greet()
        if contract.tls == "starttls":
            await talk.secure(self._context())
            await talk.greet()
        if contract.credential is not None:
            await talk.log_in(contract.credential.user, os.environ[contract.credential.env])

    def _context(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = ssl.create_default_context()
        return self._trust


class Departure:
    """Whether the dot may have left. Until then there is nothing to doubt."""

    def __init__(self, clock: Clock, deadline_ms: int) -> None:
        self._clock, self._deadline_ms = clock, deadline_ms
        self.has_left = False

    def date(self) -> str:
        return formatdate(self._clock.now().wall_ms / 1_000)

    def leave(self) -> None:
        """Called with everything but the dot at the server."""
        if self._clock.now().ms >= self._deadline_ms:
            raise NotTaken("unsent", "deadline")
        self.has_left = True


class Talk:
    """One conversation. A reply that isn't wanted ends it as `NotTaken`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host
        self._offers: Mapping[str, str] = {}

    async def greet(self) -> None:
        """EHLO by address, which every host has, unlike a name; and what the server offers."""
        local = self._writer.get_extra_info("sockname")[0]
        name = f"[IPv6:{local}]" if ":" in local else f"[{local}]"
        reply = await self.say("ehlo", f"EHLO {name}", 250)
        offered = [line.partition(" ") for line in reply.lines[1:]]
        self._offers = {word.upper(): rest.upper() for word, _, rest in offered}

    async def secure(self, context: ssl.SSLContext) -> None:
        """TLS over this connection, from here on. What the server sent too early is not believed."""
        if "STARTTLS" not in self._offers:
            raise NotTaken("unsent", "starttls_not_offered")
        await self.say("starttls", "STARTTLS", 220)
        await self._see_silence("starttls_early_bytes")
        await self._writer.start_tls(context, server_hostname=self._host)

    async def log_in(self, user: str, password: str) -> None:
        offered = self._offers.get("AUTH", "").split()
        if "PLAIN" in offered:
            await self.say("auth", f"AUTH PLAIN {_base64(chr(0) + user + chr(0) + password)}", 235)
        elif "LOGIN" in offered:
            await self.say("auth", "AUTH LOGIN", 334)
            await self.say("auth", _base64(user), 334)
            await self.say("auth", _base64(password), 235)
        else:
            raise NotTaken("unsent", "auth_not_offered")

    async def envelope(self, request: Request) -> None:
        size = f" SIZE={len(request.body) + len(request.body) // 64 + 64}" if "SIZE" in self._offers else ""
        await self.say("mail", f"MAIL FROM:<{request.headers[FROM]}>{size}", 250)
        await self.say("rcpt", f"RCPT TO:<{request.headers[TO]}>", 250, 251)
        await self.say("data", "DATA", 354)

    async def message(self, body: str, departure: Departure) -> Reply:
        """The message and its dot; the reply to it. Everything else is at the server when the dot goes out."""
        self._writer.transport.set_write_buffer_limits(0)
        stuffed = re.sub(r"(?m)^\.", "..", body)
        self._writer.write(f"Date: {departure.date()}\r\n{stuffed}".encode("ascii"))
        await self._writer.drain()
        await self._see_silence("early_reply")
        departure.leave()
        self._writer.write(b".\r\n")
        return await self._read()

    async def say(self, stage: str, line: str, *wanted: int) -> Reply:
        """One command and its reply."""
        self._writer.write(f"{line}\r\n".encode())
        await self._writer.drain()
        return await self.hear(stage, *wanted)

    async def hear(self, stage: str, *wanted: int) -> Reply:
        """The next reply, which must have one of these codes."""
        reply = await self._read()
        if reply.code in wanted:
            return reply
        is_final = stage in ("mail", "rcpt", "data") and reply.code >= 500 and reply.code not in SESSION_CODES
        raise NotTaken("refused" if is_final else "unsent", f"{stage}_{reply.code}", reply)

    async def _read(self) -> Reply:
        """One reply of bounded length. Raises whatever is wrong with it."""
        codes: set[bytes] = set()
        lines: list[str] = []
        while len(lines) < REPLY_LINES_MAX:
            hit = _REPLY.fullmatch((await self._reader.readuntil(b"\n")).rstrip(b"\r\n"))
            if hit is None:
                raise ValueError("no SMTP reply")
            codes.add(hit.group(1))
            lines.append((hit.group(3) or b"").decode("ascii", "replace"))
            if len(codes) > 1:
                raise ValueError("a reply with two codes")
            if hit.group(2) != b"-":
                return Reply(int(hit.group(1)), tuple(lines))
        raise ValueError("a reply without end")

    async def _see_silence(self, reason: str) -> None:
        """The server must have nothing to say now: bytes that are there already belong to no command of ours."""
        try:
            async with asyncio.timeout(0):
                is_early = await self._reader.read(1)
        except TimeoutError:
            return
        raise NotTaken("unsent", reason) if is_early else ConnectionResetError


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _after_dot(reply: Reply, request: Request) -> Outcome:
    """What the reply to the message means."""
    receipt = _receipt(reply, request)
    if reply.code < 300:
        return Outcome("applied", receipt)
    reason = f"dot_{reply.code}"
    if reply.code == CLOSING or reply.code < 400:
        return Outcome("doubted", receipt, reason)
    return Outcome("unsent" if reply.code < 500 else "refused", receipt, reason)


def _receipt(reply: Reply | None, request: Request) -> str:
    """The server's reply as evidence, with what to look for in its queue."""
    if reply is None:
        return "null"
    text = "\n".join(reply.lines)[:REPLY_TEXT_MAX]
    body = canonical({"reply": text, "message_id": request.headers[ID], "to": request.headers[TO]})
    return object_json(
        status=str(reply.code),
        content_type='""',
        body=body,
        digest=text_json(digest(body)),
        truncated="false",
    )
