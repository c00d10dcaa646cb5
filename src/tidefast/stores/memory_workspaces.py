"""Workspaces of the memory store: what `WorkspaceTables` asks, over plain dicts."""

import threading
from collections.abc import Iterable, Mapping, Sequence

from tidefast.protocol.ids import WorkspaceId
from tidefast.protocol.records import WorkspaceHead
from tidefast.protocol.workspace import Entry
from tidefast.stores.workspaces import LoggedWrite, StoredWrite

Stood = list[tuple[int, int | None, Entry]]  # since, until (None: now), what stood there


class MemoryWorkspaces:
    """See `WorkspaceTables`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the engine reads on one thread while its writer commits on another
        self._places: dict[int, WorkspaceHead] = {}
        self._writes: dict[int, list[LoggedWrite]] = {}
        self._files: dict[int, dict[str, Stood]] = {}
        self._oldest: dict[int, int] = {}

    def load_workspace(self, workspace_id: WorkspaceId) -> tuple[int, WorkspaceHead] | None:
        with self._lock:
            return next(((key, head) for key, head in self._places.items() if head.workspace_id == workspace_id), None)

    def busy_workspaces(self) -> Sequence[tuple[int, WorkspaceHead]]:
        with self._lock:
            return [(key, head) for key, head in sorted(self._places.items()) if head.is_live or head.open is not None]

    def workspaces(self, after: str, limit: int) -> Sequence[WorkspaceHead]:
        with self._lock:
            found = sorted(self._places.values(), key=lambda head: head.workspace_id)
        return [head for head in found if head.workspace_id > after][:limit]

    def load_write(self, workspace_key: int, log_index: int) -> LoggedWrite | None:
        found = self.load_writes(workspace_key, log_index - 1, 1)
        return found[0] if found and found[0].log_index == log_index else None

    def load_writes(self, workspace_key: int, after: int, limit: int) -> Sequence[LoggedWrite]:
        with self._lock:
            return self._writes.get(workspace_key, [])[max(after, 0) : max(after, 0) + limit]

    def manifest(self, workspace_key: int, log_index: int, after: str, limit: int) -> Sequence[tuple[str, Entry]]:
        with self._lock:
            files = sorted(self._files.get(workspace_key, {}).items())
        found = [(path, _at(stood, log_index)) for path, stood in files if path > after]
        return [(path, entry) for path, entry in found if entry is not None][:limit]

    def load_entry(self, workspace_key: int, log_index: int, path: str) -> Entry | None:
        with self._lock:
            return _at(self._files.get(workspace_key, {}).get(path, []), log_index)

    def oldest_index(self, workspace_key: int) -> int:
        return self._oldest.get(workspace_key, 0)

    def unreferenced(self, digests: Iterable[str]) -> set[str]:
        with self._lock:
            named = {
                entry.digest for files in self._files.values() for stood in files.values() for _, _, entry in stood
            }
        return set(digests) - named

    def _fault_of_workspaces(self, heads: Mapping[int, WorkspaceHead], writes: Sequence[StoredWrite]) -> str:
        """What a file's constraints would say; empty if nothing."""
        for key, head in heads.items():
            known = self._places.get(key)
            if known is not None and (head.epoch < known.epoch or head.version < known.version):
                return f"an epoch or a version of workspace {head.workspace_id} would decrease"
        lengths: dict[int, int] = {}
        for key, logged, _ in writes:
            length = lengths.get(key, len(self._writes.get(key, [])))
            if logged.log_index != length + 1:
                return f"write {logged.log_index} of workspace {key} after write {length}"
            lengths[key] = length + 1
        return ""

    def _take_workspaces(
        self, heads: Mapping[int, WorkspaceHead], writes: Sequence[StoredWrite], pruned: Mapping[int, int]
    ) -> None:
        """Take them over. The caller holds the lock."""
        self._places.update(heads)
        for key, logged, delta in writes:
            self._writes.setdefault(key, []).append(logged)
            files = self._files.setdefault(key, {})
            for path, entry in delta.items():
                _stands_now(files.setdefault(path, []), logged.log_index, entry)
        for key, oldest in pruned.items():
            self._oldest[key] = oldest
            for stood in self._files.get(key, {}).values():
                stood[:] = [row for row in stood if row[1] is None or row[1] > oldest]


def _at(stood: Stood, log_index: int) -> Entry | None:
    return next((e for since, until, e in stood if since <= log_index and (until is None or until > log_index)), None)


def _stands_now(stood: Stood, log_index: int, entry: Entry | None) -> None:
    if stood and stood[-1][1] is None:
        since, _, before = stood[-1]
        stood[-1] = (since, log_index, before)
    if entry is not None:
        stood.append((log_index, None, entry))
