"""A file system layer under SQLite that remembers every write and flush, and can fail at any of them.

From what it remembers `cut` builds the files as a power cut at that moment may leave them: what was flushed is there,
of each write since the last flush all, a part in sectors, or nothing.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from tidefast.stores import sqlite_file

SECTOR = 512


class Shim(apsw.VFS):
    """Passes everything to the real file system and notes (what, file, where, bytes)."""

    def __init__(self) -> None:
        self.name = f"shim-{id(self)}"
        self.log: list[tuple[str, str, int, bytes]] = []
        self.fail_at = 0  # the number of the write or flush that fails, and all after it if `for_good`
        self.for_good = False
        self.calls = 0
        super().__init__(self.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> "ShimFile":
        return ShimFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.log.append(("delete", Path(filename).name, 0, b""))
        super().xDelete(filename, syncdir)

    def step(self) -> None:
        self.calls += 1
        if self.fail_at and (self.calls == self.fail_at or (self.for_good and self.calls > self.fail_at)):
            raise apsw.IOError("planted")


class ShimFile(apsw.VFSFile):
    def __init__(self, shim: Shim, name: Any, flags: list[int]) -> None:
        self.shim = shim
        self.file = Path(name.filename() if hasattr(name, "filename") else str(name)).name
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        self.shim.step()
        self.shim.log.append(("write", self.file, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        self.shim.step()
        self.shim.log.append(("truncate", self.file, size, b""))
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        self.shim.step()
        self.shim.log.append(("sync", self.file, 0, b""))
        super().xSync(flags)


class SecondHandle:
    """The reader's end of the one connection; closing it leaves the writer's open."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def close(self) -> None:
        """The writer closes."""


@contextmanager
def under(shim: Shim, monkeypatch: pytest.MonkeyPatch, synchronous: str = "FULL", pages: int = 30) -> Iterator[None]:
    """Stores opened within use the shim: one connection for both ends, because a Python layer shares no memory map."""
    shared: list[apsw.Connection] = []

    def connect(path: Path, *, writable: bool) -> Any:
        if not writable:
            return SecondHandle(shared[-1])
        connection = apsw.Connection(
            str(path), flags=apsw.SQLITE_OPEN_READWRITE, vfs=shim.name, statementcachesize=sqlite_file.STATEMENTS_KEPT
        )
        connection.pragma("locking_mode", "EXCLUSIVE")
        sqlite_file._set_up(connection, writable=True)
        connection.pragma("synchronous", synchronous)
        connection.pragma("wal_autocheckpoint", pages)  # so that a short history holds several checkpoints
        shared.append(connection)
        return connection

    with monkeypatch.context() as patched:
        patched.setattr(sqlite_file, "connect", connect)
        yield


def cut(log: list[tuple[str, str, int, bytes]], start: dict[str, bytes], chance: random.Random) -> dict[str, bytes]:
    """The files after a power cut at the end of this log."""
    images = {name: bytearray(content) for name, content in start.items()}
    flushed = {
        name: max((at for at, op in enumerate(log) if op[:2] == ("sync", name)), default=-1) for name in names(log)
    }
    for at, (what, name, where, data) in enumerate(log):
        image = images.setdefault(name, bytearray())
        kept = at < flushed[name] or chance.random() < 0.5
        if what == "delete":
            images.pop(name)
        elif what == "truncate" and kept:
            del image[where:]
        elif what == "write" and kept:
            whole = at < flushed[name] or chance.random() < 0.5
            length = len(data) if whole else chance.randrange(0, len(data) + 1, SECTOR)
            image.extend(bytes(max(0, where + length - len(image))))
            image[where : where + length] = data[:length]
    return {name: bytes(image) for name, image in images.items()}


def names(log: list[tuple[str, str, int, bytes]]) -> set[str]:
    return {name for _, name, _, _ in log}
