"""The README's commands run, in the order and the directory that it says, and print what it shows.

In a shown output `...` alone on a line stands for any lines, `…` for any text; times, ports and holders may differ.
`make` lines aren't run here: they are targets that `.ci/run` runs. Servers get a free port.
"""

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidefast.demo.account import Account, tell_acceptance
from tidefast.sim.acceptance import run as play
from tidefast.sim.audit import AuditReport
from tidefast.sim.report import from_audit
from tidefast.stores.memory import MemoryStore

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = (sys.executable, "-m", "tidefast.cli.main")
SERVICES = ("serve", "worker")
TRIES = 40  # each look is a process of its own, so no pause is needed
ANY = {
    r"127\\\.0\\\.0\\\.1:8700": r"127\\.0\\.0\\.1:\\d+",
    r"w\\-[0-9a-f]{16}": "w-[0-9a-f]{16}",
    r"\\\+\d+\\\.\d+s": r"\\+\\d+\\.\\d+s",
    "…": ".*",
}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Each command of a block with the output that is shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def pattern(line: str) -> str:
    escaped = re.escape(line)
    for shown, meant in ANY.items():
        escaped = re.sub(shown, meant, escaped)
    return escaped


def differs(shown: list[str], printed: str) -> str:
    """The first shown line that wasn't printed where it should stand; empty if all were."""
    place, may_skip = 0, False
    lines = printed.splitlines()
    for line in shown:
        if line == "...":
            may_skip = True
            continue
        left = [n for n in range(place, len(lines) if may_skip else place + 1) if n < len(lines)]
        hit = next((n for n in left if re.fullmatch(pattern(line), lines[n])), None)
        if hit is None:
            return f"shown, but not printed: {line}\nprinted:\n{printed}"
        place, may_skip = hit + 1, False
    return "" if may_skip or place == len(lines) else f"printed, but not shown: {lines[place]}"


class Reader:
    """Somebody who types what the README says."""

    def __init__(self, home: Path) -> None:
        self.directory = home
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEFAST_")}
        self.env["PYTHONPATH"] = str(ROOT / "src")
        self.services: list[subprocess.Popen[str]] = []

    def types(self, line: str, shown: list[str]) -> None:
        words = shlex.split(line)
        if words[0] == "cd":
            self.directory /= words[1]
        elif words[0] == "tidefast" and words[1] in SERVICES:
            self.starts(words[1:], shown)
        elif words[0] == "tidefast":
            self.runs(words[1:], shown)
        else:
            assert words[0] == "make" or line == ". .venv/bin/activate", f"a command of no kind: {line}"

    def starts(self, words: list[str], shown: list[str]) -> None:
        more = ["--port", "0"] if words[0] == "serve" else []
        with (self.directory / f"{words[0]}.log").open("w") as log:
            process = subprocess.Popen(
                [*COMMAND, *words, *more],
                cwd=self.directory,
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.services.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert not differs(shown, said), differs(shown, said)
        if words[0] == "serve":
            self.env["TIDEFAST_URL"] = said.split()[1]

    def runs(self, words: list[str], shown: list[str]) -> None:
        """Run a command; a look at a run that others drive is repeated until they are done."""
        for _ in range(TRIES if words[0] == "show" else 1):
            done = subprocess.run(
                [*COMMAND, *words],
                cwd=self.directory,
                env=self.env,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            wrong = differs(shown, done.stdout)
            if not wrong:
                return
        raise AssertionError(f"tidefast {' '.join(words)}: {wrong}")

    def leaves(self) -> list[int]:
        """End the services, the youngest first, as a person would."""
        codes: list[int] = []
        for process in reversed(self.services):
            process.terminate()
            codes.append(process.wait(timeout=30))
            assert process.stdout is not None
            process.stdout.close()
        return codes


@contextlib.contextmanager
def reader(home: Path) -> Iterator[Reader]:
    somebody = Reader(home)
    try:
        yield somebody
    finally:
        for process in somebody.services:
            if process.poll() is None:
                process.kill()
                process.wait()


def test_every_command_of_the_readme_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns(".tidefast", "paid-*"))
    with reader(tmp_path) as somebody:
        for block in blocks("console"):
            for line, shown in commands(block):
                somebody.types(line, shown)
        assert somebody.leaves() == [0, 0]
    assert len(list(somebody.directory.glob("paid-*.txt"))) == 2, "two orders, so two payments"


def test_every_make_line_is_a_target_that_the_continuous_integration_runs() -> None:
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci/run").read_text()
    for block in blocks("console"):
        for line, _ in commands(block):
            if line.startswith("make "):
                target = line.split()[1]
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
                assert target == "setup" or f"make --no-print-directory {target}" in ci, target


def test_the_agent_of_the_readme_is_the_file_that_it_names() -> None:
    file = (ROOT / "examples/quickstart/app.py").read_text(encoding="utf-8")
    assert blocks("python")[0].strip() == file.partition('"""\n\n')[2].strip()


def without_numbers(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", line)


def test_the_acceptance_lines_are_those_that_the_demo_prints() -> None:
    nothing = AuditReport()
    empty = Account(nothing, from_audit(nothing), {}, {}, {}, 80, 32, 2, (), needs_faults=True)
    shown = next(shown for line, shown in commands(blocks("console")[0]) if line == "make run")
    start = shown.index("Acceptance") + 2
    printed = [without_numbers(line) for line in tell_acceptance(empty)]
    assert [without_numbers(line) for line in shown[start : start + len(printed)]] == printed
    assert shown[-1].startswith("ok: ")
    steps, checkpoints, commits = (re.findall(r"\d+", line) for line in shown[start : start + 3])
    bold = f"{steps[0]} double applies of {steps[1]} mutating steps, {steps[2]} of them preempted"
    bold += f"; {checkpoints[0]} stale checkpoints of {checkpoints[1]}"
    bold += f"; {commits[0]} commits under a dead epoch of {commits[1]}"
    assert bold in " ".join(README.split())


def test_the_figures_of_the_campaign_are_those_that_it_gives_today() -> None:
    found = asyncio.run(play(MemoryStore(), 200, 1))
    text = " ".join(README.split())
    for figure in (
        f"{found.report.interleavings} interleavings over {found.report.mutating_steps} mutating steps",
        f"{found.preempted_steps} of them preempted, in {found.distinct_orders} distinct orders",
        f"with {found.late_acks} acknowledgements that arrive after the new grant",
        f"{found.report.violations['double_apply']} double applies",
        f"{found.report.violations['stale_checkpoint']} accepted stale checkpoints",
        f"{found.report.violations['dead_commit']} commits under a dead epoch",
    ):
        assert figure in text, f"the README should say: {figure}"


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (["a", "b"], "a\n"),
        (["a"], "a\nb\n"),
        (["a", "...", "c"], "a\nb\n"),
        (["a … c"], "a b d\n"),
        (["w-948f9397555dac2c"], "w-nobody\n"),
    ],
)
def test_another_output_than_the_shown_one_is_caught(shown: list[str], printed: str) -> None:
    assert differs(shown, printed)


def test_an_output_may_be_cut_and_may_differ_where_the_readme_says_so() -> None:
    shown = ["a", "...", "c …", "+0.007s at http://127.0.0.1:8700 as w-948f9397555dac2c", "..."]
    printed = "a\nb\nb\nc d\n+11.102s at http://127.0.0.1:41001 as w-0123456789abcdef\ne\n"
    assert differs(shown, printed) == ""
