"""The agent's side of a workspace: files that outlive the disk they lie on.

Every call is a step under the name that the agent gives it, answered from the journal when another pass asks again. The
await ends when a write is committed, whichever replica made it; a replica that dies meanwhile is the authority's
business, and costs time only.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tidefast.sdk.run import Run

Encoding = Literal["utf-8", "base64"]


class Workspace:
    """One workspace, as one run uses it. Made by `Run.workspace`.

    Paths are relative to its root. A call that is refused (a path that leaves the root, a patch that doesn't fit)
    raises `Rejected` and has changed nothing.
    """

    def __init__(self, run: "Run", name: str) -> None:
        self._run = run
        self.name = name

    async def _ask(self, step_id: str, verb: str, **args: Any) -> Any:
        given = {member: value for member, value in args.items() if value is not None}
        body = await self._run.tool(step_id, f"workspace.{verb}", workspace=self.name, **given)
        return body["result"]

    # --- reading: what the disk holds when the step is asked for the first time, and the same ever after -------------

    async def read_file(
        self, step_id: str, path: str, *, encoding: Encoding = "utf-8", offset: int = 0, limit: int | None = None
    ) -> Any:
        """{content, encoding, size, digest, is_truncated}; `offset` and `limit` in bytes."""
        return await self._ask(step_id, "read_file", path=path, encoding=encoding, offset=offset, limit=limit)

    async def list_files(
        self, step_id: str, path: str = ".", *, is_recursive: bool = False, limit: int | None = None
    ) -> Any:
        """{entries: [{path, kind, size, mode}], is_truncated}, sorted by path."""
        return await self._ask(step_id, "list_files", path=path, is_recursive=is_recursive, limit=limit)

    async def stat(self, step_id: str, path: str) -> Any:
        """{path, kind, size, mode, mtime_ms, digest}."""
        return await self._ask(step_id, "stat", path=path)

    async def search(
        self, step_id: str, pattern: str, path: str = ".", *, glob: str = "*", limit: int | None = None
    ) -> Any:
        """{matches: [{path, line, text}], is_truncated}: lines that match a regular expression."""
        return await self._ask(step_id, "search", pattern=pattern, path=path, glob=glob, limit=limit)

    # --- writing: each a fenced step, durable when it returns ---------------------------------------------------------

    async def write_file(
        self, step_id: str, path: str, content: str, *, encoding: Encoding = "utf-8", mode: int | None = None
    ) -> Any:
        """Replace or make a file, and the directories above it: {path, size, digest, is_new}."""
        return await self._ask(step_id, "write_file", path=path, content=content, encoding=encoding, mode=mode)

    async def edit_file(self, step_id: str, path: str, edits: Sequence[Mapping[str, Any]]) -> Any:
        """Search and replace, all edits or none: `[{"old_text", "new_text", "is_all"?}]`."""
        return await self._ask(step_id, "edit_file", path=path, edits=[dict(edit) for edit in edits])

    async def apply_patch(self, step_id: str, patch: str, *, base: Mapping[str, str] | None = None) -> Any:
        """A unified diff or a *Begin Patch* envelope, all or nothing; `base` names the digests that it was made for."""
        return await self._ask(step_id, "apply_patch", patch=patch, base=None if base is None else dict(base))

    async def make_dir(self, step_id: str, path: str, *, mode: int | None = None) -> Any:
        """Make a directory and those above it; one that is there is fine."""
        return await self._ask(step_id, "make_dir", path=path, mode=mode)

    async def delete(self, step_id: str, path: str, *, is_recursive: bool = False) -> Any:
        """Remove a file, a link or an empty directory; with `is_recursive` a tree."""
        return await self._ask(step_id, "delete", path=path, is_recursive=is_recursive)

    async def move(self, step_id: str, source: str, destination: str, *, is_replacing: bool = False) -> Any:
        """Rename; an existing destination is a conflict unless `is_replacing`."""
        return await self._ask(step_id, "move", source=source, destination=destination, is_replacing=is_replacing)

    async def run_command(
        self,
        step_id: str,
        *,
        argv: Sequence[str] | None = None,
        shell: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        stdin: str = "",
        timeout_ms: int | None = None,
        output_bytes: int | None = None,
        is_checked: bool = False,
        escapes: bool = False,
    ) -> Any:
        """Run a program or a line of shell: {exit_code, signal, is_timed_out, stdout, stderr, …}.

        What it changed in the workspace is the step's write. With `is_checked` a failure is refused and rolled back.
        `escapes` says that it may have effects elsewhere: once begun it is never run again by itself, but held.
        """
        return await self._ask(
            step_id,
            "run_command",
            argv=None if argv is None else list(argv),
            shell=shell,
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=stdin,
            timeout_ms=timeout_ms,
            output_bytes=output_bytes,
            is_checked=is_checked,
            escapes=escapes,
        )

    async def run_migration(self, step_id: str, path: str, sql: str) -> Any:
        """SQL statements against a SQLite file of the workspace, in one transaction: {changes}."""
        return await self._ask(step_id, "run_migration", path=path, sql=sql)
