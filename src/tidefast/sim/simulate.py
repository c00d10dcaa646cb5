"""One simulated world: a store, an authority that dies and comes back, workers, providers, a person, and faults.

Engine, gateway, keeper, authority, worker, pass and heartbeat are the product's own. What is simulated is the time, the
wire, the providers, the agents' work, and the hand that kills, freezes and cuts. A world lives its hours under fire and
then has calm weather until every run has ended; a run that doesn't get there is stuck. What the world saw is judged in
`judging.py`, when it has come to rest.
"""

import asyncio
import contextvars
import gc
import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import structlog

from tidefast.protocol.answers import StepAnswer
from tidefast.protocol.canonical import canonical
from tidefast.protocol.ids import RunId, StepId, step_key
from tidefast.protocol.laws import Ack, Violation
from tidefast.protocol.points import Facts, Point
from tidefast.protocol.records import Now, RunHead
from tidefast.protocol.verdicts import Done, Refused, Renewed
from tidefast.sdk.heartbeat import LoopHeartbeat
from tidefast.sdk.worker import Worker
from tidefast.services.authority import Authority
from tidefast.services.tools import ToolBook
from tidefast.sim.network import Fate, Instance, Line, Wire
from tidefast.sim.person import Person
from tidefast.sim.provider import TOOLS, Arrival, Providers
from tidefast.sim.schedule import BLOWS, Aim, Memory, backoff, build_app, draw_aim, draw_work
from tidefast.sim.virtual import Process, Stopped, VirtualLoop, run_virtual
from tidefast.stores.base import Batch, Store
from tidefast.wire import tokens

WORKERS = 3
RUNS_EACH = 3
BACKLOG = 2
STORM_S = 240.0  # the mean time between faults that aim at nothing
CALM_S_MAX = 3 * 3_600.0
WALL_START_MS = 1_700_000_000_000
REJECTIONS = frozenset(("stale_epoch", "lease_lapsed", "run_ended"))
STEP_VERBS = frozenset(("apply", "compensate"))


class Mark(NamedTuple):
    """Where a fault struck. `run_id` is empty if it struck everybody; `at_ms` is on the authority's clock."""

    at_ms: int
    kind: str
    run_id: str
    step_id: str = ""


class Hand(NamedTuple):
    """One life of a worker."""

    process: Process
    worker: Worker
    slot: int


