"""Mails: what a contract may say about a mail server, and a message that nobody can break out of."""

import email
import email.policy
from email.message import EmailMessage
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidefast.protocol.contract_table import parse_contract
from tidefast.protocol.contracts import Contract, Credential, sender_parts
from tidefast.protocol.mail import FROM, ID, TO, render_mail
from tidefast.protocol.patterns import RenderError

KEY = "0123456789abcdef0123456789abcdef"
GOOD: dict[str, Any] = {"kind": "smtp", "url": "smtp://mail.example", "from": "The desk <desk@shop.example>"}
MAIL = Contract("mail", "smtp", url="smtp://mail.example", sender="desk@shop.example")


def read(body: str) -> EmailMessage:
    message = email.message_from_string(body, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    return message


def rendered(**args: Any) -> EmailMessage:
    request = render_mail(MAIL, {"to": "ann@home.example", "subject": "Hello", "text": "Hi", **args}, KEY)
    assert_can_be_sent(request.body)
    return read(request.body)


def assert_can_be_sent(body: str) -> None:
    """Seven bits, lines that end in CRLF and only so, none too long."""
    assert body.isascii() and body.endswith("\r\n")
    assert body.count("\r") == body.count("\n") == body.count("\r\n")
    assert all(len(line) <= 998 for line in body.split("\r\n"))


def test_a_table_with_server_and_sender_is_a_mail_tool_that_nothing_replays() -> None:
    contract, problems = parse_contract("mail", {**GOOD, "credential": {"user": "desk", "env": "MAIL_PASSWORD"}})
    assert contract is not None and not problems
    assert (contract.kind, contract.tls, contract.dedups, contract.effect) == ("smtp", "starttls", False, "external")
    assert contract.credential == Credential("", "MAIL_PASSWORD", "desk")
    assert contract.origin == contract.scope == "smtp://mail.example"


BAD: list[tuple[dict[str, Any], set[str]]] = [
    ({"url": ""}, {"url"}),
    ({"url": "smtps://mail.example"}, {"url"}),
    ({"url": "http://mail.example"}, {"url"}),
    ({"url": "smtp://mail.example/path"}, {"url"}),
    ({"url": "smtp://mail.example?x"}, {"url"}),
    ({"url": "smtp://user@mail.example"}, {"url"}),
    ({"url": "smtp://{args.host}"}, {"url"}),
    ({"url": "smtp://mail.example:70000"}, {"url"}),
    ({"url": "smtp://mail.example:0"}, {"url"}),
    ({"url": "smtp://:25"}, {"url"}),
    ({"url": "smtp://[::1"}, {"url"}),
    ({"from": ""}, {"from"}),
    ({"from": "desk"}, {"from"}),
    ({"from": "a@b.example, c@d.example"}, {"from"}),
    ({"from": 'The "desk" <a@b.example>'}, {"from"}),
    ({"from": "desk@shop.example\nBcc: x@y.example"}, {"from"}),
    ({"tls": "maybe"}, {"tls"}),
    ({"effect": "none"}, {"effect"}),
    ({"key": "header:X"}, {"key"}),
    ({"key_ttl": "1h"}, {"key_ttl"}),
    ({"refusals": [550]}, {"refusals"}),
    ({"retries": 1}, {"retries"}),
    ({"method": "POST"}, {"method"}),
    ({"credential": "x"}, {"credential"}),
    ({"credential": {"header": "Authorization", "env": "X"}}, {"credential"}),
    ({"credential": {"user": "", "env": "X"}}, {"credential"}),
    ({"credential": {"user": 1, "env": "X"}}, {"credential"}),
    ({"credential": {"user": "desk", "env": 1}}, {"credential"}),
    ({"tls": "none", "credential": {"user": "desk", "env": "X"}}, {"tls"}),
]


@pytest.mark.parametrize(("changes", "members"), BAD)
def test_what_a_mail_tool_can_not_be_is_told_by_member(changes: dict[str, Any], members: set[str]) -> None:
    contract, problems = parse_contract("mail", {**GOOD, **changes})
    assert contract is None
    assert members <= {problem.member.split(".")[0] for problem in problems} <= members | {"key_ttl"}


def test_a_password_may_go_in_the_clear_to_this_host_only() -> None:
    table = {**GOOD, "tls": "none", "url": "smtp://127.0.0.1:2525", "credential": {"user": "d", "env": "X"}}
    assert parse_contract("mail", table)[1] == ()


@pytest.mark.parametrize("name", ["from", "tls"])
def test_other_kinds_have_no_sender_and_no_tls_member(name: str) -> None:
    _, problems = parse_contract("t", {"kind": "python", name: "none"})
    assert [problem.member for problem in problems] == [name]


def test_the_message_says_what_was_asked_and_is_found_by_its_key() -> None:
    contract = MAIL._replace(sender="Dr. Desk <desk@shop.example>")
    request = render_mail(contract, {"to": "ann@home.example", "subject": "Hello", "text": "Hi\nAnn"}, KEY)
    assert_can_be_sent(request.body)
    wanted = {FROM: "desk@shop.example", TO: "ann@home.example", ID: f"<{KEY}@shop.example>"}
    assert (request.method, request.url, request.headers) == ("MAIL", "smtp://mail.example", wanted)
    message = read(request.body)
    assert message["from"] == '"Dr. Desk" <desk@shop.example>'
    assert (message["to"], message["subject"], message["message-id"]) == ("ann@home.example", "Hello", wanted[ID])
    assert message.get_content() == "Hi\r\nAnn\r\n"


def test_other_alphabets_arrive_as_they_were_written() -> None:
    contract = MAIL._replace(sender="Grüße <desk@shop.example>")
    args = {
        "to": "ann@home.example",
        "subject": "Überweisung " * 20,
        "text": "Schöne Grüße 🙂",
        "reply_to": "b@c.example",
    }
    body = render_mail(contract, args, KEY).body
    assert_can_be_sent(body)
    message = read(body)
    assert message["from"].addresses[0].display_name == "Grüße"
    assert message["subject"] == args["subject"]
    assert message["reply-to"] == "b@c.example"
    assert message.get_content().strip() == args["text"]


def test_html_stands_beside_the_text() -> None:
    message = rendered(text="plain", html="<p>Grüße</p>")
    assert [part.get_content_type() for part in message.iter_parts()] == ["text/plain", "text/html"]
    assert [part.get_content().strip() for part in message.iter_parts()] == ["plain", "<p>Grüße</p>"]  # type: ignore[attr-defined]


def test_a_text_can_not_end_its_part_by_naming_the_boundary() -> None:
    message = rendered(text=f"--=_{KEY}--\r\nContent-Type: text/html\r\n\r\nevil", html="<p>")
    assert len(list(message.iter_parts())) == 2


def test_a_subject_that_looks_encoded_arrives_as_it_was_written() -> None:
    assert rendered(subject="=?utf-8?q?_evil?=")["subject"] == "=?utf-8?q?_evil?="


def test_a_long_line_is_encoded() -> None:
    assert rendered(text="x" * 2_000).get_content().strip() == "x" * 2_000


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"to": "ann@home.example, bob@home.example"}, "to must be one address"),
    ({"to": "ann@home.example\r\nBcc: x@y.example"}, "to must be one address"),
    ({"to": "ann@home.example>\r\nRCPT TO:<x@y.example"}, "to must be one address"),
    ({"to": "Ann <ann@home.example>"}, "to must be one address"),
    ({"to": "ann"}, "to must be one address"),
    ({"to": "änn@home.example"}, "to must be one address"),
    ({"to": "a@" + "b" * 64 + ".example"}, "to must be one address"),
    ({"to": "a" * 65 + "@b.example"}, "to must be one address"),
    ({"to": "a@b.example\n"}, "to must be one address"),
    ({"to": ["ann@home.example"]}, "to must be one address"),
    ({"reply_to": "x"}, "reply_to must be one address"),
    ({"subject": "Hello\r\nBcc: x@y.example"}, "subject must be one line"),
    ({"subject": "Hello\u2028Bcc"}, "subject must be one line"),
    ({"subject": ""}, "subject must be one line"),
    ({"subject": "   "}, "subject must be one line"),
    ({"subject": "x" * 501}, "subject must be one line"),
    ({"subject": 7}, "subject must be one line"),
    ({"text": "a\x00b"}, "text must be text"),
    ({"text": ""}, "text must be text"),
    ({"text": 7}, "text must be text"),
    ({"text": "x" * 262_145}, "text must be text"),
    ({"html": "\x1b[0m"}, "html must be text"),
    ({"bcc": "x@y.example"}, "a mail has no bcc"),
]


