"""The contents of workspaces: kept before they are joined, and removed only once nobody can name them.

A content is live while an entry of a kept log index names it, while the delta of a receipt that waits for its join
does, or while somebody here is about to join it (`pinned`). The sweep takes only what nobody touched for a while, and
between its last look and the deletion the digest is *condemned*: whoever asks for it meanwhile is told that it is
missing and brings it again afterwards. So no order of upload, join and sweep leaves an entry without its content.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import structlog

from tidefast.engine.engine import Engine
from tidefast.protocol.ids import WorkspaceId
from tidefast.stores.blobs import BlobStore

UNTOUCHED_MS = 3_600_000  # an upload has this long until its join
BATCH = 500
log = structlog.get_logger("tidefast.contents")


class Contents:
    """One store of blobs, as the services use it. Blocking work runs on threads."""

    def __init__(
        self, engine: Engine, blobs: Callable[[], BlobStore], wall_ms: Callable[[], int] | None = None
    ) -> None:
        """`blobs` opens the store of blobs, at first use: an authority without workspaces makes no file for them."""
        self._engine = engine
        self._open = blobs
        self._opened: BlobStore | None = None
        self._opening = threading.Lock()
        self._wall_ms = wall_ms or (lambda: engine.clock.now().wall_ms)
        self._pins: dict[str, int] = {}
        self._condemned: set[str] = set()
        self._swept = asyncio.Event()
        self._swept.set()

    @property
    def _blobs(self) -> BlobStore:
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    @contextmanager
    def pinned(self, digests: Iterable[str]) -> Iterator[None]:
        """For as long as somebody is about to join these, no sweep takes them."""
        held = set(digests)
        for digest in held:
            self._pins[digest] = self._pins.get(digest, 0) + 1
        try:
            yield
        finally:
            for digest in held:
                self._pins[digest] -= 1
                if not self._pins[digest]:
                    del self._pins[digest]

    async def missing(self, digests: Iterable[str]) -> set[str]:
        """Those that must be brought before a join may name them. Ask while they are pinned."""
        asked = set(digests)
        if asked & self._condemned:
            await self._swept.wait()
        return await asyncio.to_thread(lambda: self._blobs.missing(asked)) if asked else set()

    async def write(self, contents: Mapping[str, bytes]) -> None:
        """Keep small contents, durably. Raises `BlobRefused`."""
        if set(contents) & self._condemned:
            await self._swept.wait()
        if contents:
            await asyncio.to_thread(lambda: self._blobs.write(contents))

    async def upload(self, digest: str, pieces: AsyncIterator[bytes]) -> int:
        """Keep a content of any size, durably; its length. Raises `BlobRefused`, and what `pieces` raises."""
        if digest in self._condemned:
            await self._swept.wait()
        upload = await asyncio.to_thread(lambda: self._blobs.begin())
        try:
            async for piece in pieces:
                await asyncio.to_thread(upload.append, piece)
            return await asyncio.to_thread(upload.finish, digest)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(upload.discard))
            raise

    async def size(self, digest: str) -> int | None:
        return await asyncio.to_thread(lambda: self._blobs.size(digest))

    async def read(self, digest: str) -> AsyncIterator[bytes]:
        """Its bytes in pieces. Raises `KeyError` if it isn't here."""
        pieces = await asyncio.to_thread(lambda: self._blobs.read(digest))
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    async def whole(self, digest: str) -> bytes:
        """A small content. Raises `KeyError`."""
        return await asyncio.to_thread(lambda: b"".join(self._blobs.read(digest)))

    async def sweep(self, untouched_ms: int = UNTOUCHED_MS) -> int:
        """Remove contents that nothing names any more. Returns how many."""
        if not self._engine.store.workspaces(WorkspaceId(""), 1):
            return 0
        removed, after, before_ms = 0, "", self._wall_ms() - untouched_ms
        while True:
            found = await asyncio.to_thread(self._blobs.untouched_since, before_ms, after, BATCH)
            if not found:
                return removed
            after = found[-1]
            removed += await self._remove(set(found))

    async def _remove(self, candidates: set[str]) -> int:
        """Condemn those that nobody names now, look once more at what is durable, and delete."""
        waiting = self._engine.places.waiting_digests()
        self._condemned = candidates - self._pins.keys() - waiting
        self._swept.clear()
        try:
            self._condemned &= await asyncio.to_thread(self._engine.store.unreferenced, frozenset(self._condemned))
            if self._condemned:
                await asyncio.to_thread(self._blobs.delete, frozenset(self._condemned))
                log.info("contents_removed", count=len(self._condemned))
            return len(self._condemned)
        finally:
            self._condemned = set()
            self._swept.set()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
