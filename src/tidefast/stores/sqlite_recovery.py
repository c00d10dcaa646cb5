"""Backups of a store's file, and what makes a copy of it a store of its own (law 16).

A backup is made by SQLite's own online copy under one read transaction: a moment of the store, whoever writes to it
meanwhile. It names no inode, so it is refused as a store until it was restored. A restore is built beside its place and
renamed into it, so that a crash leaves either no store or a whole one with its window open.

The incarnation of a copy is above every one that can have been issued: above the one in the copy, above the last one at
this place (kept beside the file), and no less than the number of ten minutes that have gone by since 2026, because the
same backup may be restored twice and can't know of it.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from tidefast.protocol.records import Recovery
from tidefast.stores import sqlite_file
from tidefast.stores.base import Identity, StoreRefused, StoreUnavailable, start_ms
from tidefast.stores.sqlite_errors import explain

PAGES_AT_ONCE = 2_000
NO_INODE = 0  # of a backup: no file has it
SLOT_MS = 600_000
SLOTS_FROM_MS = 1_767_225_600_000  # 2026-01-01 UTC
INCARNATION_MAX = 2**21 - 1  # an epoch must stay an exact number of JSON
LAST_EVENT = "SELECT at_ms FROM events ORDER BY position DESC LIMIT 1"
LAST_INTENT = "SELECT at_ms, data FROM events WHERE kind = 'step_fenced' ORDER BY position DESC LIMIT 1"
SET_META = "INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)"


class Copied(NamedTuple):
    """What a backup holds."""

    path: Path
    bytes: int
    runs: int
    events: int
    last_commit_ms: int


def backup(source: Path, target: Path, on_pages: Callable[[int, int], None] | None = None) -> Copied:
    """Copy a store, served or not, to a file that must not exist yet. Durable on return. Raises `StoreError`."""
    source = sqlite_file.real_path(source)
    sqlite_file.refuse_unless_store(source, create=False)
    _refuse_taken(target)
    draft = target.with_name(target.name + ".new")
    reader = sqlite_file.open_checked(source, writable=False)
    try:
        found = _copy(reader, draft, on_pages)
        _put_in_place(draft, target)
    except (OSError, apsw.Error) as error:
        raise StoreUnavailable(f"no backup could be made at {target}: {error}. Mend that and try again.") from error
    finally:
        reader.close()
        draft.unlink(missing_ok=True)
    return found._replace(path=target)


def restore(source: Path, target: Path, wall_ms: int, on_pages: Callable[[int, int], None] | None = None) -> Identity:
    """Make a store at `target` of a backup, its incarnation raised and its window open. Raises `StoreError`.

    `wall_ms` is the wall clock. Whatever stands at `target` is left alone and refused: put it away first.
    """
    source, target = sqlite_file.real_path(source), sqlite_file.real_path(target)
    sqlite_file.refuse_unless_store(source, create=False)
    _refuse_taken(target)
    sqlite_file.refuse_unless_store(target, create=True)
    sqlite_file.make_directory(target)
    lock = sqlite_file.FileLock.take(target)
    draft = target.with_name(target.name + ".new")
    try:
        _refuse_taken(target)
        reader = sqlite_file.connect(source, writable=False)
        try:
            _copy(reader, draft, on_pages)
        finally:
            reader.close()
        writer = sqlite_file.open_checked(draft, writable=True)
        try:
            identity = open_window(writer, target, draft.stat().st_ino, wall_ms)
            writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        finally:
            writer.close()
        _flush(draft)
        draft.rename(target)
        sqlite_file.flush_directory(target.parent)
    except (OSError, apsw.Error) as error:
        raise StoreUnavailable(f"{source} could not be restored to {target}: {error}. Try again.") from error
    finally:
        for leftover in ("", "-wal", "-shm"):
            draft.with_name(draft.name + leftover).unlink(missing_ok=True)
        lock.release()
    return identity


def open_window(writer: apsw.Connection, place: Path, inode: int, wall_ms: int) -> Identity:
    """Make what a connection has open a store of its own: a new incarnation, every lost intent possible.

    One transaction; the number is noted beside the file before it counts.
    """
    try:
        meta: dict[Any, Any] = dict(writer.execute("SELECT name, value FROM meta").fetchall())  # type: ignore[arg-type]
        incarnation = _next_incarnation(int(meta["incarnation"]), place, wall_ms)
        window = _window(writer, start_ms(wall_ms, int(meta["mark_ms"])), read_window(meta.get("recovery")))
        _note_incarnation(place, incarnation)
        with writer:
            for name, value in (
                ("incarnation", incarnation),
                ("inode", inode),
                ("mark_ms", window.restored_ms),
                ("recovery", json.dumps(window)),
            ):
                writer.execute(SET_META, (name, value))
    except apsw.Error as error:
        raise explain(error, str(place), "adopting") from error
    return Identity(bytes(meta["namespace"]), incarnation, window.restored_ms, window)


def close_window(writer: apsw.Connection, place: Path, by: str, note: str, wall_ms: int) -> None:
    """Nothing was lost, or all of it has been looked at: an operator says so, and it is kept with the store."""
    said = json.dumps({"by": by, "note": note, "wall_ms": wall_ms})
    try:
        with writer:
            writer.execute("DELETE FROM meta WHERE name = 'recovery'")
            writer.execute(SET_META, ("recovery_closed", said))
    except apsw.Error as error:
        raise explain(error, str(place), "closing the recovery window of") from error


def read_window(value: object) -> Recovery | None:
    """The window as `meta` holds it. Raises `ValueError` for what is none."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError("the recovery window is not a text")
    return Recovery(*map(int, json.loads(value)))


