"""What the providers refuse, how they start, and the files that the demo feeds them."""

import json
import os
import smtplib
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.demo.provider_process import DEMO, SOURCE, TOKEN, Headers, Provider, running, write_orders


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    directory = tmp_path_factory.mktemp("card")
    with running("card", directory, "--orders", str(write_orders(directory)), "--key-ttl", "24h") as provider:
        yield provider


@pytest.fixture(scope="module")
def mail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with running("mail", tmp_path_factory.mktemp("mail")) as provider:
        yield provider


# --- Bad input ------------------------------------------------------------------------------------------

REFUND = '{"order": "o12", "cents": 5, "currency": "EUR"}'
BAD_REFUNDS = {
    "empty": b"",
    "no json": b"{",
    "array": b"[]",
    "text": b'"o12"',
    "bad utf-8": b'{"order": "\xff"}',
    "lone surrogate": REFUND.replace("o12", "\\ud800").encode(),
    "name twice": b'{"order": "o12", "order": "o12", "cents": 5, "currency": "EUR"}',
    "not a number": REFUND.replace("5", "NaN").encode(),
    "infinite": REFUND.replace("5", "1e999").encode(),
    "deep": b"[" * 60_000,
    "endless integer": REFUND.replace("5", "9" * 5_000).encode(),
    "unknown field": REFUND.replace("}", ', "note": 1}').encode(),
    "zero": REFUND.replace("5", "0").encode(),
    "negative": REFUND.replace("5", "-5").encode(),
    "fraction": REFUND.replace("5", "5.0").encode(),
    "boolean": REFUND.replace("5", "true").encode(),
    "amount as text": REFUND.replace("5", '"5"').encode(),
    "order is a number": REFUND.replace('"o12"', "12").encode(),
    "order is empty": REFUND.replace("o12", "").encode(),
    "order is long": REFUND.replace("o12", "o" * 129).encode(),
    "no currency": b'{"order": "o12", "cents": 5}',
    "small currency": REFUND.replace("EUR", "eur").encode(),
}


@pytest.mark.parametrize("body", BAD_REFUNDS.values(), ids=BAD_REFUNDS.keys())
def test_bad_refund_bodies(card: Provider, body: bytes) -> None:
    reply = card.call("POST", "/refunds", body, {"Idempotency-Key": "k-bad"})
    assert reply.status == 400
    assert reply.code in {"invalid_json", "unknown_field", "invalid_field"}


@pytest.mark.parametrize(
    "method, path, body, headers, status",
    [
        ("POST", "/refunds", REFUND.encode(), {}, 400),
        ("POST", "/refunds", REFUND.encode(), {"Idempotency-Key": ""}, 400),
        ("POST", "/refunds", REFUND.encode(), {"Idempotency-Key": "k" * 256}, 400),
        ("POST", "/refunds", b" " * 65_537, {"Idempotency-Key": "k"}, 413),
        ("POST", "/refunds", REFUND.encode(), {"Idempotency-Key": "k", "Authorization": "Bearer no"}, 401),
        ("POST", "/refunds", REFUND.encode(), {"Idempotency-Key": "k", "Authorization": TOKEN}, 401),
        ("POST", "/refunds", REFUND.encode(), {"Idempotency-Key": "k", "Authorization": "Bearer \xe9"}, 401),
        ("GET", "/ledger", None, {"Authorization": ""}, 401),
        ("GET", "/refunds", None, {}, 405),
        ("PUT", "/refunds/re_1", b"{}", {}, 405),
        ("POST", "/ledger", b"{}", {}, 405),
        ("POST", "/refunds/", REFUND.encode(), {"Idempotency-Key": "k"}, 404),
        ("GET", "/nothing", None, {}, 404),
        ("DELETE", "/refunds/%ff%00", None, {"Idempotency-Key": "k-odd"}, 404),
    ],
)
def test_bad_requests(
    card: Provider, method: str, path: str, body: bytes | None, headers: Headers, status: int
) -> None:
    reply = card.call(method, path, body, headers)
    assert (reply.status, set(reply.json)) == (status, {"error"})
    assert card.applied("o12") == []


