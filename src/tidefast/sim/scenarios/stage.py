"""The stage: one authority over one store, the providers beyond it, and a record of everything that happens.

The authority's process can be killed and started anew over the same store, and its gateway can be stopped at the points
that the product names. A store's commit can be made to fail, before or after it took the batch.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple, cast

from tidefast.engine.clock import ManualClock
from tidefast.engine.engine import Engine
from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.events import Event
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.laws import Ack
from tidefast.protocol.points import Facts, Point
from tidefast.protocol.records import Right, RunHead, Step
from tidefast.protocol.verdicts import Done
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.services.authority import Authority
from tidefast.services.gateway import Gateway
from tidefast.services.keeper import Keeper
from tidefast.services.tools import ToolBook
from tidefast.sim.scenarios.loop import ManualLoop
from tidefast.sim.scenarios.provider import Lost, Provider, ScriptedWire, contracts
from tidefast.sim.scenarios.seam import Line, Seam
from tidefast.sim.scenarios.text import ScriptError
from tidefast.sim.scenarios.words import Words
from tidefast.stores.base import Batch, Store, StoreUnavailable
from tidefast.stores.memory import MemoryStore
from tidefast.stores.sqlite import SqliteStore
from tidefast.stores.sqlite_recovery import backup, restore

TURNS_MAX = 20_000
TURNS = 3  # turns of the loop in a row that find nothing to do
AUTHORITY, PROVIDER, PERSON = "authority", "provider", "person"
ACKNOWLEDGED = frozenset(("checkpoint", "release", "complete", "fail"))


class Note(NamedTuple):
    """One thing that happened: a line of the trace, and an arrow (or a remark, its ends the same) in the drawing."""

    mark: str
    text: str
    source: str
    target: str
    told: str
    at_ms: int = 0  # since the scenario began

    @property
    def line(self) -> str:
        return f"{self.mark} {self.text}"


class Watched:
    """A store whose commits are seen, and can be made to fail. Everything else is the store's own."""

    def __init__(self, store: Store, stage: "Stage") -> None:
        self._store, self._stage = store, stage
        self.fails = ""  # "" | "before" | "after" the next batch is taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def commit(self, batch: Batch) -> None:
        fails, self.fails = self.fails, ""
        if fails == "before":
            raise StoreUnavailable("the disk is full")
        self._store.commit(batch)
        for stored in batch.events:
            self._stage.happened(stored.event)
        if fails == "after":
            raise StoreUnavailable("the flush was not confirmed")


