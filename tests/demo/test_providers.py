"""The refund desk's providers, as the processes that they are: real HTTP, real ledgers, real kills."""

import json
import signal
import smtplib
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.demo.provider_process import (
    TOKEN,
    Provider,
    raw_refund,
    running,
    wait_idle,
    wait_in_progress,
    write_orders,
)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    directory = tmp_path_factory.mktemp("card")
    with running("card", directory, "--orders", str(write_orders(directory)), "--key-ttl", "24h") as provider:
        yield provider


@pytest.fixture(scope="module")
def slow_card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    """A provider that works on each request long enough for a second one to arrive meanwhile."""
    directory = tmp_path_factory.mktemp("slow_card")
    with running("card", directory, "--orders", str(write_orders(directory)), "--latency", "500ms") as provider:
        yield provider


@pytest.fixture(scope="module")
def mail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with running("mail", tmp_path_factory.mktemp("mail")) as provider:
        yield provider


# --- The card provider's memory of keys -----------------------------------------------------------------


def test_replay_is_byte_identical_and_applied_once(card: Provider) -> None:
    first = card.refund("k-replay", "o1", 2_500)
    second = card.refund("k-replay", "o1", 2_500)
    assert (first.status, first.replayed) == (201, False)
    assert (second.status, second.replayed, second.body) == (201, True, first.body)
    assert set(first.json) == {"id", "order", "cents", "currency", "status"}
    (effect,) = card.applied("o1")
    assert (effect["id"], effect["key"], effect["cents"]) == (first.json["id"], "k-replay", 2_500)
    assert effect["undone"] is False


def test_order_of_names_and_spaces_does_not_make_another_body(card: Provider) -> None:
    key = {"Idempotency-Key": "k-spaces"}
    first = card.call("POST", "/refunds", b'{"order":"o2","cents":1,"currency":"EUR"}', key)
    second = card.call("POST", "/refunds", b'{ "currency": "EUR", "cents": 1, "order": "o2" }', key)
    assert (second.replayed, second.body) == (True, first.body)


def test_another_body_under_a_used_key_is_refused(card: Provider) -> None:
    refund = card.refund("k-body", "o3", 100)
    for other in (card.refund("k-body", "o3", 101), card.refund("k-body", "o4", 100)):
        assert (other.status, other.json["error"]["type"]) == (400, "idempotency_error")
    path = f"/refunds/{refund.json['id']}/cancel"
    assert card.call("POST", path, b"", {"Idempotency-Key": "k-body"}).status == 400
    assert [effect["undone"] for effect in card.applied("o3")] == [False]
    assert card.applied("o4") == []


def test_a_decline_is_stored_under_its_key(card: Provider) -> None:
    first = card.refund("k-decline", "declined", 100)
    second = card.refund("k-decline", "declined", 100)
    assert (first.status, first.code, first.replayed) == (402, "card_declined", False)
    assert (second.status, second.body, second.replayed) == (402, first.body, True)


def test_a_malformed_request_leaves_its_key_free(card: Provider) -> None:
    assert card.refund("k-free", "o5", 0).status == 400
    assert card.refund("k-free", "o5", 10).status == 201


def test_two_keys_are_two_refunds(card: Provider) -> None:
    assert card.refund("k-two-a", "o6", 100).status == 201
    assert card.refund("k-two-b", "o6", 100).status == 201
    assert [effect["key"] for effect in card.applied("o6")] == ["k-two-a", "k-two-b"]


def test_concurrent_requests_under_one_key_apply_once(slow_card: Provider) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: slow_card.refund("k-race", "o1", 700), range(8)))
    outcomes = Counter((reply.status, reply.replayed) for reply in replies)
    assert outcomes[(201, False)] == 1
    assert set(outcomes) <= {(201, False), (201, True), (409, False)}
    assert outcomes[(409, False)] > 0
    assert len(slow_card.applied("o1")) == 1


