"""What the gateway's SMTP sender makes of a mail server, moment by moment. Real sockets, a real server, no sleeps."""

import asyncio
import json
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import pytest
import uvloop
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from tests.services.certificates import trust_and_server

from tidefast.engine.clock import ManualClock, SystemClock
from tidefast.protocol.contracts import Contract, Credential
from tidefast.protocol.mail import render_mail
from tidefast.services import smtp_sender
from tidefast.services.smtp_sender import Departure, SmtpSender, Talk
from tidefast.services.tools import ConfigError, Outcome, ToolBook

KEY = "0" * 32
ARGS = {"to": "ann@home.example", "subject": "Hello", "text": "Hi\n.\n..two\nlast"}
CUT, SILENCE = "\0", "\1"  # at the end of what is said: the connection dies, or nothing more is ever said


class Scripted:
    """A mail server that says what its script says at each moment, and else what every server would."""

    def __init__(self, script: Mapping[str, str]) -> None:
        self._script = {"HELLO": "220 here", "EHLO": "250-here\r\n250 SIZE 1000", "DATA": "354 go on", **script}
        self.heard: list[str] = []
        self.taken: list[bytes] = []
        self._talks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Scripted":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*self._talks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._talks.append(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._say("HELLO", reader, writer)
            while line := await reader.readline():
                verb = line.split()[0].decode().upper()
                self.heard.append(line.decode().strip())
                await self._say(verb, reader, writer)
                if verb == "DATA":
                    self.taken.append(await reader.readuntil(b"\r\n.\r\n"))
                    await self._say("DOT", reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _say(self, moment: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = self._script.get(moment, "250 fine")
        writer.write(said.rstrip(CUT + SILENCE).encode("latin-1") + (b"" if said in (CUT, SILENCE) else b"\r\n"))
        await writer.drain()
        if said.endswith(SILENCE):
            await reader.read()
        if said.endswith((CUT, SILENCE)):
            raise ConnectionError


def mail_contract(port: int, **more: Any) -> Contract:
    fields = {"url": f"smtp://127.0.0.1:{port}", "sender": "desk@shop.example", "tls": "none", **more}
    return Contract("mail", "smtp", **fields)


async def hand_over(port: int, timeout_ms: int = 5_000, trust: ssl.SSLContext | None = None, **more: Any) -> Outcome:
    clock, contract = SystemClock(0), mail_contract(port, **more)
    sender = SmtpSender(clock, trust)
    return await sender.send(contract, render_mail(contract, ARGS, KEY), clock.now().ms + timeout_ms)


def told(script: Mapping[str, str], timeout_ms: int = 5_000, **more: Any) -> tuple[Outcome, Scripted]:
    async def run() -> tuple[Outcome, Scripted]:
        async with Scripted(script) as server:
            return await hand_over(server.port, timeout_ms, **more), server

    return asyncio.run(run())


MOMENTS = [
    # of the session: says nothing about the mail
    ("HELLO", "421 busy", "unsent", "greeting_421"),
    ("HELLO", "554 no service", "unsent", "greeting_554"),
    ("HELLO", CUT, "unsent", "IncompleteReadError"),
    ("HELLO", "SSH-2.0", "unsent", "ValueError"),
    ("HELLO", "220-a\r\n250 b", "unsent", "ValueError"),
    ("HELLO", "220-x\r\n" * 70 + "220 x", "unsent", "ValueError"),
    ("HELLO", "220 " + "x" * 5_000, "unsent", "LimitOverrunError"),
    ("EHLO", "502 what", "unsent", "ehlo_502"),
    ("EHLO", CUT, "unsent", "IncompleteReadError"),
    # of the envelope: a final code is the server's refusal, unless it asks for a login
    ("MAIL", "451 later", "unsent", "mail_451"),
    ("MAIL", "550 not you", "refused", "mail_550"),
    ("MAIL", "530 log in first", "unsent", "mail_530"),
    ("MAIL", CUT, "unsent", "IncompleteReadError"),
    ("RCPT", "450 greylisted", "unsent", "rcpt_450"),
    ("RCPT", "550 no such user", "refused", "rcpt_550"),
    ("RCPT", "251 will forward", "applied", ""),
    ("RCPT", CUT, "unsent", "IncompleteReadError"),
    ("DATA", "451 later", "unsent", "data_451"),
    ("DATA", "554 no", "refused", "data_554"),
    ("DATA", "250 what", "unsent", "data_250"),
    ("DATA", CUT, "unsent", "IncompleteReadError"),
    ("DATA", "354 go on\r\n250 queued already", "unsent", "early_reply"),
    # of the message: from here on silence is doubt
    ("DOT", "250 queued as 7", "applied", ""),
    ("DOT", "250-queued\r\n250 as 7", "applied", ""),
    ("DOT", "250", "applied", ""),
    ("DOT", "451 try later", "unsent", "dot_451"),
    ("DOT", "421 shutting down", "doubted", "dot_421"),
    ("DOT", "554 spam", "refused", "dot_554"),
    ("DOT", "354 again?", "doubted", "dot_354"),
    ("DOT", CUT, "doubted", "IncompleteReadError"),
    ("DOT", "250-half" + CUT, "doubted", "IncompleteReadError"),
    ("DOT", "25", "doubted", "ValueError"),
    ("DOT", "\xff\xfe", "doubted", "ValueError"),
]


@pytest.mark.parametrize(("moment", "said", "kind", "reason"), MOMENTS)
def test_each_moment_means_what_the_table_says(moment: str, said: str, kind: str, reason: str) -> None:
    outcome, server = told({moment: said})
    assert (outcome.kind, outcome.reason) == (kind, reason)
    assert bool(server.taken) == (moment == "DOT" or kind == "applied"), "the mail is whole at the server, or isn't"


@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        ("HELLO", "unsent"),
        ("EHLO", "unsent"),
        ("MAIL", "unsent"),
        ("RCPT", "unsent"),
        ("DATA", "unsent"),
        ("DOT", "doubted"),
    ],
)
def test_silence_until_the_deadline_is_doubt_after_the_dot_only(moment: str, kind: str) -> None:
    outcome, _ = told({moment: SILENCE}, timeout_ms=150)
    assert (outcome.kind, outcome.reason) == (kind, "TimeoutError")