def _window(writer: apsw.Connection, restored_ms: int, still_open: Recovery | None) -> Recovery:
    point_ms = int(writer.execute(LAST_EVENT).get or 0)
    behind_ms = 0  # how far the wall clock stood behind the authority's, as the newest intent tells
    for at_ms, data in writer.execute(LAST_INTENT):
        behind_ms = max(0, at_ms - int(json.loads(data)["wall_ms"]))
    wall_ms = point_ms - behind_ms
    if still_open is not None:  # restored twice: what the first restore lost is still possible
        point_ms, wall_ms = min(point_ms, still_open.point_ms), min(wall_ms, still_open.point_wall_ms)
    return Recovery(point_ms, wall_ms, restored_ms)


def _next_incarnation(known: int, place: Path, wall_ms: int) -> int:
    slot = (wall_ms - SLOTS_FROM_MS) // SLOT_MS
    incarnation = max(known + 1, _noted_incarnation(place) + 1, slot)
    if incarnation > INCARNATION_MAX:
        raise StoreRefused(
            f"{place} would get the incarnation {incarnation}, and {INCARNATION_MAX} is the last; nothing was changed. "
            "Set the wall clock right and try again."
        )
    return incarnation


def _note_path(place: Path) -> Path:
    return place.with_name(place.name + ".incarnation")


def _noted_incarnation(place: Path) -> int:
    try:
        return int(_note_path(place).read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise StoreRefused(
            f"{_note_path(place)} can't be read ({error}), and it holds the last incarnation at this place. "
            "Mend it, or name another place."
        ) from error


def _note_incarnation(place: Path, incarnation: int) -> None:
    """Before a store counts with this number, so that no later restore at this place takes it again."""
    draft = _note_path(place).with_name(_note_path(place).name + ".new")
    try:
        draft.write_text(f"{incarnation}\n", encoding="ascii")
        _flush(draft)
        draft.rename(_note_path(place))
        sqlite_file.flush_directory(place.parent)
    except OSError as error:
        raise StoreUnavailable(f"{_note_path(place)} can't be written: {error}. Mend that and try again.") from error


def _copy(reader: apsw.Connection, draft: Path, on_pages: Callable[[int, int], None] | None) -> Copied:
    """A moment of a store as a file of its own, which no store will take for itself."""
    for leftover in ("", "-journal", "-wal", "-shm"):  # of a try that crashed here
        draft.with_name(draft.name + leftover).unlink(missing_ok=True)
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    copy = apsw.Connection(os.fspath(draft), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        reader.execute("BEGIN")  # one snapshot, or each write of the owner would begin the copy anew
        reader.execute("SELECT count(*) FROM meta").get  # noqa: B018 - takes the snapshot
        with copy.backup("main", reader, "main") as pages:
            while not pages.done:
                pages.step(PAGES_AT_ONCE)
                if on_pages is not None:
                    on_pages(pages.page_count - pages.remaining, pages.page_count)
        reader.execute("COMMIT")
        copy.pragma("journal_mode", "DELETE")  # whole in one file
        copy.execute(SET_META, ("inode", NO_INODE))
        found = copy.execute("PRAGMA quick_check(1)").get
        if found != "ok":
            raise StoreRefused(f"the copy is damaged: {found}. Keep the original for study.")
        runs, events = copy.execute("SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM events)").get
        last_ms = int(copy.execute(LAST_EVENT).get or 0)
    finally:
        copy.close()
    return Copied(draft, draft.stat().st_size, int(runs), int(events), last_ms)


def _refuse_taken(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise StoreRefused(f"{target} is there already; nothing was changed. Put it away, or name another file.")


def _put_in_place(draft: Path, target: Path) -> None:
    _flush(draft)
    os.link(draft, target)  # where `rename` would replace a file that came meanwhile
    draft.unlink()
    sqlite_file.flush_directory(target.parent)


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
