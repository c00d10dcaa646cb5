"""The sweep: makes lapsed leases and lost attempts facts.

It only picks candidates; the rules judge each one again. It waits one full lease after a start, and after a gap in its
own ticks, before it lapses anything: the authority's own silence is not charged to its workers. Time ends nothing here
but a lease, and settles no doubt.
"""

import asyncio

import structlog

from tidefast.engine.engine import Engine
from tidefast.protocol.commands import Lapse, MarkLost
from tidefast.protocol.lease import is_lapsed

SWEEP_MS = 1_000
GAP_MS = 5_000  # a sweep that comes this late has slept: the process was frozen, or the host was
log = structlog.get_logger("tidefast.keeper")


class Keeper:
    """Sweeps one engine until it is stopped."""

    def __init__(self, engine: Engine, sweep_ms: int = SWEEP_MS) -> None:
        self._engine = engine
        self._sweep_ms = sweep_ms
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Book what a dead instance left on the wire as lost, then begin to sweep."""
        await self.mark_lost()
        self._task = asyncio.create_task(self._sweep_on())
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Without a sweep no lease would ever lapse again: a fault here stops the process like any broken invariant."""
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._engine.on_failure(failure)

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
        lapsed = [head.run_id for head in self._engine.live_runs() if is_lapsed(head, now)]
        await asyncio.gather(*(self._engine.submit(Lapse(run_id)) for run_id in lapsed))
        if lapsed:
            log.info("leases_lapsed", count=len(lapsed), runs=lapsed[:10])
        return len(lapsed)

    async def _sweep_on(self) -> None:
        last_ms = self._engine.clock.now().ms
        while True:
            await asyncio.sleep(self._sweep_ms / 1_000)
            now_ms = self._engine.clock.now().ms
            if now_ms - last_ms > max(GAP_MS, 2 * self._sweep_ms):
                self._engine.clock.begin_grace()
                log.warning("sweep_gap", gap_ms=now_ms - last_ms)
            last_ms = now_ms
            await self.sweep()
