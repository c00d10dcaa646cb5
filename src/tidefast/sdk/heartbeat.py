"""Heartbeats: one renewal call per process for all its leases, every third of a lease.

`ThreadHeartbeat` beats on a thread, an event loop and a connection of its own, so that agent code which blocks the
worker's loop can't starve it. `LoopHeartbeat` beats on the running loop, for an authority in the same process. A lease
that the authority calls over, or whose time is over by this machine's clock, is lost at that moment: the run's task
hears of it at its next await. If the worker's loop has not heard of a loss for a whole lease's time, it is blocked, and
the heartbeat stops renewing its other leases too. Any other refusal is of the call and not of the lease; the call is
made again.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from tidefast.protocol.verdicts import Refused, Renewed
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.sdk.errors import Preempted
from tidefast.sdk.lease import Clock, HeldLease, LeaseTable, boot_s
from tidefast.sdk.line import LOST

RECONNECT_S = 0.5
IDLE_S = 60.0  # nothing is held; `on_change` wakes the loop
_log = structlog.get_logger()


class Renewer(Protocol):
    """The one thing that a heartbeat needs of an authority."""

    async def renew(self, tokens: Sequence[str]) -> Sequence[Renewed | Refused]: ...


class Connection(Renewer, Protocol):
    """A renewer of its own, closed in the end; `HttpAuthority` is one."""

    async def close(self) -> None: ...


class Heartbeat(Protocol):
    """Keeps the leases of a table alive between `start` and `stop`."""

    def start(self, leases: LeaseTable) -> None: ...

    def stop(self) -> None: ...


async def keep(leases: LeaseTable, renewer: Renewer, wake: asyncio.Event, clock: Clock = boot_s) -> None:
    """Beat until cancelled: renew what is due, lose what is over, then wait for the next of both or for `wake`."""
    while True:
        wake.clear()
        now = clock()
        held = [lease for lease in leases.believed() if lease.lose_by_clock(now) is None]
        unheard = leases.unheard(now)
        if unheard and held:
            _give_up(held, unheard)
            continue
        if held and min(lease.beat_s for lease in held) <= now:
            await _beat(held, renewer, clock)
            continue
        next_s = min((min(lease.beat_s, lease.until_s) for lease in held), default=now + IDLE_S)
        try:
            async with asyncio.timeout(max(0.0, next_s - now)):
                await wake.wait()
        except TimeoutError:
            continue


def _give_up(held: list[HeldLease], unheard: list[HeldLease]) -> None:
    """The worker's loop doesn't run: some agent has blocked it, and no other run of this worker gets on either.

    To go on renewing would keep their leases alive over nothing. Given up, they lapse, and other workers take them.
    """
    runs = sorted({lease.run_id for lease in unheard})
    _log.error("loop_blocked", lost_and_unheard=runs, given_up=sorted(lease.run_id for lease in held))
    why = f"this worker's loop is blocked: it has not heard for a lease's time that {', '.join(runs)} was lost"
    for lease in held:
        lease.lose(Preempted(lease.run_id, lease.epoch, why, {"ended_by": "blocked_loop"}))


async def _beat(held: list[HeldLease], renewer: Renewer, clock: Clock) -> None:
    """One call for all leases. If nobody answers within a third of the shortest lease it is asked again soon."""
    asked_s = clock()
    try:
        async with asyncio.timeout(min(lease.lease_s for lease in held) / 3):
            answers = await renewer.renew([lease.token for lease in held])
        pairs = list(zip(held, answers, strict=True))
    except (AuthorityUnavailable, TimeoutError) as error:
        _log.warning("heartbeat_unanswered", leases=len(held), error=type(error).__name__)
        pairs = []
    except Exception as error:
        _log.error("heartbeat_broken", leases=len(held), error=f"{type(error).__name__}: {error}"[:200])
        pairs = []
    for lease in held if not pairs else ():
        lease.put_off(clock())
    for lease, answer in pairs:
        _take(lease, answer, asked_s, clock)


def _take(lease: HeldLease, answer: Renewed | Refused, asked_s: float, clock: Clock) -> None:
    if isinstance(answer, Renewed):
        lease.renewed(asked_s)
    elif answer.code not in LOST:
        _log.warning("renewal_refused", run=lease.run_id, code=answer.code, reason=answer.reason)
        lease.put_off(clock())
    else:
        lost = Preempted(
            lease.run_id, lease.epoch, f"its renewal was refused ({answer.code}, {answer.reason})", answer.facts
        )
        lease.lose(lost)


class LoopHeartbeat:
    """Beats on the loop that starts it. Code that blocks this loop starves it, and the authority beside it alike."""

    def __init__(self, renewer: Renewer, clock: Clock = boot_s) -> None:
        self._renewer, self._clock = renewer, clock
        self._task: asyncio.Task[None] | None = None

    def start(self, leases: LeaseTable) -> None:
        wake, loop = asyncio.Event(), asyncio.get_running_loop()
        leases.on_change = lambda: _wake(loop, wake)
        self._task = loop.create_task(keep(leases, self._renewer, wake, self._clock), name="tidefast heartbeat")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


class ThreadHeartbeat:
    """Beats on a thread of its own. `connect` is called there and gives the connection that is used there."""

    def __init__(self, connect: Callable[[], Connection], clock: Clock = boot_s) -> None:
        self._connect, self._clock = connect, clock
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = threading.Event()

    def start(self, leases: LeaseTable) -> None:
        """Returns when the thread's loop runs, so that no lease is ever added to a heart that doesn't beat."""
        self._thread = threading.Thread(target=self._run, args=(leases,), name="tidefast heartbeat", daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """End the thread; what it held is no longer renewed."""
        if self._thread is None or self._loop is None or self._task is None:
            return
        _wake(self._loop, self._task)
        self._thread.join(timeout=5)

    def _run(self, leases: LeaseTable) -> None:
        try:
            asyncio.run(self._main(leases))
        except asyncio.CancelledError:
            return

    async def _main(self, leases: LeaseTable) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        wake = asyncio.Event()
        loop = self._loop
        leases.on_change = lambda: _wake(loop, wake)
        self._ready.set()
        while True:
            try:
                connection = self._connect()
                try:
                    await keep(leases, connection, wake, self._clock)
                finally:
                    await connection.close()
            except Exception as error:
                _log.error("heartbeat_broken", error=f"{type(error).__name__}: {error}"[:200])
            now = self._clock()
            for lease in leases.believed():
                lease.lose_by_clock(now)
            await asyncio.sleep(RECONNECT_S)


def _wake(loop: asyncio.AbstractEventLoop, target: asyncio.Event | asyncio.Task[None]) -> None:
    """Set an event or cancel a task of another thread's loop; nothing if that loop has ended."""
    try:
        loop.call_soon_threadsafe(target.set if isinstance(target, asyncio.Event) else target.cancel)
    except RuntimeError:
        return
