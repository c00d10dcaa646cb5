"""All 40,320 orders of eight events on one step, each played through the real engine.

| event           | what it is                                                                        |
|-----------------|-----------------------------------------------------------------------------------|
| acquire         | another worker asks for the run's lease                                           |
| apply           | the first worker asks for the step; the provider does it, its answer is under way |
| preempt         | an operator ends the live epoch                                                   |
| late ack        | the answer to the oldest request arrives                                          |
| retry           | whoever was granted last asks for the same step                                   |
| checkpoint      | whoever was granted last saves the next checkpoint                                |
| late checkpoint | the first worker saves one, number 1                                              |
| duplicate       | the first worker's request for the step arrives once more                         |

Whatever the order, the events are followed to the run's end: answers that are still under way arrive, a live holder
asks for the step, saves and completes. Then the auditor judges the log against the provider's own count.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tidefast.engine.clock import ManualClock
from tidefast.engine.engine import Engine
from tidefast.protocol.canonical import call_digest
from tidefast.protocol.commands import (
    Admit,
    Complete,
    CreateRun,
    Grant,
    Preempt,
    Resolve,
    SaveCheckpoint,
    Settle,
)
from tidefast.protocol.contracts import PYTHON_KEY, Contract, contract_digest
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.laws import Ack
from tidefast.protocol.records import Right
from tidefast.protocol.trace import Trace
from tidefast.protocol.verdicts import Done, Granted, Refused, Send, Verdict
from tidefast.services.python_runner import python_receipt
from tidefast.sim.audit import AuditReport, audit
from tidefast.sim.history import Ledger
from tidefast.sim.report import Report, from_audit
from tidefast.sim.virtual import VirtualLoop, run_virtual
from tidefast.stores.base import Store
from tidefast.stores.memory import MemoryStore

EVENTS = ("acquire", "apply", "preempt", "late_ack", "retry", "checkpoint", "late_checkpoint", "duplicate")
ALL = 40_320
LEASE_MS, TIMEOUT_MS = 15_000, 30_000
BATCH = 480  # orders in one store, judged together
TRIES_MAX = 8
PAY = StepId("pay")
ARGS = '{"cents":500}'
CHARGE = Contract("charge", "python", key=PYTHON_KEY, key_ttl_ms=86_400_000, timeout_ms=TIMEOUT_MS)
MAIL = Contract("mail", "python", timeout_ms=TIMEOUT_MS)
REJECTIONS = frozenset(("stale_epoch", "lease_lapsed", "run_ended"))


@dataclass
class OrdersReport:
    """What all orders have shown."""

    orders: int = 0
    distinct_logs: set[str] = field(default_factory=set)
    preempted: int = 0  # steps whose first asking epoch was ended by the operator before they were committed
    late_acks: int = 0
    audit: AuditReport = field(default_factory=AuditReport)
    rejected: int = 0
    unanswered: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    stuck: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        is_preempted = 3 * self.preempted >= self.audit.mutating_steps
        return self.audit.is_ok and is_preempted and not self.stuck and not self.unanswered

    @property
    def report(self) -> Report:
        faults = dict.fromkeys(EVENTS, self.orders)
        return from_audit(
            self.audit,
            interleavings=self.orders,
            rejected=self.rejected,
            rejected_unanswered=self.unanswered,
            faults=faults,
        )


class Order:
    """One order, on one run."""

    def __init__(
        self, engine: Engine, clock: ManualClock, run_id: RunId, contract: Contract, net: Counter[str]
    ) -> None:
        self._engine, self._clock, self._run, self._contract, self._net = engine, clock, run_id, contract, net
        self._digest = contract_digest(contract)
        self._call = call_digest(contract.tool, ARGS)
        self._rights: list[Right] = []
        self._under_way: list[Send] = []
        self.acks: list[Ack] = []
        self.rejected: list[int] = []
        self.answers: Counter[str] = Counter()
        self.late_acks = 0

    async def play(self, order: Sequence[str]) -> bool:
        """Play the eight events and go on to the end. False if the run doesn't get there."""
        await self._engine.submit(CreateRun(self._run, "agent", "1", "{}"))
        await self._grant("w1")
        for event in order:
            self._clock.advance(7)
            await self._one(event)
        return await self._to_the_end()

    async def _one(self, event: str) -> None:
        first, last = self._rights[0], self._rights[-1]
        match event:
            case "acquire":
                await self._grant(f"w{len(self._rights) + 1}")
            case "apply" | "duplicate":
                self._note(event, await self._ask(first))
            case "retry":
                self._note(event, await self._ask(last))
            case "preempt":
                self._note(event, await self._engine.submit(Preempt(self._run, "operator")))
            case "late_ack":
                await self._answer_arrives()
            case "checkpoint":
                head = self._engine.head(self._run)
                await self._save(event, last, 1 if head is None else head.checkpoint + 1)
            case "late_checkpoint":
                await self._save(event, first, 1)

    def _note(self, event: str, verdict: Verdict) -> None:
        told = verdict.code if isinstance(verdict, Refused) else type(verdict).__name__
        self.answers[f"{event}: {told}"] += 1

    async def _grant(self, holder: str) -> bool:
        verdict = await self._engine.submit(Grant(self._run, holder, LEASE_MS, ""))
        if isinstance(verdict, Granted):
            self._rights.append(Right(self._run, verdict.epoch, verdict.holder))
        self._note("acquire", verdict)
        return isinstance(verdict, Granted)

    async def _ask(self, right: Right) -> Verdict:
        """Ask for the step. If it is to be sent the provider does it at once, and its answer is under way."""
        verdict = await self._engine.submit(
            Admit(
                right=right,
                step_id=PAY,
                tool=self._contract.tool,
                args_json=ARGS,
                call_digest=self._call,
                contract=self._contract,
                request=None,
                owner=self._engine.boot,
                deadline_ms=self._clock.ms + TIMEOUT_MS,
                contract_digest=self._digest,
            )
        )
        if isinstance(verdict, Send):
            if not self._contract.dedups or not self._net[verdict.key]:
                self._net[verdict.key] += 1
            self._under_way.append(verdict)
        if isinstance(verdict, Refused) and verdict.code in REJECTIONS:
            self.rejected.append(right.epoch)
        return verdict

    async def _answer_arrives(self) -> None:
        if not self._under_way:
            return
        sent = self._under_way.pop(0)
        receipt = python_receipt({"id": f"ch_{sent.key}"})
        head = self._engine.head(self._run)
        step = self._engine.step(self._run, PAY)
        is_late = head is not None and step is not None and step.attempts[sent.attempt - 1].epoch != head.epoch
        self.late_acks += is_late or (head is not None and not head.is_live)
        self._note("late_ack", await self._engine.submit(Settle(self._run, PAY, sent.attempt, "applied", receipt)))

    async def _save(self, event: str, right: Right, number: int) -> None:
        verdict = await self._engine.submit(SaveCheckpoint(right, number, f'{{"by":{right.epoch}}}'))
        self._note(event, verdict)
        if isinstance(verdict, Done):
            self.acks.append(Ack("checkpoint", right.epoch, verdict.seq, None, number))

    async def _to_the_end(self) -> bool:
        """A live holder settles, saves and completes."""
        for _ in range(TRIES_MAX):
            while self._under_way:
                await self._answer_arrives()
            head = self._engine.head(self._run)
            if head is None or head.end:
                return head is not None
            if not head.is_live and not await self._grant(f"w{len(self._rights) + 1}"):
                await self._look(head.held_steps)
                continue
            verdict = await self._ask(self._rights[-1])
            if isinstance(verdict, Send):
                continue
            await self._save("last checkpoint", self._rights[-1], head.checkpoint + 1)
            done = await self._engine.submit(Complete(self._rights[-1], '"done"', frozenset((PAY,))))
            self._note("complete", done)
            self._clock.advance(1_000)
        head = self._engine.head(self._run)
        return head is not None and bool(head.end)

    async def _look(self, held: Sequence[StepId]) -> None:
        """Nobody can be granted the run: time passes, and a person looks at what is held."""
        self._clock.advance(TIMEOUT_MS + LEASE_MS)
        for step_id in held:
            step = self._engine.step(self._run, step_id)
            is_there = step is not None and self._net[step.key] > 0
            verdict = Resolve(
                self._run, step_id, "applied" if is_there else "not_applied", "anna", "looked", "null", self._clock.ms
            )
            self._clock.advance(1)
            await self._engine.submit(verdict)


