"""The file of keys: who may call this server. TOML, one table per key, digests only.

    [keys.shop-worker]
    role = "worker"
    sha256 = "…"            # of the key; the key itself is told once, when it is made
    runs = "shop-*"         # the runs it may see and touch; all, if left out

`keys add` appends a table and `keys revoke` takes one out; everything else in the file stays as it is. A change is
written beside the file and renamed into place, under a lock on the folder, so that two of them don't lose one another.
A running server reads the file again at SIGHUP; a file that can't be used then changes nothing.
"""

import fcntl
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidefast.protocol.ids import is_id
from tidefast.server.access import OPERATOR_NAME, ROLES, Caller, key_digest

PREFIX = "tfk1."
PREFIX_LENGTH_MAX = 100  # of run ids, so that an id drawn by chance fits behind it
_FILE_BYTES_MAX = 1024 * 1024
_MEMBERS = ("role", "sha256", "runs", "workspace", "bodies")
_HEAD = (
    "# Keys of a Tidefast server: `tidefast keys add | list | revoke`. Digests only; no key can be made from them.\n"
)


class KeysRefused(Exception):
    """The file of keys can't be used or changed. The message has a line for each problem; it holds no key."""


def read_keys(path: Path) -> dict[bytes, Caller]:
    """The callers by the digest of their keys. Raises `KeysRefused` with every problem."""
    return _parse(path, _read(path))


def add_key(path: Path, caller: Caller) -> str:
    """Make a key for this caller, and return it: the only time that it can be seen. Raises `KeysRefused`."""
    key = PREFIX + secrets.token_hex(32)
    with _locked(path):
        text = _read(path) if path.exists() else _HEAD
        if caller.name in {known.name for known in _parse(path, text).values()}:
            raise KeysRefused(f"{path}: keys.{caller.name}: there is one already; revoke it first, or choose a name")
        changed = f"{text.rstrip()}\n\n{_table(caller, key)}"
        _parse(path, changed)
        _write(path, changed)
    return key


def revoke_key(path: Path, name: str) -> None:
    """Take a key out of the file. Raises `KeysRefused`, also if there is none of this name."""
    with _locked(path):
        text = _read(path)
        known = _parse(path, text)
        left = {digest: caller for digest, caller in known.items() if caller.name != name}
        if len(left) == len(known):
            names = ", ".join(sorted(caller.name for caller in known.values())) or "none"
            raise KeysRefused(f"{path}: keys.{name}: there is no such key; there are: {names}")
        table = re.compile(rf"^\[\s*keys\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\].*?(?=^\s*\[|\Z)", re.M | re.S)
        changed = table.sub("", text)
        try:
            is_done = _parse(path, changed) == left
        except KeysRefused:
            is_done = False
        if not is_done:
            raise KeysRefused(f"{path}: keys.{name}: written in a form that is not taken apart here; remove it by hand")
        _write(path, changed)


def problems_of(name: str, entry: Any) -> Iterator[str]:
    """What is wrong with one key's table, in words that name the member."""
    if not is_id(name) or name == OPERATOR_NAME:
        yield f"keys.{name[:64]!r}: expected a name of A-Z a-z 0-9 . _ -, other than `{OPERATOR_NAME}`"
    if not isinstance(entry, Mapping):
        yield f"keys.{name}: expected a table"
        return
    for member in sorted(set(entry) - set(_MEMBERS)):
        yield f"keys.{name}.{member[:64]}: unknown; known are {', '.join(_MEMBERS)}"
    role = entry.get("role")
    if role not in ROLES:
        yield f"keys.{name}.role: expected one of {', '.join(ROLES)}"
    if not re.fullmatch(r"[0-9a-f]{64}", str(entry.get("sha256"))):
        yield f"keys.{name}.sha256: expected the SHA-256 of the key, 64 hex digits; `tidefast keys add` makes one"
    runs = entry.get("runs", "*")
    if not isinstance(runs, str) or _prefix(runs) is None:
        yield f'keys.{name}.runs: expected a prefix of ids with a star behind it, like "shop-*"'
    elif role == "replica" and runs != "*":
        yield f"keys.{name}.runs: a replica's key is bound to its workspace, not to runs"
    workspace = entry.get("workspace")
    if role == "replica" and (not isinstance(workspace, str) or not is_id(workspace)):
        yield f"keys.{name}.workspace: a replica's key names the workspace that it serves"
    if role != "replica" and workspace is not None:
        yield f"keys.{name}.workspace: only a replica's key is bound to a workspace"
    if type(entry.get("bodies", False)) is not bool:
        yield f"keys.{name}.bodies: expected true or false"
    elif role != "reader" and "bodies" in entry:
        yield f"keys.{name}.bodies: only a reader's key says whether it sees bodies"


def _caller(name: str, entry: Mapping[str, Any]) -> Caller:
    role = entry["role"]
    bodies = entry.get("bodies", False) if role == "reader" else True
    return Caller(name, role, _prefix(entry.get("runs", "*")) or "", entry.get("workspace", ""), bodies)


def _prefix(runs: str) -> str | None:
    """The prefix that a pattern names, None for a pattern that isn't one."""
    if runs == "*":
        return ""
    prefix = runs.removesuffix("*")
    return prefix if runs.endswith("*") and is_id(prefix) and len(prefix) <= PREFIX_LENGTH_MAX else None


def _parse(path: Path, text: str) -> dict[bytes, Caller]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KeysRefused(f"{path}: not TOML: {error}") from error
    found, problems = (
        dict[bytes, Caller](),
        [
            f"{path}: {member[:64]}: unknown; a file of keys holds [keys.NAME]"
            for member in document
            if member != "keys"
        ],
    )
    entries = document.get("keys", {})
    if not isinstance(entries, Mapping):
        raise KeysRefused(f"{path}: keys: expected tables, [keys.NAME]")
    for name, entry in entries.items():
        wrong = [f"{path}: {problem}" for problem in problems_of(name, entry)]
        problems += wrong
        if wrong:
            continue
        digest, caller = bytes.fromhex(entry["sha256"]), _caller(name, entry)
        if digest in found:
            problems.append(f"{path}: keys.{name}.sha256: the key of {found[digest].name}; each has one of its own")
        found[digest] = caller
    if problems:
        raise KeysRefused("\n".join(problems))
    return found


def _table(caller: Caller, key: str) -> str:
    lines = [f"[keys.{_quoted(caller.name)}]", f'role = "{caller.role}"', f'sha256 = "{key_digest(key).hex()}"']
    if caller.runs:
        lines.append(f'runs = "{caller.runs}*"')
    if caller.workspace:
        lines.append(f'workspace = "{caller.workspace}"')
    if caller.role == "reader" and caller.bodies:
        lines.append("bodies = true")
    return "\n".join(lines) + "\n"


def _quoted(name: str) -> str:
    return name if "." not in name else f'"{name}"'


def _read(path: Path) -> str:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise KeysRefused(f"{path}: can't be read: {error.strerror}; `tidefast keys add` makes one") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise KeysRefused(f"{path}: not a plain file")
        if status.st_mode & 0o022:
            raise KeysRefused(f"{path}: others may write it, and so let themselves in; run: chmod go-w {path}")
        with os.fdopen(os.dup(handle), "rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
    finally:
        os.close(handle)
    if len(raw) > _FILE_BYTES_MAX:
        raise KeysRefused(f"{path}: larger than 1 MiB")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KeysRefused(f"{path}: not UTF-8") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise KeysRefused(f"{path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    """Put the file in place whole and durable, readable by its owner only."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise KeysRefused(f"{path}: can't be written: {error.strerror}") from error
