"""The dial-out: one WebSocket from the replica to its authority, dialled again whenever it breaks.

Listens on nothing, so it works behind any address translation. A socket that comes back within the lease goes on under
the same epoch; else the replica proves its disk anew. Renewals go out at every third of the lease, each counted from
before it was sent, and a socket whose renewals aren't answered is given up.
"""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException
from yarl import URL

from tidefast.sdk.lease import boot_s
from tidefast.sdk.replica.contents import Unreachable
from tidefast.sdk.replica.http_contents import HttpContents
from tidefast.sdk.replica.replica import Replica
from tidefast.wire import replica as r

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0
GRANT_S = 15.0
UNANSWERED_MAX = 3  # renewals on their way; then the socket is given up
OUTPUT_QUEUED_MAX = 64
FOR_GOOD = frozenset((400, 401, 403, 404, 405, 421, 422))  # what the same request would be answered with again
_log = structlog.get_logger()


class _Problem(msgspec.Struct):
    """Of a problem's members, those that are told."""

    code: str
    reason: str = ""
    detail: str = ""


class Ended(Exception):
    """The replica has nothing more to do here; `code` and `reason` are the authority's words."""

    def __init__(self, code: str, reason: str, detail: str = "") -> None:
        super().__init__(detail or f"{code}: {reason}")
        self.code, self.reason = code, reason


