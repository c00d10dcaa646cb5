"""The reporting end of the points: tells a fault injector where this process stands, and waits until it is let go.

One line of JSON per point over a unix socket, `{"id", "point", "pid", "run", "step", "epoch", "holder", …}`, is
answered by `{"id", "go": true}`; many points wait at once. An injector that isn't there, or goes away, holds up nobody:
what waits is let go, and later points cost one comparison.
"""

import asyncio
import json
import os

from tidefast.protocol.points import Facts, Hook, Point

LINE_BYTES_MAX = 65_536
SCHEME = "unix:"


def connect(path: str) -> Hook:
    """The hook that reports to the injector at a socket's path, which may be written `unix:PATH`.

    The connection is made at the first point, on the loop that reports it.
    """
    return Reporter(path.removeprefix(SCHEME))


class Reporter:
    """The points of one process, over one connection."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_gone = False
        self._opening = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._newest = 0

    async def __call__(self, point: Point, facts: Facts) -> None:
        """Report the point and return when it is let go."""
        writer = await self._open()
        if writer is None:
            return
        self._newest += 1
        name = self._newest
        let_go = self._waiting[name] = asyncio.get_running_loop().create_future()
        report = {**facts, "id": name, "point": point, "pid": os.getpid()}
        writer.write(json.dumps(report, separators=(",", ":")).encode() + b"\n")
        try:
            await let_go
        finally:
            self._waiting.pop(name, None)

    async def _open(self) -> asyncio.StreamWriter | None:
        """The connection; None once the injector is gone."""
        async with self._opening:
            if self._writer is None and not self._is_gone:
                try:
                    reader, self._writer = await asyncio.open_unix_connection(self._path, limit=LINE_BYTES_MAX)
                except OSError:
                    self._is_gone = True
                else:
                    self._reading = asyncio.create_task(self._listen(reader), name="points")
        return None if self._is_gone else self._writer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Let go what the injector names, and everything once it says nothing more, or nothing that makes sense."""
        try:
            while line := await reader.readline():
                self._let_go(self._waiting.get(json.loads(line)["id"]))
        except (OSError, ValueError, KeyError, TypeError):
            return
        finally:
            self._is_gone = True
            for waiting in list(self._waiting.values()):
                self._let_go(waiting)
            if self._writer is not None:
                self._writer.close()

    async def close(self) -> None:
        """Report nothing more, and let go of what waits. A process that just ends needs no such courtesy."""
        self._is_gone = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    @staticmethod
    def _let_go(waiting: "asyncio.Future[None] | None") -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