class Simulation:
    """Built on the running virtual loop."""

    def __init__(self, loop: VirtualLoop, seed: int, hours: float, store: Store) -> None:
        self.loop, self.hours, self.store = loop, hours, store
        self.chance = random.Random(seed)
        self.providers = Providers(loop, self.chance)
        self.wire = Wire(loop, self.chance)
        self.memory = Memory()
        self.marks: list[Mark] = []
        self.acks: dict[RunId, list[Ack]] = {}
        self.promises: dict[tuple[RunId, StepId], str] = {}
        self.rejected: list[tuple[RunId, StepId, int]] = []
        self.violations: list[Violation] = []
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.faulted: set[tuple[str, str]] = set()
        self.hold_times: dict[tuple[RunId, int], Now] = {}
        self.log = hashlib.sha256()
        self.is_calm = False
        self.calls = 0  # of tools and undos that no journal answered
        self._app, self._tools = build_app(self.memory), ToolBook(TOOLS)
        self._backoff = backoff(self.chance)
        self._lease_ms = self.chance.choice((60_000, 90_000, 150_000))
        self._aims: dict[tuple[str, str], Aim | None] = {}
        self._outcomes: dict[tuple[str, str, int], str] = {}
        self._heads: dict[RunId, RunHead] = {}
        self._granted_by: dict[str, int] = {}
        self._queue: deque[tuple[RunId, str, str]] = deque()
        self._hands: dict[int, Hand] = {}
        self._wall_offset_ms = self._created = self._boots = self._hired = 0
        self._namespace = store.identity().namespace
        self._watch(store)
        self.wire.on_fate, self.wire.on_double = self._wire_fate, self._doubled
        self.providers.on_fate, self.providers.inspect = self._provider_fate, self._inspect
        self.providers.on_apply = self._applied

    async def run(self) -> None:
        """The hours under fire, then calm until every run has ended."""
        self._boot()
        for slot in range(WORKERS):
            self._hire(slot)
        work = [asyncio.create_task(each) for each in (self._feed(), self._storm(), Person(self).work())]
        await asyncio.sleep(self.hours * 3_600)
        self._calm_down()
        until = self.loop.time() + CALM_S_MAX
        while (self._heads or self._queue) and self.loop.time() < until:
            await self._tick()
        for head in self._heads.values():
            why = f"the run is {head.state} after {CALM_S_MAX / 3_600:.0f} calm hours, unsettled: {head.unsettled}"
            self.violations.append(Violation("stuck", head.run_id, None, head.seq, why))
        for task in work:
            task.cancel()
        for broken in (*self.loop.broken, *self.wire.crashes):
            self.violations.append(Violation("stuck", RunId(""), None, 0, f"something broke: {broken}"))

    async def _tick(self) -> None:
        await asyncio.sleep(20.0)

    # --- lives and deaths ------------------------------------------------------------------------------

    def _boot(self) -> None:
        """A new authority over the same store."""
        self._boots += 1
        hook = self.hook
        instance = Instance(
            self.loop, self.store, self._tools, self.providers, self.wall_ms, f"boot-{self._boots}", hook
        )
        self.wire.instance = instance
        instance.process.spawn(instance.start())

    def _hire(self, slot: int) -> None:
        """A new worker process, with an identity of its own and a clock that may run a little wrong."""
        self._hired += 1
        name, start, rate = f"w{self._hired}", self.loop.time(), self.chance.choice((1.0, 1.0, 1.0, 0.94, 1.06))

        def clock() -> float:
            return start + (self.loop.time() - start) * rate

        process, line = Process(self.loop, name), Line(self.wire, name, self._heard)
        worker = Worker(
            line,
            self._app,
            LoopHeartbeat(line, clock),
            holder=name,
            lease_ms=self._lease_ms,
            max_runs=RUNS_EACH,
            hook=self.hook,
            backoff=self._backoff,
            clock=clock,
        )
        self._hands[slot] = Hand(process, worker, slot)
        process.spawn(worker.run())

    def _calm_down(self) -> None:
        self.is_calm = self.wire.is_calm = self.providers.is_calm = True
        self.wire.cut.clear()
        for hand in self._hands.values():
            hand.process.fuse = 0
            hand.process.thaw()
        if self.wire.instance is not None:
            self.wire.instance.process.fuse = 0
            self.wire.instance.process.thaw()

    def wall_ms(self) -> int:
        return WALL_START_MS + self.loop.ms() + self._wall_offset_ms

    def now_ms(self) -> int:
        """The authority's clock, or what it would be."""
        instance = self.wire.instance
        return WALL_START_MS + self.loop.ms() if instance is None else instance.clock.now().ms

    def later(self, delay_s: float, what: Callable[..., object], *arguments: Any) -> None:
        """Something outside every process happens later."""
        self.loop.call_later(delay_s, what, *arguments, context=contextvars.Context())

    async def ask(self, question: Callable[[Authority], Coroutine[Any, Any, Any]]) -> Any:
        """What a person asks of the authority; None if nobody answers."""
        instance = self.wire.instance
        if instance is None or not instance.is_open:
            return None
        task = instance.process.spawn(question(instance.authority))
        await asyncio.wait((task,), timeout=30.0)
        return task.result() if task.done() else None

    # --- work ------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Keep a small backlog of runs, so that every worker has something to do."""
        while True:
            workable = sum(1 for head in self._heads.values() if head.state in ("claimable", "leased", "failing"))
            while not self.is_calm and workable + len(self._queue) < WORKERS * RUNS_EACH + BACKLOG:
                self._created += 1
                agent, work = draw_work(self.chance)
                self._queue.append((RunId(f"r{self._created}"), agent, canonical(work)))
            for run_id, agent, text in list(self._queue):
                await self.ask(lambda authority, r=run_id, a=agent, t=text: authority.create_run(r, a, "1", t))  # type: ignore[misc]
            await asyncio.sleep(20.0)

    async def _storm(self) -> None:
        """Faults that aim at nothing in particular."""
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / STORM_S))
            if self.is_calm:
                return
            live = sorted(head.run_id for head in self._heads.values() if head.is_live)
            run_id = self.chance.choice(live) if live else RunId("")
            blow = self.chance.choices([*BLOWS, "wall_clock"], [*BLOWS.values(), 6])[0]
            if blow == "wall_clock":
                self._wall_offset_ms = self.chance.choice((0, 0, -3_600_000, -600_000, 900_000, 3_600_000))
                self._note(blow, "")
            else:
                self._strike(blow, run_id, "", 1, by="")

    # --- faults ----------------------------------------------------------------------------------------

    async def hook(self, point: Point, facts: Facts) -> None:
        """Each point that gateway and SDK report: an aimed fault may strike here."""
        run_id, step_id = str(facts["run"]), str(facts["step"])
        self._follow_receipt(point, run_id, step_id, facts)
        self.calls += point == "sdk.before_apply"
        if self.is_calm or (step_id and step_id[0] == "r"):
            return
        place = (run_id, step_id or f"#{facts.get('number', '')}")
        if place not in self._aims:
            self._aims[place] = draw_aim(self.chance, is_step=bool(step_id))
        aim = self._aims[place]
        if aim is not None and aim.point == point:
            self._aims[place] = None
            holder = str(facts["holder"])
            self._strike(aim.blow, RunId(run_id), step_id, aim.callbacks, by=point.partition(".")[0], holder=holder)

    def _strike(self, blow: str, run_id: RunId, step_id: str, callbacks: int, *, by: str, holder: str = "") -> None:
        """Let a blow fall: on the process that has just reported at one of its next callbacks, on others at once."""
        head = self._heads.get(run_id)
        holder = holder or ("" if head is None else head.holder)
        instance = self.wire.instance
        victim = next((hand for hand in self._hands.values() if hand.worker.holder == holder), None)
        if blow == "preempt":
            self.later(0.0, self._preempt, run_id, step_id)
        elif blow.endswith("_worker"):
            if victim is None:
                return
            if by == "sdk" and blow != "cut_worker":
                victim.process.light(callbacks, lambda: self._hit_worker(blow, victim, run_id, step_id))
            else:
                self.later(0.0, self._hit_worker, blow, victim, run_id, step_id)
        elif instance is not None and by == "gateway":
            instance.process.light(callbacks, lambda: self._hit_authority(blow, instance, run_id, step_id))
        elif instance is not None:
            self.later(0.0, self._hit_authority, blow, instance, run_id, step_id)

    def _note(self, kind: str, run_id: str, step_id: str = "") -> None:
        self.faults[kind] += 1
        self.marks.append(Mark(self.now_ms(), kind, run_id, step_id))
        if step_id:
            self.faulted.add((run_id, step_id))

    def _preempt(self, run_id: RunId, step_id: str) -> None:
        instance = self.wire.instance
        if self.is_calm or instance is None or not instance.is_open:
            return
        self._note("preempt", run_id, step_id)
        instance.process.spawn(instance.authority.preempt(run_id, "operator", "make room", None))

    def _hit_worker(self, blow: str, hand: Hand, run_id: RunId, step_id: str) -> None:
        if self.is_calm or hand.process.state != "running":
            return
        for lease in hand.worker.leases.believed():
            self._note_quietly(blow, lease.run_id)
        self._note(blow, run_id, step_id)
        if blow == "kill_worker":
            hand.process.kill()
            self.later(self.chance.uniform(2, 60), self._hire, hand.slot)
        elif blow == "freeze_worker":
            hand.process.freeze()
            self.later(self._lease_ms / 1_000 * self.chance.uniform(0.2, 2.5), hand.process.thaw)
        else:
            self.wire.cut.add(hand.process.name)
            self.later(self._lease_ms / 1_000 * self.chance.uniform(0.3, 2), self.wire.cut.discard, hand.process.name)

    def _note_quietly(self, kind: str, run_id: str) -> None:
        self.marks.append(Mark(self.now_ms(), kind, run_id))

    def _hit_authority(self, blow: str, instance: Instance, run_id: RunId, step_id: str) -> None:
        if self.is_calm or instance is not self.wire.instance or instance.process.state != "running":
            return
        self._note(blow, "", "")
        if step_id:
            self.faulted.add((run_id, step_id))
        if blow == "freeze_authority":
            instance.process.freeze()
            self.later(self.chance.uniform(1, 1.5 * self._lease_ms / 1_000), instance.process.thaw)
            return
        instance.process.kill()
        self.wire.instance = None
        self.wire.reset(instance)
        self.later(self.chance.uniform(0.5, 30), self._boot)

    def _wire_fate(self, fate: Fate, verb: str, arguments: Sequence[Any]) -> None:
        self.faults[f"wire {fate}"] += 1
        if verb in STEP_VERBS:
            right = tokens.peek(arguments[0])
            if right is not None:
                self.marks.append(Mark(self.now_ms(), f"wire {fate}", right.run_id, arguments[1]))
                self.faulted.add((right.run_id, _step_asked(verb, arguments)))

    def _doubled(self, verb: str) -> None:
        self.seen["duplicate arrives while the first is in flight"] += verb in (
            "apply_in_flight",
            "compensate_in_flight",
        )
        self.seen["duplicate arrives after the first was answered"] += verb in STEP_VERBS

    def _provider_fate(self, arrival: Arrival) -> None:
        if arrival.fate != "ok" and arrival.contract.effect != "none":
            self.faults[f"provider {arrival.fate}"] += 1
            self.marks.append(Mark(self.now_ms(), f"provider {arrival.fate}", arrival.run_id, arrival.step_id))
            self.faulted.add((arrival.run_id, arrival.step_id))

    # --- what must always hold, looked at as it happens ------------------------------------------------

    def _broken(self, law: str, run_id: RunId, step_id: StepId | None, why: str) -> None:
        self.violations.append(Violation(law, run_id, step_id, 0, why))

    def _inspect(self, arrival: Arrival) -> None:
        """A request leaves: its intent is durable, under this epoch, and its key and bytes are the step's."""
        run_id, step_id = arrival.run_id, arrival.step_id
        found = self.store.load_head(run_id)
        step = None if found is None else self.store.load_step(found[0], step_id)
        if step is None or not any(each.state == "out" and each.epoch == arrival.epoch for each in step.attempts):
            self._broken("unlogged_effect", run_id, step_id, "a request left before its intent was durable")
        if arrival.contract.dedups and arrival.key != step_key(self._namespace, run_id, step_id):
            self._broken("unstable_key", run_id, step_id, f"it was sent with the key {arrival.key}")
        if arrival.contract.effect != "none" and not self.providers.same_bytes(arrival):
            self._broken("changed_bytes", run_id, step_id, "a replay sent other bytes than the first sending")

    def _applied(self, arrival: Arrival, net: int) -> None:
        if net > 1:
            why = f"the provider did it a second time ({arrival.fate}, epoch {arrival.epoch})"
            self._broken("double_apply", arrival.run_id, arrival.step_id, why)

    def _follow_receipt(self, point: Point, run_id: str, step_id: str, facts: Facts) -> None:
        """A receipt that the gateway has settled is in the log, whatever became of the lease."""
        if point == "gateway.after_send":
            self._outcomes[run_id, step_id, int(facts["attempt"])] = str(facts["outcome"])
        if point != "gateway.after_settle":
            return
        outcome = self._outcomes.pop((run_id, step_id, int(facts["attempt"])), "")
        found = self.store.load_head(RunId(run_id))
        step = None if found is None else self.store.load_step(found[0], StepId(step_id))
        if outcome == "applied" and step is not None and step.attempts[int(facts["attempt"]) - 1].state == "out":
            self._broken("lost_fact", RunId(run_id), StepId(step_id), "its receipt was settled, and the log has none")

    def _heard(self, verb: str, arguments: Sequence[Any], answer: Any) -> None:
        """A worker was told something: keep it, to compare it with the log."""
        if verb in ("claim", "renew"):
            self._heard_of_leases(verb, arguments, answer)
            return
        right = tokens.peek(arguments[0]) if arguments and isinstance(arguments[0], str) else None
        if right is None:
            return
        if isinstance(answer, Refused):
            self._heard_no(verb, arguments, answer, right.run_id, right.epoch)
        elif isinstance(answer, Done):
            number = arguments[1] if verb == "checkpoint" else 0
            self.acks.setdefault(right.run_id, []).append(Ack(verb, right.epoch, answer.seq, None, number))
            self.seen["verb repeated and answered as the first time"] += not answer.was_new
        elif isinstance(answer, StepAnswer):
            first = self.promises.setdefault((right.run_id, answer.step_id), answer.receipt_json)
            if first != answer.receipt_json:
                self._broken("lost_ack", right.run_id, answer.step_id, "two callers were told different receipts")

    def _heard_of_leases(self, verb: str, arguments: Sequence[Any], answer: Any) -> None:
        if verb == "claim":
            self._granted_by.update((grant.token, self._boots) for grant in answer)
            return
        for token, told in zip(arguments[0], answer, strict=True):
            if isinstance(told, Renewed) and self._granted_by.get(token, self._boots) != self._boots:
                self._granted_by[token] = self._boots
                self.seen["lease outlived a restart of the authority"] += 1

    def _heard_no(self, verb: str, arguments: Sequence[Any], answer: Refused, run_id: RunId, epoch: int) -> None:
        if answer.code in REJECTIONS and verb in STEP_VERBS:
            self.rejected.append((run_id, StepId(_step_asked(verb, arguments)), epoch))
            self.seen["call of a dead epoch refused"] += 1
        if answer.code in REJECTIONS and verb == "checkpoint":
            self.seen["checkpoint of a dead epoch refused"] += 1
        if answer.code == "unsettled_effects" and verb == "checkpoint":
            self.seen["checkpoint refused over an open effect"] += 1
        if answer.code == "step_conflict":
            self.seen["other words for a stored call refused"] += 1

    def _watch(self, store: Store) -> None:
        """See each batch as it becomes durable."""
        commit = store.commit

        def watched(batch: Batch) -> None:
            commit(batch)
            for stored in batch.events:
                self.log.update(f"{stored.run_key} {stored.digest}\n".encode())
                if stored.event.kind == "step_held" and self.wire.instance is not None:
                    run_id = batch.heads[stored.run_key].run_id
                    self.hold_times[run_id, stored.event.seq] = self.wire.instance.clock.now()
            for head in batch.heads.values():
                if head.end:
                    self._heads.pop(head.run_id, None)
                else:
                    self._heads[head.run_id] = head
            if self._queue:
                known = {head.run_id for head in batch.heads.values()}
                self._queue = deque(each for each in self._queue if each[0] not in known)

        setattr(store, "commit", watched)  # noqa: B010 - the seam's own method, seen from outside


def _step_asked(verb: str, arguments: Sequence[Any]) -> str:
    return str(arguments[1]) + ("~undo" if verb == "compensate" else "")


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines, and no garbage collection in the middle of a history."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50), cache_logger_on_first_use=False)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        structlog.configure(**before)
        if was_enabled:
            gc.enable()


def simulate(seed: int, hours: float, store: Store) -> Simulation:
    """Play one world to its end. What can't go on is a violation of `stuck`."""
    made: list[Simulation] = []

    async def main(loop: VirtualLoop) -> None:
        made.append(Simulation(loop, seed, hours, store))
        await made[0].run()

    with quiet():
        try:
            run_virtual(main)
        except Stopped as stopped:
            made[0].violations.append(Violation("stuck", RunId(""), None, 0, str(stopped)))
    return made[0]