def test_a_server_that_goes_away_in_the_middle_of_the_message_was_never_sent_its_dot() -> None:
    async def run() -> bool:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        departure = Departure(SystemClock(0), 2**50)
        reader, writer = await asyncio.open_connection(sock=ours)
        talking = asyncio.ensure_future(Talk(reader, writer, "").message("x\r\n" * 100_000, departure))
        with theirs:
            assert await asyncio.to_thread(theirs.recv, 6) == b"Date: "
        with pytest.raises(ConnectionError):
            await talking
        writer.close()
        return departure.has_left

    assert asyncio.run(run()) is False


def test_a_server_that_goes_away_after_its_answer_has_answered() -> None:
    outcome, _ = told({"DOT": "250 queued" + CUT})
    assert outcome.kind == "applied"


def test_a_server_that_nobody_listens_for_was_never_sent_anything() -> None:
    async def run() -> Outcome:
        async with Scripted({}) as server:
            port = server.port
        return await hand_over(port)

    assert asyncio.run(run()) == Outcome("unsent", reason="ConnectionRefusedError")


def test_a_deadline_that_has_passed_is_dropped_before_anything_leaves() -> None:
    outcome, server = told({}, timeout_ms=0)
    assert (outcome, server.heard) == (Outcome("unsent", reason="deadline"), [])


class Suspended(ManualClock):
    """A host that sleeps while it waits for a server's reply: the last look before the dot is too late."""

    looks = 0

    def now(self):  # type: ignore[no-untyped-def]
        self.looks += 1
        if self.looks == 3:
            self.advance(60_000)
        return super().now()


