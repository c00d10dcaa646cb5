"""The tree on the disk as the manifest would have it, and the cost of knowing it.

A file whose inode, size, mtime and ctime are what they were holds what it held, so a scan after a command reads only
what it changed. A clock has a grain: a file changed within the last grain before a scan is read again at the next one.
Signatures live in this process alone; a new boot reads everything, because a command could have written any cache.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from tidefast.protocol.workspace import Entry, Manifest, is_path
from tidefast.sdk.replica.beneath import Root
from tidefast.sdk.replica.paths import OWN_DIRECTORY, Parts, spell

GRAIN_NS = 20_000_000  # coarser than the tick that stamps files on the kernels we know
_CHUNK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
Signature = tuple[int, int, int, int]  # inode, size, mtime_ns, ctime_ns


class Node(NamedTuple):
    """What stands at a path, and by what to know that it is unchanged; None: read it again."""

    entry: Entry
    signature: Signature | None


class Tree(NamedTuple):
    """A scan: what stands where, and what no manifest can hold, with the reason."""

    nodes: dict[str, Node]
    left_out: dict[str, str]

    def manifest(self) -> dict[str, Entry]:
        return {path: node.entry for path, node in self.nodes.items()}


class Rules(NamedTuple):
    """What a scan leaves out: globs that the user ignores, and files beyond a size in bytes."""

    ignored: tuple[str, ...] = ()
    file_bytes_max: int = 2**40

    def ignores(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        return any(fnmatchcase(path, glob) or fnmatchcase(name, glob) for glob in self.ignored)


def signature(status: os.stat_result) -> Signature:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def scan(root: Root, before: Tree | None = None, rules: Rules | None = None) -> Tree:
    """Everything beneath the root. Reads what `before` doesn't vouch for. Raises `OSError`."""
    known = before.nodes if before is not None else {}
    # What is stamped later than this may be changed again without a new stamp.
    settled_ns = time.clock_gettime_ns(time.CLOCK_REALTIME) - GRAIN_NS
    walk = _Walk(known, rules or Rules(), settled_ns)
    walk.directory(root.open((), _DIRECTORY), "")
    return Tree(walk.nodes, walk.left_out)


def scan_below(root: Root, parts: Parts, known: dict[str, Node]) -> dict[str, Node | None]:
    """What stands at a path and below it, without regard to rules. Raises `OSError`, `NotDone`."""
    walk = _Walk(known, Rules(), 0)
    with root.parent(parts) as (parent, last):
        path = spell(parts)
        status = os.stat(last, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            walk.put(path, Node(Entry("dir", status.st_mode & 0o777, "", 0), None))
            walk.directory(os.open(last, _DIRECTORY, dir_fd=parent), path + "/")
        elif stat.S_ISLNK(status.st_mode):
            walk.put(path, Node(link_entry(os.fsencode(os.readlink(last, dir_fd=parent))), None))
        elif stat.S_ISREG(status.st_mode):
            walk.file(parent, last, path, status)
    return dict(walk.nodes)


class _Walk:
    def __init__(self, known: dict[str, Node], rules: Rules, settled_ns: int) -> None:
        self.known, self.rules, self.settled_ns = known, rules, settled_ns
        self.nodes: dict[str, Node] = {}
        self.left_out: dict[str, str] = {}

    def directory(self, fd: int, prefix: str) -> None:
        """Takes in what a directory holds, and closes its descriptor."""
        below: list[tuple[str, str]] = []
        known, nodes, ignored = self.known, self.nodes, self.rules.ignored
        try:
            with os.scandir(fd) as entries:
                for item in entries:
                    name = item.name
                    path = prefix + name
                    if path == OWN_DIRECTORY:
                        continue
                    if ignored and self.rules.ignores(path):
                        self.left_out[path] = "ignored"
                        continue
                    status = item.stat(follow_symlinks=False)
                    mode = status.st_mode
                    if stat.S_ISREG(mode):
                        found = known.get(path)
                        if found is not None and found.signature == (
                            status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
                        ):  # fmt: skip
                            nodes[path] = found
                        else:
                            self.file(fd, name, path, status)
                    elif stat.S_ISDIR(mode):
                        below.append((name, path))
                        self.put(path, Node(Entry("dir", mode & 0o777, "", 0), None))
                    elif stat.S_ISLNK(mode):
                        target = os.fsencode(os.readlink(name, dir_fd=fd))
                        self.put(path, Node(link_entry(target), None))
                    else:
                        self.left_out[path] = "special"
            for name, path in below:
                if path in nodes:
                    try:
                        inside = os.open(name, _DIRECTORY, dir_fd=fd)
                    except PermissionError:
                        self.left_out[path] = "unreadable"
                        continue
                    self.directory(inside, path + "/")
        finally:
            os.close(fd)

    def file(self, parent: int, name: str, path: str, status: os.stat_result) -> None:
        if status.st_size > self.rules.file_bytes_max:
            self.left_out[path] = "too_large"
            return
        try:
            fd = os.open(name, _READ, dir_fd=parent)
        except PermissionError:  # not for root; nobody else can keep what it can't read
            self.left_out[path] = "unreadable"
            return
        try:
            status = os.fstat(fd)
            digest, size = hash_file(fd)
        finally:
            os.close(fd)
        is_settled = status.st_ctime_ns < self.settled_ns and size == status.st_size
        entry = Entry("file", status.st_mode & 0o777, digest, size)
        self.put(path, Node(entry, signature(status) if is_settled else None))

    def put(self, path: str, node: Node) -> None:
        if is_path(path):
            self.nodes[path] = node
        else:
            self.left_out[path] = "name_invalid"


def link_entry(target: bytes) -> Entry:
    """A symbolic link; its content is its target."""
    return Entry("symlink", 0o777, hashlib.sha256(target).hexdigest(), len(target))


def hash_file(fd: int, take: Callable[[bytes], object] | None = None) -> tuple[str, int]:
    """The SHA-256 and the length of what is read from a descriptor; `take` is given each piece."""
    state, size = hashlib.sha256(), 0
    while piece := os.read(fd, _CHUNK):
        state.update(piece)
        size += len(piece)
        if take is not None:
            take(piece)
    return state.hexdigest(), size


def with_parents(manifest: Manifest) -> dict[str, Entry]:
    """The manifest with the directories that nobody named."""
    whole = dict(manifest)
    for path in manifest:
        for above in parents(path):
            if above in whole:
                break
            whole[above] = Entry("dir", 0o755, "", 0)
    return whole


def parents(path: str) -> Iterator[str]:
    """The directories that a path lies in, the nearest first."""
    above = path.rpartition("/")[0]
    while above:
        yield above
        above = above.rpartition("/")[0]
