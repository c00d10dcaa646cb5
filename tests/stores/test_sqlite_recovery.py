"""Backups and restores of real files: while the owner writes, at places that are taken, twice in a row."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stores.driver import Driver, everything

from tidefast.protocol.ids import RunId, incarnation_of
from tidefast.protocol.records import Recovery
from tidefast.stores import sqlite_recovery
from tidefast.stores.base import StoreRefused, StoreUnavailable
from tidefast.stores.sqlite import SqliteStore

WALL_MS = 1_796_000_000_000  # in December 2026


def made(path: Path) -> SqliteStore:
    store = SqliteStore.open(path, create=True)
    driver = Driver(store)
    driver.create("r")
    driver.grant("r")
    driver.do("r", "pay")
    return store


def put_away(store: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        store.with_name(store.name + suffix).unlink(missing_ok=True)


def test_a_backup_of_a_served_store_is_that_moment_whole_and_nothing_that_came_later(folder: Path) -> None:
    store = made(folder / "s.db")
    before = everything(store)
    copied = sqlite_recovery.backup(folder / "s.db", folder / "b.db")
    Driver(store).create("later")
    found = SqliteStore.open_read_only(folder / "b.db")
    assert everything(found) == before
    assert (copied.runs, copied.events) == (1, 4)
    assert (folder / "b.db").stat().st_mode & 0o777 == 0o600
    found.close()
    store.close()


def test_the_owner_writes_while_pages_are_copied_and_the_copy_keeps_its_moment(folder: Path) -> None:
    store = made(folder / "s.db")
    driver = Driver(store)
    for number in range(40):
        driver.create(f"before-{number}")
    before, wrote = everything(store), []

    def write(done: int, of: int) -> None:
        driver.create(f"meanwhile-{len(wrote)}")
        wrote.append(done)

    pages, sqlite_recovery.PAGES_AT_ONCE = sqlite_recovery.PAGES_AT_ONCE, 2
    try:
        sqlite_recovery.backup(folder / "s.db", folder / "b.db", write)
    finally:
        sqlite_recovery.PAGES_AT_ONCE = pages
    assert len(wrote) > 5
    found = SqliteStore.open_read_only(folder / "b.db")
    assert everything(found) == before
    found.close()
    store.close()


def test_a_backup_can_be_read_but_not_served_even_at_the_originals_inode(folder: Path) -> None:
    made(folder / "s.db").close()
    sqlite_recovery.backup(folder / "s.db", folder / "b.db")
    with pytest.raises(StoreRefused, match="is a copy"):
        SqliteStore.open(folder / "b.db", create=False)


def test_nothing_that_is_there_is_ever_replaced(folder: Path) -> None:
    made(folder / "s.db").close()
    sqlite_recovery.backup(folder / "s.db", folder / "b.db")
    for target in ("s.db", "b.db"):
        held = (folder / target).read_bytes()
        with pytest.raises(StoreRefused, match="is there already"):
            sqlite_recovery.backup(folder / "s.db", folder / target)
        with pytest.raises(StoreRefused, match="is there already"):
            sqlite_recovery.restore(folder / "b.db", folder / target, WALL_MS)
        assert (folder / target).read_bytes() == held
    os.symlink(folder / "nowhere", folder / "link.db")
    with pytest.raises(StoreRefused, match="is there already"):
        sqlite_recovery.backup(folder / "s.db", folder / "link.db")


def test_a_restore_beside_a_log_that_was_left_behind_is_refused(folder: Path) -> None:
    made(folder / "s.db").close()
    sqlite_recovery.backup(folder / "s.db", folder / "b.db")
    (folder / "n.db-wal").write_bytes(b"of another store")
    with pytest.raises(StoreRefused, match="write-ahead log"):
        sqlite_recovery.restore(folder / "b.db", folder / "n.db", WALL_MS)
    assert not (folder / "n.db").exists()


def test_a_restore_opens_its_window_at_the_last_durable_commit(folder: Path) -> None:
    made(folder / "s.db").close()
    sqlite_recovery.backup(folder / "s.db", folder / "b.db")
    identity = sqlite_recovery.restore(folder / "b.db", folder / "n.db", WALL_MS)
    store = SqliteStore.open(folder / "n.db", create=False)
    assert store.identity() == identity and identity.recovery is not None
    assert identity.recovery.point_ms == 1_000 and identity.recovery.restored_ms > 1_700_000_000_000
    assert identity.mark_ms == identity.recovery.restored_ms, "a later start must not lie before the restore"
    store.close()


def test_the_same_backup_restored_twice_never_gives_the_same_incarnation(folder: Path) -> None:
    made(folder / "s.db").close()
    sqlite_recovery.backup(folder / "s.db", folder / "b.db")
    put_away(folder / "s.db")
    first = sqlite_recovery.restore(folder / "b.db", folder / "s.db", WALL_MS).incarnation
    put_away(folder / "s.db")
    assert sqlite_recovery.restore(folder / "b.db", folder / "s.db", WALL_MS).incarnation > first
    (folder / "s.db.incarnation").write_text("no number")
    put_away(folder / "s.db")
    with pytest.raises(StoreRefused, match="last incarnation"):
        sqlite_recovery.restore(folder / "b.db", folder / "s.db", WALL_MS)
    assert not (folder / "s.db").exists()


def test_an_incarnation_that_json_could_not_hold_is_refused(folder: Path) -> None:
    made(folder / "s.db").close()
    sqlite_recovery.backup(folder / "s.db", folder / "b.db")
    (folder / "n.db.incarnation").write_text(f"{sqlite_recovery.INCARNATION_MAX}\n")
    with pytest.raises(StoreRefused, match="is the last"):
        sqlite_recovery.restore(folder / "b.db", folder / "n.db", WALL_MS)


def test_a_second_restore_keeps_the_first_ones_gap_open(folder: Path) -> None:
    made(folder / "s.db").close()
    sqlite_recovery.backup(folder / "s.db", folder / "b.db")
    sqlite_recovery.restore(folder / "b.db", folder / "n.db", WALL_MS)
    store = SqliteStore.open(folder / "n.db", create=False)
    driver = Driver(store, ms=2_000_000_000_000)
    driver.create("after")
    store.close()
    sqlite_recovery.backup(folder / "n.db", folder / "b2.db")
    again = sqlite_recovery.restore(folder / "b2.db", folder / "n2.db", WALL_MS)
    assert again.recovery is not None and again.recovery.point_ms == 1_000


def test_a_window_is_opened_in_place_and_closed_and_both_outlive_a_restart(folder: Path) -> None:
    store = made(folder / "s.db")
    was = store.identity()
    store.open_window(WALL_MS)
    store.close()
    store = SqliteStore.open(folder / "s.db", create=False)
    window = store.identity().recovery
    assert isinstance(window, Recovery) and store.identity().incarnation > was.incarnation
    store.close_window("ops", "the disk was whole", WALL_MS)
    store.close()
    store = SqliteStore.open(folder / "s.db", create=False)
    assert store.identity().recovery is None
    kept = json.loads(dict(store._all("SELECT name, value FROM meta"))["recovery_closed"])
    assert (kept["by"], kept["note"]) == ("ops", "the disk was whole")
    store.close()
    for change in (lambda: store.open_window(WALL_MS), lambda: store.close_window("ops", "", WALL_MS)):
        with pytest.raises(StoreUnavailable, match="closed"):
            change()


def test_an_adopted_copy_has_its_window_open_too(folder: Path) -> None:
    made(folder / "s.db").close()
    shutil.copy(folder / "s.db", folder / "copy.db")
    store = SqliteStore.open(folder / "copy.db", create=False, adopt=True, wall_ms=WALL_MS)
    assert store.identity().recovery is not None
    driver = Driver(store)
    driver.create("new")
    driver.grant("new")
    found = store.load_head(RunId("new"))
    assert found is not None and incarnation_of(found[1].epoch) == store.identity().incarnation
    store.close()


KILLED = """
import os, sys
from pathlib import Path
from tidefast.stores import sqlite_recovery, sqlite_file
at, place = int(sys.argv[1]), 0
def step(name, real):
    def run(*args, **other):
        global place
        place += 1
        if place == at:
            os._exit(9)
        return real(*args, **other)
    return run
