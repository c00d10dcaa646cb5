"""`tidefast keys`, and a server that asks everybody for one."""

import json
import os
import signal
from pathlib import Path

import pytest
from tests.cli.processes import running, tidefast

from tidefast.cli.main import main
from tidefast.server.keyfile import read_keys


def made(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["keys", "add", *arguments, "--keys", str(file)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("tfk1.") and said.out.count("\n") == 1 and "only now" in said.err
    return said.out.strip()


def test_keys_are_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    made(file, capsys, "shop", "--role", "worker", "--runs", "shop-*")
    made(file, capsys, "eyes", "--role", "reader")
    made(file, capsys, "box", "--role", "replica", "--workspace", "case-1")
    assert main(["keys", "list", "--keys", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "shop-*" in shown and "bodies as digests" in shown and "workspace case-1" in shown
    assert main(["keys", "list", "--keys", str(file), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["keys"]
    assert [(key["name"], key["role"]) for key in listed] == [
        ("box", "replica"),
        ("eyes", "reader"),
        ("shop", "worker"),
    ]
    assert main(["keys", "revoke", "shop", "--keys", str(file)]) == 0
    assert [caller.name for caller in read_keys(file).values()] == ["eyes", "box"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["add"], 2, "needs a NAME"),
        (["add", "x"], 2, "role: expected one of"),
        (["add", "-x", "--role", "worker"], 2, "error"),
        (["add", "a b", "--role", "worker"], 2, "is no id"),
        (["add", "operator", "--role", "operator"], 2, "other than"),
        (["add", "x", "--role", "worker", "--runs", "shop"], 2, "with a star behind it"),
        (["add", "x", "--role", "replica"], 2, "names the workspace"),
        (["add", "x", "--role", "worker", "--bodies"], 2, "only a reader's key"),
        (["revoke", "x"], 3, "can't be read"),
        (["list"], 3, "can't be read"),
    ],
)
def test_a_wrong_use_is_told_and_makes_nothing(
    arguments: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", *arguments, "--keys", str(tmp_path / "keys.toml")]) == code
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_server_with_keys_takes_those_and_changes_them_at_sighup(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, secret = home / "keys.toml", home / "secret"
    key = made(file, capsys, "shop", "--role", "worker", "--runs", "shop-*")
    ways = ("--store", "s.db", "--port", "0", "--keys", "keys.toml", "--secret", "secret")
    with running("serve", *ways, cwd=home) as server:
        at = ("--url", server.said["url"])
        # the CLI on the server's own machine reads with the operator's key, another caller with its own or not at all
        assert tidefast("runs", *at, "--store", "s.db", cwd=home).returncode == 0
        refused = tidefast("runs", *at, cwd=home)
        assert refused.returncode == 1 and "needs a key" in refused.stderr
        assert tidefast("start", "desk", "{}", *at, "--run-id", "shop-1", cwd=home, key=key).returncode == 0
        assert "begin with shop-" in tidefast("start", "desk", "{}", *at, "--run-id", "x", cwd=home, key=key).stderr
        forbidden = tidefast("thaw", "shop-1", *at, "--note", "n", cwd=home, key=key)
        assert forbidden.returncode == 1 and "role worker" in forbidden.stderr
        secret.write_text(secret.read_text() + os.urandom(32).hex() + "\n")
        assert main(["keys", "revoke", "shop", "--keys", str(file)]) == 0
        server.process.send_signal(signal.SIGHUP)
        assert any("doesn't know the key" in tidefast("runs", *at, cwd=home, key=key).stderr for _ in range(20))
        file.write_text("[keys")
        server.process.send_signal(signal.SIGHUP)
        assert tidefast("runs", *at, "--store", "s.db", cwd=home).returncode == 0
        assert server.end() == 0
    told = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert [line["event"] for line in told] == ["credentials_read", "credentials_kept"]
    assert (told[0]["keys"], told[0]["secrets"]) == (0, 2) and "not TOML" in told[1]["problems"][0]


def test_beyond_loopback_nothing_is_served_without_keys(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tidefast("serve", "--host", "0.0.0.0", "--store", "s.db", "--port", "0", cwd=home)
    assert told.returncode == 3 and "others need --keys" in told.stderr and not (home / "s.db").exists()
    made(home / "k", capsys, "shop", "--role", "worker")
    ways = ("serve", "--host", "0.0.0.0", "--store", "s.db", "--port", "0", "--keys", "k")
    with running(*ways, cwd=home) as server:
        assert server.said["url"].startswith("http://0.0.0.0:")
