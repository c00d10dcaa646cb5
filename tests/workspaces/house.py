"""A real server over a real store, on a socket, with a run under a lease."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from tests.server.support import NAMESPACE, OPERATOR_KEY, SECRET

from tidefast.cli.wiring import Parts, build_authority
from tidefast.engine.clock import Clock
from tidefast.server.access import KeyBook, key_digest
from tidefast.server.app import build_app
from tidefast.server.credentials import Credentials, Signer
from tidefast.server.serve import serve
from tidefast.services.replicas import LEASE_MS
from tidefast.services.tools import ToolBook
from tidefast.stores.base import Store
from tidefast.stores.memory import MemoryStore
from tidefast.stores.sqlite import SqliteStore


class House:
    """What a test needs: the authority's parts, its address, and calls as a worker makes them."""

    def __init__(self, parts: Parts, url: str, http: aiohttp.ClientSession) -> None:
        self.parts, self.url, self._http = parts, url, http
        self._tokens: dict[str, str] = {}

    async def call(self, method: str, path: str, body: Any = None, token: str = "") -> tuple[int, Any]:
        headers = {"Tidefast-Lease": token} if token else {}
        async with self._http.request(method, self.url + path, json=body, headers=headers) as answer:
            is_json = "json" in answer.content_type
            return answer.status, await (answer.json() if is_json else answer.read())

    async def take(self, run: str = "r1", holder: str = "w1") -> str:
        await self.call("POST", "/v1/runs", {"run_id": run, "agent": "a", "input": None})
        status, grant = await self.call("POST", f"/v1/runs/{run}/lease", {"holder": holder, "lease_ms": 600_000})
        assert status == 200, grant
        self._tokens[run] = grant["token"]
        return str(grant["token"])

    async def apply(
        self, step: str, verb: str, args: dict[str, Any], run: str = "r1", wait_ms: int = 10_000
    ) -> tuple[int, Any]:
        if run not in self._tokens:
            await self.take(run)
        body = {"tool": f"workspace.{verb}", "args": {"workspace": "case", **args}, "wait_ms": wait_ms}
        return await self.call("POST", f"/v1/runs/{run}/steps/{step}", body, self._tokens[run])

    async def write(self, step: str, content: str, path: str = "f", run: str = "r1", **more: Any) -> tuple[int, Any]:
        return await self.apply(step, "write_file", {"path": path, "content": content}, run, **more)

    async def files(self) -> dict[str, bytes]:
        """The committed content, as anybody outside sees it."""
        _, told = await self.call("GET", "/v1/workspaces/case/files?limit=1000")
        found = {}
        for entry in told["entries"]:
            if entry["kind"] == "file":
                _, found[entry["path"]] = await self.call("GET", f"/v1/workspaces/case/files/{entry['path']}")
        return found


@contextlib.asynccontextmanager
async def house(
    path: Path | None = None, clock: Clock | None = None, *, sweeps: bool = True, replica_lease_ms: int = LEASE_MS
) -> AsyncIterator[House]:
    store: Store = MemoryStore(NAMESPACE) if path is None else SqliteStore.open(path, create=True)
    parts = await build_authority(store, ToolBook(()), clock=clock, sweeps=sweeps, replica_lease_ms=replica_lease_ms)
    credentials = Credentials(KeyBook(key_digest(OPERATOR_KEY)), Signer((SECRET,), NAMESPACE))
    app, stop = build_app(parts.authority, credentials), asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, "127.0.0.1", 0, ready.set_result, stop))
    await asyncio.wait((ready, serving), return_when=asyncio.FIRST_COMPLETED)
    async with aiohttp.ClientSession() as http:
        try:
            yield House(parts, ready.result(), http)
        finally:
            stop.set()
            await parts.gateway.workspaces.replicas.stop()
            await serving
            await parts.stop()