class Dial:
    """A replica and its way to the authority. `run` it; `stop` ends it in order."""

    def __init__(self, replica: Replica, url: str, key: str | None) -> None:
        base = URL(url.rstrip("/"))
        if base.scheme not in ("http", "https") or not base.host:
            raise ValueError(f"{url}: expected http://HOST:PORT or https://HOST")
        self._replica = replica
        self._key = key
        self._address = str((base / "v1" / "workspaces" / replica.workspace / "replica").with_scheme(
            "wss" if base.scheme == "https" else "ws"
        ))  # fmt: skip
        self._contents = HttpContents(base, replica.workspace, key, lambda: replica.token)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._outgoing: asyncio.Queue[r.FromReplica] = asyncio.Queue()
        self._asked_s: list[float] = []  # when the renewals that aren't answered yet were sent
        self._broken: asyncio.Future[None] | None = None

    def stop(self) -> None:
        """End in order: the running command is ended, the lease given back."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`. Raises `Ended` where dialling again won't help."""
        wait_s = FIRST_WAIT_S
        try:
            while not self._stopping.is_set():
                try:
                    if await self._once():
                        wait_s = FIRST_WAIT_S
                except (WebSocketException, TimeoutError, Unreachable, msgspec.DecodeError) as error:
                    _log.warning("replica_disconnected", error=f"{type(error).__name__}: {error}"[:300])
                await self._pause(wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads those that come back
                wait_s = min(wait_s * 2, LONGEST_WAIT_S)
        finally:
            await self._replica.stop()
            await self._contents.close()

    async def _once(self) -> bool:
        """One socket from its hello to its end; whether it was granted anything. Raises `Unreachable`, `Ended`."""
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        try:
            socket = await connect(
                self._address, additional_headers=headers, max_size=r.MESSAGE_BYTES_MAX, proxy=None, compression=None,
                open_timeout=10, close_timeout=1, user_agent_header="tidefast-sandbox",
            )  # fmt: skip
        except InvalidStatus as error:
            raise _judged(error) from error
        except OSError as error:
            raise Unreachable(f"no connection to {self._address}: {error}") from error
        async with socket:
            asked_s = boot_s()
            await socket.send(r.encode(self._replica.hello()))
            async with asyncio.timeout(GRANT_S):
                first = r.read_from_authority(await socket.recv())
            if not isinstance(first, r.Grant):
                await self._hear(first)
                return False
            await self._serve(socket, first, asked_s)
        return True

    async def _serve(self, socket: ClientConnection, grant: r.Grant, asked_s: float) -> None:
        """Until the socket ends or anything that is done for it fails."""
        _log.info("replica_granted", epoch=grant.epoch, plan=grant.plan, index=grant.index, resumed=grant.is_resumed)
        self._asked_s.clear()
        self._outgoing = asyncio.Queue()
        self._broken = broken = asyncio.get_running_loop().create_future()
        listening = asyncio.create_task(self._listen(socket))
        try:
            self._spawn(self._send_on(socket, self._outgoing))
            self._spawn(self._renew(grant))
            self._spawn(self._give_back(socket, grant.epoch))
            # Beside the listening: a long restore must not keep renewals from being heard.
            self._spawn(self._restore(grant, asked_s))
            await asyncio.wait((listening, broken), return_when=asyncio.FIRST_COMPLETED)
            if not broken.done():
                await listening
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await self._end_tasks()
            if broken.done():
                broken.result()

    async def _listen(self, socket: ClientConnection) -> None:
        async for frame in socket:
            await self._hear(r.read_from_authority(frame))

    async def _hear(self, said: r.FromAuthority) -> None:
        match said:
            case r.Renewed():
                if self._asked_s:
                    self._replica.renewed(self._asked_s.pop(0), said.lease_ms)
            case r.Do():
                self._spawn(self._do(said))
            case r.Ask():
                answer = self._replica.ask(said)
                self._say(answer)
                if isinstance(answer, r.Running):
                    self._spawn(self._tell_end())
            case r.Want():
                self._spawn(self._upload(said))
            case r.Joined():
                self._replica.joined(said)
            case r.Rollback():
                self._spawn(self._roll_back(said))
            case r.Superseded():
                _log.warning("replica_superseded", epoch=said.epoch, live=said.live_epoch, reason=said.reason)
                await self._replica.superseded()
                if said.reason != "lapsed":
                    raise Ended("stale_epoch", said.reason, f"epoch {said.epoch} is over ({said.reason})")
                raise Unreachable("the epoch has lapsed")
            case r.Problem():
                raise Ended(said.code, said.reason, said.detail)
            case r.Grant():
                raise Unreachable("a second grant on one socket")

    # --- what is done beside the listening --------------------------------------------------------------------------

    async def _restore(self, grant: r.Grant, asked_s: float) -> None:
        restored = await self._replica.granted(grant, asked_s, self._contents)
        if restored is not None:
            _log.info("replica_restored", index=restored.index, files=restored.files, bytes=restored.bytes,
                      left_out=len(restored.unrestorable))  # fmt: skip
            self._say(restored)

    async def _do(self, call: r.Do) -> None:
        said = await self._replica.do(call, self._contents, self._say)
        if said is not None:
            self._say(said)

    async def _tell_end(self) -> None:
        said = await self._replica.end()
        if said is not None:
            self._say(said)

    async def _upload(self, want: r.Want) -> None:
        said = await self._replica.upload(want, self._contents)
        if said is not None:
            self._say(said)

    async def _roll_back(self, word: r.Rollback) -> None:
        restored = await self._replica.rollback(word, self._contents)
        if restored is not None:
            self._say(restored)

    async def _renew(self, grant: r.Grant) -> None:
        """Ask for the lease further at every third of it; give the socket up when the answers stay away."""
        while True:
            await asyncio.sleep(grant.lease_ms / 3_000)
            if len(self._asked_s) >= UNANSWERED_MAX:
                raise Unreachable("renewals aren't answered")
            self._asked_s.append(boot_s())
            self._say(r.Renew(grant.epoch))

    async def _give_back(self, socket: ClientConnection, epoch: int) -> None:
        await self._stopping.wait()
        await self._replica.stop()
        await socket.send(r.encode(r.Bye(epoch)))
        await socket.close()

    async def _send_on(self, socket: ClientConnection, outgoing: asyncio.Queue[r.FromReplica]) -> None:
        while True:
            await socket.send(r.encode(await outgoing.get()))

    def _say(self, said: r.FromReplica) -> None:
        """Send in order. What a broken socket doesn't take is asked about later; output that piles up is dropped."""
        if not isinstance(said, r.Output) or self._outgoing.qsize() < OUTPUT_QUEUED_MAX:
            self._outgoing.put_nowait(said)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, WebSocketException):
            return  # the listener hears what came before the end, and then the end
        if error is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _end_tasks(self) -> None:
        """End what is done for the socket that broke. A running call goes on, and is asked about."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


def _judged(error: InvalidStatus) -> Exception:
    """What an answer that is no socket means: the end, or to be tried again."""
    status = error.response.status_code
    try:
        told = msgspec.json.decode(bytes(error.response.body or b""), type=_Problem)
    except msgspec.DecodeError:
        told = _Problem(f"status {status}")
    if status in FOR_GOOD:
        return Ended(told.code, told.reason, told.detail)
    return Unreachable(f"the authority answered {status} {told.code} {told.detail}")
