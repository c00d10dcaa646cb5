"""What is told about workspaces: their heads, their logs, what stands where, and what differs between two indexes."""

import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from tidefast.engine.engine import Engine
from tidefast.protocol.canonical import JSON
from tidefast.protocol.ids import WorkspaceId
from tidefast.protocol.records import WorkspaceHead
from tidefast.protocol.verdicts import Refused
from tidefast.protocol.workspace import Entry, difference
from tidefast.services.contents import Contents
from tidefast.services.replicas import Replicas
from tidefast.stores.workspaces import LoggedWrite

PAGE = 5_000
BLOCK = tarfile.BLOCKSIZE


class Stood(NamedTuple):
    """A file as it stood at an index."""

    entry: Entry
    log_index: int


class WorkspaceReads:
    """Reads over one engine. Everything told is durable."""

    def __init__(self, engine: Engine, contents: Contents, replicas: Replicas) -> None:
        self._engine = engine
        self._contents = contents
        self._replicas = replicas

    def list(self, after: str, limit: int) -> Sequence[dict[str, JSON]]:
        return [self._told(head) for head in self._engine.store.workspaces(WorkspaceId(after), limit)]

    def one(self, workspace_id: str) -> dict[str, JSON] | Refused:
        found = self._engine.store.load_workspace(WorkspaceId(workspace_id))
        return _unknown(workspace_id) if found is None else self._told(found[1])

    def _told(self, head: WorkspaceHead) -> dict[str, JSON]:
        session = self._replicas.session(head.workspace_id)
        is_connected = session is not None and session.right.epoch == head.epoch
        told: dict[str, JSON] = {
            "workspace_id": head.workspace_id,
            "log_index": head.log_index,
            "chain": head.chain,
            "epoch": head.epoch,
            "is_live": head.is_live,
            "is_connected": is_connected,
            "is_ready": session is not None and is_connected and session.is_ready,
            "expires_at_ms": head.expires_at_ms,
            "ended_by": head.lease_end,
            "open": None if head.open is None else {"run_id": head.open.run_id, "step_id": head.open.step_id},
            "unrestorable": [list(pair) for pair in session.unrestorable] if session is not None else [],
        }
        return told

    def log(self, workspace_id: str, after: int, limit: int) -> Sequence[dict[str, JSON]] | Refused:
        found = self._engine.store.load_workspace(WorkspaceId(workspace_id))
        if found is None:
            return _unknown(workspace_id)
        return [_told_write(write) for write in self._engine.store.load_writes(found[0], after, limit)]

    def entries(self, workspace_id: str, index: int | None, after: str, limit: int) -> dict[str, JSON] | Refused:
        """What stood where: in the newest content, or in that of an index."""
        at = self._at(workspace_id, index)
        if isinstance(at, Refused):
            return at
        key, log_index = at
        found = self._engine.store.manifest(key, log_index, after, limit)
        return {"index": log_index, "entries": [{"path": path, **entry._asdict()} for path, entry in found]}

    def manifest(self, workspace_id: str, index: int | None) -> tuple[int, dict[str, Entry]] | Refused:
        """(log index, the whole content)."""
        at = self._at(workspace_id, index)
        if isinstance(at, Refused):
            return at
        key, log_index = at
        return log_index, dict(self._pages(key, log_index))

    def _pages(self, key: int, log_index: int) -> Iterator[tuple[str, Entry]]:
        after = ""
        while page := self._engine.store.manifest(key, log_index, after, PAGE):
            yield from page
            after = page[-1][0]

    def file(self, workspace_id: str, path: str, index: int | None) -> Stood | Refused:
        at = self._at(workspace_id, index)
        if isinstance(at, Refused):
            return at
        entry = self._engine.store.load_entry(*at, path)
        if entry is None:
            return Refused("not_found", "path_unknown", {"workspace": workspace_id, "path": path[:500], "index": at[1]})
        return Stood(entry, at[1])

    def diff(self, workspace_id: str, since: int, until: int | None) -> dict[str, JSON] | Refused:
        """What the writes after `since` up to `until` changed."""
        first, last = self.manifest(workspace_id, since), self.manifest(workspace_id, until)
        if isinstance(first, Refused):
            return first
        if isinstance(last, Refused):
            return last
        changed = difference(first[1], last[1])
        told: list[JSON] = []
        for path in sorted(changed):
            before, after = first[1].get(path), last[1].get(path)
            how = "added" if before is None else "removed" if after is None else "changed"
            told.append({"path": path, "how": how, "before": _told_entry(before), "after": _told_entry(after)})
        return {"from": first[0], "to": last[0], "changes": told}

    async def tar(self, manifest: dict[str, Entry]) -> AsyncIterator[bytes]:
        """The content as a tar file (PAX), streamed: directories, files and links with their modes, and no times."""
        for path in sorted(manifest):
            entry = manifest[path]
            info = tarfile.TarInfo(path)
            info.mode = entry.mode
            if entry.kind == "dir":
                info.type = tarfile.DIRTYPE
            elif entry.kind == "symlink":
                info.type = tarfile.SYMTYPE
                info.linkname = (await self._contents.whole(entry.digest)).decode(errors="surrogateescape")
            else:
                info.size = entry.size
            yield info.tobuf(tarfile.PAX_FORMAT)
            if entry.kind == "file":
                async for piece in self._contents.read(entry.digest):
                    yield piece
                yield b"\0" * (-entry.size % BLOCK)
        yield b"\0" * (2 * BLOCK)

    def _at(self, workspace_id: str, index: int | None) -> tuple[int, int] | Refused:
        """(key, log index) of a content that is kept."""
        found = self._engine.store.load_workspace(WorkspaceId(workspace_id))
        if found is None:
            return _unknown(workspace_id)
        key, head = found
        log_index = head.log_index if index is None else index
        oldest = self._engine.store.oldest_index(key)
        if not oldest <= log_index <= head.log_index:
            facts: dict[str, JSON] = {"workspace": workspace_id, "oldest": oldest, "newest": head.log_index}
            return Refused("not_found", "index_unknown", {**facts, "index": log_index})
        return key, log_index


def _unknown(workspace_id: str) -> Refused:
    return Refused("not_found", "workspace_unknown", {"workspace": workspace_id})


def _told_write(write: LoggedWrite) -> dict[str, JSON]:
    told: dict[str, JSON] = dict(write._asdict())
    del told["seq"]
    return told


def _told_entry(entry: Entry | None) -> JSON:
    return None if entry is None else dict(entry._asdict())
