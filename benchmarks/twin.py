"""The same program without rules, log and chain: what two durable writes a step cost at least.

N coroutines, ten-step runs. A step encodes its arguments, hands them to the one writer thread, waits for the flush,
calls the tool, encodes the result and hands it over as well. The writer commits whatever has gathered (group commit) in
one transaction: apsw, WAL, `synchronous=FULL`, the same settings as the product's.
"""

import asyncio
import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import apsw

STEPS = 10


class Writer:
    """One thread, one connection, one transaction for everything that waits."""

    def __init__(self, file: Path) -> None:
        self._db = apsw.Connection(str(file))
        self._db.pragma("journal_mode", "WAL")
        self._db.pragma("synchronous", "FULL")
        self._db.pragma("wal_autocheckpoint", 4_000)
        self._db.execute(
            "CREATE TABLE steps (id INTEGER PRIMARY KEY, run TEXT, step TEXT, what TEXT, body TEXT) STRICT"
        )
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[tuple[str, ...], asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    async def write(self, *row: str) -> None:
        """Durable on return."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._queue.put((row, waiter))
        await waiter

    def _write(self) -> None:
        is_over = False
        while not is_over:
            items = [self._queue.get()]
            while True:
                try:
                    items.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            is_over = None in items
            batch = [item for item in items if item is not None]
            if batch:
                with self._db:
                    self._db.executemany(
                        "INSERT INTO steps (run, step, what, body) VALUES (?, ?, ?, ?)", [row for row, _ in batch]
                    )
                self._loop.call_soon_threadsafe(_tell, [waiter for _, waiter in batch])

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._db.close()


def _tell(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        waiter.set_result(None)


async def hello(name: str, number: int) -> dict[str, Any]:
    return {"hi": name, "number": number}


async def steps_per_s(directory: Path, width: int, runs: int) -> tuple[float, float]:
    """(steps per second, CPU µs per step)."""
    writer = Writer(directory / "twin.db")
    left = iter(range(runs))

    async def one() -> None:
        for run in left:
            for number in range(STEPS):
                args = {"name": "a", "number": number}
                await writer.write(f"r-{run}", f"greet-{number}", "intent", json.dumps(args))
                value = await hello(**args)  # type: ignore[arg-type]
                await writer.write(f"r-{run}", f"greet-{number}", "result", json.dumps(value))

    cpu, begun = time.process_time(), time.perf_counter()
    await asyncio.gather(*[one() for _ in range(width)])
    took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    writer.close()
    return runs * STEPS / took, cpu / (runs * STEPS) * 1e6
