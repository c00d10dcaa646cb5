"""One life of a workspace's disk: what it holds, the right that it has, and the calls that it takes.

Speaks in the messages of `wire/replica.py` and opens no socket; `dial.py` carries them. What it says is true of the
disk when it says it: a receipt's write is on the disk and in the journal, a refused call has left nothing, `restored`
means that nobody sees anything but the committed content. It checks the fence as well as it can, by the epoch and index
of each call and by its own clock, and the authority's join is the fence that counts.

A write that was done and whose receipt was lost with its epoch is *set aside*: nobody sees it, and if the same step
comes again, with the same call and on the same content, it is adopted and not done a second time. Anything else that
comes first rolls it back.
"""

import asyncio
import base64
import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from tidefast.protocol.canonical import JSON, CanonicalError, call_digest, canonical
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.workspace import Entry, Manifest, delta_json, delta_problem, fold, write_chain
from tidefast.sdk.lease import Clock, boot_s
from tidefast.sdk.replica.beneath import Root
from tidefast.sdk.replica.commands import Commands, Ran, end_marked
from tidefast.sdk.replica.confine import Confinement
from tidefast.sdk.replica.contents import Contents, Unreachable, Wanted
from tidefast.sdk.replica.files import Done as FileDone
from tidefast.sdk.replica.files import Files
from tidefast.sdk.replica.journal import At, Begun, Call, Done, Journal, Not
from tidefast.sdk.replica.paths import OWN_DIRECTORY, parse_directory, spell
from tidefast.sdk.replica.refusals import NotDone
from tidefast.sdk.replica.restore import Outcome, restore
from tidefast.sdk.replica.searching import search
from tidefast.sdk.replica.staging import Stage, ensure_own
from tidefast.sdk.replica.tree import Node, Rules, Tree, hash_file, scan, with_parents
from tidefast.wire import replica as r
from tidefast.wire import workspace as w

Changes = dict[str, Entry | None]
Say = Callable[[r.FromReplica], None]
UNRESTORABLE_MAX = 1000
UPLOADS_AT_ONCE = 8
_KEPT = frozenset(("too_large", "unreadable"))  # what may stay on a disk that was never lost


class InUse(Exception):
    """Another replica has this directory."""


