"""Opening what lies beneath a root, by descriptor.

A check of a path's text, or of its `realpath`, is over before the open: whoever swaps a directory for a link in between
wins. So nothing here resolves a name twice. `openat2` refuses links and ways out inside the kernel; where it isn't
there (before Linux 5.6, or filtered away), each part is opened relative to its parent's descriptor without following
links. Every verb then works on descriptors and on one last name in a directory that is open.

What this can't do is stop a process with rights outside the root from moving an open directory there.
"""

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from tidefast.sdk.replica.paths import Parts, spell
from tidefast.sdk.replica.refusals import NotDone, conflict, told

RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x02, 0x04, 0x08
_RESOLVE = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
_SYS_OPENAT2 = 437  # the same on every architecture that is younger than Alpha
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276, "riscv64": 276, "ppc64le": 357, "s390x": 347}
RENAME_NOREPLACE = 1
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # a pipe without a writer must not hang us
_AGAIN = 32  # the kernel gives up an open that raced with a rename

_libc = ctypes.CDLL(None, use_errno=True)


def has_openat2() -> bool:
    """Whether this kernel, and what filters our calls, lets `openat2` through."""
    if not hasattr(_libc, "syscall") or platform.machine() == "alpha":
        return False
    try:
        os.close(_openat2(-100, b".", os.O_PATH | os.O_CLOEXEC, 0))  # AT_FDCWD
    except OSError:
        return False
    return True


class Root:
    """A directory and what lies beneath it. `close` it in the end."""

    def __init__(self, path: str | os.PathLike[str], *, use_openat2: bool | None = None) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.uses_openat2 = has_openat2() if use_openat2 is None else use_openat2

    def close(self) -> None:
        os.close(self.fd)

    def open(self, parts: Parts, flags: int, mode: int = 0) -> int:
        """A descriptor of what the parts name; no link is followed. Raises `OSError`."""
        if not parts:
            return os.open(".", flags | os.O_CLOEXEC, dir_fd=self.fd)
        if self.uses_openat2:
            # Without O_NOFOLLOW, which would call a link in the last place no directory.
            return _openat2(self.fd, os.fsencode("/".join(parts)), (flags | os.O_CLOEXEC) & ~os.O_NOFOLLOW, mode)
        return self._step_by_step(parts, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    @contextmanager
    def directory(self, parts: Parts) -> Iterator[int]:
        """The descriptor of a directory. Raises `NotDone`."""
        try:
            fd = self.open(parts, _DIRECTORY)
        except OSError as error:
            raise self._why(error, parts) from error
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def parent(self, parts: Parts) -> Iterator[tuple[int, str]]:
        """The open directory that a name is in, and the name. Raises `NotDone`."""
        with self.directory(parts[:-1]) as fd:
            yield fd, parts[-1]

    @contextmanager
    def file(self, parts: Parts, *, is_lone: bool = True) -> Iterator[tuple[int, os.stat_result]]:
        """A regular file to read; `is_lone`: which no other name leads to. Raises `NotDone`."""
        try:
            fd = self.open(parts, os.O_RDONLY | _FILE)
        except OSError as error:
            raise self._why(error, parts) from error
        try:
            status = os.fstat(fd)
            refuse_unless_plain(status, parts, is_lone=is_lone)
            yield fd, status
        finally:
            os.close(fd)

    def open_to_read(self, parts: Parts) -> int:
        """A descriptor of a directory or a regular file. Raises `NotDone`."""
        try:
            fd = self.open(parts, os.O_RDONLY | _FILE)
        except OSError as error:
            raise self._why(error, parts) from error
        status = os.fstat(fd)
        if not stat.S_ISDIR(status.st_mode):
            try:
                refuse_unless_plain(status, parts)
            except NotDone:
                os.close(fd)
                raise
        return fd

    def status(self, parts: Parts) -> os.stat_result:
        """What stands at a path, a link being itself. Raises `NotDone`."""
        try:
            fd = self.open(parts[:-1], _DIRECTORY)
            try:
                return os.stat(parts[-1] if parts else ".", dir_fd=fd, follow_symlinks=False)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._why(error, parts) from error

    def _why(self, error: OSError, parts: Parts) -> NotDone:
        """The refusal for a failed open. Step by step a link looks like a file: look again, for the text alone."""
        if error.errno == errno.ENOTDIR and not self.uses_openat2 and self._has_link(parts):
            error = OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return told(error, spell(parts) or ".")

    def _has_link(self, parts: Parts) -> bool:
        for count in range(1, len(parts) + 1):
            try:
                fd = self._step_by_step(parts[:count], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, 0)
            except OSError:
                return False
            try:
                if stat.S_ISLNK(os.fstat(fd).st_mode):
                    return True
            finally:
                os.close(fd)
        return False

    def _step_by_step(self, parts: Parts, flags: int, mode: int) -> int:
        fd = self.fd
        try:
            for part in parts[:-1]:
                above, fd = fd, os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                if above != self.fd:
                    os.close(above)
            return os.open(parts[-1], flags, mode, dir_fd=fd)
        finally:
            if fd != self.fd:
                os.close(fd)


def refuse_unless_plain(status: os.stat_result, parts: Parts, *, is_lone: bool = True) -> None:
    """Refuse all but a regular file, by default with one name. Raises `NotDone`."""
    path = spell(parts)
    if stat.S_ISDIR(status.st_mode):
        raise conflict("is_a_directory", path, "a directory stands there")
    if stat.S_ISLNK(status.st_mode):
        raise conflict("path_is_link", path, "a symbolic link stands there")
    if not stat.S_ISREG(status.st_mode):
        raise conflict("not_a_file", path, "a pipe, socket or device stands there")
    if is_lone and status.st_nlink > 1:
        raise conflict("hard_link", path, "the file has another name, perhaps outside")


def rename_new(from_fd: int, name: str, to_fd: int, new_name: str) -> None:
    """Rename, and fail if the new name is taken. Raises `OSError`."""
    number = _RENAMEAT2.get(platform.machine())
    if number is not None:
        result = _libc.syscall(number, from_fd, os.fsencode(name), to_fd, os.fsencode(new_name), RENAME_NOREPLACE)
        if result == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):  # EINVAL: a file system without the flag, or into itself
            raise OSError(code, os.strerror(code))
    if _stands(to_fd, new_name):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.rename(name, new_name, src_dir_fd=from_fd, dst_dir_fd=to_fd)


def _stands(fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _openat2(fd: int, path: bytes, flags: int, mode: int) -> int:
    how = struct.pack("QQQ", flags, mode, _RESOLVE)
    for _ in range(_AGAIN):
        result: int = _libc.syscall(_SYS_OPENAT2, fd, path, how, len(how))
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(code, os.strerror(code))
