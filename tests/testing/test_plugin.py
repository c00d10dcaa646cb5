"""The fixtures work in a project of one's own, and a failure tells the story of its runs."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

INSTALLED = any(point.value == "tidefast.testing.plugin" for point in entry_points(group="pytest11"))
OPTIONS = [] if INSTALLED else ["-p", "tidefast.testing.plugin"]
TEST = """
import tidefast as tf

app = tf.App()

@app.agent
async def idle(run, _):
    return 7

def test_good(tidefast_bench, tidefast_clock, tidefast_provider):
    bench = tidefast_bench(app)
    assert bench.clock is tidefast_clock and bench.provider is tidefast_provider
    assert bench.run("idle").assert_completed().result == 7

def test_bad(tidefast_bench):
    assert tidefast_bench(app, store="sqlite").run("idle").result == 8

def test_told_already(tidefast_bench):
    result = tidefast_bench(app).run("idle")
    raise AssertionError(result.story())

def test_unrelated():
    assert False
"""


def test_fixtures_and_the_failure_section(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *OPTIONS, "."],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "3 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    told = done.stdout.split("test_bad ____")[1].split("test_told_already ____")[0]
    assert "- tidefast -" in told and "run run-1 is completed" in told and "run_completed" in told
    assert done.stdout.count("- tidefast -") == 1


def test_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, tidefast.testing.plugin; print([m for m in sys.modules if m.startswith('tidefast.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['tidefast.testing', 'tidefast.testing.plugin']"