def test_a_client_that_hangs_up_leaves_one_row(slow_card: Provider) -> None:
    with socket.create_connection(("127.0.0.1", slow_card.port)) as connection:
        connection.sendall(raw_refund("k-gone", "o2"))
        wait_in_progress(slow_card)
    wait_idle(slow_card)
    assert [effect["key"] for effect in slow_card.applied("o2")] == ["k-gone"]
    assert slow_card.refund("k-gone", "o2", 100).replayed


def test_a_client_that_hangs_up_half_way_leaves_nothing(slow_card: Provider) -> None:
    broken_off = slow_card.ledger()["counts"].get("broken_off", 0)
    with socket.create_connection(("127.0.0.1", slow_card.port)) as connection:
        connection.sendall(raw_refund("k-half", "o3")[:-5])
        wait_in_progress(slow_card)
    wait_idle(slow_card)
    assert slow_card.ledger()["counts"]["broken_off"] == broken_off + 1
    assert slow_card.applied("o3") == []


def test_sigterm_answers_what_is_in_progress(tmp_path: Path) -> None:
    with running("card", tmp_path, "--orders", str(write_orders(tmp_path)), "--latency", "300ms") as provider:
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(provider.refund, "k-term", "o1", 100)
            wait_in_progress(provider)
            assert provider.end(signal.SIGTERM) == 0
            assert reply.result().status == 201
        provider.start()
        assert len(provider.applied("o1")) == 1


def test_a_killed_provider_remembers_keys_and_amounts(tmp_path: Path) -> None:
    with running("card", tmp_path, "--orders", str(write_orders(tmp_path))) as provider:
        first = provider.refund("k-kill", "o1", 9_000)
        provider.end(signal.SIGKILL)
        provider.start()
        second = provider.refund("k-kill", "o1", 9_000)
        assert (second.replayed, second.body) == (True, first.body)
        assert len(provider.applied("o1")) == 1
        assert provider.refund("k-kill-2", "o1", 2_000).code == "amount_too_large"


def test_a_forgotten_key_refunds_again(tmp_path: Path) -> None:
    options = ("--orders", str(write_orders(tmp_path)), "--key-ttl", "0s")
    with running("card", tmp_path, *options) as provider:
        first = provider.refund("k-old", "o1", 100)
        second = provider.refund("k-old", "o1", 100)
        assert (second.status, second.replayed) == (201, False)
        assert [effect["id"] for effect in provider.applied("o1")] == [first.json["id"], second.json["id"]]


# --- Refunds and their undo -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order, cents, currency, status, code",
    [
        ("missing", 100, "EUR", 404, "no_such_order"),
        ("o7", 100, "USD", 400, "currency_mismatch"),
        ("usd", 100, "EUR", 400, "currency_mismatch"),
        ("spent", 1, "EUR", 400, "charge_already_refunded"),
        ("spent", None, "EUR", 400, "charge_already_refunded"),
        ("o7", 10_001, "EUR", 400, "amount_too_large"),
        ("declined", None, "EUR", 402, "card_declined"),
    ],
)
def test_refusals_refund_nothing(
    card: Provider, order: str, cents: int | None, currency: str, status: int, code: str
) -> None:
    reply = card.refund(f"k-refusal-{order}-{cents}-{currency}", order, cents, currency)
    assert (reply.status, reply.code) == (status, code)
    assert card.applied(order) == []


def test_no_amount_refunds_what_is_left_and_then_nothing_is(card: Provider) -> None:
    assert card.refund("k-part", "o8", 4_000).json["cents"] == 4_000
    assert card.refund("k-rest", "o8", None).json["cents"] == 6_000
    assert card.refund("k-more", "o8", 1).code == "charge_already_refunded"


