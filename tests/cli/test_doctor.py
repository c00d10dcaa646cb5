"""`tidefast doctor`: what it finds, what it says about it, and that it changes nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tidefast.cli import doctor
from tidefast.cli.main import main
from tidefast.engine.clock import wall_ms
from tidefast.stores.sqlite import SqliteStore


def looked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """(exit code, {area: (level, what)}) of the worst finding of each area."""
    code = main(["doctor", *words, "--json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["ok"] is (code == 0)
    ranks = ("ok", "warning", "failed")
    found: dict[str, tuple[str, str]] = {}
    for finding in told["findings"]:
        level, _ = found.get(finding["area"], ("ok", ""))
        if ranks.index(finding["level"]) >= ranks.index(level):
            found[finding["area"]] = (finding["level"], finding["what"])
    return code, found


def make_store(folder: Path, mark_ms: int = 0) -> Path:
    folder.mkdir(mode=0o700)
    store = SqliteStore.open(folder / "store.db", create=True, wall_ms=mark_ms or wall_ms())
    store.close()
    return folder / "store.db"


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests' own directory lies on."""
    monkeypatch.setattr(doctor, "filesystem", lambda folder: "ext4")


def test_a_good_place_without_a_store_is_fine_and_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = looked(capsys, "--store", str(tmp_path / "deep/er/store.db"))
    assert code == 0 and found["store"][0] == "ok" and "not there yet" in found["store"][1]
    assert found["flush"][1].startswith("a flush takes")
    assert not list(tmp_path.iterdir())


def test_a_whole_store_is_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path / "s")
    before = store.read_bytes()
    code, found = looked(capsys, "--store", str(store))
    assert (code, found["pages"][0], found["owner"]) == (0, "ok", ("ok", "no process owns it now"))
    assert store.read_bytes() == before


def test_an_owned_store_names_its_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owned = SqliteStore.open(make_store(tmp_path / "s"), create=False)
    try:
        _, found = looked(capsys, "--store", str(tmp_path / "s/store.db"))
        assert f"process {os.getpid()}" in found["owner"][1]
    finally:
        owned.close()


def test_a_foreign_or_damaged_file_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no store")
    assert looked(capsys, "--store", str(tmp_path / "text"))[1]["store"][0] == "failed"
    store = make_store(tmp_path / "s")
    whole = bytearray(store.read_bytes())
    whole[len(whole) // 2 :] = os.urandom(len(whole) - len(whole) // 2)
    store.write_bytes(whole)
    code, found = looked(capsys, "--store", str(store))
    assert code == 1 and "failed" in (found["store"][0], found.get("pages", ("", ""))[0])


@pytest.mark.parametrize(("kind", "word"), [("tmpfs", "gone with the power"), ("nfs4", "another machine's")])
def test_a_place_that_keeps_nothing_fails(
    kind: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "filesystem", lambda folder: kind)
    code, found = looked(capsys, "--store", str(tmp_path / "store.db"))
    assert (code, found["disk"][0]) == (1, "failed") and word in found["disk"][1]


@pytest.mark.parametrize(("times", "word"), [([2.0] * 3, "too fast"), ([90_000.0] * 3, "waits for two")])
def test_a_flush_that_can_not_be_one_or_that_is_slow_is_a_warning(
    times: list[float], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "flush_times_us", lambda folder: times)
    code, found = looked(capsys, "--store", str(tmp_path / "store.db"))
    assert (code, found["flush"][0]) == (0, "warning") and word in found["flush"][1]


@pytest.mark.parametrize(("ahead_ms", "level"), [(0, "ok"), (60_000, "warning"), (3_600_000, "failed")])
def test_a_wall_clock_behind_the_stores_time_is_told(
    ahead_ms: int, level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_mark_ms", lambda path: wall_ms() + ahead_ms)
    assert looked(capsys, "--store", str(tmp_path / "store.db"))[1]["mark"][0] == level


@pytest.mark.parametrize(("is_kept", "level"), [(True, "ok"), (False, "warning"), (None, "ok")])
def test_a_clock_that_nobody_keeps_is_a_warning(
    is_kept: bool | None,
    level: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "clock_is_synchronised", lambda: is_kept)
    assert looked(capsys, "--store", str(tmp_path / "store.db"))[1]["clock"][0] == level


def test_the_kernel_can_be_asked_about_its_clock() -> None:
    assert doctor.clock_is_synchronised() in (True, False, None)


def test_secrets_and_modes_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path / "s")
    secret = tmp_path / "s/store.db.secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o644)
    store.chmod(0o644)
    keys = tmp_path / "keys.toml"
    keys.write_text("nonsense = 1")
    keys.chmod(0o600)
    code, found = looked(capsys, "--store", str(store), "--keys", str(keys))
    assert (code, found["secret"][0], found["modes"][0], found["keys"][0]) == (1, "failed", "warning", "failed")
    assert "chmod 600" in found["secret"][1]
    assert "abab" not in found["secret"][1]


def test_contracts_and_their_credentials_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools.toml"
    tools.write_text('[tools.t]\nkind="http"\nurl="http://h/"\ncredential={header="Authorization",env="T_AUTH"}\n')
    monkeypatch.delenv("T_AUTH", raising=False)
    words = ("--store", str(tmp_path / "store.db"), "--tools", str(tools))
    assert looked(capsys, *words)[1]["tools"][0] == "failed"
    monkeypatch.setenv("T_AUTH", "a-canary-of-a-credential")
    assert main(["doctor", *words]) == 0
    said = capsys.readouterr().out
    assert "held for a person" in said and "a-canary" not in said


def test_a_server_that_is_not_there_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = looked(capsys, "--store", str(tmp_path / "store.db"), "--url", "http://127.0.0.1:1")
    assert (code, found["server"][0]) == (1, "failed")
    assert main(["doctor", "--url", "ftp://x"]) == 2


def test_few_open_files_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 4_096))
    assert looked(capsys, "--store", str(tmp_path / "store.db"))[1]["limits"][0] == "warning"


def test_the_file_system_of_a_folder_is_the_one_mounted_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert doctor.filesystem(Path("/proc/self")) == "proc"
