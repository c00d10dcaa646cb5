"""Workspaces in the SQLite store: statements, rows, and the reads of `WorkspaceTables`.

A path has one row for each time that something else stood there, with the log indexes from and until which it did. The
content at any kept index is then one scan of an index, and what a rehydration reads is what the tree holds.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import apsw
import msgspec

from tidefast.protocol.ids import WorkspaceId
from tidefast.protocol.records import WorkspaceHead
from tidefast.protocol.workspace import Entry
from tidefast.stores.base import StoreCorrupt
from tidefast.stores.workspaces import LoggedWrite, StoredWrite

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(WorkspaceHead).decode

WRITE_WORKSPACE = (
    "INSERT INTO workspaces (workspace_key, workspace_id, is_busy, epoch, version, record) VALUES (?,?,?,?,?,?)"
    " ON CONFLICT (workspace_key) DO UPDATE SET is_busy = excluded.is_busy, epoch = excluded.epoch,"
    " version = excluded.version, record = excluded.record"
)
WRITE_WRITE = (
    "INSERT INTO writes (workspace_key, log_index, run_id, step_id, at_ms, chain, seq, paths) VALUES (?,?,?,?,?,?,?,?)"
)
END_ENTRY = "UPDATE files SET until = ? WHERE workspace_key = ? AND path = ? AND until IS NULL"
WRITE_ENTRY = "INSERT INTO files (workspace_key, path, since, kind, mode, digest, size) VALUES (?,?,?,?,?,?,?)"
PRUNE = "DELETE FROM files WHERE workspace_key = ? AND until <= ?"
KEPT = "INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)"

HEAD = "SELECT workspace_key, record FROM workspaces WHERE workspace_id = ?"
BUSY = "SELECT workspace_key, record FROM workspaces WHERE is_busy = 1 ORDER BY workspace_key"
HEADS = "SELECT record FROM workspaces WHERE workspace_id > ? ORDER BY workspace_id LIMIT ?"
KEY_MAX = "SELECT coalesce(max(workspace_key), 0) FROM workspaces"
_LOGGED = "SELECT log_index, run_id, step_id, at_ms, chain, seq, paths FROM writes"
WRITE = _LOGGED + " WHERE workspace_key = ? AND log_index = ?"
WRITES = _LOGGED + " WHERE workspace_key = ? AND log_index > ? ORDER BY log_index LIMIT ?"
MANIFEST_NOW = (
    "SELECT path, kind, mode, digest, size FROM files"
    " WHERE workspace_key = ? AND until IS NULL AND path > ? ORDER BY path LIMIT ?"
)
MANIFEST = (
    "SELECT path, kind, mode, digest, size FROM files"
    " WHERE workspace_key = ? AND since <= ? AND (until IS NULL OR until > ?) AND path > ? ORDER BY path LIMIT ?"
)
ENTRY = (
    "SELECT kind, mode, digest, size FROM files WHERE workspace_key = ? AND path = ? AND since <= ?"
    " AND (until IS NULL OR until > ?)"
)
NAMED = "SELECT DISTINCT digest FROM files WHERE digest IN (SELECT value FROM json_each(?)) AND digest <> ''"
OLDEST = "SELECT value FROM meta WHERE name = ?"


def decode_head(text: str) -> WorkspaceHead:
    try:
        return _decode(text)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"a workspace's record can't be read ({error}): {text[:200]}. Restore a backup.") from error


def kept_name(workspace_key: int) -> str:
    return f"oldest_index.{workspace_key}"


def write(
    connection: apsw.Connection,
    heads: Mapping[int, WorkspaceHead],
    writes: Sequence[StoredWrite],
    pruned: Mapping[int, int],
) -> None:
    """The workspaces' part of a batch, within its transaction."""
    for key, head in heads.items():
        is_busy = head.is_live or head.open is not None
        row = (key, head.workspace_id, is_busy, head.epoch, head.version, _encode(head).decode())
        connection.execute(WRITE_WORKSPACE, row)
    for key, logged, delta in writes:
        connection.execute(WRITE_WRITE, (key, *logged))
        connection.executemany(END_ENTRY, [(logged.log_index, key, path) for path in delta])
        connection.executemany(
            WRITE_ENTRY, [(key, path, logged.log_index, *entry) for path, entry in delta.items() if entry is not None]
        )
    for key, oldest in pruned.items():
        connection.execute(PRUNE, (key, oldest))
        connection.execute(KEPT, (kept_name(key), oldest))


class SqliteWorkspaces:
    """The reads of `WorkspaceTables`, over a store that can ask its reading connection."""

    def _all(self, statement: str, *values: object) -> list[Any]:
        raise NotImplementedError

    def load_workspace(self, workspace_id: WorkspaceId) -> tuple[int, WorkspaceHead] | None:
        found = self._all(HEAD, workspace_id)
        return (found[0][0], decode_head(found[0][1])) if found else None

    def busy_workspaces(self) -> Sequence[tuple[int, WorkspaceHead]]:
        return [(key, decode_head(record)) for key, record in self._all(BUSY)]

    def workspaces(self, after: str, limit: int) -> Sequence[WorkspaceHead]:
        return [decode_head(record) for (record,) in self._all(HEADS, after, limit)]

    def load_write(self, workspace_key: int, log_index: int) -> LoggedWrite | None:
        found = self._all(WRITE, workspace_key, log_index)
        return LoggedWrite(*found[0]) if found else None

    def load_writes(self, workspace_key: int, after: int, limit: int) -> Sequence[LoggedWrite]:
        return [LoggedWrite(*row) for row in self._all(WRITES, workspace_key, after, limit)]

    def manifest(self, workspace_key: int, log_index: int, after: str, limit: int) -> Sequence[tuple[str, Entry]]:
        newest = self._all("SELECT coalesce(max(log_index), 0) FROM writes WHERE workspace_key = ?", workspace_key)
        if log_index >= newest[0][0]:
            found = self._all(MANIFEST_NOW, workspace_key, after, limit)
        else:
            found = self._all(MANIFEST, workspace_key, log_index, log_index, after, limit)
        return [(path, Entry(*entry)) for path, *entry in found]

    def load_entry(self, workspace_key: int, log_index: int, path: str) -> Entry | None:
        found = self._all(ENTRY, workspace_key, path, log_index, log_index)
        return Entry(*found[0]) if found else None

    def oldest_index(self, workspace_key: int) -> int:
        found = self._all(OLDEST, kept_name(workspace_key))
        return int(found[0][0]) if found else 0

    def unreferenced(self, digests: Iterable[str]) -> set[str]:
        asked = set(digests)
        return asked - {digest for (digest,) in self._all(NAMED, _encode(sorted(asked)).decode())}
