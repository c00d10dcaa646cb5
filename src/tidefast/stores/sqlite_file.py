"""What happens to a store's file before its first statement: the lock, the making, the look at what is there.

One process owns a file for life, by `flock` on `<file>.lock`; the kernel drops it when the process dies, so there is
nothing to clean up. A new store is built beside its place, flushed, and renamed into it, so that a crash at any
instruction leaves either no store or a whole one. What is there is never overwritten.
"""

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import apsw

from tidefast.stores import migrations
from tidefast.stores.base import StoreCorrupt, StoreError, StoreRefused, StoreUnavailable
from tidefast.stores.sqlite_errors import explain

BUSY_TIMEOUT_MS = 5_000  # only an outside tool can be in the way; it is given time to end its statement
STATEMENTS_KEPT = 512  # apsw's default of 100 is less than the statements for each batch size
CHECKPOINT_PAGES = 4_000  # 16 MiB of log: hot pages are then written back once for many commits
WAL_KEPT_BYTES = 64 * 2**20  # a log that grew under a long read is cut back to this
CHECK_ALWAYS_BYTES = 16 * 2**20  # checked page by page at each start
CHECK_UNCLEAN_BYTES = 256 * 2**20  # checked page by page after a crash; larger ones by `audit`
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Owner(NamedTuple):
    """Who holds a store's file. `boot` tells one boot of the machine from another; `url` is empty until announced."""

    pid: int
    boot: str
    url: str

    def __str__(self) -> str:
        return f"process {self.pid}" + (f" at {self.url}" if self.url else "")


class FileLock:
    """The ownership of one store file. Holds from `take` to `release` or the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> "FileLock":
        """Become the owner. Raises `StoreRefused` naming the owner if another process is."""
        descriptor = _open_lock(path, os.O_RDWR | os.O_CREAT)
        try:
            if not _wait_for(descriptor):
                raise StoreRefused(
                    f"{path} is owned by {_read_owner(descriptor)}; nothing was changed. "
                    "Talk to that process, or end it and start again."
                )
        except BaseException:
            os.close(descriptor)
            raise
        lock = cls(path, descriptor)
        lock.announce("")
        return lock

    def announce(self, url: str) -> None:
        """Write who owns the file, and where it can be reached. Not durable, and not needed to be."""
        text = json.dumps({"pid": os.getpid(), "boot": _boot(), "url": url})
        # One write of one size, so that a reader never sees half of one text and half of another.
        os.pwrite(self._descriptor, text.encode().ljust(512) + b"\n", 0)

    def release(self) -> None:
        os.close(self._descriptor)


def owner_of(path: Path) -> Owner | None:
    """The process that owns the file now; None if none does."""
    try:
        descriptor = _open_lock(path, os.O_RDONLY)
    except StoreUnavailable:
        if not _lock_path(path).exists():
            return None
        raise
    try:
        return None if _try(descriptor, fcntl.LOCK_SH) else _read_owner(descriptor)
    finally:
        os.close(descriptor)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _open_lock(path: Path, flags: int) -> int:
    try:
        return os.open(_lock_path(path), flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(f"the lock beside {path} can't be opened: {error}") from error


def _wait_for(descriptor: int) -> bool:
    """Lock exclusively, waiting out the short looks of `owner_of`; False if an owner holds it."""
    while not _try(descriptor, fcntl.LOCK_EX):
        if not _try(descriptor, fcntl.LOCK_SH):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.sched_yield()
    return True


def _try(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreUnavailable(f"the store's file can't be locked here: {error}. Use a local disk.") from error
    return True


def _read_owner(descriptor: int) -> Owner:
    try:
        members = json.loads(os.pread(descriptor, 4096, 0))
        return Owner(int(members["pid"]), str(members["boot"]), str(members["url"]))
    except (ValueError, KeyError, TypeError):
        return Owner(0, "", "")  # it holds the lock and hasn't written its name yet


def _boot() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def real_path(path: str | os.PathLike[str]) -> Path:
    """The file itself, so that two names of one file have one lock."""
    return Path(os.path.realpath(path))


def refuse_unless_store(path: Path, *, create: bool) -> bool:
    """Whether a store must be made. Judged without opening the file: closing it would drop SQLite's own locks."""
    try:
        found = path.stat()
    except FileNotFoundError:
        log = path.with_name(path.name + "-wal")
        if log.exists():
            raise StoreRefused(
                f"{path} is missing, but its write-ahead log {log.name} is there: the file was moved or deleted "
                "without it. Put the file back beside its log, or move the log away if it is not wanted."
            ) from None
        if create:
            return True
        raise StoreRefused(
            f"no store at {path}, and none is made where one was expected. Check the path; "
            "`tidefast serve` and `tidefast run` make a new one."
        ) from None
    except OSError as error:
        raise StoreUnavailable(f"{path} can't be looked at: {error}") from error
    if not path.is_file():
        raise StoreRefused(f"{path} is not a file; nothing was changed. Name a file.")
    if found.st_nlink > 1:
        raise StoreRefused(
            f"{path} has {found.st_nlink} hard links. Each name would get a lock of its own, and two owners would lose "
            "each other's writes: remove the other names."
        )
    if found.st_size == 0:
        raise StoreRefused(
            f"{path} is empty: a store was expected and its content is gone. Restore a backup; "
            "if it never held a store, delete it and start with create."
        )
    return False


