"""What is bounded, at one less, at, and at one more than its bound; and what a server that is behind lets go of."""

import asyncio
import json

import pytest
from tests.server.support import TOKEN, Spy, app_of, ask, run
from tests.server.test_serve import APPLY, exchange, request, says, server

from tidefast.server import load as loads
from tidefast.server.load import NEVER_SHED, Load
from tidefast.server.table import VERBS

BEHIND = (503, "overloaded", "loop")


def rounds(load: Load, *worked: tuple[int, float]) -> list[int]:
    """How many requests each round takes on, of so many that come, if it works for so many seconds."""
    taken = []
    for coming, worked_s in worked:
        taken.append(sum(not load.is_behind("/v1/runs") for _ in range(coming)))
        load._end_round(worked_s)
    return taken


def test_short_rounds_take_on_whatever_comes_up_to_the_bound() -> None:
    load = Load()
    assert rounds(load, *[(loads.ROUND_MAX + more, 0.001) for more in (-1, 0, 1)]) == [4095, 4096, 4096]
    assert load.shed == {"loop": 1}


def test_after_a_long_round_the_next_one_takes_on_what_would_have_made_it_short() -> None:
    load = Load()
    assert rounds(load, (500, 1.0), (500, 0.04), (500, 0.04)) == [500, 25, 25]  # 25 of 500 take 50 ms of a second
    assert rounds(load, (500, 0.02), (500, 0.02), (500, 0.02)) == [25, 38, 57]  # and more again, while rounds are short


def test_a_server_never_takes_on_nothing() -> None:
    load = Load()
    assert rounds(load, (1, 60.0), (500, 60.0), (500, 60.0)) == [1, loads.ROUND_MIN, loads.ROUND_MIN]


def test_renewals_and_probes_are_never_refused() -> None:
    load = Load()
    load._may_take = 0
    paths = [path for path in VERBS if not load.is_behind(path)]
    assert sorted(paths) == ["/healthz", "/readyz", "/v1/leases/renew", "/v1/runs/{run}/lease/renew"]
    assert load.shed == {"loop": len(VERBS) - len(paths)} and all(path.endswith(NEVER_SHED) for path in paths)


def answers(raw: bytes) -> list[bytes]:
    return raw.split(b"HTTP/1.1 ")[1:]


def test_a_server_that_is_behind_says_so_at_once_and_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "is_behind", lambda self, path: not path.endswith("z"))
    spy = Spy()
    lease = b"Tidefast-Lease: " + TOKEN.encode()
    body = b'{"tool":"t","args":{}}'
    post = request(b"POST", APPLY.encode(), lease, b"Content-Length: %d" % len(body), body=body)
    last = request(b"GET", b"/healthz", b"Connection: close")
    told = answers(exchange(spy, post + post + last))
    assert [answer[:3] for answer in told] == [b"503", b"503", b"200"] and spy.asked == []
    assert b"retry-after: 1\r\n" in told[0] and b"connection: close" not in told[0]
    assert json.loads(told[0].partition(b"\r\n\r\n")[2])["retry_after_ms"] == 500
    assert says(exchange(spy, request(b"GET", b"/v1/runs", b"Connection: close"))) == BEHIND
    expecting = request(b"POST", b"/v1/runs", b"Content-Length: 5", b"Expect: 100-continue")
    assert says(exchange(spy, expecting)) == BEHIND and spy.asked == []


def test_a_thousand_requests_in_one_piece_are_refused_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "is_behind", lambda self, path: path != "/healthz")
    many = request(b"GET", b"/v1/runs") * 1_500 + request(b"GET", b"/healthz", b"Connection: close")
    told = answers(exchange(Spy(), many))
    assert [answer[:3] for answer in told] == [b"503"] * 1_500 + [b"200"]


def test_an_answer_that_is_due_is_given_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def is_behind(self: Load, path: str) -> bool:
        asked.append(path)
        return len(asked) > 1

    monkeypatch.setattr(Load, "is_behind", is_behind)
    told = answers(exchange(Spy(), request(b"GET", b"/v1/held") + request(b"GET", b"/v1/runs", b"Connection: close")))
    assert [answer[:3] for answer in told] == [b"200", b"503"]


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_places_to_wait_are_bounded_for_each_caller_and_in_all(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "WAITS_PER_CALLER", 3)
    monkeypatch.setattr(loads, "WAITS_MAX", 5)
    load, places = Load(), []
    for number in range(3 + more):
        place = load.wait("one")
        assert place.__enter__() == (number < 3)
        places.append(place)
    others = [load.wait(f"other-{number}") for number in range(5)]
    free = 5 - min(3, 3 + more)
    assert [place.__enter__() for place in others] == [True] * free + [False] * (5 - free)
    assert load.waiting == 5
    for place in (*places, *others):
        place.__exit__(None, None, None)
    assert load.waiting == 0 and not load._waits


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_bodies_that_are_being_read_are_bounded(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"agent": "a", "input": "x" * 100}).encode()
    monkeypatch.setattr(loads, "BODIES_BYTES_MAX", len(body) - more)
    spy = Spy()
    app = app_of(spy)
    for _ in range(3):  # what was taken is given back
        reply = run(ask(app, "POST", "/v1/runs", body))
        assert reply.status == 201 if more < 1 else reply.says == (503, "overloaded", "bodies")
    assert (len(spy.asked) == 0) == (more == 1)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_connections_are_bounded(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "CONNECTIONS_MAX", 3)

    async def main() -> list[bytes]:
        async with server(Spy()) as url:
            port, heard, writers = int(url.rsplit(":", 1)[1]), [], []
            for _ in range(3 + more):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request(b"GET", b"/healthz"))
                heard.append(await reader.readuntil(b"\r\n"))
                writers.append(writer)
            for writer in writers:
                writer.close()
            return heard

    heard = asyncio.run(main())
    assert [line[9:12] for line in heard] == [b"200"] * min(3, 3 + more) + [b"503"] * max(more, 0)


def test_a_connection_that_was_closed_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "CONNECTIONS_MAX", 1)

    async def main() -> None:
        async with server(Spy()) as url:
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
                writer.write(request(b"GET", b"/healthz", b"Connection: close"))
                assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
                writer.close()

    asyncio.run(main())