@pytest.mark.parametrize(
    "method, suffix, order", [("DELETE", "", "o9"), ("POST", "/cancel", "o10")], ids=["delete", "post"]
)
def test_undo_gives_the_amount_back_to_the_order_once(card: Provider, method: str, suffix: str, order: str) -> None:
    refund = card.refund(f"k-{order}", order, None)
    path, key = f"/refunds/{refund.json['id']}{suffix}", {"Idempotency-Key": f"k-{order}-undo"}
    first = card.call(method, path, None, key)
    second = card.call(method, path, None, key)
    assert (first.status, first.json["status"]) == (200, "cancelled")
    assert (second.replayed, second.body) == (True, first.body)
    other = card.call(method, path, None, {"Idempotency-Key": f"k-{order}-undo-2"})
    assert (other.status, other.code) == (400, "refund_already_cancelled")
    (effect,) = card.applied(order)
    assert (effect["undone"], effect["undone_key"]) == (True, f"k-{order}-undo")
    assert card.refund(f"k-{order}-again", order, None).json["cents"] == 10_000


def test_undo_takes_the_refund_in_the_body_only_if_it_is_the_one_in_the_path(card: Provider) -> None:
    refund_id = card.refund("k-body-undo", "o11", 100).json["id"]
    path, key = f"/refunds/{refund_id}/cancel", {"Idempotency-Key": "k-body-undo-1"}
    assert card.call("POST", path, b'{"refund": "re_other"}', key).status == 400
    assert card.call("POST", path, json.dumps({"refund": refund_id}).encode(), key).status == 200


def test_undo_of_nothing(card: Provider) -> None:
    reply = card.call("DELETE", "/refunds/re_none", None, {"Idempotency-Key": "k-none"})
    assert (reply.status, reply.code) == (404, "no_such_refund")


# --- The mail service -----------------------------------------------------------------------------------


def test_mail_ignores_keys_and_counts_duplicates(mail: Provider) -> None:
    key = "0123456789abcdef" * 2
    replies = [mail.send("jane@example.com", f"<{key}@shop.example>") for _ in range(2)]
    assert [code for code, _ in replies] == [250, 250]
    mails = [row for row in mail.ledger()["mails"] if row["to"] == "jane@example.com"]
    assert [f"2.0.0 queued as {row['id']}" for row in mails] == [text for _, text in replies]
    assert {(row["key"], row["from"], row["subject"]) for row in mails} == {(key, "desk@shop.example", "Grüße")}


def test_a_mail_that_was_taken_survives_a_kill(mail: Provider) -> None:
    assert mail.send("kill@example.com")[0] == 250
    mail.end(signal.SIGKILL)
    mail.start()
    (row,) = [row for row in mail.ledger()["mails"] if row["to"] == "kill@example.com"]
    assert row["key"] == "<1@shop.example>"


def test_a_sender_that_hangs_up_after_the_dot_has_sent_its_mail(tmp_path: Path) -> None:
    with running("mail", tmp_path, "--latency", "300ms") as provider:
        with smtplib.SMTP("127.0.0.1", provider.smtp_port) as server:
            server.login("desk", TOKEN)
            server.mail("desk@shop.example")
            server.rcpt("gone@example.com")
            server.docmd("DATA")
            server.send(b"Subject: x\r\n\r\nx\r\n.\r\n")
            wait_in_progress(provider)
            server.close()
        wait_idle(provider)
        assert [row["to"] for row in provider.ledger()["mails"]] == ["gone@example.com"]


def test_sigterm_takes_the_mail_in_progress_in(tmp_path: Path) -> None:
    with running("mail", tmp_path, "--latency", "300ms") as provider:
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(provider.send, "last@example.com")
            wait_in_progress(provider)
            assert provider.end(signal.SIGTERM) == 0
            assert sent.result()[0] == 250
        provider.start()
        assert len(provider.ledger()["mails"]) == 1


@pytest.mark.parametrize("address", ["a@b", "a@example.invalid", "a@-x.de"])
def test_mail_refuses_an_address_that_nothing_can_reach(mail: Provider, address: str) -> None:
    assert mail.send(address) == (550, "5.1.1 no mail can reach this address")
    assert address not in {row["to"] for row in mail.ledger()["mails"]}
