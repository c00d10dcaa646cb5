"""A thousand idle long polls, five hundred callers whose headers never end, and slow bodies: honest calls don't notice.

A real `serve --keys` process. The 99th percentile of honest reads and writes is taken before the siege, during it and
after it, in one run. The mutant: a server whose waiting workers all look at the store whenever anything is committed.
"""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop
from tests.server.test_rig_overload import ROOT, Caller, worked_s

from tidefast.server.access import Caller as Key
from tidefast.server.keyfile import add_key

POLLS, SLOW, BODIES = 1_000, 500, 20
WINDOW_S = 6.0
PAUSE_S = 0.01
TRICKLE_S = 1.0
SERVE = """
import sys
from tidefast.cli.main import main
if sys.argv[1] == "wake-all":
    from tidefast.engine.claimers import Claimers
    def wake(self, head):
        for waiting in self._of_agent.values():
            for waiter in waiting:
                waiter.done() or waiter.set_result(head)
    Claimers.changed = wake
sys.exit(main(["serve", "--store", sys.argv[2], "--port", "0", "--keys", sys.argv[3], "--json"]))
"""


@contextmanager
def serving(store: Path, keys: Path, mutant: str) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-c", SERVE, mutant, str(store), str(keys)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdout is not None
    try:
        yield process.pid, int(json.loads(process.stdout.readline())["url"].rsplit(":", 1)[1])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def post(path: str, key: str, body: dict[str, object]) -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    )
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(raw) + raw


async def connect(port: int) -> Caller:
    _, caller = await asyncio.get_running_loop().create_connection(Caller, "127.0.0.1", port)
    return caller


async def honest(port: int, key: str, process: int) -> tuple[float, float]:
    """(the 99th percentile of honest calls in s, the server's processor time for one of them in s)."""
    caller, times, number = await connect(port), list[float](), 0
    until, worked = time.monotonic() + WINDOW_S, worked_s(process)
    read = f"GET /v1/runs?limit=5 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    while time.monotonic() < until:
        for raw in (read, post("/v1/runs", key, {"agent": "other", "input": {"n": number}})):
            began = time.monotonic()
            assert await caller.ask(raw) in (200, 201)
            times.append(time.monotonic() - began)
            number += 1
        await asyncio.sleep(PAUSE_S)
    spent = (worked_s(process) - worked) / number
    return sorted(times)[int(len(times) * 0.99)], spent


async def besiege(port: int, keys: list[str]) -> tuple[list[Caller], list[asyncio.Future[int]], asyncio.Task[None]]:
    """The siege: who polls, who never ends its headers, and who sends 64 KiB of a body each second."""
    polls = []
    for number in range(POLLS):
        caller = await connect(port)
        claim = {"agents": {"mine": ["1"]}, "holder": f"w-{number}", "wait_ms": 60_000}
        polls.append(asyncio.ensure_future(caller.ask(post("/v1/claims", keys[number % len(keys)], claim))))
    slow = [await connect(port) for _ in range(SLOW)]
    bodies = [await connect(port) for _ in range(BODIES)]
    for caller in bodies:
        assert caller.transport is not None
        head = post("/v1/runs", keys[0], {}).replace(b"Content-Length: 2", b"Content-Length: 1000000")
        caller.transport.write(head)

    async def trickle() -> None:
        """A byte of a header each second, a piece of a body each second; who was cut off comes again."""
        while True:
            for place, caller in enumerate(slow):
                if caller.transport is None:
                    slow[place] = caller = await connect(port)
                    caller.transport.write(b"GET /v1/runs HTTP/1.1\r\nX-Slow: ")  # type: ignore[union-attr]
                elif not caller.transport.is_closing():
                    caller.transport.write(b"a")
            for caller in bodies:
                if caller.transport is not None:
                    caller.transport.write(b" " * 64 * 1024)
            await asyncio.sleep(TRICKLE_S)

    return [*slow, *bodies], polls, asyncio.ensure_future(trickle())


async def under_siege(process: int, port: int, keys: list[str]) -> tuple[float, float, int]:
    """How many times longer honest calls take (99th percentile, processor time each), and how many polls still wait."""
    before, cost = await honest(port, keys[0], process)
    enemies, polls, trickling = await besiege(port, keys)
    during, dearer = await honest(port, keys[0], process)
    waiting = sum(not poll.done() for poll in polls)
    trickling.cancel()
    for poll in polls:
        poll.cancel()
    await asyncio.gather(trickling, *polls, return_exceptions=True)
    for enemy in enemies:
        if enemy.transport is not None:
            enemy.transport.abort()
    after, _ = await honest(port, keys[0], process)
    print(f"p99 {before * 1e3:.1f} ms, under siege {during * 1e3:.1f} ms, after {after * 1e3:.1f} ms")
    print(f"processor {cost * 1e3:.2f} ms a call, under siege {dearer * 1e3:.2f} ms; {waiting} polls wait")
    return during / max(before, after), dearer / cost, waiting


def measure(folder: Path, mutant: str) -> tuple[float, float, int]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most) if most > 0 else 8192, most))
    file = folder / f"{mutant}.toml"
    keys = [add_key(file, Key(f"fleet-{number}", "worker")) for number in range(5)]
    with serving(folder / f"{mutant}.db", file, mutant) as (process, port):
        return uvloop.run(under_siege(process, port, keys))


@pytest.mark.deep
def test_honest_calls_take_at_most_twice_as_long_under_siege(tmp_path: Path) -> None:
    slower, _, waiting = measure(tmp_path, "none")
    assert waiting == POLLS
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip("the machine is busy with other things: how long calls take says nothing of the server")
    assert slower <= 2


@pytest.mark.deep
def test_a_server_that_wakes_everybody_at_each_commit_is_found(tmp_path: Path) -> None:
    slower, dearer, _ = measure(tmp_path, "wake-all")
    assert slower > 2 or dearer > 3
