"""`tidefast run`: one process, no server, and what is left of it after a SIGKILL."""

import json
import signal
from pathlib import Path

import pytest
from tests.cli.processes import kill_at, running, tidefast

from tidefast.cli.main import main

INPUT = '{"order": "o-1", "to": "anna"}'


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_a_run_completes_prints_its_result_and_is_told_the_same_again(home: Path) -> None:
    done = tidefast("run", "shop:app", "desk", INPUT, "--run-id", "r-1", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # the app printed too, but not here
    assert (told["run"]["state"], told["run"]["result"]) == ("completed", {"order": "o-1"})
    assert "printed by the app" in done.stderr
    again = tidefast("run", "shop:app", "desk", INPUT, "--run-id", "r-1", cwd=home)
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, '{"order":"o-1"}')
    assert len(lines(home / "charged")) == len(lines(home / "mailed")) == 1
    other = tidefast("run", "shop:app", "desk", '{"order": "o-2"}', "--run-id", "r-1", cwd=home)
    assert other.returncode == 1
    assert other.stderr.splitlines()[-1].startswith("error[run_conflict]: Run r-1 exists")
    audit = tidefast("audit", cwd=home)
    assert audit.returncode == 0
    assert "ok: no law was broken" in audit.stdout


@pytest.mark.parametrize("point", ["sdk.before_checkpoint", "sdk.after_checkpoint"])
def test_a_killed_run_goes_on_and_repeats_no_committed_tool(home: Path, point: str) -> None:
    command = ("run", "shop:app", "desk", INPUT, "--run-id", "r-1")
    assert kill_at(point, home / "p", *command, cwd=home) == -signal.SIGKILL
    assert len(lines(home / "charged")) == 1
    assert lines(home / "mailed") == []
    done = tidefast(*command, "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["run"]
    assert (told["state"], told["epoch"], told["checkpoint"]) == ("completed", 2, 1)
    assert len(lines(home / "charged")) == len(lines(home / "mailed")) == 1


def test_a_run_killed_before_its_receipt_is_replayed_under_the_same_key(home: Path) -> None:
    command = ("run", "shop:app", "desk", INPUT, "--run-id", "r-1")
    assert kill_at("gateway.after_send", home / "p", *command, cwd=home) == -signal.SIGKILL
    done = tidefast(*command, cwd=home)
    assert done.returncode == 0, done.stderr
    keys = lines(home / "charged")
    assert (len(keys), len(set(keys))) == (2, 1)


def test_a_doubt_without_a_key_is_held_and_settled_by_a_person(home: Path) -> None:
    command = ("run", "shop:app", "desk", '{"order": "o-1", "to": "lost\\u001b[2J"}', "--run-id", "r-1")
    held = tidefast(*command, cwd=home)
    assert held.returncode == 7
    assert "tidefast resolve r-1 mail applied --expect-attempts 1 --note WHY" in held.stdout
    assert "\x1b" not in held.stdout + held.stderr
    listed = tidefast("held", cwd=home)
    assert "tidefast resolve r-1 mail not_applied" in listed.stdout
    assert "\x1b" not in listed.stdout
    moved = tidefast("resolve", "r-1", "mail", "applied", "--note", "seen", "--expect-attempts", "2", cwd=home)
    assert (moved.returncode, moved.stderr.partition(":")[0]) == (5, "error[moved]")
    settled = tidefast("resolve", "r-1", "mail", "applied", "--note", "seen", "--json", cwd=home)
    assert json.loads(settled.stdout)["state"] == "applied", settled.stderr
    done = tidefast(*command, cwd=home)
    assert done.returncode == 0, done.stderr
    assert len(lines(home / "mailed")) == 1


def test_a_failed_run_is_no_success(home: Path) -> None:
    failed = tidefast("run", "shop:app", "desk", '{"order": "o-1", "to": "refused"}', cwd=home)
    assert failed.returncode == 1
    assert "mail: refused" in failed.stdout


def test_a_store_with_an_owner_is_read_but_not_written(home: Path) -> None:
    with running("serve", "--port", "0", "--store", "x.db", cwd=home) as server:
        url = server.said["url"]
        read = tidefast("runs", "--store", "x.db", cwd=home)
        assert read.returncode == 0, read.stderr
        for words in (("run", "shop:app", "desk", INPUT), ("preempt", "r-1"), ("serve", "--port", "0")):
            refused = tidefast(*words, "--store", "x.db", cwd=home)
            assert refused.returncode == 4
            told = refused.stderr.splitlines()[-1]
            assert told.startswith("error[store_owned]: x.db is owned by process")
            assert told.endswith(f"ask its server: --url {url}")
        assert server.end() == 0


def test_results_cannot_rewrite_the_terminal(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = json.dumps("a\u001b]0;owned\u0007b\u202ec\u009bd\u007f")
    done = tidefast("run", "shop:app", "shows", sent, "--run-id", "r-1", cwd=home)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(home)
    monkeypatch.delenv("TIDEFAST_URL", raising=False)
    for words in (("show", "r-1"), ("log", "r-1"), ("show", "r-1", "--json"), ("runs",)):
        assert main(words) == 0
    shown = done.stdout + capsys.readouterr().out
    assert "owned" in shown
    assert all(mark.isprintable() or mark == "\n" for mark in shown)
