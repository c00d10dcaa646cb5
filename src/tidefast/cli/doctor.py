"""`tidefast doctor`: whether this host, this store and these files can keep what Tidefast promises.

It changes nothing: one small file is written beside the store, flushed a few times and removed, to see what a flush
costs. Each finding is *ok*, *warning* (it works, and this is what it costs or can't do) or *failed* (a promise of the
README doesn't hold here). The exit code is 0 if nothing failed.
"""

import ctypes
import os
import platform
import resource
import shutil
import socket
import stat
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cyclopts import Parameter

from tidefast.cli import show as out
from tidefast.cli.desk import server_url
from tidefast.cli.errors import CliError, ExitCode
from tidefast.cli.options import DEFAULT_STORE, AsJson, StoreName, Tools, Url
from tidefast.cli.place import store_path
from tidefast.engine.clock import wall_ms
from tidefast.protocol.contracts import MARGIN_DEFAULT_MS
from tidefast.stores.base import StoreError
from tidefast.stores.sqlite import SqliteStore

Level = Literal["ok", "warning", "failed"]
LEVEL_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}

SQLITE_LEAST = (3, 51, 3)
PYTHON_LEAST = (3, 11)
FLUSHES = 16
FLUSH_CREDIBLE_US = 30  # no disk that keeps its word over a power cut is faster than this
FLUSH_SLOW_MS = 50
FREE_LEAST_BYTES = 256 * 2**20
FILES_LEAST = 2_048  # what a server with its connections and its store may need
SKEW_MS = 2_000
TIME_ERROR = 5  # adjtimex: the clock is not synchronised
FORGETFUL = frozenset(("tmpfs", "ramfs", "devtmpfs"))
REMOTE = frozenset(("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "afs", "ceph", "virtiofs"))
PR_GET_PDEATHSIG = 2


class Finding(NamedTuple):
    """One thing that was looked at: what is so, and what to do about it where something should be done."""

    area: str
    level: Level
    what: str
    todo: str = ""


def doctor(
    *,
    store: StoreName = DEFAULT_STORE,
    tools: Tools = None,
    keys: Annotated[Path | None, Parameter(help="The file of callers' keys, to be checked as well.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> int:
    """Check this host, the store, its clock and disk, keys and file modes, limits, and what can't be done here.

    Changes nothing. A store that isn't there yet is no fault: the place where it would be made is looked at.
    """
    path = store_path(store)
    found = [*check_program(), *check_store(path), *check_disk(path), *check_clock(path), *check_files(path, keys)]
    found += [*check_tools(tools), *check_limits(), *check_host(), *check_commands()]
    address = server_url(url) or _owners_url(path)
    found += check_server(address) if address else []
    failed = sum(1 for finding in found if finding.level == "failed")
    warnings = sum(1 for finding in found if finding.level == "warning")
    if as_json:
        out.document({"ok": not failed, "findings": [finding._asdict() for finding in found]})
    else:
        _tell(found)
        end = "ok: nothing failed" if not failed else f"NOT OK: {failed} failed"
        out.line(f"{end}, {warnings} warnings, {len(found)} looked at")
    return ExitCode.OTHER if failed else ExitCode.OK


def _tell(found: list[Finding]) -> None:
    width = max(len(finding.area) for finding in found)
    for area, level, what, todo in found:
        out.line(f"{area:<{width}}  ", (f"{level:<7}", LEVEL_STYLES[level]), f"  {what}")
        if todo:
            out.line(f"{'':<{width}}           {todo}")


def check_program() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < PYTHON_LEAST:
        yield Finding("python", "failed", version, "use 3.11 or newer")
    else:
        yield Finding("python", "ok", f"{version} on {platform.system()} {platform.release()}, {platform.machine()}")
    import apsw

    number = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if number < SQLITE_LEAST:
        yield Finding(
            "sqlite", "failed", f"{apsw.sqlite_lib_version()} can corrupt a log", "install apsw 3.51.3 or newer"
        )
    else:
        yield Finding("sqlite", "ok", f"{apsw.sqlite_lib_version()}, bundled with apsw")


def check_store(path: Path) -> Iterator[Finding]:
    """Whether the file is a store of ours, whole, and whose."""
    if not path.exists():
        yield Finding("store", "ok", f"{path} is not there yet; `tidefast serve` or `tidefast run` makes it")
        return
    try:
        owner = SqliteStore.owner(path)
        opened = SqliteStore.open_read_only(path)
    except StoreError as error:
        yield Finding("store", "failed", str(error))
        return
    try:
        identity = opened.identity()
        size = path.stat().st_size / 2**20
        yield Finding("store", "ok", f"{path}: {size:.1f} MiB, incarnation {identity.incarnation}")
        yield _pages(opened)
        if identity.recovery is not None:
            told = "a recovery window is open: first sendings before it count as sent at the last durable commit"
            yield Finding("recovery", "warning", told, "`tidefast recover` says how it stands, and closes it")
    except StoreError as error:
        yield Finding("store", "failed", str(error))
    finally:
        opened.close()
    if owner is None:
        yield Finding("owner", "ok", "no process owns it now")
    else:
        yield Finding("owner", "ok", f"owned by {owner}")


def _pages(store: SqliteStore) -> Finding:
    fault = store.first_fault()
    if fault:
        return Finding("pages", "failed", fault, "restore a backup; `tidefast audit` says which logs are whole")
    return Finding("pages", "ok", "every page and every index is whole; `tidefast audit` judges what stands in them")


def check_disk(path: Path) -> Iterator[Finding]:
    """Where the store lies, whether a flush is one, and whether there is room."""
    folder = _folder(path)
    kind = filesystem(folder)
    if kind in FORGETFUL:
        todo = "name a place on a disk with --store"
        yield Finding("disk", "failed", f"{folder} is {kind}: what is acknowledged is gone with the power", todo)
    elif kind in REMOTE:
        todo = "use a local disk: locks and flushes of this kind are somebody else's word"
        yield Finding("disk", "failed", f"{folder} is {kind}, another machine's", todo)
    else:
        yield Finding("disk", "ok", f"{folder} is {kind or 'of unknown kind'}")
    yield _flush(folder)
    free = shutil.disk_usage(folder).free
    level: Level = "ok" if free >= FREE_LEAST_BYTES else "warning"
    yield Finding(
        "room", level, f"{free / 2**30:.1f} GiB free", "" if level == "ok" else "make room: a full disk ends the server"
    )


def _flush(folder: Path) -> Finding:
    try:
        spent = sorted(flush_times_us(folder))
    except OSError as error:
        return Finding(
            "flush", "failed", f"nothing can be written in {folder}: {error.strerror}", "check its owner and mode"
        )
    median_us = statistics.median(spent)
    told = f"a flush takes {median_us / 1_000:.2f} ms, the slowest of {FLUSHES} {spent[-1] / 1_000:.1f} ms"
    if median_us < FLUSH_CREDIBLE_US:
        return Finding(
            "flush", "warning", f"{told}: too fast for a disk", "something below keeps writes in memory only"
        )
    if median_us > FLUSH_SLOW_MS * 1_000:
        return Finding("flush", "warning", f"{told}: each step waits for two of them", "use a faster disk")
    return Finding("flush", "ok", told)


def flush_times_us(folder: Path) -> list[float]:
    """What some flushes of one page cost in this folder, in microseconds. Leaves nothing behind."""
    times: list[float] = []
    handle, name = tempfile.mkstemp(prefix=".tidefast-doctor-", dir=folder)
    try:
        for _ in range(FLUSHES):
            os.pwrite(handle, os.urandom(4096), 0)
            begun = time.perf_counter_ns()
            os.fdatasync(handle)
            times.append((time.perf_counter_ns() - begun) / 1_000)
    finally:
        os.close(handle)
        os.unlink(name)
    return times


def filesystem(folder: Path) -> str:
    """The kind of file system that a folder lies on; empty if the host doesn't say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    place, best, kind = str(folder.resolve()), "", ""
    for line in lines:
        _, mounted, found, *_ = line.split(" ")
        where = mounted.replace("\\040", " ")
        if (place == where or place.startswith(where.rstrip("/") + "/")) and len(where) >= len(best):
            best, kind = where, found
    return kind


def check_clock(path: Path) -> Iterator[Finding]:
    """The wall clock against the store's mark, and whether somebody keeps it right."""
    is_kept = clock_is_synchronised()
    if is_kept is False:
        todo = "run an NTP client: a wall clock that is wrong holds doubts that could be replayed"
        yield Finding("clock", "warning", "the kernel says that nobody keeps the wall clock right", todo)
    else:
        yield Finding("clock", "ok", "kept right by an NTP client" if is_kept else "the host doesn't say who keeps it")
    mark = _mark_ms(path)
    behind_ms = mark - wall_ms()
    if mark and behind_ms > MARGIN_DEFAULT_MS:
        todo = "set the wall clock right: until then no key's window is open, and what is in doubt is held"
        yield Finding(
            "mark", "failed", f"the wall clock is {behind_ms / 1_000:.0f} s behind the store's own time", todo
        )
    elif mark and behind_ms > SKEW_MS:
        told = f"the wall clock is {behind_ms / 1_000:.0f} s behind the store's own time"
        yield Finding("mark", "warning", told, "it was set back; the store's time goes on from its mark")
    elif mark:
        yield Finding("mark", "ok", "the wall clock is not behind the store's own time")


def clock_is_synchronised() -> bool | None:
    """What the kernel says about its wall clock; None where it says nothing."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex((ctypes.c_long * 32)())  # all zero: only asks
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def check_files(path: Path, keys: Path | None) -> Iterator[Finding]:
    """Secrets and modes: who else on this host could read them."""
    from tidefast.server import keys as places
    from tidefast.wire import secretfile

    for name, file in (("secret", places.secret_path(path)), ("operator", places.operator_key_path(path))):
        try:
            count = len(secretfile.read_all(file))
            yield Finding(name, "ok", f"{file}: {'one secret' if count == 1 else f'{count} secrets'}, for you alone")
        except FileNotFoundError:
            yield Finding(name, "ok", f"{file} is not there yet; `tidefast serve` makes it")
        except secretfile.SecretRefused as error:
            yield Finding(name, "failed", str(error))
    for file in (path, path.parent):
        if file.exists() and _is_open(file):
            mode = stat.S_IMODE(file.stat().st_mode)
            is_folder = file.is_dir()
            good = "700" if is_folder else "600"
            told = f"{file} has mode {mode:04o}: others on this host may read inputs and receipts"
            if not is_folder or path.exists():
                yield Finding("modes", "warning", told, f"chmod {good} {file}")
    if keys is not None:
        from tidefast.server.keyfile import KeysRefused, read_keys

        try:
            yield Finding("keys", "ok", f"{keys}: {len(read_keys(keys))} keys")
        except KeysRefused as error:
            yield from (Finding("keys", "failed", line) for line in str(error).splitlines())


def _is_open(file: Path) -> bool:
    return bool(file.stat().st_mode & 0o077)


def check_tools(tools: Path | None) -> Iterator[Finding]:
    if tools is None:
        return
    from tidefast.cli.wiring import build_tools
    from tidefast.services.tools import ConfigError

    try:
        book = build_tools(tools, "", [])
    except ConfigError as error:
        yield from (Finding("tools", "failed", line) for line in str(error).splitlines())
        return
    for contract in book.contracts():
        if contract.effect != "none" and not contract.dedups:
            told = f"{contract.tool}: no key is remembered, so what is in doubt is held for a person"
            yield Finding("tools", "warning", told)
    yield Finding("tools", "ok", f"{tools}: {len(book.names())} contracts, their credentials are set")


def check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_LEAST:
        raised = f"up to {hard}" if hard != resource.RLIM_INFINITY else "without limit"
        told = f"{soft} open files; a busy server needs {FILES_LEAST}"
        yield Finding("limits", "warning", told, f"ulimit -n {FILES_LEAST} before the start ({raised} is allowed)")
    else:
        yield Finding("limits", "ok", f"{soft} open files")
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", "ok", f"{cores} for this process; the authority uses two")


def check_host() -> Iterator[Finding]:
    """What this host can't do."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        yield Finding("host", "failed", "no clock that counts suspension", "use Linux")
    else:
        yield Finding("host", "ok", "a clock that counts suspension, for deadlines")
    if not _can(_dies_with_parent):
        told = (
            "children can't be told to die with their parent: a killed server may leave its tools' process for a moment"
        )
        yield Finding("host", "warning", told)
    for name, family, address in (("IPv4", socket.AF_INET, "127.0.0.1"), ("IPv6", socket.AF_INET6, "::1")):
        if not _can(lambda family=family, address=address: _binds(family, address)):  # type: ignore[misc]
            level: Level = "failed" if name == "IPv4" else "warning"
            yield Finding("host", level, f"no loopback of {name}", "" if name == "IPv6" else "bring `lo` up")


def check_commands() -> Iterator[Finding]:
    """What would keep the commands of a sandbox on this host from going on after their end."""
    from tidefast.sdk.replica.confine import examine

    found = examine()
    if found.is_tight:
        yield Finding("sandbox", "ok", found.sentence())
    else:
        todo = "run `tidefast sandbox` as root, or where user namespaces or a writable cgroup v2 are allowed"
        yield Finding("sandbox", "warning", found.sentence(), todo)


def _can(trial: Callable[[], object]) -> bool:
    try:
        trial()
    except (OSError, AttributeError):
        return False
    return True


def _dies_with_parent() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_GET_PDEATHSIG, ctypes.byref(ctypes.c_int())) != 0:
        raise OSError


def _binds(family: int, address: str) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))


def check_server(url: str) -> Iterator[Finding]:
    """Whether the server answers, and is ready."""
    import http.client

    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise CliError("usage", f"--url {url}", "expected http://HOST:PORT", ExitCode.USAGE)
    for page, good in (("/healthz", "answers"), ("/readyz", "is ready")):
        line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)
        try:
            line.request("GET", page)
            status = line.getresponse().status
            level: Level = "ok" if status == 200 else "failed"
            yield Finding("server", level, f"{url} {good if status == 200 else f'says {status} at {page}'}")
        except (OSError, http.client.HTTPException) as error:
            yield Finding("server", "failed", f"{url} doesn't answer: {type(error).__name__}", "start `tidefast serve`")
            return
        finally:
            line.close()


def _owners_url(path: Path) -> str | None:
    try:
        owner = SqliteStore.owner(path) if path.parent.is_dir() else None
    except StoreError:
        return None
    return owner.url or None if owner is not None else None


def _mark_ms(path: Path) -> int:
    try:
        opened = SqliteStore.open_read_only(path)
    except StoreError:
        return 0
    try:
        return opened.identity().mark_ms
    except StoreError:
        return 0  # said where the store is looked at
    finally:
        opened.close()


def _folder(path: Path) -> Path:
    """The nearest folder that is there: the store's own, or where it would be made."""
    folder = path.absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    return folder