@pytest.mark.parametrize(("args", "told"), REFUSED)
def test_arguments_that_would_make_another_mail_are_refused(args: dict[str, Any], told: str) -> None:
    with pytest.raises(RenderError, match=told):
        rendered(**args)


def test_a_contract_without_a_sender_makes_no_mail() -> None:
    with pytest.raises(RenderError, match="from"):
        render_mail(MAIL._replace(sender=""), {"to": "a@b.example", "subject": "x", "text": "x"}, KEY)


@given(st.text(min_size=1, max_size=500), st.text(min_size=1, max_size=800))
def test_no_subject_and_no_text_breaks_out_of_the_message(subject: str, text: str) -> None:
    try:
        message = rendered(subject=subject, text=text)
    except (RenderError, UnicodeEncodeError):
        return
    assert sorted(message.keys()) == sorted(
        ["From", "To", "Subject", "Message-ID", "MIME-Version", "Content-Type", "Content-Transfer-Encoding"]
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("desk@shop.example", ("", "desk@shop.example")),
        ("The desk <desk@shop.example>", ("The desk", "desk@shop.example")),
        ("<desk@shop.example>", ("", "desk@shop.example")),
        ("The desk desk@shop.example", None),
    ],
)
def test_a_sender_is_an_address_with_or_without_a_name(text: str, parts: tuple[str, str] | None) -> None:
    assert sender_parts(text) == parts
