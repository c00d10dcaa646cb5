"""The verbs of a workspace: what each one takes and what its result holds.

Names follow the file system server of the Model Context Protocol where it has one. The structures are the schema: the
authority checks arguments by them before an intent is made, and a replica checks them again.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from tidefast.protocol.canonical import JSON
from tidefast.protocol.workspace import VerbFacts
from tidefast.wire.replica import Digest, Whole

OUTPUT_BYTES_MAX = 1_048_576  # of a command's output, each stream, in its result
TIMEOUT_DEFAULT_MS = 120_000
TIMEOUT_MAX_MS = 3_600_000

Path = Annotated[str, Meta(min_length=1, max_length=4095)]
Content = Annotated[str, Meta(max_length=1_048_576)]
TimeoutMs = Annotated[int, Meta(ge=1, le=TIMEOUT_MAX_MS)]


class Args(Struct, forbid_unknown_fields=True):
    """The arguments of one verb. Paths are relative to the workspace's root; `.` is the root where one is optional."""


class ReadFile(Args):
    """→ {content, encoding, size, digest, is_truncated}"""

    path: Path
    encoding: Literal["utf-8", "base64"] = "utf-8"
    offset: Whole = 0  # bytes
    limit: Annotated[int, Meta(ge=1, le=1_048_576)] = 1_048_576  # bytes


class ListFiles(Args):
    """→ {entries: [{path, kind, size, mode}], is_truncated}, sorted by path"""

    path: Path = "."
    is_recursive: bool = False
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class Stat(Args):
    """→ {path, kind, size, mode, mtime_ms, digest (of a file)}"""

    path: Path


class Search(Args):
    """→ {matches: [{path, line, text}], is_truncated}: lines that match a regular expression"""

    pattern: Annotated[str, Meta(min_length=1, max_length=1000)]
    path: Path = "."
    glob: Annotated[str, Meta(max_length=1000)] = "*"
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 200


class WriteFile(Args):
    """Replaces or makes a file, and the directories above it. → {path, size, digest, is_new}"""

    path: Path
    content: Content
    encoding: Literal["utf-8", "base64"] = "utf-8"
    mode: Annotated[int, Meta(ge=0, le=0o777)] | None = None  # None: as it was, 0o644 for a new file


class Edit(Struct, forbid_unknown_fields=True):
    """`old_text` must stand in the file exactly once, or with `is_all` at least once."""

    old_text: Annotated[str, Meta(min_length=1, max_length=1_048_576)]
    new_text: Content
    is_all: bool = False


class EditFile(Args):
    """Searches and replaces, one edit after the other; all of them or none. → {path, size, digest, replaced}"""

    path: Path
    edits: Annotated[list[Edit], Meta(min_length=1, max_length=1000)]


class ApplyPatch(Args):
    """A unified diff, or the envelope that begins `*** Begin Patch`; all of it or nothing. → {paths}

    `base` may name the digests of files that the patch was made for; another content is a conflict.
    """

    patch: Annotated[str, Meta(min_length=1, max_length=1_048_576)]
    base: dict[Path, Digest] = {}


class MakeDir(Args):
    """Makes a directory and those above it; one that is there already is fine. → {path, is_new}"""

    path: Path
    mode: Annotated[int, Meta(ge=0, le=0o777)] = 0o755


class Delete(Args):
    """Removes a file, a link or an empty directory; with `is_recursive` a tree. → {path, removed}"""

    path: Path
    is_recursive: bool = False


class Move(Args):
    """Renames; an existing destination is a conflict unless `is_replacing`. → {source, destination}"""

    source: Path
    destination: Path
    is_replacing: bool = False


class RunCommand(Args):
    """Runs a program (`argv`) or a line of shell (`shell`), one of the two, in the workspace.

    → {exit_code, signal, is_timed_out, stdout, stderr, is_stdout_cut, is_stderr_cut, duration_ms}. Another exit code
    than 0 is an answer, and what the command wrote is kept, unless `is_checked`: then it is refused and rolled back.
    So is one that ran out of its time. `escapes` declares effects outside the workspace: it is never run again by
    itself once it may have begun.
    """

    argv: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    shell: Annotated[str, Meta(min_length=1, max_length=131_072)] | None = None
    env: dict[str, str] = {}
    cwd: Path = "."
    stdin: Content = ""
    timeout_ms: TimeoutMs = TIMEOUT_DEFAULT_MS
    output_bytes: Annotated[int, Meta(ge=0, le=OUTPUT_BYTES_MAX)] = 65_536  # kept of each stream: its first and last
    is_checked: bool = False
    escapes: bool = False


class RunMigration(Args):
    """Runs SQL statements against an SQLite file of the workspace, in one transaction. → {changes}"""

    path: Path
    sql: Annotated[str, Meta(min_length=1, max_length=1_048_576)]


READS: dict[str, type[Args]] = {"read_file": ReadFile, "list_files": ListFiles, "stat": Stat, "search": Search}
WRITES: dict[str, type[Args]] = {
    "write_file": WriteFile,
    "edit_file": EditFile,
    "apply_patch": ApplyPatch,
    "make_dir": MakeDir,
    "delete": Delete,
    "move": Move,
    "run_command": RunCommand,
    "run_migration": RunMigration,
}
VERBS: dict[str, type[Args]] = {**READS, **WRITES}


def verb_facts(verb: str, args: Mapping[str, JSON]) -> VerbFacts | None:
    """What the schema says of a call; None if no verb has this name."""
    kind = VERBS.get(verb)
    if kind is None:
        return None
    is_write = verb in WRITES
    try:
        read = msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        return VerbFacts(is_write, str(error)[:500])
    if not isinstance(read, RunCommand):
        return VerbFacts(is_write)
    problem = "" if (read.argv is None) != (read.shell is None) else "give `argv` or `shell`, one of the two"
    return VerbFacts(is_write, problem, read.timeout_ms, read.escapes)


def read_args(verb: str, args: dict[str, JSON]) -> Args:
    """The arguments of a verb of `VERBS`. Raises `msgspec.ValidationError` naming the member that is wrong."""
    return msgspec.convert(args, VERBS[verb])
