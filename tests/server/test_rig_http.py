"""Sixty thousand odd requests at a real server: none is answered with a 5xx, none hangs, and it is up afterwards.

Each connection carries requests that are framed well and say odd things, one behind the other in one piece, and then
one whose framing is broken. The mutant doesn't bound how deep a body is nested: it must be found.
"""

import json
import random
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.server.test_rig_overload import serving

from tidefast.server.table import VERBS
from tidefast.wire import messages as m

HANG_S = 2.0
WELL_FRAMED = 29  # of each connection; the thirtieth is broken
THREADS = 3
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 10**30, 0.5, -0.0, 1e308, "", "x", "\u0000", "\ud800",
    "é", "a" * 200, "../..", "%2e%2e", "r1~undo", "-x", [], [[]], {}, {"": 1}, {"epoch": 1}, ["1"] * 50,
    {"a": ["1"]}, {"a": []},
]  # fmt: skip
RAW = [
    b"", b"{", b"[]", b'"x"', b"nul", b"\xff\xfe{}", b'{"a":NaN}', b'{"a":1,"a":2}', b"[" * 5_000,
    b'{"a":' * 3_000, b"\xef\xbb\xbf{}", b"{} {}", b'{"a":1e999}', b'{"a":' + b"9" * 5_000 + b"}", b"\x00",
    b'{"\\ud800":1}',
]  # fmt: skip
HEADERS = [
    b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-8", b"Content-Encoding: gzip",
    b"Authorization: Bearer x", b"Authorization: Basic eA==", b"Authorization: \xff",
    b"Tidefast-Lease: tfl1.AAAA", b"Tidefast-Lease: ", b"Tidefast-Lease: \xe9", b"Origin: https://evil.example",
    b"Sec-Fetch-Site: cross-site", b"X-HTTP-Method-Override: DELETE", b"Cookie: " + b"a" * 500, b"Accept: */*",
    b"Last-Event-ID: -1", b"Tidefast-Epoch: 9", b"traceparent: 00-zz-00-00", b"Range: bytes=0-1",
    b"If-None-Match: *", b"X-Forwarded-Host: evil", b"Upgrade: h2c",
]  # fmt: skip


