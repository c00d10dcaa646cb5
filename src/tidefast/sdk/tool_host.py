"""The process that runs an app's python tools for a server: `python -m tidefast.sdk.tool_host MODULE:APP SOCKET`.

The server starts it and talks to it over one inherited socket, in lines of JSON; standard output belongs to the user's
code and goes where standard error goes. First the host says what it has, `{"tools": {NAME: contract}}`, or why it can't
start, `{"error": …}`. Then come calls, `{"call", "tool", "args", "key"}`, many at once, each answered by one line
`{"call", "kind", "body", "why"}`. `kind` is `applied`, `refused`, `unsent` or `doubted`; `lost` stands in for a body
that can't be told.

When the server is gone the host ends at once, with everything that its tools have started: nobody is left to hear an
answer, and the attempts are in doubt either way.
"""

import asyncio
import inspect
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from tidefast.protocol.canonical import JSON, CanonicalError, canonical
from tidefast.sdk.app import App, load_app
from tidefast.sdk.errors import Misuse, NotSent, Refused
from tidefast.sdk.tools import PythonTool

BODY_CHARS_MAX = 1_048_576  # as for HTTP answers: beyond it the effect counts and its body is lost
THREADS_MAX = 256  # sync tools at once; the gateway bounds the calls, this only bounds a runaway
WHY_CHARS_MAX = 500


class Call(msgspec.Struct):
    """One call as the server writes it."""

    call: int
    tool: str
    args: dict[str, Any]
    key: str


class Channel:
    """The socket to the server. Any thread may write a line; one thread reads."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._writing = threading.Lock()
        self.lines = self._socket.makefile("rb")

    def write(self, record: Mapping[str, JSON]) -> None:
        line = msgspec.json.encode(record) + b"\n"
        try:
            with self._writing:
                self._socket.sendall(line)
        except OSError:
            end_everything()


class Host:
    """Runs the tools of one app: async ones on this loop, sync ones on threads."""

    def __init__(self, app: App, channel: Channel) -> None:
        self._tools = app.tools
        self._channel = channel
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="tool")
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Take calls until the server is gone; this never returns."""
        loop = asyncio.get_running_loop()
        self._channel.write({"tools": {name: tool.contract.to_json() for name, tool in self._tools.items()}})
        threading.Thread(target=self._listen, args=(loop,), name="calls", daemon=True).start()
        await loop.create_future()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """On a thread of its own, so that a tool which blocks the loop can't keep the host from seeing its end."""
        try:
            for line in self._channel.lines:
                self._take(loop, msgspec.json.decode(line, type=Call))
        finally:
            end_everything()

    def _take(self, loop: asyncio.AbstractEventLoop, call: Call) -> None:
        tool = self._tools.get(call.tool)
        if tool is None:
            self._channel.write({"call": call.call, "kind": "unsent", "why": "tool_gone"})
        elif misfit := tool.misfit(call.args):
            self._channel.write({"call": call.call, **told_error(NotSent(misfit))})
        elif inspect.iscoroutinefunction(tool.function):
            loop.call_soon_threadsafe(self._begin, tool, call)
        else:
            self._threads.submit(self._run, tool, call)

    def _begin(self, tool: PythonTool, call: Call) -> None:
        task = asyncio.create_task(self._await(tool, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, tool: PythonTool, call: Call) -> None:
        try:
            told = told_value(await tool.function(**_arguments(tool, call)))
        except BaseException as error:
            told = told_error(error)
        self._channel.write({"call": call.call, **told})

    def _run(self, tool: PythonTool, call: Call) -> None:
        try:
            told = told_value(tool.function(**_arguments(tool, call)))
        except BaseException as error:
            told = told_error(error)
        self._channel.write({"call": call.call, **told})


def _arguments(tool: PythonTool, call: Call) -> dict[str, Any]:
    return {**call.args, "key": call.key} if tool.takes_key else call.args


def told_value(value: Any) -> dict[str, JSON]:
    """What a tool returned: the effect happened, whether or not its value can be told."""
    try:
        length = len(canonical(value))
        if length > BODY_CHARS_MAX:
            return {"kind": "applied", "lost": f"a value of {length} characters"}
        return {"kind": "applied", "body": value}
    except (CanonicalError, UnicodeError, RecursionError):
        return {"kind": "applied", "lost": f"a {type(value).__name__}, which is not a JSON value"}


def told_error(error: BaseException) -> dict[str, JSON]:
    """What a tool raised: `Refused` and `NotSent` are definite, anything else is doubt."""
    if isinstance(error, Refused):
        body = error.body if told_value(error.body).get("lost") is None else None
        return {"kind": "refused", "body": {"refused": str(error)[:WHY_CHARS_MAX]} if body is None else body}
    if isinstance(error, NotSent):
        return {"kind": "unsent", "why": f"not_sent: {str(error)[:WHY_CHARS_MAX]}"}
    return {"kind": "doubted", "why": type(error).__name__}


def end_everything() -> None:
    """End this process and, where it leads a group of its own, all that its tools have started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(arguments: list[str]) -> int:
    name, descriptor = arguments
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a tool printed must not die with a killed process
    channel = Channel(int(descriptor))
    try:
        app = load_app(name)
    except Misuse as error:
        channel.write({"error": str(error)})
        return 1
    except BaseException as error:
        channel.write({"error": f"importing it raised {type(error).__name__}: {str(error)[:WHY_CHARS_MAX]}"})
        raise
    asyncio.run(Host(app, channel).serve())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
