"""The two acceptance rules, as a campaign over a real authority.

1. Preemptions between a provider's commit and the checkpoint, with the acknowledgement arriving after the new grant: no
   effect doubles, no stale checkpoint is accepted.
2. Many mutating steps, at least a third of them preempted: none is committed under a dead epoch, and each rejected step
   is retried under a new epoch, compensated, or ended with its run.

Each interleaving is one order of the events below, injected into one step of one run. The auditor, which doesn't share
the rules, judges the logs against the provider's own count.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tidefast.protocol.answers import LeaseGrant, StepAnswer
from tidefast.protocol.commands import Lapse, Settle
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.laws import Ack
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Refused
from tidefast.services.python_runner import python_receipt
from tidefast.sim.audit import audit
from tidefast.sim.report import Report, from_audit
from tidefast.sim.world import LEASE_MS, TIMEOUT_MS, World
from tidefast.stores.base import Store, StoreUnavailable

INTERLEAVINGS = 200
ORDERS_MIN = 20
PATIENCE_MS = 60_000
REJECTIONS = frozenset(("stale_epoch", "lease_lapsed", "run_ended"))

Point = Literal["after_commit", "after_intent", "after_receipt", "before_intent"]
Ending = Literal["preempted", "lapsed", "given_up", "restarted", "released"]
Move = Literal["late_ack", "zombie_apply", "zombie_checkpoint", "zombie_end", "successor_apply", "successor_checkpoint"]
MOVES: tuple[Move, ...] = (
    "late_ack",
    "zombie_apply",
    "zombie_checkpoint",
    "zombie_end",
    "successor_apply",
    "successor_checkpoint",
)
ENDINGS: tuple[Ending, ...] = ("preempted", "lapsed", "given_up", "restarted", "released")


class Plan(NamedTuple):
    """One interleaving: where the first worker is stopped, how its epoch ends, and what happens in which order."""

    point: Point
    ending: Ending
    tool: str
    same_holder: bool  # the worker that lost its lease is also the one that gets the next
    undo: bool  # the step that is preempted is the undo
    order: tuple[Move, ...]

    @property
    def name(self) -> str:
        who = "re-acquire" if self.same_holder else "takeover"
        what = f"undo of {self.tool}" if self.undo else self.tool
        return " > ".join((what, self.point, self.ending, who, *self.order))


@dataclass
class Tally:
    """What a campaign counted, beside what the auditor counts."""

    orders: set[str] = field(default_factory=set)
    faults: Counter[str] = field(default_factory=Counter)
    late_acks: int = 0
    preempted_steps: int = 0
    rejected: list[tuple[RunId, StepId, int]] = field(default_factory=list)
    acks: dict[RunId, tuple[Ack, ...]] = field(default_factory=dict)


class AcceptanceReport(NamedTuple):
    """The report, with the two figures that the rules ask for besides."""

    report: Report
    distinct_orders: int
    late_acks: int
    preempted_steps: int
    orders_asked: int

    @property
    def is_ok(self) -> bool:
        """Every violation count is 0, and the denominators are what the rules ask for."""
        return (
            self.report.is_ok
            and self.distinct_orders >= self.orders_asked
            and 3 * self.preempted_steps >= self.report.mutating_steps
        )


def plans(count: int, seed: int) -> Iterator[Plan]:
    """`count` interleavings with a late acknowledgement, and half as many at the other points; drawn by the seed."""
    chance = random.Random(seed)
    orders = list(itertools.permutations(MOVES))
    for place in range(count + count // 2):
        is_late_ack = place < count
        point: Point = (
            "after_commit" if is_late_ack else chance.choice(("after_intent", "after_receipt", "before_intent"))
        )
        tool = chance.choice(("charge", "charge", "mail"))
        yield Plan(
            point=point,
            ending=ENDINGS[place % len(ENDINGS)],
            tool=tool,
            same_holder=chance.random() < 0.3,
            undo=tool == "charge" and chance.random() < 0.2,
            order=chance.choice(orders),
        )


async def run(
    store: Store, interleavings: int = INTERLEAVINGS, seed: int = 1, on_step: Callable[[int], None] | None = None
) -> AcceptanceReport:
    """Run the campaign over an empty store. Every run is driven to its end; then the auditor judges."""
    world, tally = World(store), Tally()
    for place, plan in enumerate(plans(interleavings, seed)):
        await Interleaving(world, RunId(f"run-{place:05}"), plan, tally).play()
        if on_step is not None:
            on_step(place + 1)
    await world.stop()
    found = audit(store, world.provider.ledger(), acks=tally.acks, now_ms=world.clock.ms)
    report = from_audit(
        found,
        interleavings=tally.late_acks,
        rejected=len(tally.rejected),
        rejected_unanswered=unanswered(store, tally.rejected),
        seed=seed,
        faults=tally.faults,
    )
    orders_asked = min(ORDERS_MIN, interleavings)
    return AcceptanceReport(report, len(tally.orders), tally.late_acks, tally.preempted_steps, orders_asked)


def unanswered(store: Store, rejected: Sequence[tuple[RunId, StepId, int]]) -> int:
    """Rejected calls whose step was neither retried under a newer epoch, nor compensated, nor ended with its run."""
    count = 0
    for run_id, step_id, epoch in rejected:
        found = store.load_head(run_id)
        step = None if found is None else store.load_step(found[0], step_id)
        is_retried = step is not None and step.state == "committed" and step.epoch > epoch
        is_closed = step is not None and step.state in ("compensated", "rejected")
        has_ended = found is not None and found[1].end != ""
        count += not (is_retried or is_closed or has_ended)
    return count


class Interleaving:
    """Plays one plan on one run: a smooth step, then the preempted one, then the way to the end."""

    def __init__(self, world: World, run_id: RunId, plan: Plan, tally: Tally) -> None:
        self._world = world
        self._run = run_id
        self._plan = plan
        self._tally = tally
        self._step = StepId("second~undo") if plan.undo else StepId("second")
        self._asking: list[asyncio.Task[StepAnswer | Refused]] = []
        self._acks: list[Ack] = []

    async def play(self) -> None:
        await self._world.authority.create_run(self._run, "agent", "1", "{}")
        first = await self._grant("w1")
        await self._ask(first, StepId("first"), "charge")
        if self._plan.undo:
            await self._ask(first, StepId("second"), "charge")
        await self._to_point(first)
        await self._end_epoch(first)
        second = await self._grant("w1" if self._plan.same_holder else "w2")
        self._tally.faults[f"{self._plan.point}/{self._plan.ending}"] += 1
        self._tally.preempted_steps += 1
        self._tally.late_acks += self._plan.point == "after_commit"
        self._tally.orders.add(self._plan.name)
        for move in self._plan.order:
            await self._move(move, first, second)
        await self._to_the_end(second)
        self._tally.acks[self._run] = tuple(self._acks)

    async def _grant(self, holder: str) -> Right:
        answer = await self._world.authority.grant(self._run, holder, LEASE_MS, "")
        if not isinstance(answer, LeaseGrant):
            raise TypeError(f"{self._run} can't be granted: {answer}")
        return Right(answer.run_id, answer.epoch, answer.holder)

    async def _ask(self, right: Right, step_id: StepId, tool: str) -> StepAnswer | Refused:
        """Ask for a step (an undo by compensating its target), and note a rejection."""
        authority = self._world.authority
        if step_id.endswith("~undo"):
            answer = await authority.compensate(right, step_id.removesuffix("~undo"), PATIENCE_MS)
        else:
            answer = await authority.apply(right, step_id, tool, '{"cents":500}', PATIENCE_MS)
        if isinstance(answer, Refused) and answer.code in REJECTIONS:
            self._tally.rejected.append((self._run, step_id, right.epoch))
        return answer

    async def _to_point(self, right: Right) -> None:
        """Bring the first worker to the point where it is stopped."""
        tool = "refund" if self._plan.undo else self._plan.tool
        match self._plan.point:
            case "before_intent":
                return
            case "after_receipt":
                await self._ask(right, self._step, self._plan.tool)
            case "after_intent":
                await self._until_provider(self._world.provider.script(tool, "withhold_request"), right)
            case "after_commit":
                await self._until_provider(self._world.provider.script(tool, "withhold_answer"), right)

    async def _until_provider(self, arrival: asyncio.Event, right: Right) -> None:
        self._asking.append(asyncio.create_task(self._ask(right, self._step, self._plan.tool)))
        await arrival.wait()

    async def _end_epoch(self, right: Right) -> None:
        world = self._world
        match self._plan.ending:
            case "preempted":
                await world.authority.preempt(self._run, "operator", "capacity", None)
            case "released":
                await world.authority.release(right, "shutdown", "")
            case "lapsed":
                world.clock.advance(LEASE_MS + 1)
                await world.engine.submit(Lapse(self._run))
            case "given_up":
                world.clock.advance(TIMEOUT_MS + 1)
                await world.engine.submit(Lapse(self._run))
            case "restarted":
                await world.restart()
                await world.authority.preempt(self._run, "operator", "the old worker is gone", None)
        await world.quiet()

    async def _move(self, move: Move, zombie: Right, successor: Right) -> None:
        number = 1
        match move:
            case "late_ack":
                await self._late_ack()
            case "zombie_apply":
                self._asking.append(asyncio.create_task(self._ask(zombie, self._step, self._plan.tool)))
            case "successor_apply":
                self._asking.append(asyncio.create_task(self._ask(successor, self._step, self._plan.tool)))
            case "zombie_checkpoint":
                await self._checkpoint(zombie, number)
            case "successor_checkpoint":
                await self._checkpoint(successor, number)
            case "zombie_end":
                answer = await self._world.authority.complete(zombie, '"by a zombie"', [], [])
                self._note(zombie, answer)
        await self._world.quiet()

    async def _late_ack(self) -> None:
        """The first attempt's answer arrives: through its own gateway, or, if that died, as word of what was done."""
        world = self._world
        calls = list(world.provider.held.values())
        world.provider.let_go()
        await world.quiet()
        if self._plan.ending != "restarted":
            return
        for call in calls:
            receipt = python_receipt({"id": f"ch_{call.key}"})
            await world.engine.submit(Settle(self._run, self._step, 1, "applied", receipt))

    async def _checkpoint(self, right: Right, number: int) -> bool:
        answer = await self._world.authority.checkpoint(right, number, f'{{"by":{right.epoch}}}')
        self._note(right, answer)
        if isinstance(answer, Done):
            self._acks.append(Ack("checkpoint", right.epoch, answer.seq, None, number))
        return isinstance(answer, Done)

    def _note(self, right: Right, answer: Done | Refused) -> None:
        if isinstance(answer, Refused) and answer.code in REJECTIONS:
            self._tally.rejected.append((self._run, self._step, right.epoch))

    async def _to_the_end(self, successor: Right) -> None:
        """The live holder finishes what is open; a person who looks at the provider's count settles what is held."""
        world = self._world
        world.provider.let_go()
        for outcome in await asyncio.gather(*self._asking, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, StoreUnavailable):
                raise outcome  # a caller of the authority that died hears nothing; all others must
        answer = await self._ask(successor, self._step, self._plan.tool)
        if isinstance(answer, Refused) and answer.code == "step_held":
            successor = await self._decide_by_hand(successor)
            answer = await self._ask(successor, self._step, self._plan.tool)
        if not isinstance(answer, StepAnswer):
            raise TypeError(f"{self._run} ({self._plan.name}) is stuck: {answer}")
        await self._checkpoint(successor, 2)
        done = await world.authority.complete(successor, '"done"', ["first", "second", self._step], [])
        if not isinstance(done, Done):
            raise TypeError(f"{self._run} ({self._plan.name}) can't complete: {done}")

    async def _decide_by_hand(self, successor: Right) -> Right:
        world = self._world
        await world.authority.release(successor, "held", "")
        world.clock.advance(TIMEOUT_MS + 1)
        verdict: Literal["applied", "not_applied"] = "applied" if world.count(self._run, self._step) else "not_applied"
        looked = world.clock.ms
        world.clock.advance(1)
        await world.authority.resolve(
            self._run, self._step, verdict, "anna", "asked the provider", "null", looked, None
        )
        return await self._grant("w3")
