"""A workspace's calls through the gateway: what is sent to its replica, and what its reply means for the step.

The three lines of `gateway.py` again, with a disk that may vanish as the provider: the intent is durable, the replica
is asked, and the receipt is joined if run and replica are both still live. Contents are durable before the join.
"""

import asyncio
import base64
import binascii
import hashlib
from contextlib import AbstractContextManager, nullcontext

import msgspec

from tidefast.engine.engine import Engine
from tidefast.protocol.canonical import JSON
from tidefast.protocol.commands import Settle
from tidefast.protocol.ids import Epoch, RunId, StepId, WorkspaceId
from tidefast.protocol.records import ReplicaRight, Right
from tidefast.protocol.verdicts import AskReplica, Refused, Send, Wait
from tidefast.services.contents import Contents
from tidefast.services.python_runner import python_receipt
from tidefast.services.replica_words import Absent, NotBegun, NotDone, Order, Reply, Told, Wrote
from tidefast.services.replicas import Replicas
from tidefast.services.tools import Outcome
from tidefast.services.workspace_reads import WorkspaceReads
from tidefast.services.workspace_tools import SLACK_MS, Check, no_verbs, verb_and_args, workspace_named
from tidefast.stores.blobs import BlobRefused
from tidefast.stores.memory_blobs import MemoryBlobs

READ_MS = 60_000
SWEEP_S = 600.0  # between two looks for contents that nothing names any more
CROOKED = frozenset(("index", "busy", "receipt_changed"))  # why a call was not begun: the disk is not where the log is


