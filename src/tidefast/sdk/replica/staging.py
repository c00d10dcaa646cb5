"""Half-written files, out of sight: what a verb writes gets its name by one rename, or never.

The stage is a directory of the replica's own in the root, so that a rename from it stays on one file system. What a
crash leaves there is removed at the next start; it never had a name that anybody reads.
"""

import itertools
import os
import shutil
import stat
from collections.abc import Sequence
from typing import NamedTuple

from tidefast.sdk.replica.beneath import Root, refuse_unless_plain
from tidefast.sdk.replica.paths import OWN_DIRECTORY, Parts, spell
from tidefast.sdk.replica.refusals import NotDone, told

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Change(NamedTuple):
    """One path of a plan: the bytes and permission bits it is to have; `content` None: it is to be gone."""

    parts: Parts
    content: bytes | None
    mode: int = 0o644


class Stage:
    """The directory for what isn't named yet. Empties it when it is opened."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._numbers = itertools.count(1)
        self.fd = self._open()
        for name in os.listdir(self.fd):
            self.clear(name)

    def _open(self) -> int:
        own = ensure_own(self._root)
        try:
            _make(own, "stage", 0o700)
            return os.open("stage", _DIRECTORY, dir_fd=own)
        finally:
            os.close(own)

    def again(self) -> None:
        """Make the directory anew if a command has removed it."""
        if os.fstat(self.fd).st_nlink == 0:
            os.close(self.fd)
            self.fd = self._open()

    def close(self) -> None:
        os.close(self.fd)

    def put(self, content: bytes, mode: int) -> str:
        """Content on the disk under a name of the stage. Durable on return. Raises `OSError`."""
        name = f"{next(self._numbers)}"
        fd = os.open(name, _NEW, 0o600, dir_fd=self.fd)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
            os.fsync(fd)
        except OSError:
            os.unlink(name, dir_fd=self.fd)
            raise
        finally:
            os.close(fd)
        return name

    def take(self, parent: int, last: str) -> str:
        """Move a directory out of the tree onto the stage; returns its name there. Raises `OSError`."""
        name = f"{next(self._numbers)}"
        os.rename(last, name, src_dir_fd=parent, dst_dir_fd=self.fd)
        return name

    def clear(self, name: str) -> None:
        """Remove something from the stage, a tree too. Raises `OSError`."""
        status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(name, dir_fd=self.fd)  # by descriptor, links are not followed
        else:
            os.unlink(name, dir_fd=self.fd)

    def replace(self, changes: Sequence[Change]) -> list[Parts]:
        """All of it or nothing, for whoever reads while we run; a crash may leave a part of several changes.

        A path has its old content or its new one at every moment. Durable on return; returns the directories that
        were made on the way. Raises `NotDone`.
        """
        undo = _Undo(self)
        try:
            names = [None if change.content is None else self._staged(undo, change) for change in changes]
            made: list[Parts] = []
            for change, name in zip(changes, names, strict=True):
                if name is not None:
                    made += self._ensure(undo, change.parts[:-1])
                self._swap(undo, change, name, is_lone=len(changes) == 1)
        except BaseException:
            undo.run()
            raise
        finally:
            undo.forget()
        return made

    def make_dirs(self, parts: Parts) -> list[Parts]:
        """Make a directory and what is missing above it; returns what was made. Durable on return. Raises `NotDone`."""
        undo = _Undo(self)
        try:
            return self._ensure(undo, parts)
        except BaseException:
            undo.run()
            raise

    def _staged(self, undo: "_Undo", change: Change) -> str:
        try:
            name = self.put(change.content or b"", change.mode)
        except OSError as error:
            raise told(error, spell(change.parts)) from error
        undo.staged.append(name)
        return name

    def _swap(self, undo: "_Undo", change: Change, name: str | None, *, is_lone: bool) -> None:
        with self._root.parent(change.parts) as (parent, last):
            try:
                status = _status(parent, last)
                if status is not None:
                    refuse_unless_plain(status, change.parts)
                    if not is_lone:
                        undo.keep(change.parts, parent, last)
                elif name is None:
                    raise FileNotFoundError(2, "nothing there")
                if name is None:
                    os.unlink(last, dir_fd=parent)
                else:
                    os.rename(name, last, src_dir_fd=self.fd, dst_dir_fd=parent)
                    if status is None:
                        undo.new.append(change.parts)
                os.fsync(parent)
            except OSError as error:
                raise told(error, spell(change.parts)) from error

    def _ensure(self, undo: "_Undo", parts: Parts) -> list[Parts]:
        made: list[Parts] = []
        for count in range(1, len(parts) + 1):
            with self._root.parent(parts[:count]) as (parent, last):
                try:
                    if _make(parent, last, 0o755):
                        made.append(parts[:count])
                        undo.dirs.append(parts[:count])
                        os.fsync(parent)
                except OSError as error:
                    raise told(error, spell(parts[:count])) from error
        with self._root.directory(parts):  # a file or a link in the way is told as what it is
            return made


class _Undo:
    """What puts a plan's paths back if a later one of them fails."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.staged: list[str] = []
        self.kept: list[tuple[Parts, str]] = []
        self.new: list[Parts] = []
        self.dirs: list[Parts] = []

    def keep(self, parts: Parts, parent: int, last: str) -> None:
        """A second name for the old content, so that it can be put back without space or reading."""
        name = f"{next(self._stage._numbers)}"
        os.link(last, name, src_dir_fd=parent, dst_dir_fd=self._stage.fd, follow_symlinks=False)
        self.kept.append((parts, name))

    def run(self) -> None:
        for parts, name in reversed(self.kept):
            with self._stage._root.parent(parts) as (parent, last):
                os.rename(name, last, src_dir_fd=self._stage.fd, dst_dir_fd=parent)
        for parts in reversed(self.new):
            with self._stage._root.parent(parts) as (parent, last):
                os.unlink(last, dir_fd=parent)
        for parts in reversed(self.dirs):
            with self._stage._root.parent(parts) as (parent, last):
                os.rmdir(last, dir_fd=parent)

    def forget(self) -> None:
        """Drop what is left on the stage."""
        for name in (*self.staged, *(name for _, name in self.kept)):
            try:
                os.unlink(name, dir_fd=self._stage.fd)
            except FileNotFoundError:
                continue


def ensure_own(root: Root) -> int:
    """A descriptor of the replica's own directory in the root, made if it isn't there. Raises `OSError`, `NotDone`."""
    _make(root.fd, OWN_DIRECTORY, 0o700)
    fd = os.open(OWN_DIRECTORY, _DIRECTORY, dir_fd=root.fd)
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise NotDone("conflict", "not_ours", f"{OWN_DIRECTORY} belongs to another user; remove it, or use another one")
    return fd


def _make(parent: int, name: str, mode: int) -> bool:
    try:
        os.mkdir(name, mode, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def _status(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
