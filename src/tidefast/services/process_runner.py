"""Runs python tools in a process of their own, the way of a server: user code never runs on the server's loop.

One host process (`tidefast.sdk.tool_host`) runs the tools of one app, many calls at once. The moment that matters is
the write of a call to its socket: before it the call is `unsent`, after it a host that dies leaves `doubted`. A call
that hasn't ended at its deadline gets its host killed, because nothing else stops a python function; the other calls in
that process are doubted with it, and a new process is started at once. The host sees the operator's environment without
our own variables and those that hold the gateway's credentials, and never a lease token.
"""

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from tidefast.engine.clock import Clock
from tidefast.protocol.canonical import JSON, digest, text_json
from tidefast.protocol.commands import OutcomeKind
from tidefast.protocol.contracts import Contract
from tidefast.protocol.events import object_json
from tidefast.services.python_runner import python_receipt
from tidefast.services.tools import ConfigError, Outcome

HOST_MODULE = "tidefast.sdk.tool_host"
OWN_VARIABLES = "TIDEFAST_"
LINE_BYTES_MAX = 16 * 2**20  # a host's answer holds at most 1 MiB of text, each character up to six bytes
START_S = 60.0  # an app that takes longer to import is taken for stuck
LAST_WORDS_S = 0.5  # how long answers that a dead host had written are still read


class Answer(msgspec.Struct):
    """One line of a host."""

    call: int
    kind: OutcomeKind
    body: Any = None
    why: str = ""
    lost: str = ""


class Hello(msgspec.Struct):
    """The first line of a host: its tools with their contracts, or why it can't start."""

    tools: dict[str, str] = {}
    error: str = ""


class HostFailed(Exception):
    """The host process did not come up. The message says why."""


