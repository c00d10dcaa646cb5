"""Making the disk hold a manifest and nothing else: the one way for keep, rollback and fetch all.

What is there already by its digest stays; what isn't in the manifest goes; what is missing is fetched, many files at
a time. So it costs what the tree holds and the difference, and an interrupted one goes on where it was: whoever comes
back reads the disk again. Nothing runs meanwhile and nobody reads, so files are written in place; what a crash cuts
short has another digest and is fetched again.
"""

import asyncio
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from tidefast.protocol.workspace import Entry, Manifest
from tidefast.sdk.replica.beneath import Root
from tidefast.sdk.replica.contents import Contents, Unreachable, Wanted, checked
from tidefast.sdk.replica.paths import OWN_DIRECTORY
from tidefast.sdk.replica.tree import Node, Rules, Tree, parents, scan, signature, with_parents

SMALL_BYTES = 1 << 20  # larger contents are streamed to the disk
BATCH_BYTES = 4 << 20
BATCH_FILES = 256
AT_ONCE = 4
ROUNDS = 3
T = TypeVar("T")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Outcome(NamedTuple):
    """What the disk holds afterwards, and what was fetched for it."""

    tree: Tree
    files: int
    bytes: int


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """The result of a call on a thread. A caller that is cancelled waits for its end: no thread writes on behind us."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                continue


async def restore(
    root: Root, target: Manifest, contents: Contents, rules: Rules, known: Tree | None, *, keeps: frozenset[str]
) -> Outcome:
    """Make the tree beneath the root the target. Paths that `known` vouches for aren't read again.

    `keeps` are the reasons for which something that no manifest can hold may stay. Raises `Unreachable`; then it is
    to be called again before anything else happens on the disk.
    """
    wanted = {path: entry for path, entry in with_parents(target).items() if path.split("/")[0] != OWN_DIRECTORY}
    files = fetched = 0
    for _ in range(ROUNDS):
        tree = await in_thread(scan, root, known, rules)
        drop = [path for path, why in tree.left_out.items() if why not in keeps and why != "ignored"]
        if not drop and tree.manifest() == wanted:
            return Outcome(tree, files, fetched)
        work = _Work(root, tree, wanted)
        await in_thread(work.clear, drop)
        count, size = await _fetch(work, contents)
        files, fetched = files + count, fetched + size
        await in_thread(work.finish)
        known = Tree(work.nodes, {})
    raise Unreachable("something else writes beneath the root; the tree doesn't hold still")


def _is_same(node: Node | None, entry: Entry) -> bool:
    return node is not None and node.entry == entry


class _Work:
    """One round: clear what is in the way, write what is missing."""

    def __init__(self, root: Root, tree: Tree, wanted: Manifest) -> None:
        self._root, self._wanted = root, wanted
        self.nodes = {path: node for path, node in tree.nodes.items() if _is_same(node, wanted.get(path, _NOTHING))}
        self._there = tree.nodes
        self.missing: dict[str, list[str]] = {}  # digest -> paths
        for path, entry in wanted.items():
            if path not in self.nodes and entry.kind != "dir" and not self._has_content(path, entry):
                self.missing.setdefault(entry.digest, []).append(path)

    def _has_content(self, path: str, entry: Entry) -> bool:
        """Whether only the mode differs."""
        node = self._there.get(path)
        return node is not None and node.entry.kind == entry.kind and node.entry.digest == entry.digest

    def size(self, digest: str) -> int:
        return self._wanted[self.missing[digest][0]].size

    def clear(self, drop: Iterable[str]) -> None:
        """Remove what doesn't belong, and make the directories."""
        gone: list[str] = []
        for path, node in self._there.items():
            entry = self._wanted.get(path)
            if node.entry.kind == "dir" and node.entry.mode & 0o700 != 0o700:
                with self._root.directory(tuple(path.split("/"))) as fd:
                    os.fchmod(
                        fd, 0o700
                    )  # or nothing could be written there; `finish` gives it the mode that it is to have
            if entry is None or (path not in self.nodes and not self._has_content(path, entry)):
                gone.append(path)
        removed: set[str] = set()
        for path in sorted([*gone, *drop]):
            if not any(above in removed for above in parents(path)):
                removed.add(path)
                self._remove(path)
        for path in sorted(path for path, entry in self._wanted.items() if entry.kind == "dir"):
            if path not in self._there or path in removed or any(above in removed for above in parents(path)):
                with self._root.parent(tuple(path.split("/"))) as (parent, last):
                    os.mkdir(last, 0o700, dir_fd=parent)

    def _remove(self, path: str) -> None:
        with self._root.parent(tuple(path.split("/"))) as (parent, last):
            try:
                if stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
                    shutil.rmtree(last, dir_fd=parent)
                else:
                    os.unlink(last, dir_fd=parent)
            except FileNotFoundError:
                return

    def write(self, batch: list[tuple[str, bytes]]) -> None:
        """Contents that came, at every path that wants them."""
        for digest, content in batch:
            checked(digest, content)
            for path in self.missing[digest]:
                self._write(path, content)

    def _write(self, path: str, content: bytes) -> None:
        entry = self._wanted[path]
        with self._root.parent(tuple(path.split("/"))) as (parent, last):
            if entry.kind == "symlink":
                os.symlink(os.fsdecode(content), last, dir_fd=parent)
                return
            fd = os.open(last, _NEW, 0o600, dir_fd=parent)
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(fd, view) :]
                os.fchmod(fd, entry.mode)
                self.nodes[path] = Node(entry, signature(os.fstat(fd)))
            finally:
                os.close(fd)

    async def write_large(self, digest: str, contents: Contents) -> None:
        """A content that is streamed into its first path, and copied from there to the others."""
        first, *more = self.missing[digest]
        entry = self._wanted[first]
        state = hashlib.sha256()
        with self._root.parent(tuple(first.split("/"))) as (parent, last):
            fd = os.open(last, (_NEW & ~os.O_WRONLY) | os.O_RDWR, 0o600, dir_fd=parent)
            try:
                async for piece in contents.stream(Wanted(digest, entry.size)):
                    state.update(piece)
                    await in_thread(os.write, fd, piece)
                if state.hexdigest() != digest:
                    raise Unreachable(f"the authority sent another content than {digest[:12]}")
                os.fchmod(fd, entry.mode)
                for path in more:
                    await in_thread(self._copy, fd, path)
            except BaseException:
                os.unlink(last, dir_fd=parent)
                raise
            finally:
                os.close(fd)

    def _copy(self, source: int, path: str) -> None:
        with self._root.parent(tuple(path.split("/"))) as (parent, last):
            fd = os.open(last, _NEW, 0o600, dir_fd=parent)
            try:
                at = 0
                while piece := os.pread(source, 1 << 20, at):
                    at += os.write(fd, piece)
                os.fchmod(fd, self._wanted[path].mode)
            finally:
                os.close(fd)

    def finish(self) -> None:
        """The permission bits, those of directories last: they may take away the right to write in them."""
        for path, entry in self._wanted.items():
            if entry.kind == "file" and path not in self.nodes and self._has_content(path, entry):
                with self._root.parent(tuple(path.split("/"))) as (parent, last):
                    os.chmod(last, entry.mode, dir_fd=parent)
        for path in sorted((path for path, entry in self._wanted.items() if entry.kind == "dir"), reverse=True):
            with self._root.directory(tuple(path.split("/"))) as fd:
                if os.fstat(fd).st_mode & 0o777 != self._wanted[path].mode:
                    os.fchmod(fd, self._wanted[path].mode)


