"""Files that hold a secret: the key that signs lease tokens, and the operator's key.

A secret is 32 random bytes, written as 64 hex digits. Of the secrets that sign tokens a file may hold several, one a
line, the newest last: that is how one is replaced while leases that the older ones signed are live. The file is made
with mode 0600 under a temporary name, flushed, and linked into place, so that a crash leaves either no file or a whole
one. A file that others can read, that is too short, or that holds a secret everybody knows is refused with a message
that says how to make a good one.
"""

import os
import secrets
import stat
from pathlib import Path

SECRET_LENGTH = 32
_FILE_LENGTH_MAX = 4096


class SecretRefused(Exception):
    """The secret file can't be used. The message says which file, why, and what to do; it holds no part of it."""


def read_or_make(path: Path) -> bytes:
    """The only secret in this file, made at first use. Raises `SecretRefused`."""
    return _only(path, read_all_or_make(path))


def read_all_or_make(path: Path) -> tuple[bytes, ...]:
    """The secrets in this file, the newest last; one is made at first use. Raises `SecretRefused`."""
    try:
        return read_all(path)
    except FileNotFoundError:
        pass
    try:
        _make(path)
    except OSError as error:
        raise SecretRefused(f"{path}: the secret can't be written: {error.strerror}; check the folder") from error
    return read_all(path)


def read(path: Path) -> bytes:
    """The only secret in this file. Raises `SecretRefused`, and `FileNotFoundError` if there is none."""
    return _only(path, read_all(path))


def _only(path: Path, found: tuple[bytes, ...]) -> bytes:
    if len(found) != 1:
        raise SecretRefused(f"{path}: {len(found)} secrets where one is expected; keep one line")
    return found[0]


def read_all(path: Path) -> tuple[bytes, ...]:
    """The secrets in this file, one a line, the newest last. Raises `SecretRefused`, and `FileNotFoundError`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SecretRefused(f"{path}: the secret can't be read: {error.strerror}") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise SecretRefused(f"{path}: not a plain file; name a file that holds 64 hex digits")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise SecretRefused(f"{path}: others may read it (mode {mode:04o}); run: chmod 600 {path}")
        text = os.read(handle, _FILE_LENGTH_MAX)
    finally:
        os.close(handle)
    lines = [line for line in text.splitlines() if line.strip()] or [b""]
    return tuple(_parse(path, line) for line in lines)


def _parse(path: Path, text: bytes) -> bytes:
    hint = f"remove it and start again, or make one: (umask 077; openssl rand -hex 32 > {path})"
    try:
        secret = bytes.fromhex(text.decode("ascii").strip())
    except ValueError as error:
        raise SecretRefused(f"{path}: not 64 hex digits; {hint}") from error
    if len(secret) != SECRET_LENGTH:
        raise SecretRefused(f"{path}: {len(secret)} bytes, {SECRET_LENGTH} are needed; {hint}")
    if len(set(secret)) < 8 or secret == bytes(range(SECRET_LENGTH)):  # random bytes: never, for all practical purposes
        raise SecretRefused(f"{path}: a secret that anyone can guess; {hint}")
    return secret


def _make(path: Path) -> None:
    """Write a new secret, durable before it is used. If another process was first, its secret stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, secrets.token_hex(SECRET_LENGTH).encode() + b"\n")
        os.fsync(handle)
    finally:
        os.close(handle)
    try:
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(fresh)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
