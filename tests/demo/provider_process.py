"""Provider processes for tests: start one, call it, kill it."""

import email.policy
import http.client
import json
import os
import signal
import smtplib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"
DEMO = SOURCE / "tidefast" / "demo"
TOKEN = "a-token-for-tests"
WAIT_SECONDS = 30

Headers = dict[str, str]


@dataclass(frozen=True)
class Reply:
    """An answer as it came over the wire."""

    status: int
    headers: Headers
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


class Provider:
    """One provider process and the way to call it."""

    def __init__(self, name: str, directory: Path, *options: str) -> None:
        self._command = [
            *(sys.executable, "-m", f"tidefast.demo.providers.{name}"),
            *("--db", str(directory / f"{name}.db"), "--port", "0", *options),
        ]
        self._errors = directory / f"{name}.stderr"
        self.start()

    def start(self) -> None:
        """Start the process and wait for the line that says where it listens."""
        path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "CARD_TOKEN": TOKEN, "MAIL_TOKEN": TOKEN, "PYTHONPATH": path}
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(self._command, env=environment, stdout=subprocess.PIPE, stderr=errors)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._errors.read_text()
        ready = json.loads(line)
        assert ready["ready"] is True
        self.port: int = ready["port"]
        self.smtp_port: int = ready.get("smtp", 0)

    def end(self, number: signal.Signals) -> int:
        """Signal the process and return its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(WAIT_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def errors(self) -> str:
        return self._errors.read_text()

    def call(self, method: str, path: str, body: bytes | None = None, headers: Headers | None = None) -> Reply:
        """Make one call with the right token, unless the headers name another."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}", **(headers or {})})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())
        finally:
            connection.close()

    def refund(self, key: str, order: str, cents: int | None, currency: str = "EUR") -> Reply:
        body = json.dumps({"order": order, "cents": cents, "currency": currency}).encode()
        return self.call("POST", "/refunds", body, {"Idempotency-Key": key})

    def send(self, recipient: str, message_id: str = "<1@shop.example>", password: str = TOKEN) -> tuple[int, str]:
        """Hand over one mail; (code, text) of the server's last word on it."""
        message = EmailMessage()
        message["From"], message["To"], message["Subject"] = "desk@shop.example", recipient, "Grüße"
        message["Message-ID"] = message_id
        message.set_content("Ihr Geld ist unterwegs.")
        with smtplib.SMTP("127.0.0.1", self.smtp_port, timeout=WAIT_SECONDS) as server:
            server.login("desk", password)
            server.mail("desk@shop.example")
            code, text = server.rcpt(recipient)
            if code == 250:
                code, text = server.data(message.as_bytes(policy=email.policy.SMTP))
            return code, text.decode()

    def ledger(self) -> Any:
        reply = self.call("GET", "/ledger")
        assert reply.status == 200
        return reply.json

    def applied(self, order: str) -> list[Any]:
        """Return the effects that the ledger holds for one order."""
        return [effect for effect in self.ledger()["effects"] if effect["order"] == order]


@contextmanager
def running(name: str, directory: Path, *options: str) -> Iterator[Provider]:
    """Run a provider, then end it in good order and see that nothing went wrong inside."""
    provider = Provider(name, directory, *options)
    try:
        yield provider
    except BaseException:
        provider.end(signal.SIGKILL)
        raise
    assert provider.end(signal.SIGTERM) == 0
    assert provider.errors() == ""


def write_orders(directory: Path) -> Path:
    """Write a hundred plain orders `o0` … `o99` of 100.00 EUR and three odd ones."""
    rows = [(f"o{number}", 10_000, "EUR", 0, "ok") for number in range(100)]
    rows += [
        ("declined", 500, "EUR", 0, "declined"),
        ("spent", 500, "EUR", 500, "ok"),
        ("usd", 500, "USD", 0, "ok"),
    ]
    names = ("order", "cents", "currency", "refunded_cents", "card")
    path = directory / "orders.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def wait_in_progress(provider: Provider) -> None:
    """Ask until the provider works on a request."""
    deadline = time.monotonic() + WAIT_SECONDS
    while provider.call("GET", "/health").json["in_progress"] == 0:
        assert time.monotonic() < deadline, "no request in progress"


def wait_idle(provider: Provider) -> None:
    """Ask until the provider has finished what it worked on."""
    deadline = time.monotonic() + WAIT_SECONDS
    while provider.call("GET", "/health").json["in_progress"] > 0:
        assert time.monotonic() < deadline, "the request is never finished"


def raw_refund(key: str, order: str) -> bytes:
    """Return the bytes of a refund request."""
    body = json.dumps({"order": order, "cents": 100, "currency": "EUR"}).encode()
    head = (
        "POST /refunds HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {TOKEN}\r\nIdempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
