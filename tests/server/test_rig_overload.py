"""Twice the load that a server can bear: what it answers in time stays near its peak, because it refuses the rest.

A real `serve` process over a file answers a question over its runs. First as many callers as keep it busy find its
peak; then requests come at twice that rate, whether or not earlier ones were answered, and each is given up after a
second. Answers are counted for each second of the server's processor, in one run, and the ratio is judged: so neither
the machine's speed nor what else runs on it matters. The mutant refuses nothing: it must fall.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 1.0
PEAK_S, OVER_S = 5.0, 10.0
BEAT_S = 0.002  # of the load, which comes by the clock
BUSY_CALLERS = 8  # enough to keep it busy, and not so many that it refuses any
RUNS = 3_000  # that a question goes through, so that asking costs little and answering much
SERVE = """
import sys
from tidefast.cli.main import main
from tidefast.server.load import Load
if sys.argv[1] == "refuse-nothing":
    Load.is_behind = lambda self, path: False
if sys.argv[1] == "any-depth":
    from tidefast.wire import strict
    strict._check_depth = lambda text: None
sys.exit(main(["serve", "--store", sys.argv[2], "--port", "0", "--json"]))
"""


@contextlib.contextmanager
def serving(store: Path, mutant: str = "none") -> Iterator[tuple[int, int]]:
    """A server process and its port."""
    command = [sys.executable, "-c", SERVE, mutant, str(store)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    try:
        assert process.stdout is not None
        yield process.pid, int(json.loads(process.stdout.readline())["url"].rsplit(":", 1)[1])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


GET = b"GET /v1/held HTTP/1.1\r\nHost: localhost\r\n\r\n"
CREATE = b'{"agent":"a","input":1}'
POST = (
    b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (
        len(CREATE),
        CREATE,
    )
)


class Caller(asyncio.Protocol):
    """One connection, one request at a time; what was said to the last one is its status, 0 for none."""

    def __init__(self) -> None:
        self.heard: asyncio.Future[int] | None = None
        self.transport: asyncio.Transport | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._tell(0)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lower = head.lower()
        start = lower.index(b"content-length:") + 15
        length = int(lower[start:].split(b"\r\n", 1)[0])
        if len(rest) >= length:
            self._buffer = b""
            self._tell(int(head[9:12]))

    def _tell(self, status: int) -> None:
        if self.heard is not None and not self.heard.done():
            self.heard.set_result(status)

    async def ask(self, raw: bytes) -> int:
        assert self.transport is not None
        self.heard = asyncio.get_running_loop().create_future()
        self.transport.write(raw)
        return await self.heard


class Callers:
    """Connections to one port, made as they are needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Caller] = []
        self._late: list[Caller] = []
        self.statuses: Counter[int] = Counter()

    async def ask(self, raw: bytes = GET) -> int:
        """One question, given up after the deadline; its connection stays until it is answered, as in a pool."""
        caller = self._free.pop() if self._free else await self._connect()
        while caller.transport is None:
            caller = await self._connect()
        try:
            async with asyncio.timeout(DEADLINE_S):
                status = await caller.ask(raw)
        except TimeoutError:
            status = 0
            self._late.append(caller)
        else:
            self._free.append(caller)
        self.statuses[status] += 1
        return status

    async def _connect(self) -> Caller:
        loop = asyncio.get_running_loop()
        _, caller = await loop.create_connection(Caller, "127.0.0.1", self._port)
        return caller

    def close(self) -> None:
        for caller in (*self._free, *self._late):
            if caller.transport is not None:
                caller.transport.abort()


async def fill(port: int) -> None:
    callers = Callers(port)
    for _ in range(RUNS // 50):
        assert await asyncio.gather(*(callers.ask(POST) for _ in range(50))) == [201] * 50
    callers.close()


async def peak_of(port: int) -> int:
    """Answers, with as many callers as keep the server busy."""
    callers, until = Callers(port), time.monotonic() + PEAK_S

    async def go_on() -> None:
        while time.monotonic() < until:
            await callers.ask()

    await asyncio.gather(*(go_on() for _ in range(BUSY_CALLERS)))
    callers.close()
    return callers.statuses[200]


async def good_at(port: int, rate: float) -> Counter[int]:
    """Statuses of what was answered within the deadline, while requests come at this rate, whatever happens."""
    callers, asking = Callers(port), set[asyncio.Task[int]]()
    began = time.monotonic()
    sent = 0
    while (now := time.monotonic() - began) < OVER_S:
        while sent < now * rate:
            task = asyncio.ensure_future(callers.ask())
            asking.add(task)
            task.add_done_callback(asking.discard)
            sent += 1
        await asyncio.sleep(BEAT_S)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    callers.close()
    return callers.statuses


def worked_s(process: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, mutant: str) -> float:
    """Goodput at twice the peak, in parts of the peak."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most) if most > 0 else 8192, most))
    with serving(folder / f"{mutant}.db", mutant) as (process, port):
        uvloop.run(fill(port))
        begun = worked_s(process)
        peak = uvloop.run(peak_of(port))
        between = worked_s(process)
        statuses = uvloop.run(good_at(port, 2 * peak / PEAK_S))
        ended = worked_s(process)
    goodput, best = statuses[200] / (ended - between), peak / (between - begun)
    print(f"{mutant}: {best:.0f} per processor second at the peak, {goodput:.0f} at twice the load, {dict(statuses)}")
    return goodput / best


@pytest.mark.deep
def test_at_twice_its_load_a_server_answers_four_fifths_of_its_peak_in_time(tmp_path: Path) -> None:
    assert measure(tmp_path, "none") >= 0.8
    assert measure(tmp_path, "refuse-nothing") < 0.8
