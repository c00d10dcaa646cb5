"""The sweep: makes lapsed leases and lost attempts facts, and has providers asked about doubts.

It only picks candidates; the rules judge each one again. It waits one full lease after a start, and after a gap in its
own ticks, before it lapses anything: the authority's own silence is not charged to its workers. Time ends nothing here
but a lease, and settles no doubt.
"""

import asyncio

import structlog

from tidefast.engine.engine import Engine
from tidefast.protocol.commands import Lapse, LapseReplica, LoseWrite, MarkLost, Preempt
from tidefast.protocol.ids import incarnation_of
from tidefast.protocol.lease import LEASE_DEFAULT_MS, is_lapsed
from tidefast.protocol.replica import replica_lapsed
from tidefast.services.prober import Prober

SWEEP_MS = 1_000
STEP_MS = 1_000  # a wall clock that moves this far between two sweeps was set by somebody
log = structlog.get_logger("tidefast.keeper")


class Keeper:
    """Sweeps one engine until it is stopped."""

    def __init__(self, engine: Engine, sweep_ms: int = SWEEP_MS, prober: Prober | None = None) -> None:
        self._engine = engine
        self._prober = prober
        self._sweep_ms = sweep_ms
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over what an earlier life left, then begin to sweep."""
        await self.take_over()
        self._task = asyncio.create_task(self._sweep_on())
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._prober is not None:
            await self._prober.stop()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Without a sweep no lease would ever lapse again: a fault here stops the process like any broken invariant."""
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._engine.on_failure(failure)

    async def take_over(self) -> None:
        """Book what a dead instance left on the wire as lost, and end the leases of an earlier incarnation."""
        await self.mark_lost()
        incarnation = self._engine.identity.incarnation
        older = [head.run_id for head in self._engine.live_runs() if incarnation_of(head.epoch) < incarnation]
        note = "the store was restored or adopted"
        await asyncio.gather(*(self._engine.submit(Preempt(run_id, "recovery", note)) for run_id in older))

    async def mark_lost(self) -> int:
        """Book attempts whose owner has ended as lost: doubt, not failure. Returns how many."""
        lost: list[MarkLost] = []
        for run_id in self._engine.store.fenced_runs():
            head = self._engine.head(run_id)
            lost += [MarkLost(run_id, step.step_id) for step in (head.open if head else ()) if step.state == "fenced"]
        await asyncio.gather(*map(self._engine.submit, lost))
        return len(lost)

    async def sweep(self) -> int:
        """Lapse every lease that is past its time. Returns how many."""
        now = self._engine.clock.now()
        await self._sweep_workspaces()
        lapsed = [head.run_id for head in self._engine.live_runs() if is_lapsed(head, now)]
        await asyncio.gather(*(self._engine.submit(Lapse(run_id)) for run_id in lapsed))
        if lapsed:
            log.info("leases_lapsed", count=len(lapsed), runs=lapsed[:10])
        return len(lapsed)

    async def _sweep_workspaces(self) -> None:
        """Lapse replicas whose lease is past its time, and judge what is open under an epoch that has ended."""
        now = self._engine.clock.now()
        busy = self._engine.places.busy()
        lapsed = [head for head in busy if head.is_live and replica_lapsed(head, now)]
        await asyncio.gather(*(self._engine.submit(LapseReplica(head.workspace_id)) for head in lapsed))
        for head in self._engine.places.busy():
            write = head.open
            if write is not None and not (head.is_live and write.epoch == head.epoch):
                await self._engine.submit(LoseWrite(head.workspace_id, write.run_id, write.step_id))

    def _has_slept(self, gap_ms: int) -> bool:
        """Whether a sweep comes so late that holders can't have been heard: the process was frozen, or the host was."""
        if gap_ms <= 2 * self._sweep_ms:
            return False
        shortest_ms = min((head.lease_ms for head in self._engine.live_runs()), default=LEASE_DEFAULT_MS)
        return gap_ms > shortest_ms // 2

    async def _sweep_on(self) -> None:
        began = self._engine.clock.now()
        last_ms, drift_ms = began.ms, began.wall_ms - began.ms
        while True:
            await asyncio.sleep(self._sweep_ms / 1_000)
            now = self._engine.clock.now()
            now_ms = now.ms
            if abs(now.wall_ms - now.ms - drift_ms) > STEP_MS:
                log.warning("wall_clock_stepped", by_ms=now.wall_ms - now.ms - drift_ms)  # it moves no lease
                drift_ms = now.wall_ms - now.ms
            if self._has_slept(now_ms - last_ms):
                self._engine.clock.begin_grace()
                log.warning("sweep_gap", gap_ms=now_ms - last_ms)
            last_ms = now_ms
            await self.sweep()
            if self._prober is not None:
                self._prober.sweep()
