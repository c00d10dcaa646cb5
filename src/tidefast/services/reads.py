"""What people ask for: runs, logs, steps. Reads see durable rows only and change nothing."""

from collections.abc import Sequence

from tidefast.engine.engine import Engine
from tidefast.protocol.answers import BudgetInfo, EventInfo, RunInfo, StepInfo
from tidefast.protocol.budget import Amount, Budget, Limit, returned
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.records import RunHead, Step
from tidefast.protocol.verdicts import Refused
from tidefast.services.bodies import Bodies

LIMIT_MAX = 1_000


class Reads:
    """Reads of one engine's store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bodies = Bodies(engine)

    async def run(self, run_id: RunId) -> RunInfo | Refused:
        head = await self._engine.settled_view(run_id)
        if head is None:
            return _no_run(run_id)
        return self._info(head, with_bodies=True)

    async def runs(self, after: str | None, limit: int, state: str | None, prefix: str = "") -> Sequence[RunInfo]:
        start = None if after is None else RunId(after)
        heads = self._engine.store.runs(start, min(limit, LIMIT_MAX), state, prefix)
        return [self._info(head, with_bodies=False) for head in heads]

    async def events(self, run_id: RunId, after: int, limit: int) -> Sequence[EventInfo] | Refused:
        key = self._engine.run_key(run_id)
        if key is None:
            return _no_run(run_id)
        return [
            EventInfo(
                stored.event.seq,
                stored.event.at_ms,
                stored.event.kind,
                stored.event.epoch,
                stored.event.step_id,
                stored.event.data_json,
                stored.digest,
            )
            for stored in self._engine.store.load_events(key, after, min(limit, LIMIT_MAX))
        ]

    async def steps(self, run_id: RunId, after: str | None, limit: int) -> Sequence[StepInfo] | Refused:
        key = self._engine.run_key(run_id)
        if key is None:
            return _no_run(run_id)
        start = None if after is None else StepId(after)
        return [
            self._step_info(run_id, step, with_bodies=False)
            for step in self._engine.store.load_steps(key, start, min(limit, LIMIT_MAX))
        ]

    async def budgets(self, after: str, limit: int) -> Sequence[BudgetInfo]:
        """Budgets in order of their names, with the limits that operators have set; others aren't known here."""
        found = self._engine.store.budgets(after, min(limit, LIMIT_MAX))
        return [budget_info(budget, budget.raised, self._engine.clock.now().ms) for budget in found]

    async def step(self, run_id: RunId, step_id: StepId) -> StepInfo | Refused:
        step = await self._engine.settled_step(run_id, step_id)
        if step is None:
            return Refused("not_found", "step_unknown", {"run": run_id, "step": step_id})
        return self._step_info(run_id, step, with_bodies=True)

    async def held(self, prefix: str = "") -> Sequence[StepInfo]:
        """Every held step of runs whose ids begin with `prefix`, with its stored call."""
        found: list[StepInfo] = []
        after: RunId | None = None
        while heads := self._engine.store.runs(after, LIMIT_MAX, None, prefix):
            for head in heads:
                for step_id in head.held_steps:
                    info = await self.step(head.run_id, step_id)
                    if isinstance(info, StepInfo):
                        found.append(info)
            after = heads[-1].run_id
        return found

    def _info(self, head: RunHead, *, with_bodies: bool) -> RunInfo:
        end_seq, name = (
            (head.end_seq, "result") if head.end == "completed" else (head.failing_seq or head.end_seq, "error")
        )
        return RunInfo(
            run_id=head.run_id,
            agent=head.agent,
            agent_version=head.agent_version,
            state=head.state,
            epoch=head.epoch,
            is_live=head.is_live,
            holder=head.holder,
            expires_at_ms=head.expires_at_ms,
            checkpoint=head.checkpoint,
            seq=head.seq,
            digest=head.digest,
            created_ms=head.created_ms,
            frozen=head.frozen,
            held=head.held_steps,
            unsettled=head.unsettled,
            input_json=self._bodies.member(head.run_id, 1, "input") if with_bodies else "null",
            result_json=self._bodies.member(head.run_id, end_seq, name) if head.end and with_bodies else "null",
        )

    def _step_info(self, run_id: RunId, step: Step, *, with_bodies: bool) -> StepInfo:
        return StepInfo(
            run_id=run_id,
            step_id=step.step_id,
            kind=step.kind,
            state=step.state,
            tool=step.tool,
            effect=step.effect,
            key=step.key,
            epoch=step.epoch,
            reason=step.reason,
            attempts=step.attempts,
            undo_of=step.undo_of,
            closed_by=step.closed_by,
            intent_json=self._bodies.data(run_id, step.intent_seq) if with_bodies and step.intent_seq else "null",
            receipt_json=self._bodies.data(run_id, step.receipt_seq) if with_bodies and step.receipt_seq else "null",
            settled_seq=step.settled_seq,
            now_ms=self._engine.clock.now().ms,
        )


def _no_run(run_id: RunId) -> Refused:
    return Refused("not_found", "run_unknown", {"run": run_id})


def budget_info(budget: Budget, limit: Limit, now_ms: int) -> BudgetInfo:
    """A budget as people see it, without the reservations that have returned."""
    budget = returned(budget, now_ms)
    reserved = Amount()
    for reservation in budget.open:
        reserved = reserved.plus(reservation.amount)
    return BudgetInfo(budget.name, *budget.spent, *budget.estimated, *reserved, *limit, budget.note)