async def play(
    loop: VirtualLoop, store: Store, orders: Sequence[tuple[int, Sequence[str]]], contract: Contract
) -> OrdersReport:
    """Play numbered orders over one empty store, and judge them together."""
    report, net, clock = OrdersReport(), Counter[str](), ManualClock()
    engine = Engine(store, clock, "boot-1", inline=True)
    engine.start()
    acks: dict[RunId, tuple[Ack, ...]] = {}
    rejected: list[tuple[RunId, int]] = []
    for number, order in orders:
        run_id = RunId(f"o{number}")
        played = Order(engine, clock, run_id, contract, net)
        if not await played.play(order):
            report.stuck.append(" > ".join(order))
        acks[run_id] = tuple(played.acks)
        rejected += [(run_id, epoch) for epoch in played.rejected]
        report.orders += 1
        report.answers += played.answers
        report.late_acks += played.late_acks

    def on_trace(trace: Trace) -> None:
        report.preempted += _is_preempted(trace)
        report.distinct_logs.add(" ".join(f"{each.event.kind}@{each.event.epoch}" for each in trace.moments))

    report.audit = audit(store, Ledger(dict(net)), acks=acks, now_ms=clock.ms, on_trace=on_trace)
    report.rejected = len(rejected)
    for run_id, epoch in rejected:
        step, head = engine.step(run_id, PAY), engine.head(run_id)
        is_answered = step is not None and step.state == "committed" and step.epoch > epoch
        report.unanswered += not (is_answered or (head is not None and bool(head.end)))
    return report


