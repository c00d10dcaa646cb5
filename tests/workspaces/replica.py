"""A replica with a dict for a disk: it speaks the real wire to a real server, and misbehaves where a test says so."""

import asyncio
import base64
import hashlib
from typing import Any

import aiohttp

from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.workspace import CHAIN_START, Entry, delta_json, write_chain
from tidefast.wire import replica as r


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class TinyReplica:
    """One process with a disk. `disk` and journal may be handed to another one, as a fork or a snapshot would."""

    def __init__(self, url: str, workspace: str = "case", boot_id: str = "boot-a", *, inline: bool = True) -> None:
        self.url, self.workspace, self.boot_id, self.inline = url, workspace, boot_id, inline
        self.files: dict[str, bytes] = {}
        self.epoch, self.index, self.chain, self.token = 0, 0, CHAIN_START, ""
        self.ahead: r.Receipt | None = None
        self.before: dict[str, bytes] = {}
        self.grants: list[r.Grant] = []
        self.done: list[tuple[str | None, str | None, int]] = []
        self.heard: list[r.FromAuthority] = []
        self.is_mute = False  # does what it is asked and doesn't say so
        self.is_frozen = asyncio.Event()  # set: nothing is done
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.began = asyncio.Event()
        self._applied = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._task: asyncio.Task[None] | None = None

    async def dial(self) -> "TinyReplica":
        self.ready.clear()
        self.ended.clear()
        self._session = aiohttp.ClientSession()
        address = f"{self.url}/v1/workspaces/{self.workspace}/replica"
        self._socket = await self._session.ws_connect(address, max_msg_size=0)
        await self.say(r.Hello(self.boot_id, self.epoch, self.index, self.chain, self.token, True, bool(self.ahead)))
        self._task = asyncio.create_task(self._listen())
        return self

    async def applied(self) -> r.Receipt:
        """The receipt of the next write that this disk takes."""
        await self._applied.wait()
        assert self.ahead is not None
        return self.ahead

    async def say(self, message: r.FromReplica) -> None:
        assert self._socket is not None
        if not self._socket.closed:
            await self._socket.send_str(r.encode(message))

    async def hang_up(self) -> None:
        """The socket is gone; the process and its disk are not."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._socket is not None:
            self._socket._response.close()  # without a word to the other side
        if self._session is not None:
            await self._session.close()

    async def _listen(self) -> None:
        assert self._socket is not None
        async for frame in self._socket:
            if frame.type is not aiohttp.WSMsgType.TEXT:
                break
            message = r.read_from_authority(frame.data)
            self.heard.append(message)
            await self._hear(message)
        self.ended.set()

    async def _hear(self, message: r.FromAuthority) -> None:
        match message:
            case r.Grant():
                await self._granted(message)
            case r.Do():
                self.began.set()
                if not self.is_frozen.is_set():
                    await self._do(message)
            case r.Ask():
                await self._asked(message)
            case r.Want():
                await self._upload(message)
            case r.Joined():
                self._applied.clear()
                if self.ahead is not None and self.ahead.chain == message.chain:
                    self.index, self.chain, self.ahead = message.index, message.chain, None
            case r.Rollback():
                await self._restore(message.index, message.chain)
            case r.Superseded():
                self.token = ""

    async def _granted(self, grant: r.Grant) -> None:
        self.grants.append(grant)
        self.epoch, self.token = grant.epoch, grant.token
        if grant.is_resumed:
            self.ready.set()
            return
        await self._restore(grant.index, grant.chain)

    async def _restore(self, index: int, chain: str) -> None:
        manifest = (await self.get(f"/manifest?index={index}"))["entries"]
        files = {path: entry for path, entry in manifest.items() if entry[0] == "file"}
        wanted = [e[2] for p, e in files.items() if sha(self.files.get(p, b"")) != e[2]]
        contents = await self.fetch(sorted(set(wanted)))
        self.files = {p: contents.get(e[2], self.files.get(p, b"")) for p, e in files.items()}
        self.index, self.chain, self.ahead = index, chain, None
        self.ready.set()
        await self.say(r.Restored(self.epoch, index, chain, len(wanted), 0))

    async def _do(self, call: r.Do) -> None:
        if call.verb == "read_file":
            path = call.args["path"]
            if path not in self.files:
                await self.say(r.Refused(call.request_id, self.epoch, "not_found", "no_file", f"no file {path}"))
                return
            await self.say(r.Answer(call.request_id, self.epoch, {"content": self.files[path].decode()}))
            return
        if (call.epoch, call.index) != (self.epoch, self.index) or self.ahead is not None:
            await self.say(r.Unsent(call.request_id, self.epoch, "index"))
            return
        path = call.args.get("path", "out")
        if path == "refused":
            await self.say(r.Refused(call.request_id, self.epoch, "conflict", "no", "it does not fit"))
            return
        content = str(call.args.get("content", call.args.get("shell", ""))).encode()
        self.done.append((call.run, call.step, call.attempt))
        self.files = {**self.files, path: content}
        delta = {path: Entry("file", 0o644, sha(content), len(content))}
        run, step = RunId(call.run or ""), StepId(call.step or "")
        chain = write_chain(self.chain, call.index + 1, run, step, delta_json(delta))
        inline = {sha(content): base64.b64encode(content).decode()} if self.inline else {}
        self.ahead = r.Receipt(
            call.request_id, run, step, self.epoch, call.index + 1, delta, chain, {"path": path}, inline
        )
        self._applied.set()
        if not self.is_mute:
            await self.say(self.ahead)

    async def _asked(self, ask: r.Ask) -> None:
        if self.ahead is not None and (self.ahead.run, self.ahead.step) == (ask.run, ask.step):
            self.ahead.request_id = ask.request_id
            await self.say(self.ahead)
        else:
            await self.say(r.Absent(ask.request_id, self.epoch, ask.run, ask.step))

    async def _upload(self, want: r.Want) -> None:
        assert self._session is not None and self.ahead is not None
        for content in self.files.values():
            if sha(content) in want.digests:
                address = f"{self.url}/v1/workspaces/{self.workspace}/blobs/{sha(content)}"
                async with self._session.put(address, data=content, headers=self.right) as answer:
                    assert answer.status == 200, await answer.text()
        self.ahead.request_id = want.request_id
        await self.say(self.ahead)

    @property
    def right(self) -> dict[str, str]:
        return {"Tidefast-Lease": self.token}

    async def get(self, path: str) -> Any:
        assert self._session is not None
        address = f"{self.url}/v1/workspaces/{self.workspace}{path}"
        async with self._session.get(address, headers=self.right) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def fetch(self, digests: list[str]) -> dict[str, bytes]:
        if not digests:
            return {}
        assert self._session is not None
        address = f"{self.url}/v1/workspaces/{self.workspace}/blobs"
        async with self._session.post(address, json={"digests": digests}, headers=self.right) as answer:
            assert answer.status == 200, await answer.text()
            body = await answer.read()
        found: dict[str, bytes] = {}
        while body:
            digest, length = body[:64].decode(), int.from_bytes(body[64:72], "big")
            found[digest], body = body[72 : 72 + length], body[72 + length :]
        return found
