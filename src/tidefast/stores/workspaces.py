"""What a store owes for workspaces: heads, joined writes, and what stood at each path when."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from tidefast.protocol.ids import RunId, StepId, WorkspaceId
from tidefast.protocol.records import WorkspaceHead
from tidefast.protocol.workspace import Delta, Entry


class LoggedWrite(NamedTuple):
    """A joined write. The workspace's event at `seq` holds its delta."""

    log_index: int
    run_id: RunId
    step_id: StepId
    at_ms: int
    chain: str
    seq: int
    paths: int  # how many changed


class StoredWrite(NamedTuple):
    """A write as a batch brings it."""

    workspace_key: int
    write: LoggedWrite
    delta: Delta


class WorkspaceTables(Protocol):
    """The part of a store that keeps workspaces. A workspace's key is drawn from the same numbers as a run's."""

    def load_workspace(self, workspace_id: WorkspaceId) -> tuple[int, WorkspaceHead] | None: ...

    def busy_workspaces(self) -> Sequence[tuple[int, WorkspaceHead]]:
        """Every workspace with a live replica or an open write; read once at start."""

    def workspaces(self, after: str, limit: int) -> Sequence[WorkspaceHead]:
        """Heads in order of their ids, after the id given."""

    def load_write(self, workspace_key: int, log_index: int) -> LoggedWrite | None: ...

    def load_writes(self, workspace_key: int, after: int, limit: int) -> Sequence[LoggedWrite]:
        """Writes with a log index above `after`, in order."""

    def manifest(self, workspace_key: int, log_index: int, after: str, limit: int) -> Sequence[tuple[str, Entry]]:
        """What stood where after the write at `log_index`, in order of paths (by code points), after the path given."""

    def load_entry(self, workspace_key: int, log_index: int, path: str) -> Entry | None:
        """What stood at one path after the write at `log_index`."""

    def oldest_index(self, workspace_key: int) -> int:
        """The oldest log index whose content is still kept whole; retention raises it."""

    def unreferenced(self, digests: Iterable[str]) -> set[str]:
        """Those of these digests that no entry of any workspace names, kept or current."""
