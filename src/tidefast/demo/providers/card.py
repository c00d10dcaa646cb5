"""A card provider that refunds orders and remembers idempotency keys, as Stripe does.

The first answer under a key, a decline included, is stored in the transaction that books the refund, and is
replayed byte for byte until the key's time is over. After that the key is forgotten: the same request is a
new refund. The ledger counts applications, not keys, so a double refund would show whatever caused it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import apsw
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tidefast.demo.providers.base import (
    Answer,
    Desk,
    JsonObject,
    Ledger,
    Problem,
    canonical,
    error_answer,
    json_answer,
    now_ms,
    option_parser,
    parse_duration_ms,
    parse_object,
    read_body,
    required_token,
    serve,
    stop,
    text_field,
)

CENTS_LIMIT = 10**12
KEY_LENGTH_LIMIT = 255
TEXT_LENGTH_LIMIT = 128

TABLES = """
CREATE TABLE IF NOT EXISTS orders (
  order_id TEXT PRIMARY KEY, cents INTEGER NOT NULL, currency TEXT NOT NULL,
  refunded_cents INTEGER NOT NULL CHECK (refunded_cents BETWEEN 0 AND cents), card TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS effects (
  number INTEGER PRIMARY KEY, refund_id TEXT NOT NULL UNIQUE, key TEXT NOT NULL, order_id TEXT NOT NULL,
  cents INTEGER NOT NULL, currency TEXT NOT NULL, at_ms INTEGER NOT NULL,
  undone_key TEXT, undone_at_ms INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS answers (
  key TEXT PRIMARY KEY, request_digest BLOB NOT NULL, status INTEGER NOT NULL, body BLOB NOT NULL,
  at_ms INTEGER NOT NULL
) STRICT;
"""

_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)

Operation = Callable[[apsw.Connection], Answer]


@dataclass(frozen=True)
class Order:
    """An order that was paid by card, as the provider knows it."""

    order: str
    cents: int
    currency: str
    refunded_cents: int
    card: str


@dataclass(frozen=True)
class RefundRequest:
    """A checked request for a refund; no amount means all that is left on the order."""

    key: str
    order: str
    cents: int | None
    currency: str


class CardProvider:
    """Refunds, their undo, and the memory of keys."""

    def __init__(self, ledger: Ledger, desk: Desk, key_ttl_ms: int, latency_ms: int) -> None:
        self._ledger = ledger
        self._desk = desk
        self._key_ttl_ms = key_ttl_ms
        self._latency_seconds = latency_ms / 1_000
        # Only in memory on purpose: a key that died with the process has had no effect.
        self._keys_in_progress: set[str] = set()

    def application(self) -> Starlette:
        """Return the provider's HTTP application."""
        return self._desk.application(
            [
                self._desk.change("/refunds", "POST", self._post_refund),
                self._desk.change("/refunds/{refund_id}", "DELETE", self._cancel_refund),
                self._desk.change("/refunds/{refund_id}/cancel", "POST", self._cancel_refund),
                self._desk.read("/ledger", self._get_ledger),
            ]
        )

    async def _post_refund(self, request: Request) -> Response:
        body = await read_body(request)
        key = read_key(request)
        fields = parse_object(body, frozenset({"order", "cents", "currency"}))
        wanted = RefundRequest(
            key, text_field(fields, "order", TEXT_LENGTH_LIMIT), read_cents(fields), read_currency(fields)
        )
        digest = request_digest("refund", fields)
        return await self._once(key, digest, lambda connection: refund(connection, wanted))

    async def _cancel_refund(self, request: Request) -> Response:
        body = await read_body(request)
        key = read_key(request)
        refund_id = str(request.path_params["refund_id"])
        fields = parse_object(body, frozenset({"refund"})) if body else {}
        if fields.get("refund", refund_id) != refund_id:
            raise Problem(400, "invalid_field", "refund in the body must be the refund in the path")
        digest = request_digest("cancel", {"refund": refund_id})
        return await self._once(key, digest, lambda connection: cancel(connection, key, refund_id))

    async def _once(self, key: str, digest: bytes, operation: Operation) -> Response:
        """Carry out the operation under its key, or replay what the key's first request was answered."""
        if key in self._keys_in_progress:
            self._desk.counts["conflicts"] += 1
            message = "another request with this idempotency key is still in progress"
            return error_answer(409, "idempotency_key_in_use", message).response()
        self._keys_in_progress.add(key)
        try:
            await asyncio.sleep(self._latency_seconds)
            outcome, answer = await self._ledger.run(
                lambda connection: answer_once(connection, key, digest, self._key_ttl_ms, operation)
            )
        finally:
            self._keys_in_progress.discard(key)
        self._desk.counts[outcome] += 1
        return answer.response({"Idempotent-Replayed": "true"} if outcome == "replayed" else None)

    async def _get_ledger(self, _request: Request) -> Response:
        effects = await self._ledger.run(read_effects)
        counts: JsonObject = {
            "effects": len(effects),
            "undone": sum(1 for effect in effects if effect["undone"]),
            **dict.fromkeys(("received", "applied", "replayed", "refused", "conflicts", "mismatched"), 0),
            **self._desk.counts,
        }
        return json_answer(200, {"effects": effects, "counts": counts}).response()


def answer_once(
    connection: apsw.Connection, key: str, digest: bytes, key_ttl_ms: int, operation: Operation
) -> tuple[str, Answer]:
    """Look the key up, else do the operation and store its answer; the caller's transaction holds both."""
    stored = connection.execute(
        "SELECT request_digest, status, body FROM answers WHERE key = ? AND at_ms + ? > ?",
        (key, key_ttl_ms, now_ms()),
    ).fetchone()
    if stored is not None:
        if stored[0] != digest:
            message = "this idempotency key was used with another request"
            return "mismatched", error_answer(400, "idempotency_mismatch", message, "idempotency_error")
        return "replayed", Answer(stored[1], stored[2])
    answer = operation(connection)
    connection.execute(
        "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)",
        (key, digest, answer.status, answer.body, now_ms()),
    )
    return ("applied" if answer.status < 300 else "refused"), answer


def refund(connection: apsw.Connection, wanted: RefundRequest) -> Answer:
    """Book one refund, or say why the order can't be refunded like that."""
    row = connection.execute("SELECT * FROM orders WHERE order_id = ?", (wanted.order,)).fetchone()
    if row is None:
        return error_answer(404, "no_such_order", f"no order {wanted.order!r}")
    order = Order(*row)
    left = order.cents - order.refunded_cents
    cents = left if wanted.cents is None else wanted.cents
    if wanted.currency != order.currency:
        return error_answer(400, "currency_mismatch", f"the order was paid in {order.currency}")
    if left == 0:
        return error_answer(400, "charge_already_refunded", "nothing is left to refund on this order")
    if cents > left:
        return error_answer(400, "amount_too_large", f"{left} cents are left to refund on this order")
    if order.card == "declined":
        return error_answer(402, "card_declined", "the bank refuses refunds to this card", "card_error")
    refund_id = f"re_{secrets.token_hex(12)}"
    connection.execute(
        "UPDATE orders SET refunded_cents = refunded_cents + ? WHERE order_id = ?", (cents, wanted.order)
    )
    connection.execute(
        "INSERT INTO effects (refund_id, key, order_id, cents, currency, at_ms) VALUES (?, ?, ?, ?, ?, ?)",
        (refund_id, wanted.key, wanted.order, cents, wanted.currency, now_ms()),
    )
    return refund_answer(201, refund_id, wanted.order, cents, wanted.currency, "refunded")


def cancel(connection: apsw.Connection, key: str, refund_id: str) -> Answer:
    """Take one refund back: the money goes to the merchant again and the order can be refunded anew."""
    row = connection.execute(
        "SELECT order_id, cents, currency, undone_key FROM effects WHERE refund_id = ?", (refund_id,)
    ).fetchone()
    if row is None:
        return error_answer(404, "no_such_refund", f"no refund {refund_id!r}")
    order_id, cents, currency, undone_key = row
    if undone_key is not None:
        return error_answer(400, "refund_already_cancelled", "this refund was cancelled before")
    connection.execute(
        "UPDATE effects SET undone_key = ?, undone_at_ms = ? WHERE refund_id = ?", (key, now_ms(), refund_id)
    )
    connection.execute("UPDATE orders SET refunded_cents = refunded_cents - ? WHERE order_id = ?", (cents, order_id))
    return refund_answer(200, refund_id, order_id, cents, currency, "cancelled")


def refund_answer(status: int, refund_id: str, order: str, cents: int, currency: str, state: str) -> Answer:
    """Describe a refund in the provider's own words."""
    return json_answer(status, {"id": refund_id, "order": order, "cents": cents, "currency": currency, "status": state})


def read_effects(connection: apsw.Connection) -> list[JsonObject]:
    """List every refund that was ever applied, in order, those taken back included."""
    names = ("id", "key", "order", "cents", "currency", "at_ms", "undone_key", "undone_at_ms")
    rows = connection.execute(
        "SELECT refund_id, key, order_id, cents, currency, at_ms, undone_key, undone_at_ms FROM effects ORDER BY number"
    )
    return [{**dict(zip(names, row, strict=True)), "undone": row[6] is not None} for row in rows]


# --- Input ----------------------------------------------------------------------------------------------


def read_key(request: Request) -> str:
    """Return the idempotency key, which every change must carry exactly once."""
    keys = request.headers.getlist("idempotency-key")
    if len(keys) != 1:
        raise Problem(400, "idempotency_key_required", "send exactly one Idempotency-Key header")
    key = keys[0]
    if not (1 <= len(key) <= KEY_LENGTH_LIMIT and key.isascii() and key.isprintable()):
        message = f"the key must be 1 to {KEY_LENGTH_LIMIT} printable ASCII characters"
        raise Problem(400, "invalid_idempotency_key", message)
    return key


def read_cents(fields: JsonObject) -> int | None:
    """Return the amount, or nothing where the caller wants all that is left."""
    cents = fields.get("cents")
    if cents is None:
        return None
    if type(cents) is not int or not 1 <= cents <= CENTS_LIMIT:
        raise Problem(400, "invalid_field", f"cents must be an integer from 1 to {CENTS_LIMIT}, or null")
    return cents


def read_currency(fields: JsonObject) -> str:
    """Return the currency code."""
    currency = text_field(fields, "currency", 3)
    if _CURRENCY.fullmatch(currency) is None:
        raise Problem(400, "invalid_field", "currency must be three capital letters")
    return currency


def request_digest(operation: str, fields: JsonObject) -> bytes:
    """Return what a key is bound to: the operation and the JSON value of its body."""
    return hashlib.sha256(operation.encode() + b"\n" + canonical(fields)).digest()


def read_orders(path: Path) -> Iterator[Order]:
    """Read the orders, one JSON object a line, and end the process at the first bad one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        stop(f"can't read the orders {path}: {error}")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            order = order_from(json.loads(line))
        except ValueError as error:
            stop(f"{path}:{number}: not an order: {error}")
        yield order


def order_from(value: object) -> Order:
    """Turn one decoded line into an order, or raise ValueError saying what is wrong with it."""
    if not isinstance(value, dict) or value.keys() != {
        "order",
        "cents",
        "currency",
        "refunded_cents",
        "card",
    }:
        raise ValueError("expected exactly the fields order, cents, currency, refunded_cents and card")
    order, currency, card = value["order"], value["currency"], value["card"]
    cents, refunded_cents = value["cents"], value["refunded_cents"]
    if not (isinstance(order, str) and 1 <= len(order) <= TEXT_LENGTH_LIMIT):
        raise ValueError(f"order must be a text of 1 to {TEXT_LENGTH_LIMIT} characters")
    if not (isinstance(currency, str) and _CURRENCY.fullmatch(currency)):
        raise ValueError("currency must be three capital letters")
    if card not in ("ok", "declined"):
        raise ValueError("card must be ok or declined")
    if type(cents) is not int or type(refunded_cents) is not int:
        raise ValueError("cents and refunded_cents must be integers")
    if not 0 <= refunded_cents <= cents <= CENTS_LIMIT:
        raise ValueError("refunded_cents must lie between 0 and cents")
    return Order(order, cents, currency, refunded_cents, card)


def seed_orders(ledger: Ledger, path: Path) -> None:
    """Enter the orders that the ledger doesn't know yet; what was refunded since is kept."""
    rows = [(order.order, order.cents, order.currency, order.refunded_cents, order.card) for order in read_orders(path)]
    with ledger.transaction() as connection:
        connection.executemany("INSERT OR IGNORE INTO orders VALUES (?, ?, ?, ?, ?)", rows).fetchall()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = option_parser("python -m tidefast.demo.providers.card", "A card provider for the refund desk.")
    parser.add_argument(
        "--key-ttl",
        type=parse_duration_ms,
        default=parse_duration_ms("24h"),
        metavar="TIME",
        help="how long an idempotency key is remembered (default 24h)",
    )
    parser.add_argument("--orders", type=Path, metavar="FILE", help="orders to start with, JSON lines")
    return parser.parse_args()


def main() -> None:
    """Run the provider until it is told to stop."""
    options = parse_options()
    desk = Desk(required_token("CARD_TOKEN"))
    ledger = Ledger(options.db, TABLES)
    if options.orders is not None:
        seed_orders(ledger, options.orders)
    serve(CardProvider(ledger, desk, options.key_ttl, options.latency).application(), options.port, ledger)


if __name__ == "__main__":
    main()