def _is_preempted(trace: Trace) -> bool:
    """Whether the operator ended an epoch before the step was committed: mid-call, or before its worker could ask."""
    committed = next((each.event.seq for each in trace.of("step_committed")), 0)
    return any(each.event.seq < committed for each in trace.of("lease_preempted"))


def all_orders() -> Iterator[tuple[int, Sequence[str]]]:
    return enumerate(itertools.permutations(EVENTS))


def sample(count: int, seed: int) -> list[tuple[int, Sequence[str]]]:
    return random.Random(seed).sample(list(all_orders()), count)


def play_some(store: Store, orders: Sequence[tuple[int, Sequence[str]]], contract: Contract = CHARGE) -> OrdersReport:
    """Play orders over one store, from outside any loop."""
    return run_virtual(lambda loop: play(loop, store, orders, contract))


def run(
    orders: Sequence[tuple[int, Sequence[str]]], contract: Contract, on_batch: Callable[[int], None] | None = None
) -> OrdersReport:
    """Play orders in batches, each over a new store in memory, and add up what they showed."""
    total = OrdersReport()
    for start in range(0, len(orders), BATCH):
        _add(total, play_some(MemoryStore(), orders[start : start + BATCH], contract))
        if on_batch is not None:
            on_batch(total.orders)
    return total


def _add(total: OrdersReport, part: OrdersReport) -> None:
    for name in ("orders", "preempted", "late_acks", "rejected", "unanswered"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    for name in ("runs", "events", "mutating_steps", "preemptions", "held"):
        setattr(total.audit, name, getattr(total.audit, name) + getattr(part.audit, name))
    total.audit.has_ledger = part.audit.has_ledger
    for law, count in part.audit.counts.items():
        total.audit.counts[law] += count
    total.audit.violations += part.audit.violations[:10]
    total.answers += part.answers
    total.stuck += part.stuck
    total.distinct_logs |= part.distinct_logs
