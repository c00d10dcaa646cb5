"""`backup`, `restore`, `recover` as real processes, with a worker that lives through all of it."""

import json
import signal
from pathlib import Path

from tests.cli.processes import running, tidefast

INPUT = '{"order": "o-1", "to": "anna"}'


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def until(state: str, url: str, home: Path) -> None:
    """Each look is a process of its own, so this needs no pause."""
    told = None
    for _ in range(60):
        told = json.loads(tidefast("show", "r-1", "--url", url, "--json", cwd=home).stdout)["run"]
        if told["state"] == state:
            return
    raise AssertionError(told)


def test_a_mail_of_lost_commits_is_held_after_a_restore_while_the_old_worker_goes_on(home: Path) -> None:
    serve = ("serve", "--app", "shop:app", "--store")
    with running(*serve, "x.db", "--port", "0", cwd=home) as server:
        url = str(server.said["url"])
        tidefast("start", "desk", INPUT, "--run-id", "r-1", "--url", url, cwd=home)
        made = tidefast("backup", "b.db", "--store", "x.db", "--json", cwd=home)
        assert json.loads(made.stdout)["runs"] == 1, made.stderr
        assert tidefast("backup", "b.db", "--store", "x.db", cwd=home).returncode == 3
        with running("worker", "shop:app", "--url", url, "--lease", "5s", cwd=home):
            until("completed", url, home)
            server.end(signal.SIGKILL)
            refused = tidefast("restore", "b.db", "--store", "x.db", cwd=home)
            assert (refused.returncode, refused.stderr.partition(":")[0]) == (3, "error[store_refused]")
            restored = tidefast("restore", "b.db", "--store", "new/x.db", "--json", cwd=home)
            assert json.loads(restored.stdout)["recovery"]["point_ms"] > 0, restored.stderr
            port = url.rpartition(":")[2]
            with running(*serve, "new/x.db", "--port", port, cwd=home) as server_again:
                until("held", url, home)
                assert lines(home / "charged")[0] == lines(home / "charged")[-1], "replayed under its key"
                assert lines(home / "mailed") == ["anna"]
                told = json.loads(tidefast("recover", "--store", "new/x.db", "--json", cwd=home).stdout)
                assert told["held"] == [{"run": "r-1", "step": "mail", "tool": "mail"}]
                owned = tidefast("recover", "--nothing-lost", "--note", "seen", "--store", "new/x.db", cwd=home)
                assert owned.returncode == 4
                verdict = ("resolve", "r-1", "mail", "applied", "--note", "in the mailbox", "--store", "new/x.db")
                assert tidefast(*verdict, "--url", url, cwd=home).returncode == 0
                until("completed", url, home)
                assert server_again.end() == 0
    assert lines(home / "mailed") == ["anna"]
    assert json.loads(tidefast("audit", "--store", "new/x.db", "--json", cwd=home).stdout)["ok"] is True
    for words, code in ((("--nothing-lost",), 2), (("--nothing-lost", "--commits-lost"), 2)):
        assert tidefast("recover", *words, "--store", "new/x.db", cwd=home).returncode == code
    closed = tidefast("recover", "--nothing-lost", "--note", "all seen", "--store", "new/x.db", cwd=home)
    assert "no recovery window is open" in closed.stdout
    opened = tidefast("recover", "--commits-lost", "--store", "new/x.db", cwd=home)
    assert "recovery window open" in opened.stdout
