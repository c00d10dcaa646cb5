"""A mail server that knows no keys: each message that it accepts is one more mail.

It speaks SMTP, takes logins, and refuses addresses that nobody can reach. Its outbox is read over HTTP, as people read
a queue: each mail with its Message-ID and the key in it, for the books only. A mail is answered with 250 once it stands
in the ledger on the disk, and one whose sender has hung up after the final dot is taken in all the same.
"""

from __future__ import annotations

import asyncio
import email
import email.policy
import hmac
import logging
import re
import secrets
import warnings
from dataclasses import dataclass
from email.message import EmailMessage

import apsw
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tidefast.demo.providers.base import (
    Desk,
    JsonObject,
    Ledger,
    json_answer,
    now_ms,
    option_parser,
    required_token,
    serve,
)

USER = "desk"
SIZE_LIMIT_BYTES = 1024 * 1024
IDLE_LIMIT_SECONDS = 30.0
ADDRESS_LENGTH_LIMIT = 254

TABLES = """
CREATE TABLE IF NOT EXISTS mails (
  number INTEGER PRIMARY KEY, mail_id TEXT NOT NULL UNIQUE, sender TEXT NOT NULL, recipient TEXT NOT NULL,
  subject TEXT NOT NULL, message_id TEXT NOT NULL, key TEXT NOT NULL, content BLOB NOT NULL, at_ms INTEGER NOT NULL
) STRICT;
"""

_ADDRESS = re.compile(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
    r"@([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}"
)
_KEY = re.compile(r"<([0-9a-f]{32})@[^<>]+>")


@dataclass(frozen=True)
class Mail:
    """One mail as it came: envelope, headers that people look for, and the bytes."""

    sender: str
    recipient: str
    subject: str
    message_id: str
    content: bytes

    @property
    def key(self) -> str:
        """The key that the Message-ID carries; the whole id if it isn't one of the desk's."""
        hit = _KEY.fullmatch(self.message_id)
        return hit.group(1) if hit else self.message_id


class MailServer:
    """Takes mails in over SMTP and counts them. What SMTP calls a hook is a method `handle_…` here."""

    def __init__(self, ledger: Ledger, desk: Desk, password: str, latency_ms: int) -> None:
        self._ledger = ledger
        self._desk = desk
        self._password = password.encode()
        self._latency_seconds = latency_ms / 1_000
        self._taking: set[asyncio.Task[str]] = set()

    def application(self) -> Starlette:
        """Return the HTTP application that shows the outbox."""
        return self._desk.application([self._desk.read("/ledger", self._get_ledger)])

    async def listen(self) -> asyncio.Server:
        """Listen for SMTP on a free port of the loopback."""
        return await asyncio.get_running_loop().create_server(self._conversation, "127.0.0.1", 0)

    def _conversation(self) -> SMTP:
        return SMTP(
            self,
            data_size_limit=SIZE_LIMIT_BYTES,
            hostname="mail.shop.example",
            ident="the desk's mail server",
            timeout=IDLE_LIMIT_SECONDS,
            authenticator=self._log_in,
            auth_required=True,
            auth_require_tls=False,  # it listens on the loopback only
        )

    def _log_in(self, server: SMTP, session: Session, envelope: Envelope, mechanism: str, data: object) -> AuthResult:
        is_known = isinstance(data, LoginPassword) and data.login == USER.encode()
        given = data.password if isinstance(data, LoginPassword) else b""
        return AuthResult(success=hmac.compare_digest(given, self._password) and is_known, handled=False)

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if not is_deliverable(address):
            self._desk.counts["refused"] += 1
            return "550 5.1.1 no mail can reach this address"
        envelope.rcpt_tos.append(address)
        return "250 2.1.5 fine"

    async def handle_DATA(  # noqa: N802 - aiosmtpd's name
        self, server: SMTP, session: Session, envelope: Envelope
    ) -> str:
        taking = asyncio.ensure_future(self._take(envelope))
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)
        return await asyncio.shield(taking)  # a sender that hangs up now has sent its mail

    async def _take(self, envelope: Envelope) -> str:
        self._desk.counts["received"] += 1
        self._desk.in_progress += 1
        try:
            await asyncio.sleep(self._latency_seconds)
            mails = read_mail(envelope)
            names = await self._ledger.run(lambda connection: [add_mail(connection, mail) for mail in mails])
        finally:
            self._desk.in_progress -= 1
        self._desk.counts["accepted"] += len(names)
        return f"250 2.0.0 queued as {' '.join(names)}"

    async def _get_ledger(self, _request: Request) -> Response:
        mails = await self._ledger.run(read_mails)
        counts: JsonObject = {
            "mails": len(mails),
            **dict.fromkeys(("received", "accepted", "refused"), 0),
            **self._desk.counts,
        }
        return json_answer(200, {"mails": mails, "counts": counts}).response()


def read_mail(envelope: Envelope) -> list[Mail]:
    """Return one mail per recipient of an envelope."""
    content = envelope.original_content or b""
    message = email.message_from_bytes(content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    subject, message_id = str(message["subject"] or ""), str(message["message-id"] or "")
    sender = str(envelope.mail_from or "")
    return [Mail(sender, str(recipient), subject, message_id, content) for recipient in envelope.rcpt_tos]


def is_deliverable(address: str) -> bool:
    """Say whether an address is well formed and its domain can exist; .invalid is reserved never to."""
    fits = len(address) <= ADDRESS_LENGTH_LIMIT and _ADDRESS.fullmatch(address) is not None
    return fits and not address.lower().endswith(".invalid")


def add_mail(connection: apsw.Connection, mail: Mail) -> str:
    """Enter one more mail, whatever was entered before."""
    mail_id = f"ml_{secrets.token_hex(12)}"
    connection.execute(
        "INSERT INTO mails (mail_id, sender, recipient, subject, message_id, key, content, at_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (mail_id, mail.sender, mail.recipient, mail.subject, mail.message_id, mail.key, mail.content, now_ms()),
    )
    return mail_id


def read_mails(connection: apsw.Connection) -> list[JsonObject]:
    """List every mail that was ever accepted, in order."""
    names = ("id", "from", "to", "subject", "message_id", "key", "at_ms")
    rows = connection.execute(
        "SELECT mail_id, sender, recipient, subject, message_id, key, at_ms FROM mails ORDER BY number"
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def main() -> None:
    """Run the service until it is told to stop."""
    parser = option_parser("python -m tidefast.demo.providers.mail", "A mail server for the refund desk.")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Requiring AUTH while not requiring TLS", UserWarning)
    logging.getLogger("mail.log").setLevel(logging.ERROR)
    token = required_token("MAIL_TOKEN")
    desk, ledger = Desk(token), Ledger(options.db, TABLES)
    server = MailServer(ledger, desk, token, options.latency)
    serve(server.application(), options.port, ledger, desk, {"smtp": server.listen})


if __name__ == "__main__":
    main()