def make_directory(path: Path) -> None:
    """Create the directories above the file, durably."""
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in missing:
            flush_directory(directory.parent)
    except OSError as error:
        raise StoreUnavailable(f"the directory of {path} can't be made: {error}") from error


def flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make(path: Path) -> None:
    """Build an empty store and put it in its place. Durable on return; the caller holds the lock."""
    draft = path.with_name(path.name + ".new")
    try:
        for leftover in ("", "-journal", "-wal", "-shm"):  # of a start that crashed here
            draft.with_name(draft.name + leftover).unlink(missing_ok=True)
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        _fill(draft)
        descriptor = os.open(draft, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.rename(path)
        flush_directory(path.parent)
    except (OSError, apsw.Error) as error:
        raise StoreUnavailable(f"no store could be made at {path}: {error}. Mend that and start again.") from error


def _fill(draft: Path) -> None:
    connection = apsw.Connection(os.fspath(draft), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.pragma("synchronous", "FULL")
        migrations.migrate(connection, 0, migrations.shipped())
        connection.executemany(
            "INSERT INTO meta (name, value) VALUES (?, ?)",
            [
                ("namespace", secrets.token_bytes(16)),
                ("incarnation", 0),
                ("mark_ms", 0),
                ("inode", draft.stat().st_ino),  # kept by the rename into place, and by no copy
            ],
        )
    finally:
        connection.close()


def connect(path: Path, *, writable: bool) -> apsw.Connection:
    """A connection with the settings that the promises rest on. Raises a `StoreError` for what is no database."""
    flags = apsw.SQLITE_OPEN_READWRITE if writable else apsw.SQLITE_OPEN_READONLY
    try:
        connection = apsw.Connection(os.fspath(path), flags=flags, statementcachesize=STATEMENTS_KEPT)
    except apsw.Error as error:
        raise explain(error, str(path), "opening") from error
    try:
        _set_up(connection, writable=writable)
    except apsw.NotADBError as error:
        connection.close()
        raise StoreRefused(f"{path} is not an SQLite database; nothing was changed. Name another file.") from error
    except apsw.Error as error:
        connection.close()
        raise explain(error, str(path), "opening") from error
    return connection


def _set_up(connection: apsw.Connection, *, writable: bool) -> None:
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    connection.pragma("foreign_keys", True)
    connection.pragma("trusted_schema", False)  # a prepared file must not run functions of its choice
    connection.pragma("cache_size", -32_768)
    if not writable:
        connection.pragma("query_only", True)
        connection.pragma("schema_version")  # reads the header, so that a foreign file shows here
        return
    connection.pragma("schema_version")
    connection.pragma("synchronous", "FULL")
    connection.pragma("wal_autocheckpoint", CHECKPOINT_PAGES)
    connection.pragma("journal_size_limit", WAL_KEPT_BYTES)


def use_wal(connection: apsw.Connection, path: Path) -> None:
    """Only after the file is known to be ours: this writes its header."""
    mode = connection.pragma("journal_mode", "WAL")
    if mode != "wal":
        raise StoreUnavailable(f"{path} can't keep a write-ahead log here (journal mode {mode}); use a local disk.")


def check(connection: apsw.Connection, path: Path, *, was_clean: bool) -> None:
    """Page by page for a small file or after a crash; a large one is only opened, and `audit` reads it all.

    A crash alone doesn't damage a file, so the check after one is a bounded precaution, not a part of recovery.
    """
    limit = CHECK_ALWAYS_BYTES if was_clean else CHECK_UNCLEAN_BYTES
    if path.stat().st_size > limit:
        return
    found = connection.execute("PRAGMA quick_check(1)").get
    if found != "ok":
        raise StoreCorrupt(f"{path} is damaged: {found}. Keep the file for study and restore a backup.")


def open_checked(path: Path, *, writable: bool) -> apsw.Connection:
    """Open what is there, judge it, bring it to the newest generation. Whatever is refused is left as it was."""
    log = path.with_name(path.name + "-wal")
    was_clean = not (log.exists() and log.stat().st_size)
    connection = connect(path, writable=writable)
    try:
        known = migrations.shipped()
        generation = migrations.check(connection, str(path), max(known))
        if writable:
            check(connection, path, was_clean=was_clean)
            use_wal(connection, path)
            migrations.migrate(connection, generation, known)
        elif generation < max(known):
            raise StoreRefused(
                f"{path} has schema generation {generation}, this program reads {max(known)}; "
                "start it once as the owner to bring the file up."
            )
    except (apsw.Error, UnicodeDecodeError, StoreError) as error:
        connection.close()
        if not isinstance(error, StoreError):
            raise explain(error, str(path), "opening") from error
        raise
    return connection
