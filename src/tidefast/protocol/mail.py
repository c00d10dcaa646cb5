"""The message of an `smtp` tool: a pure function of contract, arguments and key, made once and stored with the intent.

One recipient, so that one reply of the server is about one person. `Message-ID` is made of the key: whoever looks for
the mail in a queue or an outbox finds it by what the log says. Nothing of a caller's reaches a header line unchecked,
and the stored bytes are seven-bit lines that end in CRLF, so no text can end the message early or begin another.
"""

import base64
import re
from collections.abc import Mapping
from email.header import Header

from tidefast.protocol.canonical import JSON
from tidefast.protocol.contracts import ADDRESS, Contract, Request, sender_parts
from tidefast.protocol.patterns import RenderError

METHOD = "MAIL"  # of a stored request that is a mail
FROM, TO, ID = "MAIL FROM", "RCPT TO", "Message-ID"  # its envelope, and what it is found by
SUBJECT_LENGTH_MAX = 500
TEXT_LENGTH_MAX = 262_144  # base64 of it in UTF-8, escaped in the log, is still under a body's limit
PLAIN_LINE_MAX = 900  # SMTP allows 998 bytes
MEMBERS = frozenset(("to", "subject", "text", "html", "reply_to"))
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_CONTROL_IN_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LINE_END = re.compile(r"\r\n|\r|\n")


def render_mail(contract: Contract, args: Mapping[str, JSON], key: str) -> Request:
    """The envelope and the message of a call. Raises `RenderError`, naming the argument.

    The sender adds `Date` when an attempt goes out, as it adds the credential.
    """
    unknown = sorted(set(args) - MEMBERS)
    if unknown:
        raise RenderError(f"a mail has no {unknown[0]}; it has to, subject, text, html, reply_to")
    parts = sender_parts(contract.sender)
    if parts is None:
        raise RenderError("the contract's from is no address")
    name, address = parts
    recipient, subject, mail_id = _address(args, "to"), _subject(args), message_id(key, address)
    lines = [
        f"From: {_name(name)} <{address}>" if name else f"From: {address}",
        f"To: {recipient}",
        f"Subject: {_encoded('Subject', subject)}",
        f"Message-ID: {mail_id}",
        "MIME-Version: 1.0",
    ]
    if "reply_to" in args:
        lines.append(f"Reply-To: {_address(args, 'reply_to')}")
    text = _text(args, "text")
    if "html" in args:
        lines += _alternatives(text, _text(args, "html"), key)
    else:
        lines += _part("plain", text, is_alone=True)
    return Request(METHOD, contract.url, {FROM: address, TO: recipient, ID: mail_id}, "\r\n".join([*lines, ""]))


def message_id(key: str, address: str) -> str:
    """`Message-ID` of the mail that a key names."""
    return f"<{key}@{address.rpartition('@')[2]}>"


def _address(args: Mapping[str, JSON], name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str) or ADDRESS.fullmatch(value) is None:
        raise RenderError(f"{name} must be one address like someone@shop.example, in ASCII and without a name")
    return value


def _subject(args: Mapping[str, JSON]) -> str:
    value = args.get("subject")
    if not isinstance(value, str) or not value.strip() or len(value) > SUBJECT_LENGTH_MAX or _CONTROL.search(value):
        raise RenderError(f"subject must be one line of 1 to {SUBJECT_LENGTH_MAX} characters")
    return value


def _text(args: Mapping[str, JSON], name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= TEXT_LENGTH_MAX or _CONTROL_IN_TEXT.search(value):
        raise RenderError(f"{name} must be text of 1 to {TEXT_LENGTH_MAX} characters without control characters")
    return value


def _name(text: str) -> str:
    """A sender's name: quoted if it is plain, for it may have dots in it."""
    return f'"{text}"' if _is_plain(text) else _encoded("From", text)


def _encoded(header: str, value: str) -> str:
    """A header's text, as encoded words where it isn't plain ASCII or looks like them."""
    charset = "us-ascii" if _is_plain(value) else "utf-8"
    return Header(value, charset, header_name=header).encode(linesep="\r\n")


def _is_plain(text: str) -> bool:
    return text.isascii() and "=?" not in text


def _part(subtype: str, text: str, *, is_alone: bool) -> list[str]:
    """One body with its own headers: readable where it can be, base64 where it can't, or where a boundary is near."""
    kind = f"Content-Type: text/{subtype}; charset=utf-8"
    lines = _LINE_END.split(text)
    if is_alone and text.isascii() and all(len(line) <= PLAIN_LINE_MAX for line in lines):
        return [kind, "Content-Transfer-Encoding: 7bit", "", *lines]
    encoded = base64.encodebytes("\r\n".join(lines).encode()).decode()
    return [kind, "Content-Transfer-Encoding: base64", "", *encoded.split()]


def _alternatives(text: str, html: str, key: str) -> list[str]:
    boundary = f"=_{key}"  # in no line of base64
    return [
        f'Content-Type: multipart/alternative; boundary="{boundary}"',
        "",
        f"--{boundary}",
        *_part("plain", text, is_alone=False),
        f"--{boundary}",
        *_part("html", html, is_alone=False),
        f"--{boundary}--",
    ]