class Host:
    """One life of the host process."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer
        self.calls: dict[int, asyncio.Future[Outcome]] = {}
        self.contracts: list[Contract] = []
        self.is_over = False  # takes no further call; its process may still be dying

    def kill(self) -> None:
        """End the process and all that its tools have started: it leads a process group of its own."""
        self.is_over = True
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    async def hello(self) -> None:
        """Hear what the host has. Raises `HostFailed`."""
        try:
            async with asyncio.timeout(START_S):
                line = await self.reader.readline()
            said = (
                msgspec.json.decode(line, type=Hello) if line else Hello(error="the process ended while importing it")
            )
            if said.error:
                raise HostFailed(said.error)
            self.contracts = [Contract.from_json(msgspec.json.decode(text)) for text in said.tools.values()]
        except TimeoutError as error:
            raise HostFailed(f"importing it took longer than {START_S:.0f} s") from error
        except (OSError, ValueError) as error:
            raise HostFailed(f"its process said something else than it should: {error}") from error

    async def listen(self) -> None:
        """Hand out answers until the host is gone or stops making sense."""
        try:
            while line := await self.reader.readline():
                answer = msgspec.json.decode(line, type=Answer)
                waiting = self.calls.pop(answer.call, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(outcome_of(answer))
        except (OSError, ValueError):
            return

    def settle_all(self) -> None:
        """Doubt every call that was written and not answered."""
        for waiting in self.calls.values():
            if not waiting.done():
                waiting.set_result(Outcome("doubted", reason="tool_process_ended"))
        self.calls.clear()


class ProcessRunner:
    """Python tools of one app, in a process of their own. `start` it, call it, `stop` it."""

    def __init__(self, clock: Clock, app: str, hidden: frozenset[str] = frozenset()) -> None:
        """`hidden`: the variables that the tools' process doesn't get."""
        self._hidden = hidden
        self._clock = clock
        self._app = app
        self._numbers = itertools.count(1)
        self._host: Host | None = None
        self._starting: asyncio.Task[Host] | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    async def start(self) -> list[Contract]:
        """Start the host and hear the contracts of its tools. Raises `ConfigError` if the app can't be used."""
        try:
            host = await self._ready()
        except HostFailed as error:
            raise ConfigError(f"--app {self._app}: {error}") from error
        return host.contracts

    async def stop(self) -> None:
        """End the host. Calls that are still in it are doubted."""
        self._is_stopping = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._host is not None:
            self._host.kill()
        await asyncio.gather(*self._watches, return_exceptions=True)

    def _environment(self) -> dict[str, str]:
        named = os.environ.items()
        return {name: value for name, value in named if not name.startswith(OWN_VARIABLES) and name not in self._hidden}

    async def __call__(self, tool: str, args: Mapping[str, JSON], key: str, deadline_ms: int) -> Outcome:
        try:
            async with asyncio.timeout(self._left_s(deadline_ms)):
                host = await self._ready()
        except TimeoutError:
            return Outcome("unsent", reason="deadline")
        except HostFailed:
            return Outcome("unsent", reason="tool_process_failed")
        left_s = self._left_s(deadline_ms)
        if left_s <= 0:
            return Outcome("unsent", reason="deadline")
        number = next(self._numbers)
        line = msgspec.json.encode({"call": number, "tool": tool, "args": args, "key": key})
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        host.calls[number] = answer
        host.writer.write(line + b"\n")
        try:
            async with asyncio.timeout(left_s):
                return await answer
        except TimeoutError:
            host.calls.pop(number, None)
            self._retire(host, f"{tool} had not ended at its deadline")
            return Outcome("doubted", reason="deadline")

    def _left_s(self, deadline_ms: int) -> float:
        return max(deadline_ms - self._clock.now().ms, 0) / 1_000

    async def _ready(self) -> Host:
        """A host that takes calls; everyone who asks while one is starting waits for the same one."""
        if self._host is not None and not self._host.is_over and not self._host.writer.is_closing():
            return self._host
        if self._is_stopping:
            raise HostFailed("the server is stopping")
        return await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Task[Host]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._spawn())
            self._starting.add_done_callback(self._begun)
        return self._starting

    def _begun(self, task: asyncio.Task[Host]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # whoever waits hears it; if nobody does, the next call tries again

    async def _spawn(self) -> Host:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                HOST_MODULE,
                self._app,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # what user code prints must not reach our own standard output
                env=self._environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES_MAX)
        host = Host(process, reader, writer)
        try:
            await host.hello()
        except BaseException:
            host.kill()
            writer.close()
            await process.wait()
            raise
        self._host = host
        watch = asyncio.create_task(self._watch(host))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return host

    async def _watch(self, host: Host) -> None:
        """Stay until this life of the process is over, doubt what it leaves, and start the next one."""
        listening = asyncio.create_task(host.listen())
        exited = asyncio.create_task(host.process.wait())
        await asyncio.wait((listening, exited), return_when=asyncio.FIRST_COMPLETED)
        was_retired = host.is_over
        host.is_over = True
        # A child of a tool may hold the socket open, so the end of the process counts, not the end of the stream.
        await asyncio.wait((listening,), timeout=LAST_WORDS_S)
        host.kill()
        await exited
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        host.settle_all()
        host.writer.close()
        if not was_retired:
            self._retire(host, "the process ended by itself")

    def _retire(self, host: Host, why: str) -> None:
        """Give up a host and start the next one."""
        host.kill()
        if self._is_stopping or self._host is not host:
            return
        self._host = None
        import structlog  # only now: a start without failures needs none of it

        structlog.get_logger("tidefast.tools").warning("tool_process_restarted", app=self._app, why=why)
        self._begin()


def outcome_of(answer: Answer) -> Outcome:
    """What a host's answer means, with its receipt."""
    if answer.kind == "applied":
        return Outcome("applied", _lost_receipt(answer.lost) if answer.lost else python_receipt(answer.body))
    if answer.kind == "refused":
        return Outcome("refused", python_receipt(answer.body), "refused")
    return Outcome(answer.kind, reason=answer.why[:300])


def _lost_receipt(what: str) -> str:
    """The receipt of an effect that happened and whose value can't be told."""
    body = text_json(what)
    return object_json(
        status="null",
        content_type='"application/json"',
        body=body,
        digest=f'"{digest(body)}"',
        truncated="true",
    )
