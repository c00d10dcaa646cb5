"""A mail service that ignores idempotency keys: each request that it accepts is one more mail.

It stands for the many services that neither dedup nor can be asked. It writes down which key and step a
request named, for the books only; they change nothing.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass

import apsw
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tidefast.demo.providers.base import (
    Desk,
    JsonObject,
    Ledger,
    Problem,
    error_answer,
    json_answer,
    now_ms,
    option_parser,
    parse_object,
    read_body,
    required_token,
    serve,
    text_field,
)

SUBJECT_LENGTH_LIMIT = 998
TEXT_LENGTH_LIMIT = 64 * 1024
ADDRESS_LENGTH_LIMIT = 254

TABLES = """
CREATE TABLE IF NOT EXISTS mails (
  number INTEGER PRIMARY KEY, mail_id TEXT NOT NULL UNIQUE, recipient TEXT NOT NULL, subject TEXT NOT NULL,
  text TEXT NOT NULL, key TEXT, step TEXT, at_ms INTEGER NOT NULL
) STRICT;
"""

_ADDRESS = re.compile(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
    r"@([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}"
)


@dataclass(frozen=True)
class Mail:
    """One mail to be sent, with what the request said about its origin."""

    recipient: str
    subject: str
    text: str
    key: str | None
    step: str | None


class MailProvider:
    """Takes mails in and counts them."""

    def __init__(self, ledger: Ledger, desk: Desk, latency_ms: int) -> None:
        self._ledger = ledger
        self._desk = desk
        self._latency_seconds = latency_ms / 1_000

    def application(self) -> Starlette:
        """Return the service's HTTP application."""
        return self._desk.application(
            [self._desk.change("/send", "POST", self._send), self._desk.read("/ledger", self._get_ledger)]
        )

    async def _send(self, request: Request) -> Response:
        fields = parse_object(await read_body(request), frozenset({"to", "subject", "text"}))
        mail = Mail(
            text_field(fields, "to", TEXT_LENGTH_LIMIT),
            read_subject(fields),
            text_field(fields, "text", TEXT_LENGTH_LIMIT),
            request.headers.get("idempotency-key"),
            request.headers.get("tidefast-step"),
        )
        await asyncio.sleep(self._latency_seconds)
        if not is_deliverable(mail.recipient):
            self._desk.counts["refused"] += 1
            return error_answer(422, "invalid_address", "no mail can reach this address").response()
        mail_id = await self._ledger.run(lambda connection: add_mail(connection, mail))
        self._desk.counts["accepted"] += 1
        return json_answer(202, {"id": mail_id}).response()

    async def _get_ledger(self, _request: Request) -> Response:
        mails = await self._ledger.run(read_mails)
        counts: JsonObject = {
            "mails": len(mails),
            **dict.fromkeys(("received", "accepted", "refused"), 0),
            **self._desk.counts,
        }
        return json_answer(200, {"mails": mails, "counts": counts}).response()


def read_subject(fields: JsonObject) -> str:
    """Return the subject, which must fit on one header line."""
    subject = text_field(fields, "subject", SUBJECT_LENGTH_LIMIT)
    if "\r" in subject or "\n" in subject:
        raise Problem(400, "invalid_field", "subject must be one line")
    return subject


def is_deliverable(address: str) -> bool:
    """Say whether an address is well formed and its domain can exist; .invalid is reserved never to."""
    fits = len(address) <= ADDRESS_LENGTH_LIMIT and _ADDRESS.fullmatch(address) is not None
    return fits and not address.lower().endswith(".invalid")


def add_mail(connection: apsw.Connection, mail: Mail) -> str:
    """Enter one more mail, whatever was entered before."""
    mail_id = f"ml_{secrets.token_hex(12)}"
    connection.execute(
        "INSERT INTO mails (mail_id, recipient, subject, text, key, step, at_ms) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (mail_id, mail.recipient, mail.subject, mail.text, mail.key, mail.step, now_ms()),
    )
    return mail_id


def read_mails(connection: apsw.Connection) -> list[JsonObject]:
    """List every mail that was ever accepted, in order."""
    names = ("id", "to", "subject", "key", "step", "at_ms")
    rows = connection.execute("SELECT mail_id, recipient, subject, key, step, at_ms FROM mails ORDER BY number")
    return [dict(zip(names, row, strict=True)) for row in rows]


def main() -> None:
    """Run the service until it is told to stop."""
    parser = option_parser("python -m tidefast.demo.providers.mail", "A mail service for the refund desk.")
    options = parser.parse_args()
    desk = Desk(required_token("MAIL_TOKEN"))
    ledger = Ledger(options.db, TABLES)
    serve(MailProvider(ledger, desk, options.latency).application(), options.port, ledger)


if __name__ == "__main__":
    main()
