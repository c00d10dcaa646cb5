"""What a workspace holds: entries, the deltas that change them, and the chain that proves which deltas a disk has.

A workspace is a directory whose content is durable at the authority. Its committed content is the fold of the deltas
that joined steps left, in the order of their log index. The chain is digest(n) = SHA-256(digest(n-1) || canonical
{delta, index, run, step}), so a disk that names an index and the digest there proves which writes it has seen, and
nothing else does: a replica's own word, its files' times or a snapshot's name prove nothing.
"""

import hashlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

from tidefast.protocol.canonical import canonical, digest
from tidefast.protocol.events import CHAIN_START
from tidefast.protocol.ids import Epoch, RunId, StepId

EntryKind = Literal["file", "dir", "symlink"]
Plan = Literal["keep", "rollback", "fetch_all"]

PATH_BYTES_MAX = 4_095  # Linux' PATH_MAX without the terminating NUL
NAME_BYTES_MAX = 255  # the longest name that the common file systems take
MODE_MAX = 0o777  # who may do what; set-user-id and the like are never carried to another host
SIZE_MAX = 2**40  # a terabyte: a length beyond it is a mistake
DELTA_PATHS_MAX = 100_000  # what one step may change; larger steps are refused, and say so
_HEX = frozenset("0123456789abcdef")


class Entry(NamedTuple):
    """What stands at one path: a file's or link's content is named by the SHA-256 of its bytes (of the target's)."""

    kind: EntryKind
    mode: int  # permission bits
    digest: str  # 64 hex digits; empty for a directory
    size: int  # bytes; 0 for a directory


Delta = Mapping[str, Entry | None]  # path -> what stands there now; None: nothing does any more
Manifest = Mapping[str, Entry]  # path -> what stands there; directories that nobody named have mode 0o755


class Disk(NamedTuple):
    """What a replica says that its disk holds: the joined writes up to `log_index`, proved by the chain's digest there.

    `epoch` is the replica epoch that it was written under; 0, with log index 0, is a disk that never was a replica.
    """

    epoch: Epoch
    log_index: int
    chain: str
    is_whole: bool = True  # False while a rehydration, or the rolling back of a write, is under way
    is_ahead: bool = False  # one more write was applied, and the replica hasn't heard that it was joined


EMPTY_DISK = Disk(Epoch(0), 0, CHAIN_START)


class VerbFacts(NamedTuple):
    """What a schema says of a verb and its arguments."""

    is_write: bool
    problem: str = ""  # why the arguments don't fit; empty if they do
    timeout_ms: int = 60_000  # how long the verb itself may take
    escapes: bool = False


def is_path(text: str) -> bool:
    """Whether this names a place below the root: relative, `/` between names, none of them empty, `.` or `..`."""
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        return False
    if not 0 < len(raw) <= PATH_BYTES_MAX or b"\0" in raw:
        return False
    return all(0 < len(name) <= NAME_BYTES_MAX and name not in (b".", b"..") for name in raw.split(b"/"))


def is_digest(text: str) -> bool:
    """Whether this is a SHA-256 as 64 lower-case hex digits."""
    return len(text) == 64 and _HEX.issuperset(text)


def entry_problem(entry: Entry) -> str:
    """Why this can't stand at a path; empty if it can."""
    if not 0 <= entry.mode <= MODE_MAX:
        return f"the mode {entry.mode:o} has bits beyond {MODE_MAX:o}"
    if entry.kind == "dir":
        return "a directory has no content" if entry.digest or entry.size else ""
    if not is_digest(entry.digest):
        return "the content's digest is not a SHA-256"
    return "" if 0 <= entry.size <= SIZE_MAX else "the size is out of range"


def delta_problem(delta: Delta) -> str:
    """Why this can't be what a step changed; empty if it can. Looks at the delta alone, not at what it changes."""
    if len(delta) > DELTA_PATHS_MAX:
        return f"more than {DELTA_PATHS_MAX} paths changed"
    for path, entry in delta.items():
        if not is_path(path):
            return f"{path[:200]!r} is no path below the root"
        problem = "" if entry is None else entry_problem(entry)
        if problem:
            return f"{path[:200]!r}: {problem}"
        above = path.rpartition("/")[0]
        while above:
            holder = delta.get(above, _SOME_DIR)
            if entry is not None and (holder is None or holder.kind != "dir"):
                return f"{path[:200]!r} stands below what is no directory"
            above = above.rpartition("/")[0]
    return ""


_SOME_DIR = Entry("dir", 0o755, "", 0)


def fold(manifest: Manifest, delta: Delta) -> dict[str, Entry]:
    """The content after a step."""
    after = dict(manifest)
    for path, entry in delta.items():
        if entry is None:
            after.pop(path, None)
        else:
            after[path] = entry
    return after


def difference(before: Manifest, after: Manifest) -> dict[str, Entry | None]:
    """The smallest delta that makes one content out of another."""
    changed: dict[str, Entry | None] = {path: None for path in before if path not in after}
    changed.update({path: entry for path, entry in after.items() if before.get(path) != entry})
    return changed


def delta_json(delta: Delta) -> str:
    """The canonical text of a delta: an entry is `[kind, mode, digest, size]`. Raises `CanonicalError` for no path."""
    return canonical({path: None if entry is None else list(entry) for path, entry in delta.items()})


def tree_digest(manifest: Manifest) -> str:
    """What makes two contents the same content, as 64 hex digits."""
    return digest(delta_json(manifest))


def write_chain(chain: str, index: int, run_id: RunId, step_id: StepId, delta_text: str) -> str:
    """The digest after the write at `index`, as 64 hex digits. `delta_text` is the delta's canonical text."""
    text = f'{{"delta":{delta_text},"index":{index},"run":"{run_id}","step":"{step_id}"}}'
    return hashlib.sha256((chain + text).encode()).hexdigest()


def plan_for(disk: Disk, index: int, chain_there: str | None) -> Plan:
    """What a new grant asks of a disk, when the log stands at `index`.

    `chain_there` is the log's digest at the disk's own index; None if the log doesn't reach that far.

    | the disk                                           | plan                                                  |
    |----------------------------------------------------|-------------------------------------------------------|
    | proves the newest index, whole                     | keep                                                  |
    | proves an older one, or has an unjoined write more | rollback: its own records say what differs            |
    | proves nothing: new, half restored, other digest   | fetch_all: read and hash what is there, believe       |
    |                                                    | nothing; remove what isn't committed, fetch the rest  |
    """
    if index == 0 and disk == EMPTY_DISK:
        return "keep"
    if not disk.epoch or not disk.is_whole or chain_there != disk.chain:
        return "fetch_all"
    return "keep" if disk.log_index == index and not disk.is_ahead else "rollback"
