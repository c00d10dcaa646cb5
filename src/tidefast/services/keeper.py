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

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def mark_lost(self) -> int:
        """Book attempts whose owner has ended as lost: doubt, not failure. Returns how many."""
        count = 0
        for run_id in self._engine.store.fenced_runs():
            head = self._engine.head(run_id)
            for step in head.open if head is not None else ():
                if step.state == "fenced":
                    await self._engine.submit(MarkLost(run_id, step.step_id))
                    count += 1
        return count

    async def sweep(self) -> int:
        """Lapse every lease that is past its time. Returns how many."""
        now = self._engine.clock.now()
        lapsed = [head.run_id for head in self._engine.live_runs() if is_lapsed(head, now)]
        for run_id in lapsed:
            await self._engine.submit(Lapse(run_id))
            log.info("lease_lapsed", run=run_id)
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
