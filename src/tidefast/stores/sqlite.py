"""The store of one host: one SQLite file, one owner process.

A batch is one transaction in a write-ahead log that is flushed at COMMIT (`synchronous=FULL`), so what `commit`
returned from survives a power cut. After a failed commit this object refuses every further one: an fsync that failed
may have thrown the pages away, and a retry could acknowledge what isn't there.

Two connections: the writer's, and a read-only one for the event loop, so that a read never waits for a flush. Each has
a lock, because one connection must not be used by two threads at once.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw

from tidefast.protocol.answers import JournalEntry
from tidefast.protocol.budget import Budget
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.notices import Notice
from tidefast.protocol.records import MUTATING, RunHead, Step
from tidefast.stores import sqlite_file, sqlite_workspaces
from tidefast.stores import sqlite_rows as rows
from tidefast.stores.base import (
    JOURNAL_ENTRY_BYTES,
    MARK_STEP_MS,
    RUN_KEY_MAX,
    Batch,
    Identity,
    StoreCorrupt,
    StoredEvent,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    utf8_length,
)
from tidefast.stores.sqlite_errors import explain
from tidefast.stores.sqlite_file import FileLock, Owner
from tidefast.stores.sqlite_recovery import close_window, open_window, read_window
from tidefast.stores.sqlite_workspaces import SqliteWorkspaces


class SqliteStore(SqliteWorkspaces):
    """See `Store`. Built by `open` or `open_read_only`; `close` gives the file back."""

    def __init__(self, path: Path, lock: FileLock | None, writer: apsw.Connection | None, reader: apsw.Connection):
        self.path = path
        self._lock = lock
        self._writer = writer
        self._reader = reader
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._failure: StoreError | None = None
        self._identity = self._read_identity()

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, create: bool, adopt: bool = False, wall_ms: int = 0
    ) -> "SqliteStore":
        """Own the file at `path`, and make it first if `create` is true and there is none.

        Raises `StoreRefused` if it is missing, empty, foreign, newer, owned, or a copy that was not adopted, and
        `StoreCorrupt` if it is damaged. With `adopt` a copy becomes a store of its own: its incarnation is raised, so
        that every token of the original is refused and every new epoch is above all that the original can have issued,
        and its recovery window is open, as of the wall clock given.
        """
        real = sqlite_file.real_path(path)
        is_missing = sqlite_file.refuse_unless_store(real, create=create)
        if is_missing:
            sqlite_file.make_directory(real)
        lock = FileLock.take(real)
        try:
            # Looked at again under the lock: another process may have made it meanwhile.
            if sqlite_file.refuse_unless_store(real, create=create):
                sqlite_file.make(real)
            store = cls._opened(real, lock)
        except BaseException:
            lock.release()
            raise
        try:
            store._settle_place(real.stat().st_ino, adopt, wall_ms)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open_read_only(cls, path: str | os.PathLike[str]) -> "SqliteStore":
        """Read the file at `path`, whether or not a process owns it. `commit` raises."""
        real = sqlite_file.real_path(path)
        sqlite_file.refuse_unless_store(real, create=False)
        return cls._opened(real, None)

    @classmethod
    def _opened(cls, path: Path, lock: FileLock | None) -> "SqliteStore":
        writer = sqlite_file.open_checked(path, writable=True) if lock is not None else None
        try:
            reader = sqlite_file.open_checked(path, writable=False)
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        try:
            return cls(path, lock, writer, reader)
        except BaseException:
            reader.close()
            if writer is not None:
                writer.close()
            raise

    @staticmethod
    def owner(path: str | os.PathLike[str]) -> Owner | None:
        """The process that owns the file at `path` now; None if none does."""
        return sqlite_file.owner_of(sqlite_file.real_path(path))

    def announce(self, url: str) -> None:
        """Tell other processes where this owner can be reached."""
        if self._lock is not None:
            self._lock.announce(url)

    def _read_identity(self) -> Identity:
        meta = dict(self._all(rows.META))
        namespace, incarnation, mark_ms = meta.get("namespace"), meta.get("incarnation"), meta.get("mark_ms")
        if not isinstance(namespace, bytes) or not isinstance(incarnation, int) or not isinstance(mark_ms, int):
            raise StoreCorrupt(f"{self.path} has lost its namespace, incarnation or mark; restore a backup.")
        try:
            return Identity(namespace, incarnation, mark_ms, read_window(meta.get("recovery")))
        except (ValueError, TypeError) as error:
            raise StoreCorrupt(f"{self.path} has a recovery window that can't be read ({error}).") from error

    def _settle_place(self, inode: int, adopt: bool, wall_ms: int) -> None:
        """Refuse a file that was copied or restored, or make it a store of its own."""
        known = dict(self._all(rows.META)).get("inode")
        if known == inode or self._writer is None:
            return
        if not adopt:
            raise StoreRefused(
                f"{self.path} is a copy: the file was copied or restored since it was made, and the original may still "
                "be served, or may have promised more than this copy holds. If the original is gone for good and this "
                "copy is whole, say so once: `tidefast adopt --store FILE`."
            )
        self.open_window(wall_ms)

    def open_window(self, wall_ms: int) -> None:
        """Commits of this store may be lost: raise the incarnation, and open the window for their lost intents."""
        with self._writing:
            self._identity = open_window(self._owned(), self.path, self.path.stat().st_ino, wall_ms)

    def close_window(self, by: str, note: str, wall_ms: int) -> None:
        """Close that window: an operator says that nothing was lost, or has looked at all of it."""
        with self._writing:
            close_window(self._owned(), self.path, by, note, wall_ms)
            self._identity = self._identity._replace(recovery=None)

    def _owned(self) -> apsw.Connection:
        if self._writer is None:
            raise StoreUnavailable(f"{self.path} is open for reading only, or closed; nothing was written.")
        return self._writer

    # --- reads ------------------------------------------------------------------------------------------------------

    def _all(self, statement: str, *values: object) -> list[Any]:
        with self._reading:
            try:
                return self._reader.execute(statement, values).fetchall()
            except apsw.Error as error:
                raise explain(error, str(self.path), "reading") from error

    def _one(self, statement: str, *values: object) -> rows.Row | None:
        found = self._all(statement, *values)
        return found[0] if found else None

    def identity(self) -> Identity:
        return self._identity

    def first_fault(self) -> str:
        """The first page or index that is damaged, in SQLite's words; empty if none is. Reads the whole file."""
        found = str(self._all("PRAGMA quick_check(1)")[0][0])
        return "" if found == "ok" else found

    def run_key_max(self) -> int:
        return int(max(self._all(rows.RUN_KEY_MAX)[0][0], self._all(sqlite_workspaces.KEY_MAX)[0][0]))

    def load_head(self, run_id: RunId) -> tuple[int, RunHead] | None:
        row = self._one(rows.HEAD, run_id)
        return None if row is None else (row[0], rows.decode_head(row[1]))

    def _busy_heads(self) -> list[tuple[int, RunHead]]:
        return [(key, rows.decode_head(record)) for key, record in self._all(rows.BUSY_HEADS)]

    def live_heads(self) -> Sequence[tuple[int, RunHead]]:
        return [(key, head) for key, head in self._busy_heads() if head.is_live]

    def fenced_runs(self) -> Sequence[RunId]:
        return [head.run_id for _, head in self._busy_heads() if any(step.state == "fenced" for step in head.open)]

    def load_step(self, run_key: int, step_id: StepId) -> Step | None:
        row = self._one(rows.STEP, run_key, step_id)
        return None if row is None else rows.step_of(row)

    def step_ids(self, run_key: int, limit: int) -> Sequence[StepId]:
        return [StepId(step_id) for (step_id,) in self._all(rows.STEP_IDS, run_key, limit)]

    def forgotten(self, run_key: int, since_seq: int, epoch: Epoch) -> Sequence[StepId]:
        found = self._all(rows.FORGOTTEN, run_key, since_seq, epoch)
        return [StepId(step_id) for step_id, effect in found if effect in MUTATING]

    def effects(self, run_key: int) -> Sequence[StepId]:
        return [StepId(step_id) for step_id, effect in self._all(rows.EFFECTS, run_key) if effect in MUTATING]

    def load_contract(self, digest: str) -> str | None:
        row = self._one(rows.CONTRACT, digest)
        return None if row is None else str(row[0])

    def load_budget(self, name: str) -> Budget | None:
        row = self._one(rows.BUDGET, name)
        return None if row is None else rows.decode_budget(row[0])

    def budgets(self, after: str, limit: int) -> Sequence[Budget]:
        return [rows.decode_budget(record) for (record,) in self._all(rows.BUDGETS, after, limit)]

    def load_event(self, run_key: int, seq: int) -> StoredEvent | None:
        row = self._one(rows.EVENT, rows.event_key(run_key, seq))
        return None if row is None else rows.event_of(row)

    def load_events(self, run_key: int, after: int, limit: int) -> Sequence[StoredEvent]:
        first, last = rows.event_key(run_key, after), rows.event_key(run_key, rows.SEQ_MAX)
        return [rows.event_of(row) for row in self._all(rows.EVENTS, first, last, limit)]

    def load_steps(self, run_key: int, after: StepId | None, limit: int) -> Sequence[Step]:
        return [rows.step_of(row) for row in self._all(rows.STEPS, run_key, after or "", limit)]

    def journal(self, run_key: int, after: int, bytes_max: int) -> tuple[Sequence[JournalEntry], int]:
        found: list[rows.Row] = []
        size, go_on = 0, 0
        with self._reading:
            try:
                cursor = self._reader.execute(rows.JOURNAL, (run_key, after))
                for row in cursor:
                    size += JOURNAL_ENTRY_BYTES + utf8_length(row[8])
                    if found and size > bytes_max:
                        cursor.close()  # an open statement would keep the log from being folded into the file
                        go_on = found[-1][6]
                        break
                    found.append(row)
            except apsw.Error as error:
                raise explain(error, str(self.path), "reading") from error
        return [JournalEntry(*row) for row in found], go_on

    def claimable(
        self, agents: Mapping[str, Sequence[str]], now_ms: int, limit: int, prefix: str = ""
    ) -> Sequence[RunId]:
        found: list[tuple[int, str]] = []
        for agent, versions in agents.items():
            names = rows.encode(list(versions)).decode()
            found += self._all(rows.CLAIMABLE, agent, now_ms, not versions, names, prefix, prefix, limit)
        return [RunId(run_id) for _, run_id in sorted(found)[:limit]]

    def probing(self, now_ms: int, limit: int) -> Sequence[RunId]:
        return [RunId(run_id) for (run_id,) in self._all(rows.PROBING, now_ms, limit)]

    def runs(self, after: RunId | None, limit: int, state: str | None, prefix: str = "") -> Sequence[RunHead]:
        key = self._key_after(after)
        if state is None:
            found = self._all(rows.RUNS, key, prefix, prefix, limit)
        elif state == "leased":
            found = self._all(rows.RUNS_LEASED, key, prefix, prefix, limit)
        else:
            found = self._all(rows.RUNS_OF_STATE, state, key, prefix, prefix, limit)
        return [rows.decode_head(row[0]) for row in found]

    def held_runs(self, after: RunId | None, limit: int, prefix: str = "") -> Sequence[RunHead]:
        found = self._all(rows.RUNS_HELD, self._key_after(after), prefix, prefix, limit)
        return [rows.decode_head(row[0]) for row in found]

    def _key_after(self, after: RunId | None) -> int:
        """The key behind which a page begins; above all keys if the run named is unknown."""
        row = None if after is None else self._one(rows.RUN_KEY, after)
        return 0 if after is None else RUN_KEY_MAX if row is None else int(row[0])

    # --- the one door that writes -----------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        """Make a batch durable in one flushed transaction.

        Raises `StoreUnavailable` if that can't be known and `StoreCorrupt` if the file contradicts the batch; after
        either one this store takes no further batch.
        """
        with self._writing:
            writer = self._owned()
            if self._failure is not None:
                raise StoreUnavailable(
                    f"{self.path} takes no further batch after a failed commit; restart this process."
                ) from self._failure
            events = [rows.event_row(stored) for stored in batch.events]
            heads = [rows.head_row(key, head) for key, head in batch.heads.items()]
            steps = [rows.step_row(key, step) for (key, _), step in batch.steps.items()]
            budgets = [rows.budget_row(budget) for budget in batch.budgets.values()]
            notices = [notice for notice in batch.notices.values() if notice is not None]
            told = [name for name, notice in batch.notices.items() if notice is None]
            mark_ms = batch.mark_ms if batch.mark_ms >= self._identity.mark_ms + MARK_STEP_MS else 0
            try:
                writer.execute("BEGIN IMMEDIATE")
                rows.WRITE_RUNS.run(writer, heads)
                rows.WRITE_EVENTS.run(writer, events)
                rows.WRITE_STEPS.run(writer, steps)
                rows.WRITE_CONTRACTS.run(writer, list(batch.contracts.items()))
                if batch.workspaces or batch.pruned:
                    sqlite_workspaces.write(writer, batch.workspaces, batch.writes, batch.pruned)
                rows.WRITE_BUDGETS.run(writer, budgets)
                rows.WRITE_NOTICES.run(writer, notices)
                if told:
                    writer.execute(rows.DELETE_NOTICES, (rows.encode(told).decode(),))
                if mark_ms:
                    writer.execute(rows.WRITE_MARK, (mark_ms,))
                writer.execute("COMMIT")
            except Exception as error:
                self._failure = explain(error, str(self.path), "committing to")
                self._roll_back(writer)
                raise self._failure from error
            if mark_ms:
                self._identity = self._identity._replace(mark_ms=mark_ms)

    def notices(self, due_ms: int, limit: int) -> Sequence[Notice]:
        return [Notice(*row) for row in self._all(rows.NOTICES, due_ms, limit)]

    def _roll_back(self, writer: apsw.Connection) -> None:
        """Leave no transaction open, and write nothing more: not even the checkpoint that closing would make."""
        try:
            writer.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            if writer.in_transaction:
                writer.execute("ROLLBACK")
        except apsw.Error as error:
            if self._failure is not None:
                self._failure.add_note(f"and it could not be rolled back: {error}")

    def close(self) -> None:
        """Fold the write-ahead log into the file and give up the ownership. Closing twice is harmless."""
        with self._writing, self._reading:
            writer, self._writer = self._writer, None
            lock, self._lock = self._lock, None
            try:
                self._reader.close()
                if writer is not None:
                    self._fold(writer)
                    writer.close()
            except apsw.Error as error:
                raise explain(error, str(self.path), "closing") from error
            finally:
                if lock is not None:
                    lock.release()

    def _fold(self, writer: apsw.Connection) -> None:
        if self._failure is not None:
            return
        try:
            writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.BusyError:
            return  # another process reads just now; the log stays beside the file, and the next owner folds it