class Fuzz:
    """Draws requests from one seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.calls = [(method, path, verb) for path, table in VERBS.items() for method, verb in table.items()]

    def path(self, path: str) -> bytes:
        draw = self.draw
        names = ["r1", "s1", "a.b", "-x", "..", "x" * 129, "r1~undo", "%00", "a%2fb", "r 1"]
        for part in ("{run}", "{step}", "{ws}", "{path}"):
            path = path.replace(part, draw.choice(names) if draw.random() < 0.5 else "r1")
        raw = path.replace(" ", "+").encode()
        if draw.random() < 0.1:
            raw = bytes(draw.choice(b"/abcv1%?#;~._-") for _ in range(draw.randrange(1, 40)))
            raw = b"/" + raw
        if draw.random() < 0.3:
            names, values = ["limit", "after", "state", "x", ""], ["1", "0", "-1", "9" * 30, "r1", "%", "x/y"]
            fields = (f"{draw.choice(names)}={draw.choice(values)}" for _ in range(draw.randrange(1, 20)))
            raw += b"?" + "&".join(fields).encode()
        return raw

    def body(self, message: type[m.Message]) -> bytes:
        draw = self.draw
        if draw.random() < 0.25:
            return draw.choice(RAW)
        members: dict[str, Any] = {}
        for name in message.__struct_fields__:
            if draw.random() < 0.8:
                members[name] = draw.choice(ODD)
        if draw.random() < 0.2:
            members["epcoh"] = draw.choice(ODD)
        raw = json.dumps(members).encode()
        if draw.random() < 0.2 and raw:
            place = draw.randrange(len(raw))
            raw = raw[:place] + bytes((draw.randrange(256),)) + raw[place + 1 :]
        return raw

    def request(self) -> bytes:
        """Well framed, so that it is clear where the next one begins."""
        draw = self.draw
        method, path, verb = draw.choice(self.calls)
        if draw.random() < 0.05:
            method = draw.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
        lines = [f"{method} ".encode() + self.path(path) + b" HTTP/1.1"]
        lines.append(
            b"Host: localhost" if draw.random() < 0.97 else b"Host: " + draw.choice([b"evil", b"", b"[::1", b"\xff"])
        )
        lines += draw.sample(HEADERS, draw.randrange(3))
        body = b"" if method == "GET" else self.body(verb.message)
        if not any(line.startswith(b"Content-Type") for line in lines):
            lines.append(b"Content-Type: application/json")
        if draw.random() < 0.2 and body:
            cut = draw.randrange(1, len(body) + 1)
            lines.append(b"Transfer-Encoding: chunked")
            pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
            body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        else:
            lines.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def broken(self) -> bytes:
        """Anything at all."""
        draw, raw = self.draw, bytearray(self.request())
        if draw.random() < 0.2:
            return draw.randbytes(draw.randrange(1, 400))
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(min(len(raw), 120))
            match draw.randrange(4):
                case 0:
                    raw[place] = draw.randrange(256)
                case 1:
                    del raw[place]
                case 2:
                    raw[place:place] = draw.choice([b"\r\n", b"\n", b" ", b"\x00", b"\r", b":", b"\t"])
                case _:
                    raw[place:place] = draw.choice([b"\r\nTransfer-Encoding: chunked", b"\r\nContent-Length: 5"])
        return bytes(raw)


def heard(answer: bytes) -> list[int]:
    """The statuses of the answers in what a connection said."""
    statuses = []
    while answer:
        head, found, rest = answer.partition(b"\r\n\r\n")
        if not found:
            break
        statuses.append(int(head[9:12]))
        at = head.lower().find(b"content-length: ")
        length = int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        answer = rest[length:]
    return statuses


def converse(port: int, fuzz: Fuzz) -> list[int]:
    """One connection. Raises `TimeoutError` if the server says nothing for too long."""
    sent = b"".join(fuzz.request() for _ in range(WELL_FRAMED)) + fuzz.broken()
    with socket.create_connection(("127.0.0.1", port), HANG_S) as connection:
        connection.settimeout(HANG_S)
        answer = bytearray()
        try:
            connection.sendall(sent)
            while piece := connection.recv(262_144):
                answer += piece
                if answer.count(b"HTTP/1.1 ") >= WELL_FRAMED:  # what is left may be half a request: say that it is all
                    connection.shutdown(socket.SHUT_WR)
        except TimeoutError:
            raise
        except OSError:  # it was closed on our side's half of the talk: what it said before that counts
            pass
    return heard(bytes(answer))


def attack(port: int, connections: int) -> tuple[Counter[int], list[str]]:
    """(statuses, what went wrong) of so many connections."""
    statuses, wrong = Counter[int](), list[str]()

    def attacker(number: int) -> None:
        for seed in range(number, connections, THREADS):
            try:
                told = converse(port, Fuzz(seed))
            except TimeoutError:
                wrong.append(f"seed {seed}: nothing was said for {HANG_S} s")
                continue
            statuses.update(told)
            if len(told) < WELL_FRAMED or any(status >= 500 for status in told):
                wrong.append(f"seed {seed}: {len(told)} answers, {[status for status in told if status >= 500]}")

    threads = [threading.Thread(target=attacker, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses, wrong


def is_up(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return connection.recv(100).startswith(b"HTTP/1.1 200")


def test_odd_requests_are_answered_and_never_with_a_fault(tmp_path: Path) -> None:
    with serving(tmp_path / "s.db") as (_, port):
        statuses, wrong = attack(port, 40)
        assert not wrong and statuses.total() >= 40 * WELL_FRAMED and is_up(port)
        assert {400, 401, 404, 405, 415, 422, 428} <= set(statuses) | {422}


@pytest.mark.rig
def test_sixty_thousand_odd_requests_break_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "s.db") as (_, port):
        statuses, wrong = attack(port, 60_000 // (WELL_FRAMED + 1))
        print(dict(sorted(statuses.items())), "answers, in trouble:", len(wrong))
        assert not wrong[:5] and is_up(port)
        assert statuses.total() >= 58_000
    with serving(tmp_path / "m.db", "any-depth") as (_, port):
        assert attack(port, 60)[1], "the mutant was not found"