def test_a_deadline_that_passes_during_the_conversation_is_looked_at_before_the_dot() -> None:
    async def run() -> tuple[Outcome, list[bytes]]:
        async with Scripted({}) as server:
            clock, contract = Suspended(), mail_contract(server.port)
            request = render_mail(contract, ARGS, KEY)
            return await SmtpSender(clock).send(contract, request, clock.ms + 5_000), server.taken

    assert asyncio.run(run()) == (Outcome("unsent", reason="deadline"), [])


def test_the_receipt_has_the_servers_words_and_what_to_look_for() -> None:
    outcome, server = told({"DOT": "250-2.0.0 Ok\r\n250 queued as 7\xff"})
    receipt = json.loads(outcome.receipt_json)
    body = {"reply": "2.0.0 Ok\nqueued as 7\ufffd", "message_id": f"<{KEY}@shop.example>", "to": "ann@home.example"}
    assert (receipt["status"], receipt["body"], receipt["truncated"]) == (250, body, False)
    assert server.heard[1].startswith("MAIL FROM:<desk@shop.example> SIZE=")
    assert server.heard[2:] == ["RCPT TO:<ann@home.example>", "DATA", "QUIT"]


def test_a_refusals_receipt_has_the_servers_words() -> None:
    receipt = json.loads(told({"RCPT": "550 5.1.1 no such user"})[0].receipt_json)
    assert (receipt["status"], receipt["body"]["reply"]) == (550, "5.1.1 no such user")


def test_a_lone_dot_in_a_text_does_not_end_the_message() -> None:
    _, server = told({})
    head, _, text = server.taken[0].partition(b"\r\n\r\n")
    assert head.startswith(b"Date: ") and text == b"Hi\r\n..\r\n...two\r\nlast\r\n.\r\n"


def test_no_more_conversations_at_once_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smtp_sender, "CONNECTIONS_MAX", 1)

    async def run() -> list[str]:
        async with Scripted({"DOT": SILENCE}) as server:
            clock, contract = SystemClock(0), mail_contract(server.port)
            sender, request = SmtpSender(clock), render_mail(contract, ARGS, KEY)
            both = [sender.send(contract, request, clock.now().ms + 150) for _ in range(2)]
            return sorted(outcome.kind for outcome in await asyncio.gather(*both))

    assert asyncio.run(run()) == ["doubted", "unsent"]


# --- a real server: aiosmtpd ----------------------------------------------------------------------------


