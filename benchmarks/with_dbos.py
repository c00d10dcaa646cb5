"""The same ten-step run as a DBOS workflow on SQLite, with DBOS's own settings. Run as a process of its own.

python with_dbos.py DIRECTORY WIDTH RUNS    prints {"steps_per_s": …, "cpu_us": …, "journal": …}
"""

import asyncio
import json
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

from dbos import DBOS

STEPS = 10


@DBOS.step()
async def hello(name: str, number: int) -> dict[str, Any]:
    return {"hi": name, "number": number}


@DBOS.workflow()
async def greeter(name: str) -> int:
    for number in range(STEPS):
        await hello(name, number)
    return STEPS


async def steps_per_s(width: int, runs: int) -> tuple[float, float]:
    left = iter(range(runs))

    async def one() -> None:
        for _ in left:
            assert await greeter("a") == STEPS

    await greeter("warm")
    cpu, begun = time.process_time(), time.perf_counter()
    await asyncio.gather(*[one() for _ in range(width)])
    took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return runs * STEPS / took, cpu / (runs * STEPS) * 1e6


def main(directory: str, width: str, runs: str) -> None:
    file = Path(directory) / "dbos.db"
    DBOS(config={"name": "bench", "system_database_url": f"sqlite:///{file}", "log_level": "ERROR"})
    DBOS.launch()
    rate, cpu_us = asyncio.run(steps_per_s(int(width), int(runs)))
    DBOS.destroy()
    with sqlite3.connect(file) as db:
        journal = db.execute("PRAGMA journal_mode").fetchone()[0]
    print(json.dumps({"steps_per_s": rate, "cpu_us": cpu_us, "journal": journal}))


if __name__ == "__main__":
    main(*sys.argv[1:])
