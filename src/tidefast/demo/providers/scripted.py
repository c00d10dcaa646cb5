"""A model server by script: it streams, thinks, cuts, repeats, rewords and bills, and counts what it did.

It speaks as much of the chat completions protocol as the gateway needs, on raw sockets, so that a stream can be cut at
any piece as a dying server would cut it. What it would be paid for is in `bill`: an asking counts from the moment when
its first piece is made, whether or not anybody hears the rest.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REQUEST_BYTES_MAX = 4 * 1_048_576


@dataclass(frozen=True)
class Said:
    """One answer and how it comes. `calls` are (tool, arguments as text). `cut_after`: so many pieces, then silence."""

    text: str = ""
    calls: Sequence[tuple[str, str]] = ()
    pieces: int = 8
    think_s: float = 0.0
    pace_s: float = 0.0
    cut_after: int | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    finish: str = ""
    has_usage: bool = True
    is_polite: bool = False  # a cut looks like the end of the answer, as a proxy's would


Script = Callable[[dict[str, Any], int], Said | Awaitable[Said]]  # (request, how many came before) -> answer


@dataclass(frozen=True)
class Billed:
    """One asking that costs. `step` is the one that the gateway names in its header, RUN/STEP."""

    model: str
    input_tokens: int
    output_tokens: int
    question: str
    step: str = ""


class ScriptedModel:
    """The server. `start` binds a free port of the loopback; `close` hangs up on everybody."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bill: list[Billed] = []
        self.asked: list[dict[str, Any]] = []  # every request that came whole, in order
        self.raw: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.running = 0
        self.most_running = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._talks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> str:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        self._server = await asyncio.start_server(self._talk, sock=listener, backlog=1024)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        return self.url

    async def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for talk in list(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._talks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
        finally:
            if task is not None:
                self._talks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request of a connection; False when the connection is over."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {n.lower(): v for n, _, v in (line.partition(": ") for line in head[1:] if line)}
        length = int(headers.get("content-length", "0"))
        if length > REQUEST_BYTES_MAX:
            return False
        body = await reader.readexactly(length)
        if not head[0].startswith("POST"):
            bill = [
                {"step": b.step, "input_tokens": b.input_tokens, "output_tokens": b.output_tokens} for b in self.bill
            ]
            return await self._whole(writer, 200, {"data": [], "bill": bill}, {})
        request: dict[str, Any] = json.loads(body)
        count = len(self.asked)
        self.asked.append(request)
        self.raw.append(body)
        self.headers.append(headers)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            said = self.script(request, count)
            answer = said if isinstance(said, Said) else await said
            return await self._answer(writer, request, answer, headers.get("tidefast-step", ""))
        finally:
            self.running -= 1

    async def _answer(self, writer: asyncio.StreamWriter, request: dict[str, Any], said: Said, step: str) -> bool:
        if said.status != 200:
            told = {"error": {"message": said.text or "no", "type": "scripted", "code": str(said.status)}}
            return await self._whole(writer, said.status, told, said.headers)
        if said.think_s:
            await asyncio.sleep(said.think_s)
        question = str(request["messages"][-1].get("content"))
        output = max(len(said.text.split()), 1) + 8 * len(said.calls)
        tokens = len(json.dumps(request["messages"])) // 4
        self.bill.append(Billed(request["model"], tokens, output, question[:200], step))
        if not request.get("stream"):
            if said.cut_after is not None:
                writer.transport.abort()
                return False
            return await self._whole(writer, 200, self._completion(request, said), said.headers)
        return await self._stream(writer, request, said)

    async def _stream(self, writer: asyncio.StreamWriter, request: dict[str, Any], said: Said) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for place, event in enumerate(self._events(request, said)):
            if said.cut_after is not None and place >= said.cut_after:
                await writer.drain()
                if said.is_polite:
                    break
                writer.transport.abort()
                return False
            if said.pace_s and place:
                await asyncio.sleep(said.pace_s)
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _events(self, request: dict[str, Any], said: Said) -> list[bytes]:
        """The stream, piece by piece: role, text, calls, finish, usage if it was asked for, end."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        size = max(1, -(-len(said.text) // said.pieces))
        deltas += [{"content": said.text[at : at + size]} for at in range(0, len(said.text), size)]
        for place, (name, arguments) in enumerate(said.calls):
            function = {"name": name, "arguments": ""}
            call = {"index": place, "id": f"call_{len(self.bill)}_{place}", "type": "function", "function": function}
            deltas.append({"tool_calls": [call]})
            half = len(arguments) // 2
            for part in (arguments[:half], arguments[half:]):
                deltas.append({"tool_calls": [{"index": place, "function": {"arguments": part}}]})
        top = {
            "id": f"chatcmpl-{len(self.bill)}",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": request["model"],
        }
        chunks = [{**top, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({**top, "choices": [{"index": 0, "delta": {}, "finish_reason": self._finish(said)}]})
        if said.has_usage and (request.get("stream_options") or {}).get("include_usage"):
            chunks.append({**top, "choices": [], "usage": self._usage()})
        return [*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks), b"data: [DONE]\n\n"]

    def _completion(self, request: dict[str, Any], said: Said) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.text or None}
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{len(self.bill)}_{place}",
                    "type": "function",
                    "function": {"name": name, "arguments": text},
                }
                for place, (name, text) in enumerate(said.calls)
            ]
        choice = {"index": 0, "message": message, "finish_reason": self._finish(said)}
        top = {"id": f"chatcmpl-{len(self.bill)}", "object": "chat.completion", "created": 1, "model": request["model"]}
        return {**top, "choices": [choice], **({"usage": self._usage()} if said.has_usage else {})}

    def _usage(self) -> dict[str, int]:
        last = self.bill[-1]
        total = last.input_tokens + last.output_tokens
        return {"prompt_tokens": last.input_tokens, "completion_tokens": last.output_tokens, "total_tokens": total}

    def _finish(self, said: Said) -> str:
        return said.finish or ("tool_calls" if said.calls else "stop")

    async def _whole(self, writer: asyncio.StreamWriter, status: int, body: object, headers: Mapping[str, str]) -> bool:
        raw = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} Scripted", "Content-Type: application/json", f"Content-Length: {len(raw)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        await writer.drain()
        return True
