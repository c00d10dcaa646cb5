"""The replicas that are connected, and what is asked of them.

A replica is a *session* of one epoch: a socket, whose messages the server puts into the words of this module (`Link`,
and the replies). Here stands who may have a session, which calls go to it, and what becomes of a call whose session
ends. Rights are the rules' business: every grant and every end of an epoch is a decision, and a receipt counts only
when it is joined. If this process dies, the sessions are gone and nothing else is: a replica dials in again, within
its lease under the same epoch, and its journal is asked about what was open.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from tidefast.engine.engine import Engine
from tidefast.protocol.commands import (
    GrantReplica,
    LoseWrite,
    ReleaseReplica,
    RenewReplica,
)
from tidefast.protocol.events import CHAIN_START, Event
from tidefast.protocol.ids import Epoch, RunId, StepId, WorkspaceId
from tidefast.protocol.records import ReplicaRight, WorkspaceHead
from tidefast.protocol.replica import replica_fence, replica_lapsed
from tidefast.protocol.verdicts import Done, Refused, Renewed, ReplicaGranted
from tidefast.protocol.workspace import Disk
from tidefast.services.contents import Contents
from tidefast.services.replica_words import Absent, Link, NotBegun, Opened, Order, Proof, Reply, Wrote

LEASE_MS = 15_000
CALM = frozenset(("step_refused", "step_unsent", "step_rejected"))  # ends of a call that left nothing on the disk
log = structlog.get_logger("tidefast.replicas")


@dataclass(slots=True, eq=False)
class Session:
    """One connection of a replica under its epoch."""

    right: ReplicaRight
    number: int
    link: Link
    is_ready: bool = False
    unrestorable: Sequence[tuple[str, str]] = ()
    waiting: dict[str, asyncio.Future[Reply | None]] = field(default_factory=dict)  # None: the session ended first

    def answer(self, request_id: str, reply: Reply) -> None:
        """A reply has come. One that nobody waits for any more is dropped: the journal still has it."""
        future = self.waiting.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def expect(self, request_id: str) -> asyncio.Future[Reply | None]:
        future = self.waiting[request_id] = asyncio.get_running_loop().create_future()
        return future


class Replicas:
    """The sessions of one authority. Built once, on the running loop."""

    def __init__(self, engine: Engine, contents: Contents, lease_ms: int = LEASE_MS) -> None:
        self._engine = engine
        self._contents = contents
        self._lease_ms = lease_ms
        self._sessions: dict[WorkspaceId, Session] = {}
        self._numbers: dict[WorkspaceId, int] = {}  # of the newest session; a fork with an older token is no resume
        self._changed: dict[WorkspaceId, set[asyncio.Future[None]]] = {}
        self._losing: set[asyncio.Task[object]] = set()
        self._opening: dict[WorkspaceId, asyncio.Lock] = {}
        engine.on_workspace = self._on_events

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def open(
        self, workspace_id: WorkspaceId, boot_id: str, disk: Disk, proof: Proof | None, link: Link
    ) -> tuple[Session, Opened]:
        """A session for a replica that has said what its disk holds: under its own epoch again, or under the next."""
        async with self._opening.setdefault(workspace_id, asyncio.Lock()):
            place = self._engine.places.find(workspace_id)
            head = None if place is None else place.head
            there = self._chain_at(workspace_id, disk.log_index)
            if head is not None and self._may_resume(head, boot_id, disk, proof, there):
                return self._resume(head, disk, link)
            verdict = await self._engine.submit(GrantReplica(workspace_id, boot_id, self._lease_ms, disk, there))
            if not isinstance(verdict, ReplicaGranted):
                raise TypeError(f"a grant can't be answered with {verdict!r}")
            right = ReplicaRight(workspace_id, verdict.epoch, boot_id)
            session = self._register(right, link, is_ready=False)
            opened = Opened(
                right,
                session.number,
                verdict.lease_ms,
                verdict.expires_at_ms,
                verdict.plan,
                verdict.log_index,
                verdict.chain,
                is_resumed=False,
            )
            log.info("replica_granted", workspace=workspace_id, epoch=verdict.epoch, plan=verdict.plan)
            return session, opened

    def _may_resume(
        self, head: WorkspaceHead, boot_id: str, disk: Disk, proof: Proof | None, there: str | None
    ) -> bool:
        if proof is None or not head.is_live or replica_lapsed(head, self._engine.clock.now()):
            return False
        if proof.right != (head.workspace_id, head.epoch, head.boot_id) or boot_id != head.boot_id:
            return False
        if proof.number != self._numbers.get(head.workspace_id, proof.number) or not disk.is_whole:
            return False
        lag = head.log_index - disk.log_index
        return disk.epoch == head.epoch and there == disk.chain and (lag == 0 or (lag == 1 and disk.is_ahead))

    def _resume(self, head: WorkspaceHead, disk: Disk, link: Link) -> tuple[Session, Opened]:
        right = ReplicaRight(head.workspace_id, head.epoch, head.boot_id)
        session = self._register(right, link, is_ready=True)
        opened = Opened(
            right, session.number, head.lease_ms, head.expires_at_ms, "keep", head.log_index, head.chain, True
        )
        return session, opened

    def resumed(self, session: Session, disk: Disk) -> None:
        """After a resumed replica was told so: what it missed, about the write that its disk is ahead by."""
        head = self._head(session.right.workspace_id)
        if head is None or not disk.is_ahead or head.epoch != session.right.epoch:
            return
        if head.log_index == disk.log_index + 1:
            place = self._engine.places.find(head.workspace_id)
            newest = None if place is None else self._engine.store.load_write(place.key, head.log_index)
            if newest is not None:
                link = session.link
                link.joined(newest.run_id, newest.step_id, head.epoch, newest.log_index, newest.chain)
        elif head.open is None:
            self._roll_back(session, head)

    def _register(self, right: ReplicaRight, link: Link, *, is_ready: bool) -> Session:
        name = right.workspace_id
        before = self._sessions.pop(name, None)
        if before is not None:
            if before.right == right:
                before.link.close()
            self._end(before)
        number = self._numbers[name] = self._numbers.get(name, secrets.randbits(40)) + 1
        session = self._sessions[name] = Session(right, number, link, is_ready)
        self._wake(name)
        return session

    def closed(self, session: Session) -> None:
        """The socket is gone. The epoch lives on until its lease ends; calls wait for the next session."""
        if self._sessions.get(session.right.workspace_id) is session:
            del self._sessions[session.right.workspace_id]
        self._end(session)

    def _end(self, session: Session) -> None:
        session.is_ready = False
        for future in session.waiting.values():
            if not future.done():
                future.set_result(None)
        session.waiting.clear()
        self._wake(session.right.workspace_id)

    async def renew(self, session: Session) -> None:
        """The replica asks for its lease further."""
        verdict = await self._engine.submit(RenewReplica(session.right))
        head = self._head(session.right.workspace_id)
        if isinstance(verdict, Renewed) and head is not None:
            session.link.renewed(session.right.epoch, head.lease_ms, verdict.expires_at_ms)
        else:
            self._supersede(session, "lapsed")

    def restored(self, session: Session, log_index: int, chain: str, unrestorable: Sequence[tuple[str, str]]) -> bool:
        """The replica says that its disk holds this index. True, and ready for work, if that is the newest one."""
        head = self._head(session.right.workspace_id)
        if head is None or (head.log_index, head.chain) != (log_index, chain):
            return False
        session.is_ready, session.unrestorable = True, unrestorable
        self._wake(session.right.workspace_id)
        return True

    async def release(self, right: ReplicaRight, reason: str) -> Done | Refused:
        """The replica ends, or isn't believed any more."""
        verdict = await self._engine.submit(ReleaseReplica(right, reason))
        return verdict if isinstance(verdict, Done | Refused) else Refused("invalid", "reason")

    def fence(self, right: ReplicaRight) -> Refused | None:
        """The refusal that this right would meet now; None if its epoch is live."""
        return replica_fence(self._head(right.workspace_id), right, self._engine.clock.now())

    # --- what the gateway asks --------------------------------------------------------------------------------------

    def ready(self, workspace_id: WorkspaceId) -> Epoch | None:
        """The epoch of the connected replica whose disk is restored; None if there is none."""
        session = self._sessions.get(workspace_id)
        return session.right.epoch if session is not None and session.is_ready else None

    async def wait(self, workspace_id: WorkspaceId, timeout_ms: int) -> None:
        """Return when something of this workspace or its replica has changed, or after the time given."""
        waiter = asyncio.get_running_loop().create_future()
        waiting = self._changed.setdefault(workspace_id, set())
        waiting.add(waiter)
        try:
            async with asyncio.timeout(max(timeout_ms, 1) / 1_000):
                await waiter
        except TimeoutError:
            return
        finally:
            waiting.discard(waiter)
            if not waiting:
                self._changed.pop(workspace_id, None)

    async def call(
        self,
        workspace_id: WorkspaceId,
        order: Order,
        deadline_ms: int,
        *,
        was_sent: bool = False,
        known: frozenset[str] = frozenset(),
    ) -> Reply | None:
        """What a replica of the order's epoch says in the end; None if the epoch ends, or the time, before it is known.

        A session that ends is waited for again while its epoch lives, and then the journal is asked before anything is
        sent a second time. With `was_sent` it is asked at once. `known` are contents that the caller keeps by itself.
        """
        while (session := await self._session(workspace_id, order.epoch, deadline_ms)) is not None:
            request_id = f"{order.request_id}.{secrets.token_hex(4)}"
            reply = session.expect(request_id)
            if was_sent and order.run_id is not None and order.step_id is not None:
                session.link.ask(request_id, order.epoch, order.run_id, order.step_id, order.attempt)
            else:
                left_ms = deadline_ms - self._engine.clock.now().ms
                session.link.do(order._replace(request_id=request_id, within_ms=min(order.within_ms, left_ms)))
            answer = await self._reply(reply, deadline_ms)
            if isinstance(answer, Absent) and was_sent:
                return answer
            if isinstance(answer, Wrote):
                answer = await self._with_contents(session, request_id, answer, deadline_ms, known)
            if answer is not None:
                return answer
            was_sent = order.run_id is not None
        return None

    async def _session(self, workspace_id: WorkspaceId, epoch: Epoch, deadline_ms: int) -> Session | None:
        """The ready session of an epoch, waited for while the epoch may come back and the time isn't over."""
        while True:
            session, head = self._sessions.get(workspace_id), self._head(workspace_id)
            if head is None or not head.is_live or head.epoch != epoch:
                return None
            if session is not None and session.is_ready and session.right.epoch == epoch:
                return session
            left_ms = deadline_ms - self._engine.clock.now().ms
            if left_ms <= 0:
                return None
            await self.wait(workspace_id, min(left_ms, 1_000))

    async def _reply(self, reply: "asyncio.Future[Reply | None]", deadline_ms: int) -> Reply | None:
        left_ms = deadline_ms - self._engine.clock.now().ms
        try:
            async with asyncio.timeout(max(left_ms, 0) / 1_000):
                return await reply
        except TimeoutError:
            return None

    async def _with_contents(
        self, session: Session, request_id: str, wrote: Wrote, deadline_ms: int, known: frozenset[str]
    ) -> Reply | None:
        """A receipt once everything that it names is kept here; None if its session ended before that."""
        await self._contents.write({digest: text for digest, text in wrote.inline.items() if digest not in known})
        named = {entry.digest for entry in wrote.write.delta.values() if entry is not None and entry.digest}
        named -= known | wrote.inline.keys()
        while missing := await self._contents.missing(named):
            again = session.expect(request_id)
            session.link.want(request_id, sorted(missing))
            reply = await self._reply(again, deadline_ms)
            if not isinstance(reply, Wrote):
                return reply
            if reply.write != wrote.write:
                return NotBegun("receipt_changed")
        session.unrestorable = wrote.unrestorable or session.unrestorable
        return wrote

    # --- what has become durable ------------------------------------------------------------------------------------

    def _on_events(self, workspace_id: WorkspaceId, events: list[Event]) -> None:
        """Tell the replica what its workspace's log says, and settle what an ended epoch leaves open."""
        session, head = self._sessions.get(workspace_id), self._head(workspace_id)
        for event in events:
            if event.kind.startswith("lease_") and event.kind != "lease_granted":
                self._epoch_ended(session, event)
            elif session is None or head is None or event.epoch != session.right.epoch:
                continue
            elif event.kind == "write_committed":
                run_id = RunId(str(event.data["run"]))
                step_id, index = StepId(event.step_id or ""), int(str(event.data["index"]))
                session.link.joined(run_id, step_id, event.epoch, index, str(event.data["chain"]))
            elif event.kind == "write_dropped" and event.data["reason"] not in CALM:
                self._roll_back(session, head)
        self.settle_lost(head)
        self._wake(workspace_id)

    def _epoch_ended(self, session: Session | None, event: Event) -> None:
        if session is None or session.right.epoch != event.epoch:
            return
        reasons = {"lease_lapsed": "lapsed", "lease_preempted": "replaced"}
        self._supersede(session, reasons.get(event.kind, "ended"))

    def _supersede(self, session: Session, reason: str) -> None:
        head = self._head(session.right.workspace_id)
        session.link.superseded(session.right.epoch, Epoch(0) if head is None else head.epoch, reason)
        self.closed(session)

    def straighten(self, workspace_id: WorkspaceId, epoch: Epoch) -> None:
        """The replica's disk isn't where the log is: have it go back to what is joined."""
        session, head = self._sessions.get(workspace_id), self._head(workspace_id)
        if session is not None and head is not None and session.right.epoch == epoch == head.epoch:
            self._roll_back(session, head)

    def _roll_back(self, session: Session, head: WorkspaceHead) -> None:
        session.is_ready = False
        session.link.rollback(head.epoch, head.log_index, head.chain)

    def settle_lost(self, head: WorkspaceHead | None) -> None:
        """If a write is open under an epoch that has ended, have it judged as lost."""
        if head is None or head.open is None or (head.is_live and head.open.epoch == head.epoch):
            return
        task: asyncio.Task[object] = asyncio.ensure_future(
            self._engine.submit(LoseWrite(head.workspace_id, head.open.run_id, head.open.step_id))
        )
        self._losing.add(task)
        task.add_done_callback(self._losing.discard)

    # --- small things -----------------------------------------------------------------------------------------------

    def session(self, workspace_id: WorkspaceId) -> Session | None:
        return self._sessions.get(workspace_id)

    def _head(self, workspace_id: WorkspaceId) -> WorkspaceHead | None:
        place = self._engine.places.find(workspace_id)
        return None if place is None else place.head

    def _chain_at(self, workspace_id: WorkspaceId, log_index: int) -> str | None:
        if log_index == 0:
            return CHAIN_START
        place = self._engine.places.find(workspace_id)
        if place is None or place.head is None or log_index > place.head.log_index:
            return None
        if log_index == place.head.log_index:
            return place.head.chain
        write = self._engine.store.load_write(place.key, log_index)
        return None if write is None else write.chain

    def _wake(self, workspace_id: WorkspaceId) -> None:
        for waiter in self._changed.get(workspace_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def stop(self) -> None:
        """Close every socket; the epochs live on for their leases."""
        for session in list(self._sessions.values()):
            session.link.close()
            self.closed(session)
        await asyncio.gather(*self._losing, return_exceptions=True)
