"""A request hidden in another one is never carried out, however the two ends of a connection may count bytes."""

import pytest
from tests.server.support import OPERATOR_KEY, Spy
from tests.server.test_serve import exchange, request

HIDDEN = (
    b"POST /v1/runs/r1/preempt HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
    + OPERATOR_KEY.encode()
    + b"\r\nContent-Length: 0\r\n\r\n"
)
CHUNKED = b"0\r\n\r\n" + HIDDEN
LENGTH = b"Content-Length: %d" % len(CHUNKED)
TE = b"Transfer-Encoding: chunked"

CASES: list[tuple[str, bytes]] = [
    ("CL.TE", request(b"POST", b"/v1/runs", LENGTH, TE, body=CHUNKED)),
    ("TE.CL", request(b"POST", b"/v1/runs", TE, b"Content-Length: 4", body=CHUNKED)),
    ("space before the colon", request(b"POST", b"/v1/runs", LENGTH, b"Transfer-Encoding : chunked", body=CHUNKED)),
    ("tab before the value", request(b"POST", b"/v1/runs", LENGTH, b"Transfer-Encoding:\tchunked", body=CHUNKED)),
    ("xchunked", request(b"POST", b"/v1/runs", LENGTH, b"Transfer-Encoding: xchunked", body=CHUNKED)),
    ("identity, chunked", request(b"POST", b"/v1/runs", LENGTH, b"Transfer-Encoding: identity, chunked", body=CHUNKED)),
    ("chunked, identity", request(b"POST", b"/v1/runs", b"Transfer-Encoding: chunked, identity", body=CHUNKED)),
    ("twice chunked", request(b"POST", b"/v1/runs", TE, b"Transfer-Encoding: cow", body=CHUNKED)),
    ("vertical tab", request(b"POST", b"/v1/runs", LENGTH, b"Transfer-Encoding: \x0bchunked", body=CHUNKED)),
    ("bare CR in a header", request(b"POST", b"/v1/runs", LENGTH, b"X: a\rTransfer-Encoding: chunked", body=CHUNKED)),
    ("bare LF in a header", request(b"POST", b"/v1/runs", b"X: a\nTransfer-Encoding: chunked", LENGTH, body=CHUNKED)),
    ("NUL in a header", request(b"POST", b"/v1/runs", LENGTH, b"X: a\x00b", TE, body=CHUNKED)),
    ("folded header", request(b"POST", b"/v1/runs", LENGTH, b"Transfer-Encoding:\r\n chunked", body=CHUNKED)),
    ("two lengths", request(b"POST", b"/v1/runs", LENGTH, b"Content-Length: 0", body=CHUNKED)),
    ("a list of lengths", request(b"POST", b"/v1/runs", b"Content-Length: 0, 0", body=HIDDEN)),
    ("a signed length", request(b"POST", b"/v1/runs", b"Content-Length: +0", body=HIDDEN)),
    ("a length in hex", request(b"POST", b"/v1/runs", b"Content-Length: 0x0", body=HIDDEN)),
    ("a length with a blank", request(b"POST", b"/v1/runs", b"Content-Length: 0 0", body=HIDDEN)),
    ("an underscored length", request(b"POST", b"/v1/runs", b"Content-Length: 0_0", body=HIDDEN)),
    ("a chunk size with 0x", request(b"POST", b"/v1/runs", TE, body=b"0x0\r\n\r\n" + HIDDEN)),
    ("a signed chunk size", request(b"POST", b"/v1/runs", TE, body=b"-0\r\n\r\n" + HIDDEN)),
    ("a chunk size that overflows", request(b"POST", b"/v1/runs", TE, body=b"f" * 17 + b"\r\n\r\n" + HIDDEN)),
    ("a chunk that ends in LF", request(b"POST", b"/v1/runs", TE, body=b"1\r\na\n0\r\n\r\n" + HIDDEN)),
    ("a chunk size that ends in LF", request(b"POST", b"/v1/runs", TE, body=b"0\n\r\n" + HIDDEN)),
    ("HTTP/1.0 and chunked", request(b"POST", b"/v1/runs", LENGTH, TE, body=CHUNKED).replace(b"1.1", b"1.0", 1)),
]  # fmt: skip


@pytest.mark.parametrize("raw", [row[1] for row in CASES], ids=[row[0] for row in CASES])
def test_what_could_be_counted_in_two_ways_is_refused_and_the_connection_closed(raw: bytes) -> None:
    spy = Spy()
    answer = exchange(spy, raw)
    assert "oversee" not in spy.asked and answer.count(b"HTTP/1.1 4") <= 2
    for head in answer.split(b"HTTP/1.1 ")[1:]:
        assert 400 <= int(head[:3] if head[:3].isdigit() else b"400") < 500, answer


def test_a_whole_request_behind_a_whole_body_is_one_of_its_own() -> None:
    """The control: what is not hidden is carried out, so the cases above would show it if they were."""
    spy = Spy()
    one = request(b"POST", b"/v1/runs", b"Content-Length: 2", b"Content-Type: application/json", body=b"{}")
    answer = exchange(spy, one + HIDDEN + request(b"GET", b"/healthz", b"Connection: close"))
    assert spy.asked == ["oversee"] and answer.count(b"HTTP/1.1 ") == 3


@pytest.mark.parametrize(
    "target", [b"http://evil.example/v1/held", b"http://localhost@evil/v1/held", b"*", b"localhost:1"]
)
def test_a_target_in_another_form_reaches_nothing_foreign(target: bytes) -> None:
    spy = Spy()
    answer = exchange(spy, request(b"GET", target, b"Connection: close"))
    assert answer[9:12] in (b"200", b"400", b"404", b"421"), answer
    if answer[9:12] == b"200":
        assert spy.asked == ["held"]  # the absolute form of an address of this server; its Host header decided