class Outbox:
    """What a real mail server was given."""

    def __init__(self) -> None:
        self.mails: list[tuple[str, list[str], bytes]] = []
        self.users: list[bytes] = []

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        assert envelope.mail_from is not None and isinstance(envelope.original_content, bytes)
        self.mails.append((envelope.mail_from, envelope.rcpt_tos, envelope.original_content))
        return "250 OK"

    def log_in(self, server: SMTP, session: Session, envelope: Envelope, mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        self.users.append(data.login)
        return AuthResult(success=data == LoginPassword(b"desk", "pässword".encode()), handled=False)


def at_real_server(
    trust: ssl.SSLContext | None, loop: Any = None, *, tls: str, **options: Any
) -> tuple[Outcome, Outbox]:
    outbox = Outbox()
    wrapped = options.pop("wrapped", None)
    more = {"credential": options.pop("credential", None)}

    async def run() -> Outcome:
        server = await asyncio.get_running_loop().create_server(
            lambda: SMTP(outbox, hostname="here", authenticator=outbox.log_in, **options), "127.0.0.1", 0, ssl=wrapped
        )
        try:
            port = server.sockets[0].getsockname()[1]
            return await hand_over(port, trust=trust, tls=tls, **more)
        finally:
            server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(run()), outbox


@pytest.mark.parametrize("loop", [None, uvloop.new_event_loop])
@pytest.mark.parametrize("tls", ["none", "starttls", "tls"])
def test_a_real_server_takes_one_mail_under_each_kind_of_tls(tls: str, loop: Any) -> None:
    trust, server = trust_and_server()
    more: dict[str, Any] = {"none": {}, "starttls": {"tls_context": server}, "tls": {"wrapped": server}}[tls]
    outcome, outbox = at_real_server(trust, loop, tls=tls, **more)
    assert (outcome.kind, outcome.reason) == ("applied", "")
    ((sender, recipients, content),) = outbox.mails
    assert (sender, recipients) == ("desk@shop.example", ["ann@home.example"])
    assert (
        content.endswith(b"\r\n\r\nHi\r\n.\r\n..two\r\nlast\r\n")
        and f"Message-ID: <{KEY}@shop.example>".encode() in content
    )


@pytest.mark.parametrize("mechanism", ["PLAIN", "LOGIN"])
def test_a_password_from_the_environment_logs_in(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_PASSWORD", "pässword")
    other = {"PLAIN": "LOGIN", "LOGIN": "PLAIN"}[mechanism]
    trust, server = trust_and_server()
    more: dict[str, Any] = {"credential": Credential("", "MAIL_PASSWORD", "desk"), "auth_exclude_mechanism": [other]}
    outcome, outbox = at_real_server(trust, tls="starttls", tls_context=server, auth_required=True, **more)
    assert (outcome.kind, outbox.users, len(outbox.mails)) == ("applied", [b"desk"], 1)


def test_a_wrong_password_refuses_no_mail_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_PASSWORD", "wrong")
    trust, server = trust_and_server()
    more: dict[str, Any] = {"credential": Credential("", "MAIL_PASSWORD", "desk"), "tls_context": server}
    outcome, outbox = at_real_server(trust, tls="starttls", auth_required=True, **more)
    assert (outcome.kind, outcome.reason, outbox.mails) == ("unsent", "auth_535", [])


def test_a_server_that_wants_a_login_and_gets_none_refuses_no_mail_for_good() -> None:
    trust, server = trust_and_server()
    outcome, _ = at_real_server(trust, tls="starttls", tls_context=server, auth_required=True)
    assert (outcome.kind, outcome.reason) == ("unsent", "mail_530")


@pytest.mark.parametrize("tls", ["starttls", "tls"])
def test_a_certificate_for_another_name_ends_the_conversation(tls: str) -> None:
    trust, server = trust_and_server("127.0.0.9")
    more: dict[str, Any] = {"starttls": {"tls_context": server}, "tls": {"wrapped": server}}[tls]
    outcome, outbox = at_real_server(trust, tls=tls, **more)
    assert (outcome, outbox.mails) == (Outcome("unsent", reason="SSLCertVerificationError"), [])


def test_nobody_is_trusted_whom_the_system_does_not_trust() -> None:
    _, server = trust_and_server()
    outcome, _ = at_real_server(None, tls="tls", wrapped=server)
    assert outcome == Outcome("unsent", reason="SSLCertVerificationError")


def test_starttls_that_is_not_offered_is_not_done_without() -> None:
    outcome, server = told({}, tls="starttls")
    assert (outcome.reason, [line.split()[0] for line in server.heard]) == ("starttls_not_offered", ["EHLO"])


def test_what_a_server_says_before_tls_is_not_believed_under_it() -> None:
    script = {"EHLO": "250-here\r\n250 STARTTLS", "STARTTLS": "220 go\r\n250 and this"}
    outcome, _ = told(script, tls="starttls")
    assert (outcome.kind, outcome.reason) == ("unsent", "starttls_early_bytes")


@pytest.mark.parametrize("offer", ["250 AUTH CRAM-MD5", "250 fine"])
def test_a_login_that_is_not_offered_is_told(offer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_PASSWORD", "x")
    outcome, server = told({"EHLO": f"250-here\r\n{offer}"}, credential=Credential("", "MAIL_PASSWORD", "desk"))
    assert (outcome.reason, len(server.heard)) == ("auth_not_offered", 1)


def test_a_password_of_two_lines_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_PASSWORD", "x\r\ny")
    with pytest.raises(ConfigError, match="MAIL_PASSWORD"):
        ToolBook([mail_contract(25, credential=Credential("", "MAIL_PASSWORD", "desk"))])
