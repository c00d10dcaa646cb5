"""Real processes: a worker that is killed, and one that is frozen past its lease, while a model streams to it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import ENVIRONMENT, running, tidefast

APP = """
import tidefast as tf

app = tf.App()


@app.agent
async def desk(run: tf.Run, input: object) -> str:
    async with run.openai("plan") as client:
        stream = await client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "plan"}], stream=True
        )
        words = ""
        async for chunk in stream:
            words += chunk.choices[0].delta.content or ""
            with open("heard", "a") as file:
                file.write(f"{run.epoch} {chunk.choices[0].finish_reason}\\n")
    return words
"""
MODELS = '[upstreams.local]\nurl = "http://127.0.0.1:PORT/v1"\nmodels = ["small"]\n'


@contextlib.contextmanager
def scripted(pace: str) -> Iterator[int]:
    """The demo's scripted model as a process: its port."""
    command = [sys.executable, "-m", "tidefast.demo.providers.model", "--pace", pace]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["port"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def bill(port: int) -> list[Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/bill", timeout=10) as answer:
        found: list[Any] = json.load(answer)["bill"]
    return found


def heard(home: Path) -> list[str]:
    file = home / "heard"
    return file.read_text().splitlines() if file.exists() else []


def journaled(home: Path, url: str) -> Any:
    """The answer of the step `plan` in the log of the run; None while there is none."""
    log = tidefast("log", "r-1", "--url", url, "--json", cwd=home)
    events = json.loads(log.stdout)["events"]
    bodies = [e["data"]["receipt"]["body"] for e in events if e["kind"] in ("step_committed", "step_applied")
              and "receipt" in e["data"]]  # fmt: skip
    return bodies[0]["choices"][0]["message"]["content"] if bodies else None


def state(home: Path, url: str) -> dict[str, Any]:
    told = tidefast("show", "r-1", "--url", url, "--json", cwd=home)
    found: dict[str, Any] = json.loads(told.stdout)["run"]
    return found


@pytest.mark.rig
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_worker_lost_in_mid_stream_leaves_its_answer_to_its_successor(tmp_path: Path, number: int) -> None:
    home = tmp_path
    (home / "agents.py").write_text(APP)
    with scripted("500ms") as port:  # the answer takes longer than a lease
        (home / "models.toml").write_text(MODELS.replace("PORT", str(port)))
        serve = ("serve", "--store", "x.db", "--port", "0", "--models", "models.toml")
        with running(*serve, cwd=home) as server:
            url = str(server.said["url"])
            tidefast("start", "desk", "1", "--run-id", "r-1", "--url", url, cwd=home)
            worker = ("worker", "agents:app", "--url", url, "--lease", "1s")
            with running(*worker, cwd=home) as first:
                while not heard(home):
                    assert first.process.poll() is None, first.log.read_text()
                os.kill(first.process.pid, number)
                (home / "second").mkdir()
                (home / "second" / "agents.py").write_text(APP)
                with running(*worker, cwd=home / "second") as second:
                    while state(home, url)["state"] != "completed":
                        assert second.process.poll() is None, second.log.read_text()
                    if number == signal.SIGSTOP:
                        os.kill(first.process.pid, signal.SIGCONT)
                    words = state(home, url)["result"]
            assert journaled(home, url) == words
            assert [one["step"] for one in bill(port)] == ["r-1/plan"]
            assert not any(line.endswith("stop") for line in heard(home))  # the end was never heard by the first
            audit = tidefast("audit", "--store", "x.db", "--json", cwd=home)
            assert json.loads(audit.stdout)["ok"] is True