class Stage:
    """Everything that a scenario's moves act on."""

    def __init__(self, store: Store, clock: ManualClock, *, epoch_in_key: bool = False) -> None:
        self.store, self.clock = store, clock
        self._start_ms = clock.ms
        self.words = Words(clock.ms)
        self.notes: list[Note] = []
        self.provider = Provider(self._served)
        self.tools = contracts()
        self.run = RunId("")
        self.granted: dict[tuple[str, str], list[LeaseGrant]] = {}
        self.frozen: dict[str, asyncio.Event] = {}
        self.acks: dict[RunId, list[Ack]] = {}
        self.last: object = None  # what the newest question was answered
        self._newest: asyncio.Task[None] | None = None
        self.outcomes: dict[str, str] = {}  # of SDK passes, by worker
        self.halt_at = ""
        self._halted: list[asyncio.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch_in_key = epoch_in_key
        self._boots = 0
        self._backup: MemoryStore | None = None
        self._watched = Watched(store, self)
        asyncio.get_running_loop().set_exception_handler(_only_the_living)
        self._start()

    def _start(self) -> None:
        self._boots += 1
        self.clock.mark_ms = self.store.identity().mark_ms
        self.clock.begin_grace()
        self.line = Line()
        self.engine = Engine(cast(Store, self._watched), self.clock, f"boot-{self._boots}", inline=True)
        self.engine.start()
        wire = ScriptedWire(self.clock, self.provider, epoch_in_key=self._epoch_in_key)
        gateway = Gateway(self.engine, ToolBook(self.tools.values()), wire, None, self._point)
        self.authority = Authority(self.engine, gateway)
        self.keeper = Keeper(self.engine, prober=gateway.prober)

    async def restart(self) -> None:
        """The authority is killed: memory and connections are gone, the store stays. A new one starts."""
        self.engine.failure = self.engine.failure or StoreUnavailable("the process was killed")
        self.line.die()
        self._halted.clear()
        self.halt_at = ""
        await self.quiet()
        self._start()
        await self.keeper.take_over()

    def back_up(self) -> None:
        """A backup is made beside the authority, which notices nothing."""
        if isinstance(self.store, SqliteStore):
            backup(self.store.path, self.store.path.with_suffix(".backup"))
        elif isinstance(self.store, MemoryStore):
            self._backup = self.store.copy()

    async def restore(self) -> None:
        """The store is lost with all that came after the backup; providers and workers are not. A new authority starts.

        What was acknowledged in the lost time is not owed any more: that is what a lost disk means.
        """
        old = self.store
        if isinstance(old, SqliteStore):
            target = old.path.with_suffix(".restored")
            restore(old.path.with_suffix(".backup"), target, self.clock.wall_ms)
            old.close()
            self.store = SqliteStore.open(target, create=False)
        elif self._backup is not None:
            self.store = self._backup.restored(self.clock.wall_ms)
        self._watched = Watched(self.store, self)
        window = self.store.identity().recovery
        self.clock.ms = max(self.clock.ms, 0 if window is None else window.restored_ms)
        for run, given in self.acks.items():
            found = self.store.load_head(run)
            self.acks[run] = [ack for ack in given if found is not None and ack.seq <= found[1].seq]
        await self.restart()

    def fail_store(self, when: str) -> None:
        self._watched.fails = when

    async def quiet(self) -> None:
        """Return when nothing more will happen by itself."""
        turns, loop = 0, asyncio.get_running_loop()
        if not isinstance(loop, ManualLoop):
            raise TypeError("a stage is driven on a manual loop")
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            turns = 0 if loop.has_work() else turns + 1
            if turns == TURNS:
                return
        raise ScriptError("it never comes to rest: something asks again and again without time passing")

    async def stop(self) -> None:
        """The scenario is over; nobody waits any longer."""
        mine = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not mine]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def note(self, mark: str, text: str, source: str, target: str = "", told: str = "") -> None:
        at_ms = self.clock.ms - self._start_ms
        self.notes.append(Note(mark, text, source, target or source, told or text, at_ms))

    def happened(self, event: Event) -> None:
        """An event became durable."""
        self.note("+", self.words.event(event), AUTHORITY, told=self.words.told(event))

    def _served(self, text: str, told: str, is_answer: bool) -> None:
        source, target = (PROVIDER, AUTHORITY) if is_answer else (AUTHORITY, PROVIDER)
        self.note("~", text, source, target, told)

    async def ask(self, who: str, what: str, question: Coroutine[Any, Any, object], ack: Ack | None = None) -> None:
        """Put a question to the authority, and wait until nothing moves. The answer is noted when it comes."""
        task = self.put(who, what, question, ack)
        await self.quiet()
        if not task.done():
            self.note("=", f"{who}: {what} waits", who, told=f"{what}: no answer yet")

    def put(
        self, who: str, what: str, question: Coroutine[Any, Any, object], ack: Ack | None = None
    ) -> "asyncio.Task[None]":
        """Put a question to the authority."""
        task = self.spawn(self._asking(who, what, question, ack, self.run))
        self._newest, self.last = task, None
        return task

    async def _asking(
        self, who: str, what: str, question: Coroutine[Any, Any, object], ack: Ack | None, run: RunId
    ) -> None:
        try:
            answer = await self.line.call(question)
        except AuthorityUnavailable:
            self.note("=", f"{who}: {what} gets no answer", who, told=f"{what}: the line is dead")
            return
        if asyncio.current_task() is self._newest:
            self.last = answer
        if ack is not None and isinstance(answer, Done):
            self.acks.setdefault(run, []).append(ack._replace(seq=answer.seq))
        heard = self.words.heard(answer)
        told = heard if not what or isinstance(answer, Done) else f"{what}: {heard}"
        self.note("=", " ".join(f"{who}: {what} {self.words.answer(answer)}".split()), AUTHORITY, who, told)

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Let something of the scenario run beside its moves."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _point(self, point: Point, facts: Facts) -> None:
        """The gateway has reached a point; it stands still there if the script says so."""
        if point != f"gateway.{self.halt_at}":
            return
        self.note("!", f"the gateway stands still at {self.halt_at}", AUTHORITY, told=f"stands still: {self.halt_at}")
        self.halt_at = ""
        halted = asyncio.Event()
        self._halted.append(halted)
        await halted.wait()

    def go_on(self) -> None:
        """The gateway goes on where it stood still."""
        if not self._halted:
            raise ScriptError("the gateway doesn't stand still")
        for halted in self._halted:
            halted.set()
        self._halted.clear()

    async def awake(self, who: str) -> None:
        """Return when this worker isn't frozen."""
        if who in self.frozen:
            await self.frozen[who].wait()

    def seam(self, who: str) -> Seam:
        return Seam(who, self.store.identity().namespace, lambda: (self.authority, self.line), self.awake)

    def right(self, address: str) -> Right:
        """What a worker carries: `w1` its newest grant of this run, `w1@2` epoch 2, be it ever so forged."""
        who, _, epoch = address.partition("@")
        if epoch:
            return Right(self.run, _epoch(epoch), who)
        return _right(self.grant_of(who))

    def grant_of(self, who: str) -> LeaseGrant:
        grants = self.granted.get((self.run, who))
        if not grants:
            raise ScriptError(f"{who} was never granted {self.run}")
        return grants[-1]

    def head(self) -> RunHead:
        head = self.engine.head(self.run)
        if head is None:
            raise ScriptError(f"there is no run {self.run!r}")
        return head

    def step(self, name: str) -> Step | None:
        return self.engine.step(self.run, StepId(name))

    def events(self) -> list[Event]:
        found = self.store.load_head(self.run)
        return [] if found is None else [stored.event for stored in self.store.load_events(found[0], 0, 10_000)]


def _epoch(text: str) -> Any:
    return int(text)


def _right(grant: LeaseGrant) -> Right:
    return Right(grant.run_id, grant.epoch, grant.holder)


def _only_the_living(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What goes wrong inside a killed authority is heard by nobody; all else is a defect and is shown."""
    if not isinstance(context.get("exception"), StoreUnavailable | AuthorityUnavailable | Lost):
        loop.default_exception_handler(context)
