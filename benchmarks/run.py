"""`make bench`: what Tidefast's books cost, as ratios measured in one run.

    python benchmarks/run.py [--quick] [--without-dbos] [--directory DIR]

Each measurement is a process of its own; the variants take turns (A B C A B C …) and medians are compared, so that what
else the machine does falls on all of them. What the figures mean stands in docs/benchmarks.md.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import msgspec

HERE = Path(__file__).parent
WIDTHS = (1, 16, 64)
AIM_TWIN = {1: 0.60, 16: 0.45, 64: 0.35}
AIM_DBOS = 5.0
AIM_RESUME_MS = 40.0
HISTORY = 5_000
WINDOWS = ((10, 60), (100, 200), (1_000, 1_200), (2_400, 2_600), (4_700, 4_990))


class Size(NamedTuple):
    """How much is measured: rounds, and for each width how many runs of the three programs."""

    rounds: int
    fenced: dict[int, int]
    dbos: dict[int, int]
    resumes: int


FULL = Size(7, {1: 100, 16: 300, 64: 600}, {1: 20, 16: 32, 64: 64}, 9)
QUICK = Size(3, {1: 50, 16: 150, 64: 300}, {1: 5, 16: 16, 64: 64}, 3)


def measure(directory: Path, *command: str | int) -> Any:
    """One measurement in a fresh process and a fresh directory; its answer is the last line it prints."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        if command[0] == "dbos":
            words = [HERE / "with_dbos.py", place, *command[1:]]
        else:
            words = [HERE / "run.py", "--directory", place, "--one", *command]
        line = [sys.executable, *map(str, words)]
        told = subprocess.run(line, check=True, stdout=subprocess.PIPE, timeout=1_800)
    return json.loads(told.stdout.splitlines()[-1])


def answer(kind: str, words: list[str], directory: Path) -> None:
    """Inside a measurement's own process."""
    import fenced
    import twin

    from tidefast.cli.loop import run_program

    if kind == "fenced" or kind == "twin":
        program = fenced if kind == "fenced" else twin
        rate, cpu_us = run_program(program.steps_per_s(directory, int(words[0]), int(words[1])))
        print(json.dumps({"steps_per_s": rate, "cpu_us": cpu_us}))
    else:
        marks = run_program(fenced.long_run(directory, words[0], HISTORY + 1))
        costs = [(marks[last] - marks[first]) / (last - first) * 1e6 for first, last in WINDOWS]
        resumes = [run_program(fenced.resume_ms(directory, words[0])) for _ in range(int(words[1]))]
        print(json.dumps({"costs": costs, "resumes": resumes}))


def compare_widths(size: Size, directory: Path, with_dbos: bool) -> None:
    names = "".join(f"{name:>23}" for name in ("tidefast", "(a) twin", "(b) DBOS"))
    print(f"{'at once':>8}{names} {'of (a)':>7} {'aim':>6} {'× (b)':>7} {'aim':>4}")
    for width in WIDTHS:
        found: dict[str, list[dict[str, float]]] = {"fenced": [], "twin": [], "dbos": []}
        for number in range(size.rounds):
            found["fenced"].append(measure(directory, "fenced", width, size.fenced[width]))
            found["twin"].append(measure(directory, "twin", width, size.fenced[width]))
            if with_dbos and number < 3:  # it's far away: three are enough to see how far
                found["dbos"].append(measure(directory, "dbos", width, size.dbos[width]))
        rates = {name: [one["steps_per_s"] for one in of] for name, of in found.items() if of}
        middle = {name: statistics.median(of) for name, of in rates.items()}
        of_twin = statistics.median(a / b for a, b in zip(rates["fenced"], rates["twin"], strict=True))
        cells = [f"{width:>8}"]
        for name in ("fenced", "twin", "dbos"):
            cpu_us = statistics.median([one["cpu_us"] for one in found[name]] or [0])
            cells.append(f"{middle.get(name, 0):>8.0f}/s {cpu_us:>7.0f} µs CPU")
        times = f"{middle['fenced'] / middle['dbos']:>7.1f}" if "dbos" in middle else f"{'-':>7}"
        cells += [f"{of_twin:>7.0%}", f"{AIM_TWIN[width]:>6.0%}", times, f"{AIM_DBOS:>4.0f}"]
        print(" ".join(cells), flush=True)


def long_runs(size: Size, directory: Path) -> None:
    print(f"\none run of {HISTORY} steps: CPU µs per step there, and ms from asking for its lease to its next step")
    windows = " ".join(f"{f'{first}-{last}':>12}" for first, last in WINDOWS)
    print(f"{'agent':<12} {windows} {'last/first':>11} {'resume ms':>10} {'aim':>4}")
    for agent in ("walker", "rememberer"):
        told = [measure(directory, "long", agent, size.resumes) for _ in range(max(1, size.rounds // 3))]
        costs = [statistics.median(column) for column in zip(*(one["costs"] for one in told), strict=True)]
        resume = statistics.median(one for of in told for one in of["resumes"])
        cells = " ".join(f"{cost:>12.0f}" for cost in costs)
        print(f"{agent:<12} {cells} {costs[-1] / costs[0]:>11.2f} {resume:>10.1f} {AIM_RESUME_MS:>4.0f}", flush=True)


def machine(directory: Path) -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return (
        f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {platform.system()} {platform.release()}; "
        f"Python {platform.python_version()}, SQLite {apsw.sqlite_lib_version()}, msgspec {msgspec.__version__}; "
        f"flush of 4 KiB {flush_us(directory):.0f} µs"
    )


def flush_us(directory: Path) -> float:
    """The median of a hundred small writes, each flushed: what durability itself costs here."""
    took = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(100):
            begun = time.perf_counter()
            os.pwrite(file.fileno(), bytes(4_096), 0)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - begun)
    return statistics.median(took) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and runs: a look, no figures to publish")
    parser.add_argument("--without-dbos", action="store_true", help="leave (b) out")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where the files lie")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        answer(given.one[0], given.one[1:], given.directory)
        return
    size = QUICK if given.quick else FULL
    print(f"{time.strftime('%Y-%m-%d')}  {' '.join([Path(sys.executable).name, *sys.argv])}")
    print(machine(given.directory))
    print(f"{size.rounds} rounds, ten-step runs {size.fenced}\n", flush=True)
    compare_widths(size, given.directory, not given.without_dbos)
    long_runs(size, given.directory)


if __name__ == "__main__":
    main()