class Replica:
    """The disk of one workspace under a directory. `close` it in the end."""

    def __init__(
        self,
        directory: Path,
        workspace: str,
        confinement: Confinement,
        *,
        rules: Rules | None = None,
        allowed: frozenset[str] = frozenset(),
        passed: frozenset[str] = frozenset(),
        clock: Clock = boot_s,
    ) -> None:
        """Take the directory, and end every process that an earlier life has left. Raises `InUse`, `OSError`."""
        self.boot_id = secrets.token_hex(16)
        self.workspace = workspace
        self._root = Root(directory)
        self._rules = rules or Rules(file_bytes_max=r.BLOB_BYTES_MAX)
        self._clock = clock
        self._commands = Commands(self._root, confinement, passed)
        self._own = ensure_own(self._root)
        self._lock = _take_lock(self._own, self._commands.mark)
        end_marked(self._commands.mark)
        _ignore_for_git(self._own)
        self._stage = Stage(self._root)
        self._files = Files(self._root, self._stage, allowed)
        self.journal = Journal(self._own, workspace)
        self._tree: Tree | None = None
        self._undo: Changes = {}  # what the write ahead has replaced
        self.epoch, self.token, self._until_s = 0, "", 0.0
        self._is_restored = False
        self._is_aside = False  # the write ahead is of an older epoch, and nobody may see it
        self._is_stopping = False
        self._never: set[Call] = set()
        self._running: tuple[Call, asyncio.Task[r.FromReplica]] | None = None
        self.call_id = ""  # under which the end of the running call is told

    def close(self) -> None:
        self.journal.close()
        self._stage.close()
        os.close(self._lock)
        os.close(self._own)
        self._root.close()

    # --- the right --------------------------------------------------------------------------------------------------

    def hello(self) -> r.Hello:
        disk = self.journal.disk
        return r.Hello(
            self.boot_id,
            disk.epoch,
            disk.log_index,
            disk.chain,
            self.token,
            disk.is_whole,
            self.journal.ahead is not None,
        )

    async def granted(self, grant: r.Grant, asked_s: float, contents: Contents) -> r.Restored | None:
        """Take a grant that answers a `hello` sent after `asked_s`; None: the disk is as it was. Raises `Unreachable`.

        Under a new epoch nothing of an older one runs on, and what anyone sees is the content at the grant's index.
        """
        self.token = grant.token
        self._until_s = asked_s + grant.lease_ms / 1_000
        if grant.is_resumed and grant.epoch == self.epoch and self._is_restored:
            return None
        self._is_restored = False
        await self.end_running()
        self.epoch = grant.epoch
        self._never.clear()
        committed = with_parents(await contents.manifest(grant.index))
        if await self._is_ahead_of(grant, committed):
            self._is_restored = self._is_aside = True
            return r.Restored(grant.epoch, grant.index, grant.chain, 0, 0, self._left_out({}))
        keeps = _KEPT if grant.plan == "keep" else frozenset[str]()
        # What was refused under this epoch stays known: a restore that was cut short is only gone on with.
        is_known = grant.is_resumed and self.journal.ahead is None
        return await self._restored(committed, grant.index, grant.chain, contents, keeps, keeps_journal=is_known)

    def renewed(self, asked_s: float, lease_ms: int) -> None:
        """The authority renewed the lease, in answer to a request sent after `asked_s`."""
        self._until_s = max(self._until_s, asked_s + lease_ms / 1_000)

    @property
    def is_in_touch(self) -> bool:
        """Whether the lease still runs by this machine's clock."""
        return self._clock() < self._until_s

    async def superseded(self) -> None:
        """The epoch has ended: nothing more is done under it, and a running command is ended."""
        self._is_restored = False
        self._until_s = 0.0
        self.token = ""
        await self.end_running()

    async def stop(self) -> None:
        """Take no more calls, and end the running one; what it did counts for nothing."""
        self._is_stopping = True
        await self.end_running()

    # --- calls ------------------------------------------------------------------------------------------------------

    async def do(self, call: r.Do, contents: Contents, say: Say) -> r.FromReplica | None:
        """Do a call; None if its end is told otherwise. Raises `Unreachable` where the disk must be restored first."""
        arrived_s = self._clock()
        if call.verb not in w.VERBS:
            return self._refused(call, NotDone("unsupported", "verb_unknown", f"no verb is called {call.verb[:60]}"))
        why = self._why_not(call, arrived_s)
        if why is not None:
            return r.Unsent(call.request_id, call.epoch, why)
        try:
            args = w.read_args(call.verb, call.args)
        except (msgspec.ValidationError, ValueError) as error:
            return self._refused(call, NotDone("invalid", "args_invalid", str(error)))
        if call.verb not in w.READS and (call.run is None or call.step is None):
            return self._refused(call, NotDone("invalid", "args_invalid", "a mutating call has a run and a step"))
        known, what = Call(call.run or "", call.step or "", call.attempt), _what(call)
        if self._is_aside and not self._adopts(known, what):
            await self._roll_back(contents)
        if call.verb in w.READS:
            return await self._read(call, args)
        if self.journal.ahead is not None:
            if self.journal.ahead.call == known:
                return self._again(call.request_id)
            return r.Unsent(call.request_id, call.epoch, "busy")
        task = asyncio.create_task(self._write(known, what, call, args, contents, say))
        self._running, self.call_id = (known, task), call.request_id
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def end(self) -> r.FromReplica | None:
        """How the running call ends, under the newest id that was asked about; None if nothing runs."""
        return None if self._running is None else await asyncio.shield(self._running[1])

    def _ended(self, task: asyncio.Task[r.FromReplica]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # told to whoever waits; after a lost connection that is nobody

    def ask(self, asked: r.Ask) -> r.FromReplica:
        """What the journal says about an attempt of a step."""
        call = Call(asked.run, asked.step, asked.attempt)
        if self._running is not None and self._running[0] == call:
            self.call_id = asked.request_id
            return r.Running(asked.request_id, self.epoch)
        ahead = self.journal.ahead
        if ahead is not None and (ahead.call.run, ahead.call.step) == (asked.run, asked.step):
            self._is_aside = False
            return self._again(asked.request_id)
        refused = self.journal.refused.get((asked.run, asked.step))
        if refused is not None and refused.call.attempt == asked.attempt:
            return msgspec.structs.replace(refused.refused, request_id=asked.request_id, epoch=self.epoch)
        self._never.add(call)
        return r.Absent(asked.request_id, self.epoch, asked.run, asked.step)

    def joined(self, joined: r.Joined) -> None:
        """The write ahead is committed. A word about another write is old, and changes nothing."""
        ahead = self.journal.ahead
        if ahead is not None and (joined.index, joined.chain) == (ahead.receipt.index, ahead.receipt.chain):
            self.journal.append(self._at(joined.index, joined.chain, is_whole=True), is_synced=False)
            self._undo = {}

    async def rollback(self, word: r.Rollback, contents: Contents) -> r.Restored | None:
        """Undo the write that never will be joined. Raises `Unreachable`."""
        if word.epoch != self.epoch or self._tree is None:
            return None
        self._is_restored = False
        await self.end_running()
        disk = self.journal.disk
        if (disk.log_index, disk.chain) == (word.index, word.chain):
            return await self._roll_back(contents)
        manifest = with_parents(await contents.manifest(word.index))
        return await self._restored(manifest, word.index, word.chain, contents, _KEPT)

    async def upload(self, want: r.Want, contents: Contents) -> r.FromReplica | None:
        """Give the authority the contents of the write ahead that it asks for; then the receipt again."""
        ahead = self.journal.ahead
        if ahead is None:
            return None
        paths = {entry.digest: path for path, entry in ahead.receipt.delta.items() if entry is not None}
        gate = asyncio.Semaphore(UPLOADS_AT_ONCE)

        async def one(digest: str) -> None:
            async with gate:
                entry = cast(Entry, ahead.receipt.delta[paths[digest]])
                await contents.upload(Wanted(digest, entry.size), lambda: self._pieces(paths[digest], entry))

        try:
            async with asyncio.TaskGroup() as group:
                for digest in want.digests:
                    if digest in paths:
                        group.create_task(one(digest))
        except* Unreachable as errors:
            raise Unreachable(str(errors.exceptions[0])) from errors
        return self._again(want.request_id)

    async def end_running(self) -> None:
        """End the running call and wait until nothing of it is alive."""
        if self._running is not None:
            task = self._running[1]
            self._commands.cut()
            await asyncio.gather(task, return_exceptions=True)

    # --- how calls are done -----------------------------------------------------------------------------------------

    def _why_not(self, call: r.Do, arrived_s: float) -> Any:
        if call.epoch != self.epoch:
            return "stale_epoch"
        if self._is_stopping:
            return "stopping"
        if not self._is_restored:
            return "not_restored"
        if call.verb in w.READS:
            return None
        if self._running is not None:
            return "busy"
        if call.run is not None and call.step is not None and Call(call.run, call.step, call.attempt) in self._never:
            return "late"
        if self._clock() >= self._until_s:
            return "lease_lapsed"
        if (self._clock() - arrived_s) * 1_000 > call.within_ms:
            return "late"
        return None if call.index == self.journal.disk.log_index else "index"

    async def _read(self, call: r.Do, args: w.Args) -> r.FromReplica:
        try:
            match args:
                case w.ReadFile():
                    result = await asyncio.to_thread(self._files.read_file, args)
                case w.ListFiles():
                    result = await asyncio.to_thread(self._files.list_files, args)
                case w.Stat():
                    result = await asyncio.to_thread(self._files.stat, args)
                case w.Search():
                    result = await self._search(args)
                case _:
                    raise NotDone("unsupported", "verb_unknown", f"{call.verb} reads nothing")
        except NotDone as refusal:
            return self._refused(call, refusal)
        return r.Answer(call.request_id, self.epoch, result)

    async def _search(self, args: w.Search) -> JSON:
        parts = parse_directory(args.path)
        prefix = spell(parts) + "/" if parts else ""
        spec = {"pattern": args.pattern, "glob": args.glob, "limit": args.limit, "prefix": prefix, "own": OWN_DIRECTORY}
        fd = self._root.open_to_read(parts)
        try:
            found = await search(fd, spec)
        finally:
            os.close(fd)
        if found is None:
            raise NotDone(
                "timed_out", "timed_out", "the search took too long; make the pattern simpler or the path deeper"
            )
        if "bad" in found:
            raise NotDone("invalid", "pattern_invalid", f"the pattern can't be used: {found['bad']}")
        return cast(JSON, found)

    def _adopts(self, known: Call, what: str) -> bool:
        """Whether the write that is set aside is the one of this call. If so it is this attempt's from now on."""
        ahead = self.journal.ahead
        if ahead is None or (ahead.call.run, ahead.call.step, ahead.what) != (known.run, known.step, what):
            return False
        receipt = msgspec.structs.replace(ahead.receipt, epoch=self.epoch)
        self.journal.append(Done(known, what, receipt), is_synced=True)
        self._is_aside = False
        return True

    async def _roll_back(self, contents: Contents) -> r.Restored:
        disk = self.journal.disk
        return await self._restored(self._committed(), disk.log_index, disk.chain, contents, _KEPT)

    async def _write(
        self, known: Call, what: str, call: r.Do, args: w.Args, contents: Contents, say: Say
    ) -> r.FromReplica:
        tree = cast(Tree, self._tree)
        left_out: dict[str, str] = tree.left_out
        try:
            if isinstance(args, w.RunCommand):
                self.journal.append(Begun(known, self.epoch), is_synced=True)
                result, after = await self._command(args, say)
                changed, left_out = _changed(tree, after), after.left_out
            else:
                result, changed = await asyncio.to_thread(self._file_verb, args, tree)
            delta = {path: None if node is None else node.entry for path, node in changed.items()}
            problem = delta_problem(delta)
            if problem:
                raise NotDone("too_large", "delta_refused", f"what the call changed can't be kept: {problem}")
        except NotDone as refusal:
            return await self._refuse(known, call, args, refusal, contents)
        receipt = self._receipt(known, delta, result, {k: v for k, v in left_out.items() if k not in tree.left_out})
        # A file verb's own flushes are done; its record may be lost with the power, and the write with it.
        self.journal.append(Done(known, what, receipt), is_synced=isinstance(args, w.RunCommand))
        self._undo = {path: tree.nodes[path].entry if path in tree.nodes else None for path in changed}
        self._tree = Tree(_folded(tree.nodes, changed), left_out)
        return self._again(self.call_id)

    def _file_verb(self, args: w.Args, tree: Tree) -> tuple[JSON, dict[str, Node | None]]:
        match args:
            case w.WriteFile():
                done = self._files.write_file(args)
            case w.EditFile():
                done = self._files.edit_file(args)
            case w.ApplyPatch():
                done = self._files.apply_patch(args)
            case w.MakeDir():
                done = self._files.make_dir(args)
            case w.Delete():
                done = self._files.delete(args, tree)
            case w.Move():
                done = self._files.move(args, tree)
            case w.RunMigration():
                done = self._files.run_migration(args)
            case _:
                raise NotDone("unsupported", "verb_unknown", f"{type(args).__name__} writes nothing")
        return done.result, _real(done, tree)

    async def _command(self, args: w.RunCommand, say: Say) -> tuple[JSON, Tree]:
        """Run it and look at what it left. Raises `NotDone` where that is to be undone."""

        def heard(stream: str, text: str) -> None:
            say(r.Output(self.call_id, cast(Any, stream), text))

        ran: Ran = await self._commands.run(args, self._lock, heard)
        self._own_again()
        if ran.failed:
            raise NotDone("not_found", "command_not_started", f"the command can't be started: {ran.failed}")
        if ran.is_cut:
            raise _Cut("conflict", "stopped", "the replica ended the command")
        facts: dict[str, JSON] = {key: value for key, value in ran.result.items() if key not in ("stdout", "stderr")}
        facts |= {"stdout": str(ran.result["stdout"])[-4096:], "stderr": str(ran.result["stderr"])[-4096:]}
        if ran.result["is_timed_out"]:
            why = f"the command had not ended after {args.timeout_ms} ms; what it changed is undone"
            raise NotDone("timed_out", "timed_out", why, **facts)
        if args.is_checked and ran.result["exit_code"] != 0:
            how = (
                f"code {ran.result['exit_code']}" if ran.result["signal"] is None else f"signal {ran.result['signal']}"
            )
            raise NotDone("conflict", "exit_code", f"the command ended with {how}; what it changed is undone", **facts)
        return ran.result, await asyncio.to_thread(scan, self._root, self._tree, self._rules)

    async def _refuse(
        self, known: Call, call: r.Do, args: w.Args, refusal: NotDone, contents: Contents
    ) -> r.FromReplica:
        """Note the refusal, undo what a command left, and only then tell it. Raises `Unreachable`."""
        refused = self._refused(call, refusal)
        if isinstance(args, w.RunCommand):
            self._is_restored = False
            if not isinstance(refusal, _Cut):
                self.journal.append(Not(known, refused), is_synced=True)
                # Until this is done the authority hears nothing; after a lost connection it asks, and hears it then.
                disk = self.journal.disk
                await self._restored(self._committed(), disk.log_index, disk.chain, contents, _KEPT, keeps_journal=True)
        return msgspec.structs.replace(refused, request_id=self.call_id)

    async def _restored(
        self,
        target: Manifest,
        index: int,
        chain: str,
        contents: Contents,
        keeps: frozenset[str],
        *,
        keeps_journal: bool = False,
    ) -> r.Restored:
        if not keeps_journal:
            self.journal.append(self._at(index, chain, is_whole=False), is_synced=True)
        done: Outcome = await restore(self._root, target, contents, self._rules, self._tree, keeps=keeps)
        if not keeps_journal:
            self.journal.append(self._at(index, chain, is_whole=True), is_synced=True)
        self._tree, self._undo, self._is_restored, self._is_aside = done.tree, {}, True, False
        return r.Restored(self.epoch, index, chain, done.files, done.bytes, self._left_out({}))

    async def _is_ahead_of(self, grant: r.Grant, committed: Manifest) -> bool:
        """Whether the disk holds the committed content and the one write that the journal has, and nothing else."""
        ahead = self.journal.ahead
        disk = self.journal.disk
        if ahead is None or (disk.log_index, disk.chain) != (grant.index, grant.chain):
            return False
        tree = await asyncio.to_thread(scan, self._root, None, self._rules)
        if tree.manifest() != with_parents(fold(committed, ahead.receipt.delta)):
            return False
        self._tree = tree
        self._undo = {path: committed.get(path) for path in ahead.receipt.delta}
        self.journal.append(self._at(grant.index, grant.chain, is_whole=True), is_synced=False)
        self.journal.append(ahead, is_synced=True)
        return True

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _at(self, index: int, chain: str, *, is_whole: bool) -> At:
        return At(self.workspace, self.epoch, index, chain, is_whole)

    def _committed(self) -> Manifest:
        """What the disk held before the write ahead."""
        return fold(cast(Tree, self._tree).manifest(), self._undo)

    def _refused(self, call: r.Do, refusal: NotDone) -> r.Refused:
        facts = cast(dict[str, Any], dict(refusal.facts))
        detail = str(refusal)[:4000].encode(errors="replace").decode()
        return r.Refused(call.request_id, self.epoch, cast(Any, refusal.code), refusal.reason, detail, facts)

    def _receipt(self, known: Call, delta: Changes, result: JSON, left_out: dict[str, str]) -> r.Receipt:
        disk = self.journal.disk
        index = disk.log_index + 1
        chain = write_chain(disk.chain, index, RunId(known.run), StepId(known.step), delta_json(delta))
        lost = self._left_out(left_out)
        return r.Receipt("-", known.run, known.step, self.epoch, index, delta, chain, result, {}, lost)

    def _again(self, request_id: str) -> r.Receipt:
        """The receipt of the write ahead, with the small contents that go along."""
        receipt = cast(Done, self.journal.ahead).receipt
        inline = self._inline(receipt.delta)
        return msgspec.structs.replace(receipt, request_id=request_id, epoch=self.epoch, inline=inline)

    def _inline(self, delta: Changes) -> dict[str, str]:
        room, inline = r.INLINE_BYTES_MAX, dict[str, str]()
        for path, entry in delta.items():
            if entry is not None and entry.kind != "dir" and entry.digest not in inline and entry.size <= room:
                content = self._content(path, entry)
                if content is not None:
                    inline[entry.digest] = base64.b64encode(content).decode()
                    room -= entry.size
        return inline

    def _content(self, path: str, entry: Entry) -> bytes | None:
        """A small content from the disk; None if something else stands there by now."""
        parts = tuple(path.split("/"))
        try:
            if entry.kind == "symlink":
                with self._root.parent(parts) as (parent, last):
                    return os.fsencode(os.readlink(last, dir_fd=parent))
            pieces: list[bytes] = []
            with self._root.file(parts, is_lone=False) as (fd, _):
                digest, _ = hash_file(fd, pieces.append)
            return b"".join(pieces) if digest == entry.digest else None
        except (NotDone, OSError):
            return None

    async def _pieces(self, path: str, entry: Entry) -> AsyncIterator[bytes]:
        if entry.kind == "symlink" or entry.size <= r.INLINE_BYTES_MAX:
            yield self._content(path, entry) or b""
            return
        with self._root.file(tuple(path.split("/")), is_lone=False) as (fd, _):
            while piece := await asyncio.to_thread(os.read, fd, 1 << 20):
                yield piece

    def _left_out(self, only: dict[str, str]) -> list[r.Unrestorable]:
        """What a new replica wouldn't get back, as it is told."""
        items = only or (self._tree.left_out if self._tree is not None else {})
        return [
            r.Unrestorable(path.encode(errors="backslashreplace").decode()[:4096], why)
            for path, why in list(items.items())[:UNRESTORABLE_MAX]
        ]

    def _own_again(self) -> None:
        """Make our own directory anew if a command has removed it."""
        if os.fstat(self._own).st_nlink == 0:
            os.close(self._own)
            self._own = ensure_own(self._root)
            _ignore_for_git(self._own)
            self.journal.move_to(self._own)
        self._stage.again()


class _Cut(NotDone):
    """A command that the replica ended for its own reasons: no answer, and what it did counts for nothing."""


def _what(call: r.Do) -> str:
    """What makes two calls the same call."""
    try:
        return call_digest(call.verb, canonical(cast(JSON, call.args)))
    except CanonicalError:  # it can't be written down, so it is equal to none
        return ""


def _changed(before: Tree, after: Tree) -> dict[str, Node | None]:
    """What differs between two scans. A path that none of them can hold any more is gone."""
    changed: dict[str, Node | None] = {path: None for path in before.nodes if path not in after.nodes}
    for path, node in after.nodes.items():
        known = before.nodes.get(path)
        if known is not node and (known is None or known.entry != node.entry):
            changed[path] = node
    return changed


def _real(done: FileDone, tree: Tree) -> dict[str, Node | None]:
    """Of what a verb says that it changed, that which differs from what was known."""
    nodes = tree.nodes
    return {
        path: node
        for path, node in done.changed.items()
        if (node is None and path in nodes)
        or (node is not None and (path not in nodes or nodes[path].entry != node.entry))
    }


def _folded(nodes: dict[str, Node], changed: dict[str, Node | None]) -> dict[str, Node]:
    for path, node in changed.items():
        if node is None:
            nodes.pop(path, None)
        else:
            nodes[path] = node
    return nodes


def _take_lock(own: int, mark: str) -> int:
    """The lock that a replica and the supervisors of its commands hold. Raises `InUse`."""
    fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=own)
    for is_last in (False, True):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            if is_last or (owner.isdigit() and os.path.exists(f"/proc/{owner}")):
                os.close(fd)
                raise InUse(f"the replica of process {owner or '?'} has this directory") from None
            end_marked(mark)  # its replica is dead, and a command of it is still being ended
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _ignore_for_git(own: int) -> None:
    fd = os.open(".gitignore", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=own)
    os.write(fd, b"*\n")
    os.close(fd)
