"""What a power cut may leave of a directory: every call that changes it is noted, and the disk is built anew from them.

Data of a file that wasn't flushed may be there, in part (up to any byte, or as zeros), or not at all. Names follow the
calls on their directory in order, up to any of them after its last flush; a rename between two directories may have
reached one of them or both.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Key = tuple[int, int]  # device and inode


@dataclass
class File:
    """The bytes of a file as they are, and as they were flushed."""

    now: bytearray = field(default_factory=bytearray)
    flushed: bytes | None = None  # None: never

    def copy(self) -> "File":
        return File(bytearray(self.now), self.flushed)


@dataclass
class Folder:
    """The names in a directory that are flushed, and what was done to it since: (name, what it names now)."""

    names: dict[str, Key] = field(default_factory=dict)
    since: list[tuple[str, Key | None]] = field(default_factory=list)

    def now(self) -> dict[str, Key]:
        return after(self.names, self.since)

    def copy(self) -> "Folder":
        return Folder(dict(self.names), list(self.since))


def after(names: dict[str, Key], done: list[tuple[str, Key | None]]) -> dict[str, Key]:
    found = dict(names)
    for name, key in done:
        if key is None:
            found.pop(name, None)
        else:
            found[name] = key
    return found


Disk = dict[Key, File | Folder]


class Recorder:
    """The disk as a cut would find it, after each call. Starts with everything below the top flushed."""

    def __init__(self, top: Path) -> None:
        self.top = key_of(top)
        self.disk: Disk = {}
        self.states: list[tuple[str, Disk]] = []
        self._load(top)

    def _load(self, path: Path) -> None:
        folder = Folder()
        for item in path.iterdir():
            folder.names[item.name] = key_of(item)
            if item.is_dir():
                self._load(item)
            else:
                content = item.read_bytes()
                self.disk[key_of(item)] = File(bytearray(content), content)
        self.disk[key_of(path)] = folder

    def note(self, what: str) -> None:
        self.states.append((what, {key: item.copy() for key, item in self.disk.items()}))

    def file(self, fd: int) -> File:
        item = self.disk.setdefault(key_of(fd), File())
        assert isinstance(item, File)
        return item

    def folder(self, fd: int) -> Folder:
        item = self.disk.setdefault(key_of(fd), Folder())
        assert isinstance(item, Folder)
        return item


def key_of(place: Any) -> Key:
    status = os.fstat(place) if isinstance(place, int) else os.stat(place)
    return status.st_dev, status.st_ino


@contextmanager
def recording(top: Path, monkeypatch: pytest.MonkeyPatch, *, without: str = "") -> Iterator[Recorder]:
    """Note what the calls of this block do below `top`. `without`: a mutant that leaves out a kind of flush."""
    seen = Recorder(top)
    names = ("open", "write", "fsync", "rename", "unlink", "mkdir", "link")
    real = {name: getattr(os, name) for name in names}

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = real["open"](path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT and dir_fd is not None and key_of(fd) not in seen.disk:
            seen.file(fd)
            seen.folder(dir_fd).since.append((path, key_of(fd)))
            seen.note(f"create {path}")
        elif flags & os.O_TRUNC and key_of(fd) in seen.disk:
            seen.file(fd).now.clear()
        return int(fd)

    def wrote(fd: int, data: Any) -> int:
        count = real["write"](fd, data)
        if key_of(fd) in seen.disk:
            seen.file(fd).now += bytes(data[:count])
            seen.note("write")
        return int(count)

    def flushed(fd: int) -> None:
        item = seen.disk.get(key_of(fd))
        kind = "file" if isinstance(item, File) else "directory"
        if without == kind:
            return
        real["fsync"](fd)
        if isinstance(item, File):
            item.flushed = bytes(item.now)
        elif item is not None:
            item.names, item.since = item.now(), []
        seen.note(f"flush of a {kind}")

    def renamed(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        key = seen.folder(src_dir_fd).now()[old]
        real["rename"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        seen.folder(dst_dir_fd).since.append((new, key))
        seen.folder(src_dir_fd).since.append((old, None))
        seen.note(f"rename {old} {new}")

    def unlinked(name: Any, *, dir_fd: int | None = None) -> None:
        real["unlink"](name, dir_fd=dir_fd)
        if dir_fd is None or key_of(dir_fd) not in seen.disk:
            return  # a temporary file elsewhere
        seen.folder(dir_fd).since.append((name, None))
        seen.note(f"unlink {name}")

    def made(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real["mkdir"](name, mode, dir_fd=dir_fd)
        if dir_fd is None:
            return  # a temporary directory elsewhere
        fd = real["open"](name, os.O_RDONLY, dir_fd=dir_fd)
        seen.disk[key_of(fd)] = Folder()
        seen.folder(dir_fd).since.append((name, key_of(fd)))
        os.close(fd)
        seen.note(f"mkdir {name}")

    def linked(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool) -> None:
        real["link"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        seen.folder(dst_dir_fd).since.append((new, seen.folder(src_dir_fd).now()[old]))
        seen.note(f"link {old} {new}")

    with monkeypatch.context() as patched:
        for name, call in {
            "open": opened, "write": wrote, "fsync": flushed, "rename": renamed, "unlink": unlinked, "mkdir": made,
            "link": linked,
        }.items():  # fmt: skip
            patched.setattr(os, name, call)
        yield seen


def cut(seen: Recorder, state: Disk, chance: random.Random, to: Path) -> None:
    """Build below `to` what a power cut in this state may leave."""
    _build(state, seen.top, chance, to, {})


def _build(state: Disk, key: Key, chance: random.Random, to: Path, made: dict[Key, bytes]) -> None:
    folder = state[key]
    assert isinstance(folder, Folder)
    to.mkdir(parents=True, exist_ok=True)
    for name, inside in after(folder.names, folder.since[: chance.randint(0, len(folder.since))]).items():
        item = state.get(inside)
        if isinstance(item, Folder):
            _build(state, inside, chance, to / name, made)
        elif item is not None:
            (to / name).write_bytes(made.setdefault(inside, _left(item, chance)))


def _shared(a: bytes, b: bytes) -> int:
    """How many bytes two contents begin with in common."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _left(file: File, chance: random.Random) -> bytes:
    """What may be left of a file's bytes."""
    now = bytes(file.now)
    if file.flushed == now:
        return now
    kept = file.flushed or b""
    kind = chance.randint(0, 3)
    if kind == 0:
        return kept
    if kind == 1:
        return now
    at = chance.randint(_shared(kept, now), len(now))  # what was flushed isn't lost
    return now[:at] if kind == 2 else now[:at] + b"\0" * (len(now) - at)
