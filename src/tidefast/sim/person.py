"""The person in charge of a simulated world: looks at what is held, looks at the provider, and says what is so.

A look is dated by the authority's clock before it is made, and the verdict names the attempts that were there. The
person is slow, and the world moves between the look and the verdict.
"""

import asyncio
from typing import TYPE_CHECKING

from tidefast.protocol.answers import StepInfo
from tidefast.protocol.canonical import canonical
from tidefast.protocol.commands import ResolveVerdict
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.verdicts import Refused, Settled
from tidefast.sim.provider import UNDONE_BY, told_receipt

if TYPE_CHECKING:
    from tidefast.sim.simulate import Simulation

ROUND_S = 300.0
BY, NOTE = "anna", "looked at the provider"


class Person:
    """Goes round every few minutes, in calm weather every half minute."""

    def __init__(self, world: "Simulation") -> None:
        self._world = world
        self._undone: set[tuple[RunId, StepId]] = set()  # by hand: whoever looks again finds nothing, and remembers why

    async def work(self) -> None:
        world = self._world
        while True:
            await asyncio.sleep(30.0 if world.is_calm else world.chance.expovariate(1 / ROUND_S))
            for step in await world.ask(lambda authority: authority.held()) or ():
                await self._decide(step)
            for run in await world.ask(lambda authority: authority.runs(None, 1_000, "frozen")) or ():
                world.seen[f"frozen run thawed ({run.frozen})"] += 1
                await self._thaw(run.run_id)

    async def _thaw(self, run_id: RunId) -> None:
        await self._world.ask(lambda authority: authority.oversee("thaw", run_id, BY, NOTE, None))

    async def _decide(self, step: StepInfo) -> None:
        world, chance = self._world, self._world.chance
        count, name = world.providers.find(step.run_id, step.step_id, step.key)
        await asyncio.sleep(chance.uniform(0.5, 5.0) if world.is_calm else chance.uniform(1, 60))
        if step.tool in UNDONE_BY and not count and step.reason == "undo_refused":
            self._undo_by_hand(step)
            count, name = 1, "by hand"
        if count:
            verdict: ResolveVerdict = "applied"
            if step.tool not in UNDONE_BY and chance.random() < 0.1 and self._is_over(step):
                world.providers.take_back_by_hand(step.run_id, step.step_id)
                self._undone.add((step.run_id, step.step_id))
                verdict = "compensated"
        elif (step.run_id, step.step_id) in self._undone:
            verdict = "compensated"
        else:
            verdict = "refused" if chance.random() < 0.25 and step.tool not in UNDONE_BY else "not_applied"
        receipt = canonical(told_receipt(name)) if verdict == "applied" else "null"
        answer = await world.ask(
            lambda authority: authority.resolve(
                step.run_id, step.step_id, verdict, BY, NOTE, receipt, step.now_ms, len(step.attempts)
            )
        )
        if isinstance(answer, Settled):
            world.seen[f"person says {verdict}"] += 1
        elif isinstance(answer, Refused):
            world.seen["verdict refused: too early or the step has moved"] += 1

    def _is_over(self, step: StepInfo) -> bool:
        """Whether a verdict that needs every deadline to have passed would be taken."""
        return all(attempt.deadline_ms < step.now_ms for attempt in step.attempts)

    def _undo_by_hand(self, step: StepInfo) -> None:
        """The provider refused the undo: the person finds another way, outside, and says so."""
        if step.undo_of is not None:
            self._world.providers.take_back_by_hand(step.run_id, step.undo_of)
