"""Blobs in a SQLite file of their own, beside the store's.

Of their own, because contents are large and the log's flushes must not wait for them. A blob is a row and its pieces of
256 KiB; a large upload commits piece by piece without a flush, under a row that nobody finds, and the commit that names
its digest is flushed and with it all pieces before it. What a crash left half uploaded is removed at the next start.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from tidefast.stores.base import StoreCorrupt, StoreError, StoreRefused, StoreUnavailable
from tidefast.stores.blobs import PIECE_BYTES, BlobRefused
from tidefast.stores.sqlite_errors import explain
from tidefast.stores.sqlite_file import flush_directory

BLOB_BYTES_MAX = 2**30
APPLICATION_ID = 0x54696442  # "TidB"
PAGE_BYTES = 16_384
PAGES_AT_ONCE = 1_000
PIECE_BITS = 13  # pieces of one blob: 2**13 * 256 KiB is above the largest
BUSY_TIMEOUT_MS = 5_000
TOUCH_STEP_MS = 60_000  # a blob that was touched less than this ago isn't touched again

SCHEMA = """
CREATE TABLE blobs (
    blob_key INTEGER PRIMARY KEY, digest TEXT UNIQUE, size INTEGER NOT NULL, touched_ms INTEGER NOT NULL
) STRICT;
CREATE TABLE pieces (piece_key INTEGER PRIMARY KEY, content BLOB NOT NULL) STRICT;
CREATE INDEX blobs_touched ON blobs (touched_ms);
"""
KNOWN = "SELECT digest, touched_ms FROM blobs WHERE digest IN (SELECT value FROM json_each(?))"
TOUCH = "UPDATE blobs SET touched_ms = ? WHERE digest IN (SELECT value FROM json_each(?))"
NEW = "INSERT INTO blobs (digest, size, touched_ms) VALUES (?, ?, ?) RETURNING blob_key"
PIECE = "INSERT INTO pieces (piece_key, content) VALUES (?, ?)"
FIND = "SELECT blob_key, size FROM blobs WHERE digest = ?"
READ = "SELECT content FROM pieces WHERE piece_key = ?"
NAME = "UPDATE blobs SET digest = ?, size = ?, touched_ms = ? WHERE blob_key = ?"
DROP_PIECES = "DELETE FROM pieces WHERE piece_key >= ? AND piece_key < ?"
DROP = "DELETE FROM blobs WHERE blob_key = ?"
NAMELESS = "SELECT blob_key FROM blobs WHERE digest IS NULL"
UNTOUCHED = "SELECT digest FROM blobs WHERE touched_ms < ? AND digest > ? ORDER BY digest LIMIT ?"
HELD = "SELECT coalesce(sum(size), 0) FROM blobs WHERE digest IS NOT NULL"

_encode = msgspec.json.Encoder().encode


class SqliteBlobs:
    """See `BlobStore`. `bytes_max` bounds all contents together, 0 for no bound."""

    def __init__(self, path: Path, *, clock_ms: Callable[[], int], bytes_max: int = 0, is_reader: bool = False) -> None:
        """Open or make the file; with `is_reader` only read what another process owns.

        Raises `StoreRefused` for a file of another kind or a missing one, `StoreError` if it can't be used.
        """
        if is_reader and not path.is_file():
            raise StoreRefused(
                f"no contents at {path}; they lie beside the store. Put the file back, or ask the server."
            )
        self.path = path
        self._bytes_max = bytes_max
        self._clock_ms = clock_ms
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._failure: StoreError | None = None
        try:
            self._writer = None if is_reader else self._open()
            self._reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
            self._reader.set_busy_timeout(BUSY_TIMEOUT_MS)
        except apsw.NotADBError as error:
            raise StoreRefused(f"{path} is not an SQLite database; nothing was changed. Move it away.") from error
        except apsw.Error as error:
            raise explain(error, str(path), "opening") from error
        self._held = int(self._rows(HELD)[0][0])

    def _open(self) -> apsw.Connection:
        writer = apsw.Connection(str(self.path))
        writer.set_busy_timeout(BUSY_TIMEOUT_MS)
        if (
            writer.pragma("application_id") == 0
            and not writer.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
        ):
            writer.pragma("page_size", PAGE_BYTES)
            writer.pragma("journal_mode", "WAL")
            writer.pragma("synchronous", "FULL")
            with writer:
                writer.execute(SCHEMA)
                writer.pragma("application_id", APPLICATION_ID)
        if writer.pragma("application_id") != APPLICATION_ID:
            writer.close()
            raise StoreRefused(f"{self.path} is an SQLite database, but holds no contents of workspaces. Move it away.")
        writer.pragma("journal_mode", "WAL")
        writer.pragma("synchronous", "FULL")
        with writer:
            for (key,) in writer.execute(NAMELESS).fetchall():
                _drop(writer, int(str(key)))
        return writer

    def _rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with self._reading:
            try:
                return self._reader.execute(statement, values).fetchall()
            except apsw.Error as error:
                raise explain(error, str(self.path), "reading") from error

    def missing(self, digests: Iterable[str]) -> set[str]:
        asked, now_ms = set(digests), self._clock_ms()
        found = self._rows(KNOWN, _encode(sorted(asked)).decode())
        stale = [str(digest) for digest, touched_ms in found if int(touched_ms) < now_ms - TOUCH_STEP_MS]
        if stale and self._writer is not None:
            self._commit(lambda writer: writer.execute(TOUCH, (now_ms, _encode(stale).decode())), is_flushed=True)
        return asked - {str(digest) for digest, _ in found}

    def write(self, contents: Mapping[str, bytes]) -> None:
        for digest, content in contents.items():
            if hashlib.sha256(content).hexdigest() != digest:
                raise BlobRefused("mismatch", f"the content named {digest[:12]} has another digest")
        new = self.missing(contents)
        self._check_room(sum(len(contents[digest]) for digest in new))

        def insert(writer: apsw.Connection) -> None:
            for digest in sorted(new):
                if writer.execute(FIND, (digest,)).fetchall():
                    continue
                content = contents[digest]
                key = writer.execute(NEW, (digest, len(content), self._clock_ms())).get
                for n in range(0, len(content), PIECE_BYTES):
                    writer.execute(PIECE, (key << PIECE_BITS | n // PIECE_BYTES, content[n : n + PIECE_BYTES]))
                self._held += len(content)

        if new:
            self._commit(insert, is_flushed=True)

    def begin(self) -> "SqliteUpload":
        key = self._commit(lambda writer: writer.execute(NEW, (None, 0, self._clock_ms())).get, is_flushed=False)
        return SqliteUpload(self, int(key))

    def size(self, digest: str) -> int | None:
        found = self._rows(FIND, digest)
        return int(found[0][1]) if found else None

    def read(self, digest: str) -> Iterator[bytes]:
        found = self._rows(FIND, digest)
        if not found:
            raise KeyError(digest)
        key, size = int(found[0][0]), int(found[0][1])
        return self._pieces(digest, key, size)

    def _pieces(self, digest: str, key: int, size: int) -> Iterator[bytes]:
        for n in range((size + PIECE_BYTES - 1) // PIECE_BYTES):
            found = self._rows(READ, key << PIECE_BITS | n)
            if not found or not isinstance(found[0][0], bytes):
                raise StoreCorrupt(f"{self.path} has lost a piece of {digest}; restore a backup.")
            yield found[0][0]

    def untouched_since(self, at_ms: int, after: str, limit: int) -> Sequence[str]:
        return [str(digest) for (digest,) in self._rows(UNTOUCHED, at_ms, after, limit)]

    def delete(self, digests: Iterable[str]) -> None:
        def drop(writer: apsw.Connection) -> None:
            for digest in digests:
                found: list[Any] = writer.execute(FIND, (digest,)).fetchall()
                for key, size in found:
                    _drop(writer, key)
                    self._held -= size

        self._commit(drop, is_flushed=False)

    def close(self) -> None:
        with self._writing, self._reading:
            self._reader.close()
            if self._writer is not None:
                self._writer.close()

    def _check_room(self, more: int) -> None:
        if self._bytes_max and self._held + more > self._bytes_max:
            raise BlobRefused("full", f"the contents of all workspaces would take more than {self._bytes_max} bytes")

    def _commit(self, write: Callable[[apsw.Connection], Any], *, is_flushed: bool) -> Any:
        """One transaction. After one that failed nothing is taken any more: what a flush lost can't be known."""
        with self._writing:
            if self._failure is not None or self._writer is None:
                raise self._failure or StoreUnavailable(f"{self.path} is open for reading only.")
            try:
                self._writer.pragma("synchronous", "FULL" if is_flushed else "NORMAL")
                with self._writer:
                    written = write(self._writer)
                return written
            except apsw.Error as error:
                self._failure = explain(error, str(self.path), "committing to")
                raise self._failure from error


