"""SQL against a database file of the workspace: the whole of it takes effect, or the file stays as it was.

The statements run on a private copy, with its write-ahead log if it has one, where nobody can swap a path under SQLite;
the result replaces the file by rename. They can attach no other file and load no extension, so they reach nothing
outside.
"""

import shutil
import tempfile
import time
from pathlib import Path

from tidefast.sdk.replica.beneath import Root
from tidefast.sdk.replica.paths import Parts, spell
from tidefast.sdk.replica.refusals import NotDone, conflict
from tidefast.sdk.replica.staging import Change

DATABASE_BYTES_MAX = 256 * 2**20
LIMIT_S = 120.0
SIDES = ("-wal", "-shm", "-journal")
_STEPS = 10_000  # of SQLite's machine, between two looks at the clock


def migrate(root: Root, parts: Parts, sql: str) -> tuple[list[Change], int]:
    """What is to be written, and how many rows were changed. Writes nothing beneath the root. Raises `NotDone`."""
    folder = Path(tempfile.mkdtemp(prefix="tidefast-"))
    try:
        mode = _copy(root, parts, folder / "db")
        gone: list[Change] = []
        for side in SIDES:
            beside = (*parts[:-1], parts[-1] + side)
            if mode is not None and _copy(root, beside, folder / f"db{side}") is not None:
                gone.append(Change(beside, None))
        (folder / "db-shm").unlink(missing_ok=True)  # SQLite makes it anew from the log
        changes = _run(folder / "db", sql, spell(parts))
        # The log goes first: a log beside another database than its own would be played into it.
        return [*gone, Change(parts, (folder / "db").read_bytes(), mode or 0o644)], changes
    finally:
        shutil.rmtree(folder)


def _copy(root: Root, parts: Parts, to: Path) -> int | None:
    """Copy a file out; its mode, None if there is none. Raises `NotDone`."""
    try:
        with root.file(parts) as (fd, status):
            if status.st_size > DATABASE_BYTES_MAX:
                limit = DATABASE_BYTES_MAX
                raise NotDone("too_large", "file_too_large", f"{spell(parts)}: at most {limit} bytes", limit=limit)
            with open(fd, "rb", closefd=False) as source, to.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            return status.st_mode & 0o777
    except NotDone as refusal:
        if refusal.code == "not_found":
            return None
        raise


def _run(path: Path, sql: str, shown: str) -> int:
    import apsw  # here, because most replicas never need it

    until = time.monotonic() + LIMIT_S
    connection = apsw.Connection(str(path))
    try:
        connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 0)
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.set_authorizer(_authorizer)
        connection.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
        before = connection.total_changes()
        connection.execute(sql).fetchall()
        if connection.in_transaction:
            raise conflict("transaction_open", shown, "the statements leave a transaction open; end it with COMMIT")
        changes = connection.total_changes() - before
        connection.set_authorizer(None)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return changes
    except apsw.NotADBError as error:
        raise conflict("not_a_database", shown, "this is no SQLite database") from error
    except apsw.InterruptError as error:
        raise NotDone("timed_out", "timed_out", f"{shown}: not done after {LIMIT_S:.0f} s; nothing changed") from error
    except apsw.Error as error:
        raise conflict("sql_refused", shown, f"{error}; nothing changed") from error
    finally:
        connection.close(True)


def _authorizer(action: int, first: str | None, *more: str | None) -> int:
    import apsw

    outside = (apsw.SQLITE_ATTACH, apsw.SQLITE_DETACH)
    is_out = action in outside or (action == apsw.SQLITE_FUNCTION and "load_extension" in more)
    return apsw.SQLITE_DENY if is_out else apsw.SQLITE_OK
