"""The command `sandbox`: what it says when it can't, and that its key is nowhere to be read."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SRC = str(Path(__file__).resolve().parents[2] / "src")
CANARY = "canary-5e1d77"
NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens


def started(*words: str, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tidefast.cli.main", "sandbox", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": SRC, **env},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["{}", "--workspace", "../x"], 2, "error[usage]: --workspace"),
        (["{}", "--workspace", "w", "--authority", "ftp://x"], 2, "expected http://HOST:PORT"),
        (["{}", "--workspace", "w", "--key-file", "{}/none"], 2, "error[usage]: --key-file"),
        (["{}/file", "--workspace", "w"], 2, "name a directory that this user may write"),
    ],
)
def test_what_cannot_be_started_is_told_in_one_line(tmp_path: Path, words: list[str], code: int, line: str) -> None:
    (tmp_path / "file").write_text("in the way")
    process = started(*(word.format(tmp_path) for word in words))
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert line in told.splitlines()[-1]
    assert "Traceback" not in told


def test_the_key_is_gone_from_the_process_before_it_dials_and_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    process = started(str(tmp_path / "ws"), "--workspace", "w", "--authority", NOBODY, TIDEFAST_KEY=CANARY)
    assert process.stderr is not None
    lines = [process.stderr.readline(), process.stderr.readline()]
    assert "replica_starts" in lines[0]
    assert "replica_disconnected" in lines[1]
    if os.geteuid() == 0:
        assert CANARY.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
    second = started(str(tmp_path / "ws"), "--workspace", "w", "--authority", NOBODY)
    assert "error[in_use]" in second.communicate(timeout=60)[1]
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert CANARY not in "".join(lines) + told
