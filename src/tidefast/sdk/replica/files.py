"""The file verbs. Each mutating one says what it changed, path by path; a refused one has changed nothing.

Every path goes through `beneath.py`; every content gets its name through `staging.py`. Arguments are those of
`wire/workspace.py`, which has checked them.
"""

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from tidefast.protocol.canonical import JSON
from tidefast.protocol.workspace import Entry
from tidefast.sdk.replica.beneath import Root, refuse_unless_plain, rename_new
from tidefast.sdk.replica.migration import migrate
from tidefast.sdk.replica.patches import FilePatch, patched, read_patch
from tidefast.sdk.replica.paths import OWN_DIRECTORY, Parts, parse, parse_directory, refuse_protected, spell
from tidefast.sdk.replica.refusals import NotDone, conflict, misfit, told
from tidefast.sdk.replica.staging import Change, Stage
from tidefast.sdk.replica.tree import Node, Tree, hash_file, scan_below
from tidefast.wire import workspace as w

FILE_BYTES_MAX = 8 * 2**20  # of a file that is edited or patched: its content is held in memory
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}


class Done(NamedTuple):
    """A mutating verb's result, and what stands now at each path that it changed; None: nothing."""

    result: JSON
    changed: dict[str, Node | None]


class Files:
    """The verbs over one root. `allowed` are protected names that its owner lets be written."""

    def __init__(self, root: Root, stage: Stage, allowed: frozenset[str] = frozenset()) -> None:
        self._root, self._stage, self._allowed = root, stage, allowed

    # --- reading ----------------------------------------------------------------------------------------------------

    def read_file(self, args: w.ReadFile) -> JSON:
        parts = parse(args.path)
        with self._root.file(parts) as (fd, status):
            raw = os.pread(fd, args.limit, args.offset)
            digest, size = hash_file(fd)
        is_truncated = args.offset + len(raw) < status.st_size
        if args.encoding == "base64":
            content = base64.b64encode(raw).decode()
        else:
            try:
                content = _whole_text(raw, args.offset, is_truncated)
            except UnicodeDecodeError as error:
                raise conflict(
"not_text", spell(parts), f"not UTF-8 at byte {args.offset + error.start}; read it as base64") from error  # fmt: skip
        return {
            "content": content, "encoding": args.encoding, "size": size, "digest": digest, "is_truncated": is_truncated,
        }  # fmt: skip

    def list_files(self, args: w.ListFiles) -> JSON:
        top = parse_directory(args.path)
        found: list[JSON] = []
        is_truncated = False
        for path, status in sorted(self._below(top, args.is_recursive)):
            if len(found) == args.limit:
                is_truncated = True
                break
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special")
            found.append({"path": path, "kind": kind, "size": _size(status), "mode": status.st_mode & 0o777})
        return {"entries": found, "is_truncated": is_truncated}

    def stat(self, args: w.Stat) -> JSON:
        parts = parse_directory(args.path)
        status = self._root.status(parts)
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special")
        told_: dict[str, JSON] = {
            "path": spell(parts) or ".", "kind": kind, "size": _size(status), "mode": status.st_mode & 0o777,
            "mtime_ms": status.st_mtime_ns // 1_000_000,
        }  # fmt: skip
        if kind == "file" and status.st_nlink == 1:
            with self._root.file(parts) as (fd, _):
                told_["digest"] = hash_file(fd)[0]
        return told_

    # --- writing ----------------------------------------------------------------------------------------------------

    def write_file(self, args: w.WriteFile) -> Done:
        parts = self._to_write(args.path)
        content = _bytes(args.content, args.encoding)
        there = self._there(parts)
        mode = args.mode if args.mode is not None else 0o644 if there is None else there.st_mode & 0o777
        changed = self._replace([Change(parts, content, mode)])
        result: JSON = {
            "path": spell(parts), "size": len(content), "digest": _digest(content), "is_new": there is None,
        }  # fmt: skip
        return Done(result, changed)

    def edit_file(self, args: w.EditFile) -> Done:
        parts = self._to_write(args.path)
        text, mode = self._text(parts)
        replaced = 0
        for number, edit in enumerate(args.edits, 1):
            count = text.count(edit.old_text)
            if count == 0 or (count > 1 and not edit.is_all):
                why = "stands nowhere in the file" if count == 0 else f"stands there {count} times; give more of it"
                reason = "text_not_found" if count == 0 else "text_ambiguous"
                raise conflict(reason, spell(parts), f"the old text of edit {number} {why}", edit=number)
            text = text.replace(edit.old_text, edit.new_text)
            replaced += count
        content = _encoded(text, parts)
        changed = self._replace([Change(parts, content, mode)])
        result: JSON = {
            "path": spell(parts), "size": len(content), "digest": _digest(content), "replaced": replaced,
        }  # fmt: skip
        return Done(result, changed)

    def apply_patch(self, args: w.ApplyPatch) -> Done:
        """Read the patch, fit all of it in memory, then give every file its name."""
        changes: list[Change] = []
        for path, digest in args.base.items():
            with self._root.file(parse(path)) as (fd, _):
                if hash_file(fd)[0] != digest:
                    raise conflict("base_moved", path, "its content is not the one that the patch was made for")
        for file in read_patch(args.patch):
            changes += self._fitted(file)
        changed = self._replace(changes)
        return Done({"paths": sorted({spell(change.parts) for change in changes})}, changed)

    def make_dir(self, args: w.MakeDir) -> Done:
        parts = self._to_write(args.path)
        made = self._stage.make_dirs(parts)
        if made and args.mode != 0o755:
            with self._root.directory(parts) as fd:
                os.fchmod(fd, args.mode)
        return Done({"path": spell(parts), "is_new": bool(made)}, self._dirs(made))

    def delete(self, args: w.Delete, tree: Tree) -> Done:
        parts = self._to_write(args.path)
        path = spell(parts)
        with self._root.parent(parts) as (parent, last):
            try:
                status = os.stat(last, dir_fd=parent, follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    removed = 1
                    os.unlink(last, dir_fd=parent)
                elif args.is_recursive:
                    # Out of sight by one rename first, so that a crash leaves the whole tree or none of it.
                    name = self._stage.take(parent, last)
                    removed = _count(self._stage.fd, name)
                    os.fsync(parent)
                    self._stage.clear(name)
                else:
                    removed = 1
                    os.rmdir(last, dir_fd=parent)
                os.fsync(parent)
            except OSError as error:
                raise told(error, path) from error
        gone = [known for known in tree.nodes if known == path or known.startswith(path + "/")]
        return Done({"path": path, "removed": removed}, dict.fromkeys([path, *gone]))

    def move(self, args: w.Move, tree: Tree) -> Done:
        source, target = self._to_write(args.source), self._to_write(args.destination)
        old, new = spell(source), spell(target)
        if target[: len(source)] == source:
            raise conflict("move_into_itself", new, f"lies in {old} itself")
        with self._root.parent(source) as (from_fd, name), self._root.parent(target) as (to_fd, new_name):
            try:
                if args.is_replacing:
                    os.rename(name, new_name, src_dir_fd=from_fd, dst_dir_fd=to_fd)
                else:
                    rename_new(from_fd, name, to_fd, new_name)
                os.fsync(to_fd)
                os.fsync(from_fd)
            except OSError as error:
                raise told(error, new if error.errno in (17, 39, 21) else old) from error
        moved = {path: node for path, node in tree.nodes.items() if path == old or path.startswith(old + "/")}
        known = {new + path[len(old) :]: node for path, node in moved.items()}
        gone = [path for path in tree.nodes if path == new or path.startswith(new + "/")]  # what it replaced
        changed = dict[str, Node | None].fromkeys([old, *moved, *gone])
        return Done({"source": old, "destination": new}, changed | scan_below(self._root, target, known))

    def run_migration(self, args: w.RunMigration) -> Done:
        changes, count = migrate(self._root, self._to_write(args.path), args.sql)
        return Done({"changes": count}, self._replace(changes))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _to_write(self, path: str) -> Parts:
        parts = parse(path)
        refuse_protected(parts, self._allowed)
        return parts

    def _there(self, parts: Parts) -> os.stat_result | None:
        try:
            status = self._root.status(parts)
        except NotDone as refusal:
            if refusal.code == "not_found":
                return None
            raise
        refuse_unless_plain(status, parts)
        return status

    def _text(self, parts: Parts) -> tuple[str, int]:
        path = spell(parts)
        with self._root.file(parts) as (fd, status):
            if status.st_size > FILE_BYTES_MAX:
                raise NotDone("too_large", "file_too_large", f"{path}: has {status.st_size} bytes, and at most"
                              f" {FILE_BYTES_MAX} are edited", path=path, limit=FILE_BYTES_MAX)  # fmt: skip
            pieces: list[bytes] = []
            hash_file(fd, pieces.append)
        try:
            return b"".join(pieces).decode(), status.st_mode & 0o777
        except UnicodeDecodeError as error:
            raise conflict("not_text", path, f"not UTF-8 at byte {error.start}") from error

    def _fitted(self, file: FilePatch) -> list[Change]:
        parts = self._to_write(file.path)
        if file.action == "create":
            if self._there(parts) is not None:
                raise misfit(file.path, "the patch makes a file that is there already")
            return [Change(parts, _encoded(patched("", file), parts), file.mode or 0o644)]
        try:
            text, mode = self._text(parts)
        except NotDone as refusal:
            if refusal.code == "not_found":
                raise misfit(file.path, "the patch changes a file that isn't there") from refusal  # fmt: skip
            raise
        after = patched(text, file)
        if file.action == "delete":
            if after and file.hunks:
                raise misfit(file.path, "the patch deletes the file and leaves lines of it")
            return [Change(parts, None)]
        content = _encoded(after, parts)
        if file.to is None:
            return [Change(parts, content, file.mode or mode)]
        target = self._to_write(file.to)
        if self._there(target) is not None:
            raise misfit(file.to, "the patch renames onto a file that is there")
        return [Change(target, content, file.mode or mode), Change(parts, None)]

    def _replace(self, changes: list[Change]) -> dict[str, Node | None]:
        made = self._stage.replace(changes)
        changed = self._dirs(made)
        for change in changes:
            node = None
            if change.content is not None:
                entry = Entry("file", change.mode, _digest(change.content), len(change.content))
                node = Node(entry, None)
            changed[spell(change.parts)] = node
        return changed

    def _dirs(self, made: list[Parts]) -> dict[str, Node | None]:
        return {
            spell(parts): Node(Entry("dir", self._root.status(parts).st_mode & 0o777, "", 0), None) for parts in made
        }

    def _below(self, top: Parts, is_recursive: bool) -> Iterator[tuple[str, os.stat_result]]:
        with self._root.directory(top) as fd:
            yield from walk(fd, "".join(part + "/" for part in top), is_recursive)


def walk(fd: int, prefix: str, is_recursive: bool) -> Iterator[tuple[str, os.stat_result]]:
    """What a directory holds, links as themselves, the replica's own files left out."""
    with os.scandir(fd) as entries:
        items = sorted(entries, key=lambda item: item.name)
        for item in items:
            path = prefix + item.name
            if path == OWN_DIRECTORY:
                continue
            try:
                status = os.stat(item.name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:  # gone since it was listed
                continue
            yield path.encode(errors="backslashreplace").decode(), status
            if is_recursive and stat.S_ISDIR(status.st_mode):
                try:
                    below = os.open(item.name, _DIRECTORY, dir_fd=fd)
                except OSError:  # gone, or no directory any more
                    continue
                try:
                    yield from walk(below, path + "/", is_recursive)
                finally:
                    os.close(below)


def _count(parent: int, name: str) -> int:
    fd = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        return 1 + sum(1 for _ in walk(fd, "./", True))
    finally:
        os.close(fd)


def _size(status: os.stat_result) -> int:
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_size


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _bytes(content: str, encoding: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True) if encoding == "base64" else content.encode()
    except (binascii.Error, ValueError) as error:
        raise NotDone("invalid", "content_format", f"the content is not {encoding}: {error}") from error


def _encoded(text: str, parts: Parts) -> bytes:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise NotDone("invalid", "content_format", f"{spell(parts)}: the new text has no UTF-8 form") from error
    if len(content) > FILE_BYTES_MAX:
        raise NotDone("too_large", "file_too_large", f"{spell(parts)}: would have more than {FILE_BYTES_MAX} bytes",
                      path=spell(parts), limit=FILE_BYTES_MAX)  # fmt: skip
    return content


def _whole_text(raw: bytes, offset: int, is_cut: bool) -> str:
    """The text of a piece of a file: characters that its two ends cut apart fall away."""
    start = 0
    while offset and start < min(3, len(raw)) and raw[start] & 0xC0 == 0x80:
        start += 1
    try:
        return raw[start:].decode()
    except UnicodeDecodeError as error:
        if is_cut and error.reason == "unexpected end of data":
            return raw[start : start + error.start].decode()
        raise