class Workspaces:
    """What the gateway knows of workspaces."""

    def __init__(self, engine: Engine, contents: Contents, replicas: Replicas, check: Check) -> None:
        self._engine = engine
        self.contents = contents
        self.replicas = replicas
        self.check = check
        self._sweeping: asyncio.Task[None] | None = None
        self.reads = WorkspaceReads(engine, contents, replicas)

    def start(self) -> None:
        """Have what earlier lives left open under ended epochs judged, and begin to sweep contents."""
        for head in self._engine.places.busy():
            self.replicas.settle_lost(head)
        self._sweeping = asyncio.create_task(self._sweep_on())

    async def _sweep_on(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.contents.sweep()

    async def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self.replicas.stop()
        self.contents.close()

    def pinned(self, outcome: Outcome) -> AbstractContextManager[None]:
        """Keeps what an outcome's write names from the sweep until its join is decided."""
        if outcome.write is None:
            return nullcontext()
        return self.contents.pinned(e.digest for e in outcome.write.delta.values() if e is not None)

    async def send(self, right: Right, step_id: StepId, send: Send, args_json: str) -> Outcome:
        """One attempt at a replica. Never raises for what a replica does."""
        verb, args = verb_and_args(send.contract.tool, args_json)
        workspace_id = workspace_named(send.contract)
        if send.write is None:
            return await self._read(workspace_id, verb, args, send)
        order = Order(
            request_id=f"{right.run_id}.{step_id}.{send.attempt}"[:100],
            epoch=send.write.epoch,
            log_index=send.write.log_index,
            verb=verb,
            args=args,
            within_ms=max(self._left_ms(send) - (send.contract.timeout_ms - SLACK_MS), 1_000),
            run_id=right.run_id,
            step_id=step_id,
            attempt=send.attempt,
            run_epoch=right.epoch,
        )
        known = _content_of(verb, args)
        with self.contents.pinned(known):
            keeping = asyncio.create_task(self.contents.write(known)) if known else None  # while the replica writes
            try:
                reply = await self.replicas.call(workspace_id, order, send.deadline_ms, known=frozenset(known))
                if keeping is not None:
                    await keeping
            except BlobRefused as refused:
                return await self._not_kept(workspace_id, order.epoch, refused)
        if isinstance(reply, NotBegun) and reply.reason in CROOKED:
            self.replicas.straighten(workspace_id, order.epoch)
        return self._outcome(reply, send.write.epoch)

    async def _not_kept(self, workspace_id: WorkspaceId, epoch: Epoch, refused: BlobRefused) -> Outcome:
        """The authority can't keep a content: the step is refused, and what the replica has of it is rolled back."""
        code = "full" if refused.reason == "full" else "too_large"
        receipt = python_receipt({"code": code, "reason": refused.reason, "detail": refused.detail})
        session = self.replicas.session(workspace_id)
        if session is not None and session.right.epoch == epoch:
            await self.replicas.release(session.right, refused.reason)
        return Outcome("refused", receipt, code)

    async def _read(self, workspace_id: WorkspaceId, verb: str, args: dict[str, JSON], send: Send) -> Outcome:
        reply = await self.read(workspace_id, verb, args, send.deadline_ms)
        return Outcome("unsent", reason="no_replica") if reply is None else self._outcome(reply, None)

    async def read(self, workspace_id: WorkspaceId, verb: str, args: dict[str, JSON], deadline_ms: int) -> Reply | None:
        """What a reading verb finds on the replica's disk; None if no replica answers until the deadline."""
        while (left_ms := deadline_ms - self._engine.clock.now().ms) > 0:
            epoch = self.replicas.ready(workspace_id)
            if epoch is None:
                await self.replicas.wait(workspace_id, min(left_ms, 1_000))
                continue
            order = Order("read", epoch, 0, verb, args, left_ms)
            reply = await self.replicas.call(workspace_id, order, deadline_ms)
            if reply is not None and not isinstance(reply, NotBegun):
                return reply
            await self.replicas.wait(workspace_id, 100)
        return None

    async def read_now(self, workspace_id: str, verb: str, args_json: str, wait_ms: int) -> dict[str, JSON] | Refused:
        """A reading verb that is no step: what the disk holds now."""
        args: dict[str, JSON] = msgspec.json.decode(args_json)
        facts = self.check(verb, args)
        if facts is None or facts.is_write:
            return Refused("not_found", "tool_unknown", {"tool": verb})
        if facts.problem:
            return Refused("invalid", "args", {"tool": verb, "problem": facts.problem})
        deadline_ms = self._engine.clock.now().ms + wait_ms
        reply = await self.read(WorkspaceId(workspace_id), verb, args, deadline_ms)
        match reply:
            case Told():
                return {"result": reply.result}
            case NotDone():
                return Refused("invalid", "args", {"tool": verb, "problem": str(reply.refusal.get("detail", ""))})
            case _:
                return Refused("no_replica", "away", {"workspace": workspace_id})

    async def ask(self, run_id: RunId, step_id: StepId, ask: AskReplica) -> Wait:
        """Put a doubt to the journal of the replica that was asked, and settle it by what it says."""
        order = Order("ask", ask.epoch, 0, "", {}, 0, run_id, step_id, ask.attempt)
        deadline_ms = self._engine.clock.now().ms + READ_MS
        try:
            reply = await self.replicas.call(ask.workspace_id, order, deadline_ms, was_sent=True)
        except BlobRefused as refused:
            outcome = await self._not_kept(ask.workspace_id, ask.epoch, refused)
        else:
            outcome = self._outcome(reply, ask.epoch)
        if reply_is_known(outcome):
            await self.settle(run_id, step_id, ask.attempt, outcome)
        return Wait("step_in_flight", "settled", self._engine.clock.now().ms, step_id, workspace_id=ask.workspace_id)

    async def settle(self, run_id: RunId, step_id: StepId, attempt: int, outcome: Outcome) -> object:
        """Settle an attempt with everything its write names pinned; a receipt that doesn't follow ends its replica."""
        command = Settle(run_id, step_id, attempt, outcome.kind, outcome.receipt_json, outcome.reason, outcome.write)
        with self.pinned(outcome):
            return await self._engine.submit(command)

    async def distrust(self, workspace_id: WorkspaceId, epoch: Epoch) -> None:
        """A replica said what can't be: its epoch ends, and what it did is gone."""
        place = self._engine.places.find(workspace_id)
        if place is not None and place.head is not None and place.head.epoch == epoch:
            right = ReplicaRight(workspace_id, epoch, place.head.boot_id)
            await self.replicas.release(right, "receipt_invalid")

    def _left_ms(self, send: Send) -> int:
        return send.deadline_ms - self._engine.clock.now().ms

    def _outcome(self, reply: Reply | None, epoch: Epoch | None) -> Outcome:
        match reply:
            case Wrote():
                result: JSON = {"result": reply.result, "write": _summary(reply, epoch)}
                return Outcome("applied", python_receipt(result), write=reply.write)
            case Told():
                return Outcome("applied", python_receipt({"result": reply.result}))
            case NotDone():
                return Outcome("refused", python_receipt(dict(reply.refusal)), "refused")
            case NotBegun():
                return Outcome("unsent", reason=reply.reason)
            case Absent():
                return Outcome("unsent", reason="absent")
            case _:
                return Outcome("doubted", reason="replica_away")


def reply_is_known(outcome: Outcome) -> bool:
    return outcome.kind != "doubted"


def _summary(wrote: Wrote, epoch: Epoch | None) -> dict[str, JSON]:
    """What the run's log keeps of a write; the delta itself stands in the workspace's."""
    summary: dict[str, JSON] = {
        "chain": wrote.write.chain,
        "epoch": epoch,
        "index": wrote.write.log_index,
        "paths": len(wrote.write.delta),
    }
    if wrote.unrestorable:
        summary["unrestorable"] = [list(pair) for pair in wrote.unrestorable[:100]]
    return summary


def _content_of(verb: str, args: dict[str, JSON]) -> dict[str, bytes]:
    """The content that a call brings with it, so that it is kept while the replica still writes."""
    content = args.get("content")
    if verb != "write_file" or not isinstance(content, str):
        return {}
    try:
        raw = base64.b64decode(content, validate=True) if args.get("encoding") == "base64" else content.encode()
    except (binascii.Error, ValueError):
        return {}
    return {hashlib.sha256(raw).hexdigest(): raw}


def without_verbs(engine: Engine) -> Workspaces:
    """What a gateway has that serves no workspaces: their logs can be read, and no tool is known."""
    contents = Contents(engine, MemoryBlobs)
    return Workspaces(engine, contents, Replicas(engine, contents), no_verbs)