for name in ("_flush", "_note_incarnation", "open_window", "_copy"):
    setattr(sqlite_recovery, name, step(name, getattr(sqlite_recovery, name)))
sqlite_recovery.sqlite_file.flush_directory = step("dir", sqlite_file.flush_directory)
Path.rename = step("rename", Path.rename)
sqlite_recovery.restore(Path(sys.argv[2]), Path(sys.argv[3]), 0)
os._exit(0)
"""


def test_a_restore_that_is_killed_leaves_no_store_or_a_whole_one_with_its_window_open(folder: Path) -> None:
    made(folder / "s.db").close()
    sqlite_recovery.backup(folder / "s.db", folder / "b.db")
    ends = []
    for at in range(1, 30):
        target = folder / f"k{at}" / "s.db"
        done = subprocess.run([sys.executable, "-c", KILLED, str(at), str(folder / "b.db"), str(target)], check=False)
        if target.exists():
            store = SqliteStore.open(target, create=False)
            assert store.identity().recovery is not None and store.identity().incarnation > 0
            assert store.load_head(RunId("r")) is not None
            store.close()
        else:
            assert done.returncode == 9
            sqlite_recovery.restore(folder / "b.db", target, WALL_MS)  # nothing is in the way of another try
        ends.append(done.returncode)
        if done.returncode == 0:
            break
    assert ends[-1] == 0 and ends.count(9) >= 8
