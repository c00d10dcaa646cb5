"""What people ask for: runs, logs, steps. Reads see durable rows only and change nothing."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from tidefast.engine.engine import Engine
from tidefast.protocol.answers import BudgetInfo, EventInfo, RunInfo, StepInfo
from tidefast.protocol.budget import Amount, Budget, Limit, returned
from tidefast.protocol.doubt import line_to_add, next_move
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.records import RunEnd, RunHead, RunState, Step
from tidefast.protocol.verdicts import Refused
from tidefast.services.bodies import Bodies
from tidefast.services.secrecy import masked

LIMIT_MAX = 1_000
PAGE = 64  # of heads at a time
PAGE_BYTES_MAX = 4 * 1024 * 1024
EVENTS_AT_ONCE = 50
ENDED = frozenset(get_args(RunEnd))


class Troubles(NamedTuple):
    """How many steps wait for a person, how many are in doubt, and how long the oldest of either has been."""

    held: int
    in_doubt: int
    oldest_ms: int


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
        """Up to `limit` events, fewer where they are large: a page ends with the event that makes it 4 MiB."""
        key = self._engine.run_key(run_id)
        if key is None:
            return _no_run(run_id)
        found: list[EventInfo] = []
        left, room = min(limit, LIMIT_MAX), PAGE_BYTES_MAX
        while left > 0 and room > 0 and (page := self._engine.store.load_events(key, after, min(left, EVENTS_AT_ONCE))):
            for event, digest in ((stored.event, stored.digest) for stored in page):
                if room > 0:
                    shown = self._shown(run_id, event.step_id, event.data_json)
                    found.append(EventInfo(*event[:5], shown, digest))
                    room -= len(event.data_json)
            left, after = left - len(page), page[-1].event.seq
        return found

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

    async def has_ended(self, run_id: RunId) -> bool:
        """Whether nothing more will happen to a run, late receipts aside; durable."""
        head = await self._engine.settled_view(run_id)
        return head is not None and bool(head.end)

    async def troubles(self) -> Troubles:
        """What a person may have to look at. Goes through the open steps of every run that hasn't ended."""
        held = in_doubt = 0
        now_ms = oldest_ms = self._engine.clock.now().ms
        for state in get_args(RunState):
            after: RunId | None = None
            while state not in ENDED and (heads := self._engine.store.runs(after, LIMIT_MAX, state)):
                for head, step_id, is_held in _troubled(heads):
                    held, in_doubt = held + is_held, in_doubt + (not is_held)
                    step = self._engine.step(head.run_id, step_id)
                    if step is not None and step.attempts:
                        oldest_ms = min(oldest_ms, step.attempts[0].admitted_ms)
                after = heads[-1].run_id
                await asyncio.sleep(0)  # so many runs must not keep the loop from everybody else
        return Troubles(held, in_doubt, now_ms - oldest_ms)

    async def held(
        self, prefix: str = "", after: tuple[str, str] | None = None, limit: int = LIMIT_MAX
    ) -> Sequence[StepInfo]:
        """Up to `limit` held steps with their stored calls, in order of runs and steps, behind the (run, step) `after`.

        Only of runs whose ids begin with `prefix`.
        """
        found: list[StepInfo] = []
        for head in self._heads_from(None if after is None else RunId(after[0]), prefix):
            for step_id in sorted(head.held_steps):
                if after is not None and head.run_id == after[0] and step_id <= after[1]:
                    continue
                info = await self.step(head.run_id, step_id)
                if isinstance(info, StepInfo):
                    found.append(info)
                if len(found) >= min(limit, LIMIT_MAX):
                    return found
        return found

    def _heads_from(self, start: RunId | None, prefix: str) -> Iterator[RunHead]:
        """The run named, then those after it that have a held step, in order of creation."""
        first = None if start is None else self._engine.head(start)
        if first is not None:
            yield first
        while heads := self._engine.store.held_runs(start, PAGE, prefix):
            yield from heads
            start = heads[-1].run_id

    def _info(self, head: RunHead, *, with_bodies: bool) -> RunInfo:
        end_seq, name = (
            (head.end_seq, "result") if head.end == "completed" else (head.ending_seq or head.end_seq, "error")
        )
        if head.end == "cancelled":
            name = "note"
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
        now = self._engine.clock.now()
        move, at_ms = next_move(step, self._engine.contract(step.contract), now) if step.contract else ("", 0)
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
            intent_json=self._body(run_id, step, step.intent_seq) if with_bodies else "null",
            receipt_json=self._body(run_id, step, step.receipt_seq) if with_bodies else "null",
            settled_seq=step.settled_seq,
            now_ms=now.ms,
            doubt_since_ms=min((a.admitted_ms for a in step.doubts), default=0) if move else 0,
            next_move=move,
            next_at_ms=at_ms,
            refusals_line=self._line_to_add(run_id, step) if with_bodies else "",
        )

    def _line_to_add(self, run_id: RunId, step: Step) -> str:
        """The entry of `refusals` that the answer of a held step asks for."""
        key = self._engine.run_key(run_id)
        if step.state != "held" or step.reason != "unlisted_answer" or key is None:
            return ""
        line, after = "", step.intent_seq
        while page := self._engine.store.load_events(key, after, EVENTS_AT_ONCE):
            for event in (stored.event for stored in page if stored.event.step_id == step.step_id):
                receipt = event.data.get("receipt") if event.kind == "step_doubted" else None
                if isinstance(receipt, dict) and isinstance(receipt.get("status"), int) and receipt["status"] >= 300:
                    line = line_to_add(receipt["status"], None if receipt.get("encoding") else receipt.get("body"))
            after = page[-1].event.seq
        return line

    def _body(self, run_id: RunId, step: Step, seq: int) -> str:
        return self._shown(run_id, step.step_id, self._bodies.data(run_id, seq)) if seq else "null"

    def _shown(self, run_id: RunId, step_id: StepId | None, data_json: str) -> str:
        """An event's data as people may see it: without what the contract of its step calls secret."""
        step = None if step_id is None else self._engine.step(run_id, step_id)
        if step is None or not step.contract or not (paths := self._engine.contract(step.contract).secret):
            return data_json
        args, _ = self._bodies.stored_call(run_id, step.intent_seq)
        return masked(data_json, paths, json.loads(args))


def _troubled(heads: Sequence[RunHead]) -> Iterator[tuple[RunHead, StepId, bool]]:
    """The steps of these runs that are held or in doubt, and whether they are held."""
    for head in heads:
        for step in head.open:
            if step.state in ("held", "in_doubt"):
                yield head, step.step_id, step.state == "held"


def _no_run(run_id: RunId) -> Refused:
    return Refused("not_found", "run_unknown", {"run": run_id})


def budget_info(budget: Budget, limit: Limit, now_ms: int) -> BudgetInfo:
    """A budget as people see it, without the reservations that have returned."""
    budget = returned(budget, now_ms)
    reserved = Amount()
    for reservation in budget.open:
        reserved = reserved.plus(reservation.amount)
    return BudgetInfo(budget.name, *budget.spent, *budget.estimated, *reserved, *limit, budget.note)