class SqliteUpload:
    """See `Upload`."""

    def __init__(self, blobs: SqliteBlobs, key: int) -> None:
        self._blobs, self._key = blobs, key
        self._sum = hashlib.sha256()
        self._buffer = bytearray()
        self._size = self._count = 0

    def append(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > BLOB_BYTES_MAX:
            raise BlobRefused("too_large", f"one content has at most {BLOB_BYTES_MAX} bytes")
        self._blobs._check_room(self._size)
        self._sum.update(piece)
        self._buffer += piece
        while len(self._buffer) >= PIECE_BYTES:
            self._put(bytes(self._buffer[:PIECE_BYTES]))
            del self._buffer[:PIECE_BYTES]

    def _put(self, piece: bytes) -> None:
        key = self._key << PIECE_BITS | self._count
        self._count += 1
        self._blobs._commit(lambda writer: writer.execute(PIECE, (key, piece)), is_flushed=False)

    def finish(self, digest: str) -> int:
        if self._sum.hexdigest() != digest:
            raise BlobRefused("mismatch", f"the content named {digest[:12]} has another digest")
        if self._buffer:
            self._put(bytes(self._buffer))

        def name(writer: apsw.Connection) -> None:
            if writer.execute(FIND, (digest,)).fetchall():
                _drop(writer, self._key)
            else:
                writer.execute(NAME, (digest, self._size, self._blobs._clock_ms(), self._key))
                self._blobs._held += self._size

        self._blobs._commit(name, is_flushed=True)
        return self._size

    def discard(self) -> None:
        self._blobs._commit(lambda writer: _drop(writer, self._key), is_flushed=False)


def _drop(writer: apsw.Connection, key: int) -> None:
    writer.execute(DROP_PIECES, (key << PIECE_BITS, (key + 1) << PIECE_BITS))
    writer.execute(DROP, (key,))


def contents_beside(store: Path) -> Path:
    """The file that holds the contents of a store's workspaces."""
    return store.with_name(store.name + ".contents")


def copy_contents(source: Path, target: Path) -> int:
    """Copy the contents beside one store to those beside another, served or not; 0 bytes if there are none.

    Durable on return. What is there is never overwritten. Taken after the store, a copy holds all that the store names.
    """
    old, new = contents_beside(source), contents_beside(target)
    if not old.is_file():
        return 0
    if new.exists():
        raise StoreRefused(f"{new} is there already; nothing was changed. Put it away, or name another file.")
    draft = new.with_name(new.name + ".new")
    draft.unlink(missing_ok=True)
    try:
        reader, writer = apsw.Connection(str(old), flags=apsw.SQLITE_OPEN_READONLY), apsw.Connection(str(draft))
        try:
            reader.set_busy_timeout(BUSY_TIMEOUT_MS)
            with writer.backup("main", reader, "main") as copying:
                while not copying.done:
                    copying.step(PAGES_AT_ONCE)
        finally:
            writer.close()
            reader.close()
        flush(draft)
        draft.rename(new)
        flush_directory(new.parent)
    except (OSError, apsw.Error) as error:
        raise StoreUnavailable(f"{old} could not be copied to {new}: {error}. Mend that and try again.") from error
    return new.stat().st_size


def flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
