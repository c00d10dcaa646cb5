"""A replica's socket: messages of `wire/replica.py` on one side, the words of `services/replicas.py` on the other.

The first message is `hello`; what isn't a message of the protocol closes the socket. Nothing is judged here but form:
paths, digests and indexes of a receipt are the rules' business.
"""

import asyncio
import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from tidefast.protocol.canonical import JSON
from tidefast.protocol.commands import Write
from tidefast.protocol.ids import Epoch, RunId, StepId, WorkspaceId, is_id
from tidefast.protocol.workspace import Disk
from tidefast.server.access import admit
from tidefast.server.credentials import Credentials
from tidefast.services import replica_words as s
from tidefast.stores.base import StoreError
from tidefast.wire import replica as r
from tidefast.wire.problem import Problem, problem
from tidefast.wire.tokens import is_holder

if TYPE_CHECKING:
    from tidefast.services.authority import Authority
    from tidefast.services.replicas import Replicas, Session

HELLO_S = 10.0
QUEUED_MAX = 1_000  # messages to a replica that reads nothing
BOOT_ID_MAX = 64


class SocketLink:
    """See `Link`: what is said is queued, and sent in order by one task."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._queue: asyncio.Queue[r.FromAuthority | None] = asyncio.Queue(QUEUED_MAX)

    def say(self, message: r.FromAuthority | None) -> None:
        """Queue a message; None closes the socket after those before it."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            while not self._queue.empty():
                self._queue.get_nowait()
            self._queue.put_nowait(None)

    async def send_on(self) -> None:
        """Send what is queued until the socket is to be closed."""
        while (message := await self._queue.get()) is not None:
            await self._socket.send_text(r.encode(message))
        if self._socket.application_state is WebSocketState.CONNECTED:
            await self._socket.close()

    def do(self, order: s.Order) -> None:
        asked = r.Do(
            order.request_id, order.epoch, order.log_index, order.verb, dict(order.args), max(order.within_ms, 0)
        )
        if order.run_id is not None and order.step_id is not None:
            asked.run, asked.step = order.run_id, order.step_id
            asked.attempt, asked.run_epoch = order.attempt, order.run_epoch
        self.say(asked)

    def ask(self, request_id: str, epoch: Epoch, run_id: RunId, step_id: StepId, attempt: int) -> None:
        self.say(r.Ask(request_id, run_id, step_id, attempt, epoch))

    def want(self, request_id: str, digests: Sequence[str]) -> None:
        self.say(r.Want(request_id, list(digests)))

    def renewed(self, epoch: Epoch, lease_ms: int, expires_at_ms: int) -> None:
        self.say(r.Renewed(epoch, lease_ms, expires_at_ms))

    def joined(self, run_id: RunId, step_id: StepId, epoch: Epoch, log_index: int, chain: str) -> None:
        self.say(r.Joined(run_id, step_id, epoch, log_index, chain))

    def rollback(self, epoch: Epoch, log_index: int, chain: str) -> None:
        self.say(r.Rollback(epoch, log_index, chain))

    def superseded(self, epoch: Epoch, live_epoch: Epoch, reason: str) -> None:
        self.say(r.Superseded(epoch, live_epoch, reason))  # type: ignore[arg-type]
        self.say(None)

    def close(self) -> None:
        self.say(None)


