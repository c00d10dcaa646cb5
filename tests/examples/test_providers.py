"""The examples of difficult providers: each is run as its page says, and the provider's own list is counted."""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import tidefast

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Place:
    """A copy of an example, with its provider running on a port of its own."""

    def __init__(self, folder: Path, origin: str) -> None:
        self.folder, self.origin = folder, origin

    def run(self, agent: str, order: str) -> subprocess.CompletedProcess[str]:
        given = json.dumps({"order": order})
        return tidefast("run", "app:app", agent, given, "--tools", "tools.toml", "--run-id", order, cwd=self.folder)

    def resolve(self, run: str) -> subprocess.CompletedProcess[str]:
        return tidefast("resolve", run, "pay", "applied", "--note", "the provider shows it", cwd=self.folder)

    def shown(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.origin}{path}", timeout=10) as answer:
            return json.load(answer)


@contextmanager
def place(example: str, provider: str, port: str, tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / example
    shutil.copytree(EXAMPLES / example, folder, ignore=shutil.ignore_patterns(".tidefast"))
    process = subprocess.Popen(
        [sys.executable, provider, "0"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        origin = process.stdout.readline().strip().removeprefix("listening on ")
        tools = folder / "tools.toml"
        tools.write_text(tools.read_text().replace(f"http://127.0.0.1:{port}", origin))
        yield Place(folder, origin)
    finally:
        process.kill()
        process.communicate()


def test_a_provider_that_settles_and_answers_402_or_502(tmp_path: Path) -> None:
    with place("settles", "bank.py", "9101", tmp_path) as bank:
        done = bank.run("pay", "o-502")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == {"cents": 500, "id": "tr_1", "order": "o-502"}
        held = bank.run("pay", "o-402")
        assert held.returncode == 7 and "unlisted_answer" in held.stdout + held.stderr
        assert bank.resolve("o-402").returncode == 0
        again = bank.run("pay", "o-402")
        assert again.returncode == 0, again.stderr
        assert [len(bank.shown(f"/transfers?order={order}")["data"]) for order in ("o-502", "o-402")] == [1, 1]
        assert tidefast("audit", cwd=bank.folder).returncode == 0


@pytest.mark.rig
def test_a_provider_that_forgets_keys(tmp_path: Path) -> None:
    with place("forgetful", "shop.py", "9102", tmp_path) as shop:
        done = shop.run("buy", "o-flaky")
        assert done.returncode == 0, done.stderr
        held = shop.run("buy", "o-down")
        assert held.returncode == 7 and "key_window" in held.stdout + held.stderr
        assert "key_window" in tidefast("held", cwd=shop.folder).stdout
        assert shop.resolve("o-down").returncode == 0
        assert shop.run("buy", "o-down").returncode == 0
        assert [charge["order"] for charge in shop.shown("/charges")] == ["o-flaky", "o-down"]
        assert tidefast("audit", cwd=shop.folder).returncode == 0
