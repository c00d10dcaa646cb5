"""Ends the runs that fail or are cancelled and that no worker ends.

Such a run needs no agent code: what is open is asked for by its stored calls, what can be is undone in the recorded
order, then the run ends. Any worker of the agent does that; if none has within one lease, the authority takes the lease
itself, as holder `authority`, under the same rules as everybody. Where it can't go on (a step is held, an operator has
stopped the run, the lease is lost) it gives the lease back and looks again when that has changed.
"""

import asyncio
import secrets
from collections.abc import Iterator, Sequence

import structlog

from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.commands import Fail, Grant, Release, Renew
from tidefast.protocol.ids import RunId
from tidefast.protocol.lease import LEASE_DEFAULT_MS
from tidefast.protocol.records import Right, RunHead
from tidefast.protocol.verdicts import Done, Granted, Refused, Renewed
from tidefast.services.authority import Authority
from tidefast.services.bodies import Bodies

HOLDER = "authority"
WHY = "no worker came; the authority has settled what was open"
AT_ONCE = 16  # how many runs it drives at a time
PAGE = 64
LOOK_MS = 1_000
ASK_MS = 30_000  # how long one question may wait in the gateway
REST_FIRST_S, REST_MOST_S = 0.2, 30.0  # between two questions about the same doubt
WAITING = frozenset(("step_in_flight", "step_pending", "in_doubt", "no_replica", "overloaded"))
UNDO_SUFFIX = "~undo"
log = structlog.get_logger("tidefast.closer")


class Closer:
    """Looks for runs that are ending and that nobody drives, until it is stopped."""

    def __init__(self, authority: Authority, lease_ms: int = LEASE_DEFAULT_MS) -> None:
        self._authority, self._engine, self._lease_ms = authority, authority.engine, lease_ms
        self._bodies = Bodies(self._engine)
        self._driving: dict[RunId, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_on())

    async def stop(self) -> None:
        """End, giving every lease back. Calls that are out are the gateway's to finish."""
        tasks = [*self._driving.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_MS / 1_000)
            try:
                self.look()
            except Exception as error:  # the store says so itself; runs go on ending by their workers
                log.error("closer_broken", error=f"{type(error).__name__}: {error}"[:200])

    def look(self) -> Sequence[RunId]:
        """Begin to drive the runs that nobody has taken within one lease. Returns which."""
        found: list[RunId] = []
        for head in self._ending():
            if len(self._driving) >= AT_ONCE:
                break
            if head.run_id not in self._driving and self._is_left_alone(head):
                self._begin(head.run_id)
                found.append(head.run_id)
        return found

    def _ending(self) -> Iterator[RunHead]:
        for state in ("failing", "cancelling"):
            after: RunId | None = None
            while heads := self._engine.store.runs(after, PAGE, state):
                yield from heads
                after = heads[-1].run_id

    def _is_left_alone(self, head: RunHead) -> bool:
        """Whether workers have had one lease's time to take the run since it began to end, or was let go of."""
        began_ms = self._bodies.at_ms(head.run_id, head.ending_seq)
        since_ms = max(began_ms, head.lease_ended_ms)
        now_ms = self._engine.clock.now().ms
        return now_ms >= max(since_ms + (head.lease_ms or self._lease_ms), head.not_before_ms)

    def _begin(self, run_id: RunId) -> None:
        task = asyncio.create_task(self.drive(run_id), name=f"tidefast ends {run_id}")
        self._driving[run_id] = task
        task.add_done_callback(lambda ended: self._over(run_id, ended))

    def _over(self, run_id: RunId, task: "asyncio.Task[None]") -> None:
        self._driving.pop(run_id, None)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            log.error("closing_broken", run=run_id, error=f"{type(failure).__name__}: {failure}"[:200])

    async def drive(self, run_id: RunId) -> None:
        """Take the lease of a run that is ending and bring it to its end, or to where a person is needed."""
        granted = await self._engine.submit(Grant(run_id, HOLDER, self._lease_ms, secrets.token_hex(16)))
        if not isinstance(granted, Granted):
            return
        right = Right(run_id, granted.epoch, HOLDER)
        log.info("ending_taken", run=run_id, epoch=granted.epoch)
        ending = asyncio.create_task(self._end(right))
        beating = asyncio.create_task(self._beat(right))
        try:
            await asyncio.wait((ending, beating), return_when=asyncio.FIRST_COMPLETED)
            why = ending.result() if ending.done() else "the lease is lost"
        except asyncio.CancelledError:
            why = "the authority stops"
            raise
        finally:
            for task in (ending, beating):
                task.cancel()
            if why:
                await self._engine.submit(Release(right, "held", why[:500]))
                log.info("ending_released", run=run_id, epoch=granted.epoch, why=why)

    async def _beat(self, right: Right) -> None:
        """Keep the lease; returns when it is lost."""
        while True:
            await asyncio.sleep(self._lease_ms / 3_000)
            if not isinstance(await self._engine.submit(Renew(right)), Renewed):
                return

    async def _end(self, right: Right) -> str:
        """Do what is left, in order, until the run has ended (empty) or can't go on (why)."""
        rest_s = REST_FIRST_S
        while True:
            answer = await self._engine.submit(Fail(right, WHY))
            if isinstance(answer, Done):
                return "" if answer.state != "failing" else "it fails for the first time"
            if not isinstance(answer, Refused) or answer.code != "unsettled_effects":
                return f"{answer.code} ({answer.reason})" if isinstance(answer, Refused) else "unexpected"
            found = answer.facts.get("steps")
            steps = [str(step) for step in found] if isinstance(found, list | tuple) else []
            is_quiet = True
            for step in steps[:1] if answer.reason == "to_undo" else _not_undone(steps):
                told = await self._ask(right, step, is_undo=answer.reason == "to_undo")
                if isinstance(told, Refused) and told.code in WAITING:
                    is_quiet = False
                elif isinstance(told, Refused) and told.code != "step_rejected":
                    return f"{told.code} ({told.reason}), step {step}"
            rest_s = REST_FIRST_S if is_quiet else min(rest_s * 2, REST_MOST_S)
            if not is_quiet:
                await self._engine.wait_for_change(right.run_id, int(rest_s * 1_000))

    async def _ask(self, right: Right, step: str, *, is_undo: bool) -> StepAnswer | Refused:
        if is_undo or step.endswith(UNDO_SUFFIX):
            return await self._authority.compensate(right, step.removesuffix(UNDO_SUFFIX), ASK_MS)
        return await self._authority.apply(right, step, "", None, ASK_MS)


def _not_undone(steps: Sequence[str]) -> list[str]:
    """The steps to be asked for; one that is being undone is settled by its undo."""
    undone = {step.removesuffix(UNDO_SUFFIX) for step in steps if step.endswith(UNDO_SUFFIX)}
    return [step for step in steps if step not in undone]
