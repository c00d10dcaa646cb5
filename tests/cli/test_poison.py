"""Runs that never get anywhere, and runs of other versions: with real workers they starve nobody."""

import json
from pathlib import Path

import pytest
from tests.cli.processes import running, tidefast

APP = """
import tidefast as tf

app = tf.App()


@app.agent
async def poison(run: tf.Run, input: int) -> None:
    raise RuntimeError("always")


@app.agent(version="2", accepts=["1"])
async def works(run: tf.Run, input: int) -> int:
    return await run.step("one", lambda: input)
"""


@pytest.mark.rig
def test_a_poison_run_starves_no_other_and_a_run_goes_only_to_a_version_that_drives_it(home: Path) -> None:
    (home / "mix.py").write_text(APP)
    with running("serve", "--store", "x.db", "--port", "0", cwd=home) as server:
        url = ("--url", str(server.said["url"]))
        for number in range(4):
            tidefast("start", "poison", "1", "--run-id", f"p-{number}", *url, cwd=home)
        for number, version in enumerate(("1", "2", "3")):
            tidefast("start", "works", "7", "--run-id", f"w-{number}", "--version", version, *url, cwd=home)
        with running("worker", "mix:app", "--max-runs", "1", *url, cwd=home):
            states = {}
            for _ in range(60):
                told = json.loads(tidefast("runs", "--json", *url, cwd=home).stdout)["runs"]
                states = {run["run_id"]: run["state"] for run in told}
                if states["w-0"] == states["w-1"] == "completed":
                    break
        assert (states["w-0"], states["w-1"], states["w-2"]) == ("completed", "completed", "claimable")
