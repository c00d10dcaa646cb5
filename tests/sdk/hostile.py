"""A proxy that breaks what passes through it: a real one, over TCP, that knows where a request ends and no more."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence

Fault = str
WHOLE = "whole"
# What a network, a proxy or a load balancer does to one request. Doubling is what a retrying proxy does.
FAULTS: tuple[Fault, ...] = (
    "reset before the request",
    "reset in its head",
    "reset after its head",
    "reset in its body",
    "hang up before its last byte",
    "reset after the request",
    "close after the request",
    "answer cut in its head",
    "answer cut in its body",
    "answer in crumbs",
    "doubled, first answer",
    "doubled, second answer",
    "doubled at once",
    "doubled later",
)
LATER_S = 0.2


class Broken(Exception):
    """This connection is over: reset it, or close it."""

    def __init__(self, *, reset: bool) -> None:
        super().__init__()
        self.reset = reset


class HostileProxy:
    """Stands before a server and does to a share of the requests what its seed says. Counts by (kind, fault)."""

    def __init__(
        self,
        port: int,
        seed: int,
        share: float,
        kind_of: Callable[[str, str], str],
        faults: Sequence[Fault] = FAULTS,
    ) -> None:
        self._port, self._share, self._kind_of, self._faults = port, share, kind_of, faults
        self._chance = random.Random(seed)
        self.done: Counter[tuple[str, Fault]] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = [*faults]

    async def __aenter__(self) -> "HostileProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def faulted(self) -> int:
        return sum(count for (_, fault), count in self.done.items() if fault != WHOLE)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._begin(self._serve(reader, writer))

    def _begin(self, work: "asyncio.Future[None] | object") -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_reset = False
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_length(head))
                method, path, _ = head.split(b" ", 2)
                kind = self._kind_of(method.decode(), path.decode())
                fault = self._draw()
                self.done[kind, fault] += 1
                await self._break(fault, head, body, writer)
        except Broken as broken:
            is_reset = broken.reset
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            if is_reset:
                writer.transport.abort()
            writer.close()

    def _draw(self) -> Fault:
        """Every fault comes up as often as every other: a bag that is filled again when it is empty."""
        if self._chance.random() >= self._share:
            return WHOLE
        if not self._waiting:
            self._waiting = [*self._faults]
        return self._waiting.pop(self._chance.randrange(len(self._waiting)))

    async def _break(self, fault: Fault, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        request = head + body
        match fault:
            case "reset before the request":
                raise Broken(reset=True)
            case "reset in its head":
                await self._send_part(head[: len(head) // 2], reset=True)
            case "reset after its head":
                await self._send_part(head if body else head[:-1], reset=True)
            case "reset in its body":
                await self._send_part(head + body[: len(body) // 2] if body else head[:-2], reset=True)
            case "hang up before its last byte":
                await self._send_part(request[:-1], reset=False)
            case "reset after the request" | "close after the request":
                self._begin(self._ask_nothing(request))
                raise Broken(reset=fault.startswith("reset"))
            case "answer cut in its head" | "answer cut in its body":
                answer = await self._ask(request)
                ends = answer.index(b"\r\n\r\n") + 4
                cut = ends // 2 if fault.endswith("head") else (ends + len(answer)) // 2
                writer.write(answer[:cut] if cut < len(answer) else answer[:-1])
                await writer.drain()
                raise Broken(reset=False)
            case "answer in crumbs":
                for byte in await self._ask(request):
                    writer.write(bytes((byte,)))
                await writer.drain()
            case "doubled, first answer":
                answer = await self._ask(request)
                await self._ask(request)
                writer.write(answer)
            case "doubled, second answer":
                await self._ask(request)
                writer.write(await self._ask(request))
            case "doubled at once":
                answers = await asyncio.gather(self._ask(request), self._ask(request))
                writer.write(answers[self._chance.randrange(2)])
            case "doubled later":
                writer.write(await self._ask(request))
                self._begin(self._ask_later(request))
            case _:
                writer.write(await self._ask(request))
        await writer.drain()

    async def _send_part(self, part: bytes, *, reset: bool) -> None:
        """Some of the request reaches the server, then both connections die."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(part)
        await writer.drain()
        if reset:
            writer.transport.abort()
        else:
            writer.write_eof()
            with contextlib.suppress(OSError):
                await reader.read()
        writer.close()
        raise Broken(reset=reset)

    async def _ask(self, request: bytes) -> bytes:
        """The server's whole answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            return head + await reader.readexactly(_length(head))
        finally:
            writer.close()

    async def _ask_nothing(self, request: bytes) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._ask(request)

    async def _ask_later(self, request: bytes) -> None:
        await asyncio.sleep(self._chance.uniform(0, LATER_S))
        await self._ask_nothing(request)


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
