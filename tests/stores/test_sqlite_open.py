"""The file of the SQLite store: what is opened, what is made, what is refused, and who owns it."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.stores.driver import Driver, everything

from tidefast.protocol.ids import RunId
from tidefast.stores import migrations, sqlite_file
from tidefast.stores.base import Batch, StoreCorrupt, StoreRefused, StoreUnavailable
from tidefast.stores.sqlite import SqliteStore


@pytest.fixture
def path(folder: Path) -> Path:
    """A store with some content, closed."""
    file = folder / "s.db"
    fill(file)
    return file


def fill(file: Path, runs: int = 20) -> None:
    store = SqliteStore.open(file, create=True)
    driver = Driver(store)
    for number in range(runs):
        driver.create(f"r{number}")
        driver.grant(f"r{number}")
        driver.do(f"r{number}", "s", receipt="x" * 500)
    store.close()


def untouched(file: Path, refusal: type[Exception], match: str) -> None:
    """Opening is refused in each way, and no byte of the file is changed."""
    before = file.read_bytes()
    for create in (False, True):
        with pytest.raises(refusal, match=match):
            SqliteStore.open(file, create=create)
    with pytest.raises(refusal, match=match):
        SqliteStore.open_read_only(file)
    assert file.read_bytes() == before
    assert SqliteStore.owner(file) is None


def test_a_missing_file_is_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    for each in (lambda p: SqliteStore.open(p, create=False), SqliteStore.open_read_only):
        with pytest.raises(StoreRefused, match=r"no store at .*make a new one"):
            each(tmp_path / "sub" / "s.db")
    assert list(tmp_path.iterdir()) == []


def test_a_new_store_is_made_with_its_directory_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "s.db"
    store = SqliteStore.open(file, create=True)
    store.commit(Batch(mark_ms=5_000))
    for name in ("s.db", "s.db-wal", "s.db-shm", "s.db.lock"):
        assert stat.S_IMODE((file.parent / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    store.close()
    assert sorted(each.name for each in file.parent.iterdir()) == ["s.db", "s.db.lock"]


def test_two_stores_have_two_namespaces(tmp_path: Path) -> None:
    identities = []
    for name in ("a.db", "b.db"):
        store = SqliteStore.open(tmp_path / name, create=True)
        identities.append(store.identity())
        store.close()
    assert identities[0].namespace != identities[1].namespace
    assert [each[1:] for each in identities] == [(0, 0, None), (0, 0, None)]


def test_a_store_opened_again_holds_the_same(path: Path) -> None:
    store = SqliteStore.open(path, create=False)
    before, identity = everything(store), store.identity()
    store.close()
    for create in (True, False):
        again = SqliteStore.open(path, create=create)
        assert (everything(again), again.identity()) == (before, identity)
        again.close()


def test_the_mark_is_remembered(path: Path) -> None:
    store = SqliteStore.open(path, create=False)
    store.commit(Batch(mark_ms=77_000))
    store.close()
    again = SqliteStore.open(path, create=False)
    assert again.identity().mark_ms == 77_000
    again.close()


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.db").touch()
    untouched(tmp_path / "s.db", StoreRefused, "is empty")


@pytest.mark.parametrize("content", [b"hello", b"x" * 100_000, b"\x00" * 8192, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.db").write_bytes(content)
    untouched(tmp_path / "s.db", StoreRefused, "not an SQLite database")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="not a file"):
        SqliteStore.open(tmp_path, create=True)


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    connection = apsw.Connection(str(file))
    connection.execute("CREATE TABLE songs (name)")
    connection.close()
    untouched(file, StoreRefused, "not one of this program's")


def test_a_newer_generation_is_refused(path: Path) -> None:
    edit(path, "PRAGMA user_version = 99; UPDATE meta SET value = 99 WHERE name = 'generation'")
    untouched(path, StoreRefused, "generation 99.*newer program")


def test_a_file_whose_records_have_other_fields_is_refused(path: Path) -> None:
    edit(path, "UPDATE meta SET value = replace(value, 'holder', 'owner') WHERE name = 'shape'")
    untouched(path, StoreRefused, "records have other fields")


@pytest.mark.parametrize(
    "statement",
    ["UPDATE runs SET record = '[1]'", "UPDATE runs SET record = '{'", "UPDATE steps SET attempts = '[[1]]'"],
)
def test_a_record_that_can_not_be_read_is_damage(path: Path, statement: str) -> None:
    edit(path, statement)
    store = SqliteStore.open(path, create=False)
    with pytest.raises(StoreCorrupt, match="can't be read"):
        everything(store)
    store.close()


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ("PRAGMA user_version = 0", "generation 0 in its header and 3"),
        ("UPDATE meta SET value = 5 WHERE name = 'generation'", "generation 3 in its header and 5"),
        ("DELETE FROM meta WHERE name = 'generation'", "and None in its table"),
        ("DELETE FROM meta WHERE name = 'namespace'", "has lost its namespace"),
        ("UPDATE meta SET value = '9x' WHERE name = 'incarnation'", "has lost its namespace"),
        ("UPDATE meta SET value = 1.5 WHERE name = 'mark_ms'", "has lost its namespace"),
        ("DROP TABLE meta", "lacks a table"),
    ],
)
def test_a_file_at_odds_with_itself_is_refused(path: Path, statement: str, match: str) -> None:
    edit(path, statement)
    untouched(path, StoreCorrupt, match)


def edit(path: Path, statements: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(statements)
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    connection.close()


@pytest.mark.parametrize("page", [1, 2, 5, 9])
def test_a_damaged_page_is_found_when_the_store_is_opened(path: Path, page: int) -> None:
    content = bytearray(path.read_bytes())
    content[page * 4096 : page * 4096 + 64] = b"\xa5" * 64
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match="damaged"):
        SqliteStore.open(path, create=True)
    assert path.read_bytes() == content


def test_a_file_cut_short_is_found_when_the_store_is_opened(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreCorrupt):
        SqliteStore.open(path, create=False)


def test_a_log_without_its_file_is_not_poured_into_a_new_one(path: Path) -> None:
    path.with_name("s.db-wal").write_bytes(b"old frames")
    path.unlink()
    with pytest.raises(StoreRefused, match="write-ahead log"):
        SqliteStore.open(path, create=True)
    assert not path.exists()


def test_an_older_generation_is_brought_up_and_keeps_its_content(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations.shipped()
    next_one = {**known, max(known) + 1: "ALTER TABLE contracts ADD COLUMN note TEXT"}
    before = SqliteStore.open_read_only(path)
    content = everything(before)
    before.close()
    monkeypatch.setattr(migrations, "shipped", lambda: next_one)
    with pytest.raises(StoreRefused, match="start it once as the owner"):
        SqliteStore.open_read_only(path)
    store = SqliteStore.open(path, create=False)
    assert everything(store) == content
    store.close()
    monkeypatch.setattr(migrations, "shipped", lambda: known)
    untouched(path, StoreRefused, "newer program")


def test_a_migration_that_fails_leaves_the_old_generation_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations.shipped()
    broken = {**known, max(known) + 1: "CREATE TABLE extra (a); INSERT INTO nowhere VALUES (1)"}
    monkeypatch.setattr(migrations, "shipped", lambda: broken)
    with pytest.raises(StoreCorrupt, match="nowhere"):
        SqliteStore.open(path, create=False)
    monkeypatch.setattr(migrations, "shipped", lambda: known)
    store = SqliteStore.open(path, create=False)
    assert store.load_head(RunId("r0")) is not None
    store.close()


def test_the_generations_are_numbered_without_a_gap() -> None:
    known = migrations.shipped()
    assert sorted(known) == list(range(1, len(known) + 1))


# --- making, cut at each instruction ---------------------------------------------------------------------


class Cut(BaseException):
    """The process ends here."""


def test_a_making_cut_at_any_instruction_leaves_a_clean_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = 0
    for at in range(1, 10_000):
        file = tmp_path / str(at) / "s.db"
        file.parent.mkdir()
        if not made_until(at, file, monkeypatch):
            break
        cuts += 1
        store = SqliteStore.open(file, create=True)
        assert store.run_key_max() == 0
        assert not file.with_name("s.db.new").exists()
        store.close()
    assert cuts > 50


def made_until(at: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run `make`, ended at its `at`th line or with its draft torn; False if it got to its end."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename in (sqlite_file.__file__, migrations.__file__):
            count += event == "line"
            if count == at:
                raise Cut
        return trace

    with monkeypatch.context() as patched:
        ended = False
        filling = sqlite_file._fill

        def fill_half(draft: Path) -> None:
            nonlocal count
            filling(draft)
            # A crash within SQLite leaves a torn file: each prefix of it is one more cut.
            for size in range(0, draft.stat().st_size, 4096):
                count += 1
                if count == at:
                    os.truncate(draft, size)
                    raise Cut

        patched.setattr(sqlite_file, "_fill", fill_half)
        sys.settrace(trace)
        try:
            sqlite_file.make(file)
        except Cut:
            ended = True
        finally:
            sys.settrace(None)
    return ended


@pytest.mark.parametrize("call", ["open", "fsync", "close"])
def test_a_disk_that_fails_while_a_store_is_made_gives_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(os, call)
    failing = 0
    while True:
        failing += 1
        count = 0

        def fail(*values: Any, failing: int = failing, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == failing:
                raise OSError(errno.EIO, "Input/output error")
            return real(*values, **named)

        file = tmp_path / f"{failing}.db"
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fail)
            try:
                sqlite_file.make(file)
            except StoreUnavailable as error:
                told = str(error)
            else:
                break
        assert str(file) in told
        SqliteStore.open(file, create=True).close()
    assert failing > 2


# --- ownership -------------------------------------------------------------------------------------------

OWN = """
import sys
from tidefast.stores.sqlite import SqliteStore
store = SqliteStore.open(sys.argv[1], create=True)
store.announce("http://127.0.0.1:7007")
print("owned", flush=True)
sys.stdin.readline()
store.close()
"""


def other_process(path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", OWN, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "owned\n"
    return process


def ended(process: "subprocess.Popen[str]") -> None:
    process.communicate("\n")
    assert process.returncode in (0, -signal.SIGKILL)


def test_a_store_that_another_process_owns_is_refused_naming_it(path: Path) -> None:
    process = other_process(path)
    with pytest.raises(StoreRefused, match=rf"process {process.pid} at http://127.0.0.1:7007"):
        SqliteStore.open(path, create=True)
    owner = SqliteStore.owner(path)
    assert owner is not None and (owner.pid, owner.url) == (process.pid, "http://127.0.0.1:7007")
    link = path.with_name("link.db")
    link.symlink_to(path)
    with pytest.raises(StoreRefused, match="is owned by process"):
        SqliteStore.open(link, create=True)
    ended(process)
    assert SqliteStore.owner(path) is None


def test_an_owner_that_was_killed_owns_nothing(path: Path) -> None:
    process = other_process(path)
    process.kill()
    ended(process)
    assert SqliteStore.owner(path) is None
    store = SqliteStore.open(path, create=False)
    owner = SqliteStore.owner(path)
    assert owner is not None and (owner.pid, owner.url) == (os.getpid(), "")
    store.close()


def test_one_process_can_not_own_a_store_twice(path: Path) -> None:
    store = SqliteStore.open(path, create=False)
    with pytest.raises(StoreRefused, match=f"process {os.getpid()}"):
        SqliteStore.open(path, create=False)
    store.commit(Batch(mark_ms=9_000))
    store.close()


def test_a_lock_file_without_a_readable_name_still_locks(path: Path) -> None:
    store = SqliteStore.open(path, create=False)
    for content in (b"", b"{", b"[]", json.dumps({"pid": "x"}).encode(), b'{"pid":1}', b"null"):
        path.with_name("s.db.lock").write_bytes(content)
        with pytest.raises(StoreRefused, match="is owned by"):
            SqliteStore.open(path, create=False)
    store.close()


def test_a_reader_sees_what_a_living_owner_commits_and_writes_nothing(path: Path) -> None:
    store = SqliteStore.open(path, create=False)
    reader = SqliteStore.open_read_only(path)
    Driver(store).create("fresh")
    assert reader.load_head(RunId("fresh")) == store.load_head(RunId("fresh"))
    assert everything(reader) == everything(store)
    with pytest.raises(StoreUnavailable, match="for reading only"):
        reader.commit(Batch(mark_ms=10**9))
    reader.announce("http://nowhere")
    reader.close()
    owner = SqliteStore.owner(path)
    assert owner is not None and owner.url == ""
    store.close()


def test_a_closed_store_says_so_and_closes_twice(path: Path) -> None:
    store = SqliteStore.open(path, create=False)
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.commit(Batch(mark_ms=10**9))
    with pytest.raises(StoreUnavailable, match="closed"):
        store.load_head(RunId("r0"))


def test_a_file_system_without_locks_gives_one_clear_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(sqlite_file.fcntl, "flock", refuse)
    with pytest.raises(StoreUnavailable, match="No locks available"):
        SqliteStore.open(path, create=False)
    with pytest.raises(StoreUnavailable, match="No locks available"):
        SqliteStore.owner(path)
