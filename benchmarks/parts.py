"""Where a step's time goes: CPU µs per step by part, from samples of the main thread's stack.

    python benchmarks/parts.py [WIDTH] [RUNS]

The kernel's profiling timer ticks with each millisecond of CPU time. A tick belongs to the room of the innermost frame
of ours; ticks outside `Run.tool` and the gateway's task are the run's own: create, grant, pass, complete. Ticks while
no Python code runs on the main thread are the writer's and the loop's; the writer has a clock of its own.
"""

import collections
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import fenced

import tidefast
from tidefast.cli.loop import run_program
from tidefast.engine.engine import Engine

ROOT = str(Path(tidefast.__file__).parent) + "/"
OF_A_STEP = {("sdk/run.py", "tool"), ("services/gateway.py", "_admit"), ("services/gateway.py", "_over")}
OF_A_BATCH = {("engine/engine.py", "_written"), ("engine/engine.py", "_hand_over")}
WHAT = {
    "protocol": "rules: decide, evolve, chain",
    "engine": "engine: judge, gather, answer",
    "services": "gateway, python runner",
    "sdk": "SDK: run, line, journal",
    "cli": "local authority",
    "stores": "reads from SQLite",
    "": "the tool and the agent",
}


def place(frame: FrameType | None) -> tuple[str, bool]:
    """(the room of the innermost frame of ours, whether this belongs to a step)."""
    room, is_step, is_ours = "", False, False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(ROOT):
            name = code.co_filename.removeprefix(ROOT)
            if not is_ours and not name.startswith("cli/loop"):
                room, is_ours = name.split("/")[0], True
            is_step = is_step or (name, code.co_name) in OF_A_STEP | OF_A_BATCH
        elif code.co_filename.endswith("fenced.py") and code.co_name in ("hello", "greeter"):
            is_ours = True
        frame = frame.f_back
    return (room, is_step) if is_ours else ("idle", False)


def main(width: int = 64, runs: int = 1_000) -> None:
    found: collections.Counter[tuple[str, bool]] = collections.Counter()
    writer_s = 0.0
    write = Engine._write

    def timed_write(engine: Engine) -> None:
        nonlocal writer_s
        begun = time.thread_time()
        write(engine)
        writer_s = time.thread_time() - begun

    Engine._write = timed_write  # type: ignore[method-assign]
    directory = Path(tempfile.mkdtemp())
    signal.signal(signal.SIGPROF, lambda number, frame: found.update((place(frame),)))
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    rate, cpu_us = run_program(fenced.steps_per_s(directory, width, runs))
    signal.setitimer(signal.ITIMER_PROF, 0)
    shutil.rmtree(directory)
    each = cpu_us / sum(found.values())
    writer_us = writer_s / (runs * fenced.STEPS) * 1e6
    rows = [(what, found[room, True] * each) for room, what in WHAT.items()]
    rows += [
        (
            "the run's own: create, grant, pass, complete (a tenth each step)",
            sum(count for (room, is_step), count in found.items() if room != "idle" and not is_step and room) * each,
        ),
        ("writer thread: rows, SQLite, flush", writer_us),
        ("event loop, threads waking each other", max(0.0, found["idle", False] * each - writer_us)),
    ]
    rows[6] = (WHAT[""], (found["", True] + found["", False]) * each)
    print(f"{width} at once: {rate:.0f} steps/s, {cpu_us:.0f} µs CPU a step")
    for what, us in sorted(rows, key=lambda row: -row[1]):
        print(f"{us:8.0f} µs {us / cpu_us:5.0%}  {what}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
