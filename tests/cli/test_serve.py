"""`serve` and `worker` as real processes: ready lines, kills, and a restart over the same store."""

import json
import signal
from pathlib import Path

from tests.cli.processes import kill_at, running, tidefast

INPUT = '{"order": "o-1", "to": "anna"}'


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def finished(url: str, run: str, home: Path) -> dict[str, object]:
    """The run once it has ended; each look is a process of its own, so this needs no pause."""
    for _ in range(40):
        told = tidefast("show", run, "--url", url, "--json", cwd=home)
        assert told.returncode == 0, told.stderr
        info: dict[str, object] = json.loads(told.stdout)["run"]
        if info["state"] in ("completed", "failed"):
            return info
    raise AssertionError(info)


def test_a_killed_worker_and_a_killed_server_lose_nothing(home: Path) -> None:
    serve = ("serve", "--store", "x.db", "--port", "0", "--app", "shop:app")
    with running(*serve, cwd=home) as server:
        url = str(server.said["url"])
        assert server.said["tools"] == ["charge", "mail"]
        started = tidefast("start", "desk", INPUT, "--run-id", "r-1", "--url", url, "--json", cwd=home)
        assert json.loads(started.stdout) == {"run_id": "r-1", "state": "claimable", "was_new": True}
        end = kill_at("sdk.before_checkpoint", home / "p", "worker", "shop:app", "--url", url, cwd=home)
        assert end == -signal.SIGKILL
        assert len(lines(home / "charged")) == 1
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    with running(*serve, cwd=home) as server:
        url = str(server.said["url"])
        wrong = tidefast("preempt", "r-1", "--url", url, cwd=home)
        assert (wrong.returncode, wrong.stderr.partition(":")[0]) == (1, "error[unauthenticated]")
        moved = tidefast("preempt", "r-1", "--expect-epoch", "7", "--url", url, "--store", "x.db", cwd=home)
        assert (moved.returncode, moved.stderr.partition(":")[0]) == (5, "error[moved]")
        key = "x.db.operator-key"
        done = tidefast("preempt", "r-1", "--note", "dead", "--url", url, "--operator-key", key, "--json", cwd=home)
        assert json.loads(done.stdout)["state"] == "preempted", done.stderr
        with running("worker", "shop:app", "--url", url, "--lease", "5s", cwd=home) as worker:
            assert worker.said["agents"] == ["desk", "shows"]
            info = finished(url, "r-1", home)
            assert (info["state"], info["epoch"], info["checkpoint"]) == ("completed", 2, 1)
            assert worker.end() == 0
        assert len(lines(home / "charged")) == len(lines(home / "mailed")) == 1
        audit = tidefast("audit", "--store", "x.db", "--json", cwd=home)
        assert json.loads(audit.stdout)["ok"] is True
        assert server.end() == 0
    assert tidefast("runs", "--url", url, cwd=home).returncode == 4


def test_every_config_problem_is_told_at_once(home: Path) -> None:
    (home / "tools.toml").write_text(
        '[tools.a]\nkind = "ftp"\nretires = 3\n[tools.b]\nkind = "http"\nurl = "nowhere"\ntimeout = "soon"\n'
    )
    (home / "secret").write_text("00" * 32)
    (home / "secret").chmod(0o600)
    words = ("serve", "--port", "70000", "--host", "10.0.0.1", "--tools", "tools.toml", "--secret", "secret")
    refused = tidefast(*words, "--app", "shop", cwd=home)
    assert refused.returncode == 3
    told = refused.stderr.splitlines()
    assert all(line.startswith("error[config]: ") for line in told)
    for part in (
        "--port 70000: expected 0 to 65535",
        "--host 10.0.0.1: expected this machine's own address",
        "--app shop: expected MODULE:APP",
        "tools.toml: tools.a.kind: expected one of http, python",
        "tools.toml: tools.a.retires: unknown member",
        "tools.toml: tools.b.url: expected http(s)://",
        "tools.toml: tools.b.timeout: expected a duration",
        "secret: a secret that anyone can guess",
    ):
        assert any(part in line for line in told), part
    assert not (home / ".tidefast").exists()


def test_problems_of_app_and_files_are_told_together(home: Path) -> None:
    (home / "tools.toml").write_text('[tools.charge]\nkind = "http"\nurl = "https://example.org/"\nretires = 3\n')
    refused = tidefast("serve", "--port", "0", "--tools", "tools.toml", "--app", "nowhere:app", cwd=home)
    assert refused.returncode == 3
    assert "--app nowhere:app: there is no module nowhere" in refused.stderr
    assert "tools.toml: tools.charge.retires: unknown member" in refused.stderr
    (home / "tools.toml").write_text('[tools.charge]\nkind = "http"\nurl = "https://example.org/"\n')
    twice = tidefast("serve", "--port", "0", "--tools", "tools.toml", "--app", "shop:app", cwd=home)
    assert twice.returncode == 3
    assert "tools.charge: expected one contract, --app shop:app declares it as well" in twice.stderr