_NOTHING = Entry("file", -1, "", 0)


async def _fetch(work: _Work, contents: Contents) -> tuple[int, int]:
    """Everything that is missing, several calls at a time; how many contents and bytes came."""
    wanted = [Wanted(digest, work.size(digest)) for digest in work.missing]
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(batch: list[Wanted]) -> None:
        async with gate:
            came: list[tuple[str, bytes]] = []
            try:
                async for pair in contents.fetch(batch):
                    came.append(pair)  # noqa: PERF401 - a comprehension would lose them
            finally:  # what came before the line broke needn't come again
                await in_thread(work.write, came)

    async def large(digest: str) -> None:
        async with gate:
            await work.write_large(digest, contents)

    try:
        async with asyncio.TaskGroup() as group:
            for batch in batched(item for item in wanted if item.size <= SMALL_BYTES):
                group.create_task(one(batch))
            for item in wanted:
                if item.size > SMALL_BYTES:
                    group.create_task(large(item.digest))
    except* Unreachable as errors:
        raise Unreachable(str(errors.exceptions[0])) from errors
    return len(wanted), sum(item.size for item in wanted)


def batched(wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    """Contents in groups that one call asks for."""
    batch: list[Wanted] = []
    size = 0
    for item in wanted:
        if batch and (len(batch) == BATCH_FILES or size + item.size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.size
    if batch:
        yield batch