def test_a_mail_without_the_right_password_is_not_taken(mail: Provider) -> None:
    before = len(mail.ledger()["mails"])
    with pytest.raises(smtplib.SMTPAuthenticationError):
        mail.send("a@example.com", password="wrong")
    with smtplib.SMTP("127.0.0.1", mail.smtp_port) as server:
        server.ehlo()
        assert server.mail("desk@shop.example")[0] == 530
    assert len(mail.ledger()["mails"]) == before


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("card", ["--port", "70000"], "expected a port"),
        ("card", ["--port", "0", "--key-ttl", "1 day"], "expected a duration"),
        ("card", ["--port", "0", "--orders", "missing.jsonl"], "can't read the orders missing.jsonl"),
        ("card", ["--port", "0", "--orders", "bad.jsonl"], "bad.jsonl:2: not an order: card must be"),
        ("card", ["--port", "0", "--db", "no/such/directory/card.db"], "can't open the ledger"),
        ("card", ["--port", "0", "--db", "bad.jsonl"], "can't open the ledger"),
        ("mail", ["--port", "0"], "set MAIL_TOKEN"),
    ],
)
def test_a_wrong_start_says_what_is_wrong(tmp_path: Path, name: str, options: list[str], message: str) -> None:
    good = '{"order": "o", "cents": 1, "currency": "EUR", "refunded_cents": 0, "card": "ok"}'
    (tmp_path / "bad.jsonl").write_text(good + "\n" + good.replace("ok", "maybe") + "\n")
    environment = {**os.environ, "CARD_TOKEN": TOKEN, "MAIL_TOKEN": "", "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", f"tidefast.demo.providers.{name}", "--db", "x.db", *options]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


# --- The demo's files -----------------------------------------------------------------------------------


def read_lines(name: str) -> list[Any]:
    """Read one of the demo's JSON-lines files."""
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def test_tickets_end_as_the_demo_says(tmp_path: Path) -> None:
    tickets = read_lines("tickets.jsonl")
    assert [ticket["ticket"] for ticket in tickets] == [f"t-{number:03d}" for number in range(1, 41)]
    with running("card", tmp_path, "--orders", str(DEMO / "orders.jsonl")) as provider:
        replies = [
            provider.refund(ticket["ticket"], ticket["order"], ticket["ask_cents"], ticket["currency"])
            for ticket in tickets
        ]
    refusals = Counter(reply.code for reply in replies if reply.status != 201)
    assert refusals == {"card_declined": 1, "charge_already_refunded": 1, "amount_too_large": 1}
    left = {order["order"]: order["cents"] - order["refunded_cents"] for order in read_lines("orders.jsonl")}
    for ticket, reply in zip(tickets, replies, strict=True):
        if reply.status == 201 and ticket["ask_cents"] is None:
            assert reply.json["cents"] == left[ticket["order"]]


def test_ticket_addresses_take_mail(mail: Provider) -> None:
    assert {mail.send(ticket["email"])[0] for ticket in read_lines("tickets.jsonl")} == {250}


def test_contracts_name_answers_that_the_providers_give(card: Provider) -> None:
    tools = tomllib.loads((DEMO / "tools.toml").read_text(encoding="utf-8"))["tools"]
    assert set(tools) == {"refund", "cancel_refund", "send_mail"}
    assert tools["refund"]["undo"]["tool"] in tools
    listed = {row["error.code"] for row in tools["refund"]["refusals"] if isinstance(row, dict)}
    assert listed == {"charge_already_refunded", "amount_too_large"}
    assert card.refund("k-contract-1", "spent", 2).code in listed
    assert card.refund("k-contract-2", "o13", 20_000).code in listed
