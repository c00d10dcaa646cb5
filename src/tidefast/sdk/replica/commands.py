"""Running a command in the workspace: a clean environment, limits, its output as it comes, and nothing left behind.

The command's working directory is opened beneath the root and handed over as a descriptor. Its environment is made of
a short list of names; no variable of ours and no credential of the replica's is among them.
"""

import asyncio
import codecs
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tidefast.protocol.canonical import JSON
from tidefast.sdk.replica.beneath import Root
from tidefast.sdk.replica.confine import MARK, Confinement, Started, end_groups, memory_file, start
from tidefast.sdk.replica.paths import parse_directory
from tidefast.sdk.replica.refusals import NotDone
from tidefast.wire.workspace import RunCommand

PASSED = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "SSL_CERT_FILE",
    "SSL_CERT_DIR",
))  # fmt: skip
PATH_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
END_S = 10.0  # how long a supervisor may take to end everything before it is killed itself
LAST_WORDS_S = 2.0  # how long output is read that a process which got away holds open
_PIECE = 65_536
OnOutput = Callable[[str, str], None]


class Ran(NamedTuple):
    """What became of a command. `failed` says why it never began; then nothing else counts."""

    result: dict[str, JSON]
    failed: str = ""
    is_cut: bool = False  # ended by us, not at its time limit: the replica stops or lost its epoch


class Commands:
    """Commands of one root. `passed` are further names of the environment that they may see."""

    def __init__(self, root: Root, confinement: Confinement, passed: frozenset[str] = frozenset()) -> None:
        self._root, self._confinement, self._passed = root, confinement, PASSED | passed
        self._running: Started | None = None
        self._was_cut = False
        status = os.fstat(root.fd)
        self.mark = f"{status.st_dev}:{status.st_ino}"

    def cut(self) -> None:
        """End the command that runs, if one does, and all that it started."""
        self._was_cut = True
        if self._running is not None:
            self._running.cut()

    async def run(self, args: RunCommand, lock: int, on_output: OnOutput) -> Ran:
        """Run it to its end, its timeout, or `cut`. When it returns no process of it is alive. Raises `NotDone`."""
        argv = _argv(args)
        env = self._environment(args.env)
        self._was_cut = False
        with self._root.directory(parse_directory(args.cwd)) as cwd:
            stdin = memory_file(args.stdin.encode()) if args.stdin else asyncio.subprocess.DEVNULL
            began = time.monotonic()
            try:
                running = await start(self._confinement, argv, env, cwd, lock, stdin, self.mark)
            finally:
                if args.stdin:
                    os.close(stdin)
        self._running = running
        try:
            if self._was_cut:
                running.cut()
            stdout, stderr = Kept(args.output_bytes), Kept(args.output_bytes)
            is_timed_out = await self._watch(running, args.timeout_ms / 1_000, stdout, stderr, on_output)
            told = running.told()
        finally:
            self._running = None
            running.close()
        return self._ran(told, stdout, stderr, is_timed_out, round((time.monotonic() - began) * 1_000))

    async def _watch(
        self, running: Started, timeout_s: float, stdout: "Kept", stderr: "Kept", on_output: OnOutput
    ) -> bool:
        process = running.process
        readers = [
            asyncio.create_task(_drain(process.stdout, stdout, "stdout", on_output)),
            asyncio.create_task(_drain(process.stderr, stderr, "stderr", on_output)),
        ]
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((ended,), timeout=timeout_s)
            is_timed_out = not ended.done()
            running.cut()
            await asyncio.wait((ended,), timeout=END_S)
            if not ended.done():
                os.killpg(process.pid, 9)
                await ended
            await asyncio.wait(readers, timeout=LAST_WORDS_S)
            return is_timed_out
        finally:
            running.cut()
            for task in (*readers, ended):
                task.cancel()
            await asyncio.gather(*readers, ended, return_exceptions=True)

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name in self._passed or name.startswith("LC_")}
        env.setdefault("PATH", PATH_DEFAULT)
        for name, value in given.items():
            if not name or "=" in name or "\0" in name + value:
                raise NotDone("invalid", "env_format", f"{name[:100]!r} is no name of an environment variable")
            env[name] = value
        env[MARK] = self.mark
        return env

    def _ran(self, told: dict[str, Any], stdout: "Kept", stderr: "Kept", is_timed_out: bool, duration_ms: int) -> Ran:
        failed = str(told.get("not_started") or told.get("failed") or "")
        number = told.get("signal")
        exit_code: JSON = told.get("exit")
        result: dict[str, JSON] = {
            "exit_code": exit_code, "signal": number, "is_timed_out": is_timed_out, "stdout": stdout.text(),
            "stderr": stderr.text(), "is_stdout_cut": stdout.is_cut, "is_stderr_cut": stderr.is_cut,
            "duration_ms": duration_ms,
        }  # fmt: skip
        is_cut = self._was_cut or (not failed and not is_timed_out and exit_code is None and number is None)
        return Ran(result, failed, is_cut)


class Kept:
    """The first and the last bytes of an output, half of the limit each."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._limit = limit
        self._first, self._last = bytearray(), bytearray()
        self._total = 0

    @property
    def is_cut(self) -> bool:
        return self._total > self._limit

    def add(self, piece: bytes) -> None:
        self._total += len(piece)
        room = self._limit - self._half - len(self._first)
        self._first += piece[:room]
        self._last += piece[room:] if room > 0 else piece
        if len(self._last) > 2 * self._half + _PIECE:
            del self._last[: len(self._last) - self._half]

    def text(self) -> str:
        last = self._last[max(0, len(self._last) - self._half) :]
        if not self.is_cut:
            return (self._first + last).decode(errors="replace")
        left_out = self._total - len(self._first) - len(last)
        note = f"\n[{left_out} bytes left out]\n"
        return self._first.decode(errors="replace") + note + last.decode(errors="replace")


async def _drain(reader: asyncio.StreamReader | None, kept: Kept, name: str, on_output: OnOutput) -> None:
    assert reader is not None, "the stream was asked for as a pipe"  # noqa: S101
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    while piece := await reader.read(_PIECE):
        kept.add(piece)
        text = decode(piece)
        if text:
            on_output(name, text)


def _argv(args: RunCommand) -> list[str]:
    if (args.argv is None) == (args.shell is None):
        raise NotDone("invalid", "command_format", "give one of argv and shell")
    argv = args.argv if args.argv is not None else ["/bin/sh", "-c", args.shell or ""]
    if any("\0" in word for word in argv) or not argv[0]:
        raise NotDone("invalid", "command_format", "a word of the command is empty or holds a NUL")
    return argv


def end_marked(mark: str) -> int:
    """Kill every process that an earlier life of a root's replica has left, and wait; returns how many."""
    end_groups(mark)
    killed: set[int] = set()
    wanted = f"{MARK}={mark}".encode()
    while found := _marked(wanted):
        for pid in found:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        killed |= found
        if not _wait(found):
            break
    return len(killed)


def _marked(wanted: bytes) -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.add(int(name))
            except OSError:
                continue
    return found


def _wait(pids: set[int]) -> bool:
    """Wait until these processes have ended; False if one of them doesn't."""
    until = time.monotonic() + END_S
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready = select.poll()
            ready.register(fd, select.POLLIN)
            if not ready.poll(max(0, round((until - time.monotonic()) * 1_000))):
                return False
        finally:
            os.close(fd)
    return True