class ReplicaSocket:
    """The address that replicas dial."""

    def __init__(self, authority: "Authority", credentials: Credentials) -> None:
        self._authority = authority
        self._credentials = credentials

    @property
    def _replicas(self) -> "Replicas":
        return self._authority.workspaces.replicas

    async def serve(self, socket: WebSocket) -> None:
        """One socket, from its request to its end."""
        workspace_id = socket.path_params["ws"]
        caller = admit(self._credentials.book, "replica", socket.headers.get("authorization", ""))
        if isinstance(caller, Problem):
            await _turn_away(socket, caller)
        elif not is_id(workspace_id):
            await _turn_away(socket, problem("not_found", "workspace_unknown", {"workspace": workspace_id[:160]}))
        elif caller.workspace not in ("", workspace_id):
            await _turn_away(socket, problem("forbidden", "workspace", {"workspace": caller.workspace}))
        else:
            await socket.accept()
            await self._talk(socket, WorkspaceId(workspace_id))

    async def _talk(self, socket: WebSocket, workspace_id: WorkspaceId) -> None:
        link, session = SocketLink(socket), None
        sending = asyncio.create_task(link.send_on())
        try:
            async with asyncio.timeout(HELLO_S):
                hello = r.read_from_replica(await socket.receive_text())
            if not isinstance(hello, r.Hello) or len(hello.boot_id) > BOOT_ID_MAX or not is_holder(hello.boot_id):
                raise ValueError("the first message is `hello`, with a boot id of at most 64 visible characters")
            session = await self._open(link, workspace_id, hello)
            while not sending.done():
                await self._hear(session, link, r.read_from_replica(await socket.receive_text()))
        except (WebSocketDisconnect, TimeoutError):
            pass
        except (msgspec.DecodeError, ValueError, KeyError) as error:
            link.say(r.Problem("invalid", "message", str(error)[:1000]))
        except StoreError as error:
            link.say(r.Problem("store_unavailable", type(error).__name__))
        finally:
            if session is not None:
                self._replicas.closed(session)
            link.close()
            await asyncio.gather(sending, return_exceptions=True)

    async def _open(self, link: SocketLink, workspace_id: WorkspaceId, hello: r.Hello) -> "Session":
        disk = Disk(Epoch(hello.epoch), hello.index, hello.chain, hello.is_whole, hello.is_ahead)
        proved = self._credentials.signer.verify_replica(hello.token) if hello.token else None
        proof = None if proved is None else s.Proof(*proved)
        session, opened = await self._replicas.open(workspace_id, hello.boot_id, disk, proof, link)
        grant = r.Grant(
            opened.right.epoch,
            self._credentials.signer.mint_replica(opened.right, opened.number),
            opened.lease_ms,
            opened.expires_at_ms,
            opened.plan,
            opened.log_index,
            opened.chain,
            opened.is_resumed,
        )
        link.say(grant)
        if opened.is_resumed:
            self._replicas.resumed(session, disk)
        return session

    async def _hear(self, session: "Session", link: SocketLink, said: r.FromReplica) -> None:
        match said:
            case r.Renew():
                await self._replicas.renew(session)
            case r.Restored():
                left_out = [(entry.path, entry.reason) for entry in said.unrestorable]
                self._restored(session, link, said, left_out)
            case r.Receipt():
                session.answer(said.request_id, _wrote(said))
            case r.Answer():
                session.answer(said.request_id, s.Told(said.result))
            case r.Refused():
                session.answer(said.request_id, s.NotDone(_refusal(said)))
            case r.Unsent():
                session.answer(said.request_id, s.NotBegun(said.reason))
            case r.Absent():
                session.answer(said.request_id, s.Absent())
            case r.Bye():
                await self._replicas.release(session.right, said.reason)
            case r.Running() | r.Output():
                return
            case r.Hello():
                raise ValueError("`hello` is said once")

    def _restored(
        self, session: "Session", link: SocketLink, said: r.Restored, left_out: Sequence[tuple[str, str]]
    ) -> None:
        if said.epoch == session.right.epoch:
            self._replicas.restored(session, said.index, said.chain, left_out)


def _refusal(said: r.Refused) -> dict[str, JSON]:
    return {"code": said.code, "reason": said.reason, "detail": said.detail, "facts": said.facts}


def _wrote(said: r.Receipt) -> s.Wrote:
    """A receipt in the services' words. Raises `ValueError` for contents that are no base64."""
    try:
        inline = {digest: base64.b64decode(text, validate=True) for digest, text in said.inline.items()}
    except binascii.Error as error:
        raise ValueError(f"inline contents: {error}") from error
    write = Write(Epoch(said.epoch), said.index, said.delta, said.chain)
    return s.Wrote(write, said.result, inline, [(entry.path, entry.reason) for entry in said.unrestorable])


async def _turn_away(socket: WebSocket, told: Problem) -> None:
    """Refuse a socket with the problem as its answer, where the server can; else with a bare refusal."""
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        from tidefast.server.door import refusal

        await socket.send_denial_response(refusal(told))
    else:
        await socket.close(1008, told.reason)
