"""The engine: one door, `submit`.

A command is judged at once, on the event loop's thread, against heads that are in memory or freshly read; its events
join the batch that is being gathered. One writer thread commits one batch at a time while the next one gathers (group
commit). A caller is answered when the batch that its answer rests on is durable, also when its own command wrote
nothing: a duplicate must not hear of a receipt that a power cut could still take back.

If the process dies before the commit returns, nothing was answered; after it, the events are there. An exception in
commit means that nobody knows: the engine stops, and every waiting caller hears `StoreUnavailable`.
"""

import asyncio
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from tidefast.engine.claimers import Claimers
from tidefast.engine.clock import Clock
from tidefast.engine.places import Place, Places
from tidefast.protocol.budget import Budget
from tidefast.protocol.commands import Command, CreateRun
from tidefast.protocol.contracts import Contract, contract_digest
from tidefast.protocol.events import Event
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import RunId, StepId, WorkspaceId
from tidefast.protocol.lease import fence, unknown_run
from tidefast.protocol.machine import decide, needs
from tidefast.protocol.notices import Notice, notice_of
from tidefast.protocol.records import Guard, Right, RunHead, Step, View
from tidefast.protocol.verdicts import Decision, Refused, Renewed, Send, Verdict
from tidefast.stores.base import Batch, Store, StoredEvent, StoreUnavailable

STOP_SLICE_MS = 100  # how often a stopping engine looks again, should nobody tell it
IDS_KEPT = 2_000  # of a run's steps in memory; for a longer run the store is asked whether a step is new
# A lone run's commit is cheaper on the loop than by two hand-overs between threads, if the last one was this quick. The
# first slow one does block the loop for its length; those after it go to the thread until one there is quick again.
LONE_FLUSH_S = 0.001
FINISHED = frozenset(("committed", "rejected", "compensated"))


class InvariantViolation(Exception):
    """What the engine holds contradicts itself. Never caught except to stop the process."""


@dataclass(slots=True, eq=False)
class RunEntry:
    """One run in memory: its head, its unfinished steps, and the batch that its newest events wait in."""

    key: int
    head: RunHead | None
    steps: dict[StepId, Step] = field(default_factory=dict)
    gathering: "Gathering | None" = None
    ids: set[StepId] | None = None  # every step the run has, so that a new one is known as new; None: ask the store


@dataclass(slots=True, eq=False)
class Gathering:
    """A batch and everyone who waits for it."""

    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    batch: Batch = field(default_factory=Batch)
    entries: dict[RunId, RunEntry] = field(default_factory=dict)
    places: dict[WorkspaceId, tuple[Place, list[Event]]] = field(default_factory=dict)


class Engine:
    """Submits commands to the rules over one store. Built on the running event loop; `start` it, then `stop` it."""

    def __init__(self, store: Store, clock: Clock, boot: str | None = None, *, inline: bool = False) -> None:
        """With `inline`, commits run on the event loop instead of a thread: slower, and the same every time."""
        self.store = store
        self.clock = clock
        self.boot = boot or secrets.token_hex(8)
        self.identity = store.identity()
        self.failure: BaseException | None = None
        self._instances = frozenset((self.boot,))
        self._runs: dict[RunId, RunEntry] = {}
        self._contracts: dict[str, Contract] = {}
        self.keeps_notices = False  # whether somebody is told of what is held, frozen or failed
        self._notice_kept = asyncio.Event()
        self._budgets: dict[str, Budget] = {}  # those with something open, or not durable yet
        self._stored_contracts: set[str] = set()
        self._next_key = store.run_key_max() + 1
        self.places = Places(store, self._new_key)
        self._gathering: Gathering | None = None
        self._writing = False
        self._inline = inline
        self._flush_s = LONE_FLUSH_S  # how long the last commit took; the first goes to the thread
        self._queue: queue.SimpleQueue[Gathering | None] = queue.SimpleQueue()
        self._waiters: dict[RunId | WorkspaceId | None, set[asyncio.Future[None]]] = {}
        self.claimers = Claimers(clock.now)
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.on_commit: Callable[[Batch, float], None] = lambda batch, seconds: None
        self.on_workspace: Callable[[WorkspaceId, list[Event]], None] = lambda workspace_id, events: (
            None
        )  # durable ones

    def start(self) -> None:
        """Read the live runs into memory and start the writer."""
        for key, head in self.store.live_heads():
            self._runs[head.run_id] = RunEntry(key, head)
        self.places.start()
        if not self._inline:
            self._thread = threading.Thread(target=self._write, name="tidefast-writer", daemon=True)
            self._thread.start()

    async def stop(self) -> None:
        """Make what is gathered durable, then end the writer. The store stays open."""
        while self.failure is None and not self.is_idle:
            await self.wait_for_change(None, STOP_SLICE_MS)
        self.failure = self.failure or StoreUnavailable("this engine was stopped")
        self._queue.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def submit(self, command: Command, then: Callable[[Verdict], None] | None = None) -> Verdict:
        """The verdict on a command, durable. Raises `StoreUnavailable` if nobody knows whether it is.

        `then` is told the verdict before the batch is closed: what it books (`book`) becomes durable with the command.
        """
        try:
            gatherings, decision = self._judge(command)
            if then is not None:
                then(decision.verdict)
        except InvariantViolation as violation:
            self._stop_for(violation)
            raise
        if decision.must_sync:
            for gathering in gatherings:
                await self._durable(gathering)
        return decision.verdict

    def _durable(self, gathering: Gathering) -> asyncio.Future[None]:
        """A future of this caller's own, so that cancelling one caller cancels no other."""
        waiter = self._loop.create_future()
        gathering.waiting.append(waiter)
        return waiter

    def budget(self, name: str) -> Budget:
        """A budget as it stands now, durable or not; a fresh one if nothing was ever booked under this name."""
        return self._budgets.get(name) or self.store.load_budget(name) or Budget(name)

    def book(self, budgets: Iterable[Budget]) -> None:
        """Put changed budgets into the batch that is being gathered; durable when `booked` returns."""
        for budget in budgets:
            self._budgets[budget.name] = self._open_batch().batch.budgets[budget.name] = budget

    def book_notice(self, name: str, notice: Notice | None) -> None:
        """Book what became of a notice (None: nothing is left to do); durable when `booked` returns."""
        self._open_batch().batch.notices[name] = notice

    async def wait_for_notice(self, timeout_ms: int) -> None:
        """Return when a notice of an event became durable, or after the time given."""
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await self._notice_kept.wait()
        except TimeoutError:
            return
        finally:
            self._notice_kept.clear()

    async def booked(self) -> None:
        """Return once every budget that was booked is durable. Raises `StoreUnavailable` if nobody knows."""
        if self.failure is not None:
            raise StoreUnavailable("the store failed and this process must be restarted") from self.failure
        if self._gathering is not None:
            await self._durable(self._gathering)

    @property
    def is_idle(self) -> bool:
        """Whether everything that was submitted is durable."""
        return self._gathering is None and not self._writing

    def live_runs(self) -> list[RunHead]:
        """The heads of the runs whose newest epoch no event has ended."""
        return [entry.head for entry in self._runs.values() if entry.head is not None and entry.head.is_live]

    def head(self, run_id: RunId) -> RunHead | None:
        """The head as the rules see it now; what it says may not be durable yet."""
        entry = self._entry(run_id)
        return None if entry is None else entry.head

    def step(self, run_id: RunId, step_id: StepId) -> Step | None:
        """A step as the rules see it now."""
        entry = self._entry(run_id)
        return None if entry is None else self._step(entry, step_id)

    def run_key(self, run_id: RunId) -> int | None:
        entry = self._entry(run_id)
        return None if entry is None else entry.key

    async def settled_view(self, run_id: RunId) -> RunHead | None:
        """The head once everything it says is durable."""
        entry = self._entry(run_id)
        if entry is None:
            return None
        head = entry.head  # taken before the wait: what moves meanwhile isn't durable when the wait ends
        if entry.gathering is not None:
            await self._durable(entry.gathering)
        return head

    async def settled_step(self, run_id: RunId, step_id: StepId) -> Step | None:
        """A step once everything it says is durable."""
        step = self.step(run_id, step_id)
        await self.settled_view(run_id)
        return step

    async def fence(self, right: Right) -> Refused | None:
        """The refusal that this right would meet now, durable like any other; None if its epoch is live."""
        head = self.head(right.run_id)
        decision = unknown_run(right.run_id) if head is None else fence(head, right, self.clock.now())
        if decision is None or not isinstance(decision.verdict, Refused):
            return None
        await self.settled_view(right.run_id)
        return decision.verdict

    def contract(self, digest: str) -> Contract:
        """The contract that an intent named. Raises `InvariantViolation` if the store has lost it."""
        known = self._contracts.get(digest)
        if known is None:
            text = self.store.load_contract(digest)
            if text is None:
                raise InvariantViolation(f"the store names the contract {digest} but does not hold it")
            known = self._contracts[digest] = Contract.from_json(msgspec.json.decode(text))
        return known

    async def wait_for_change(self, run_id: RunId | WorkspaceId | None, timeout_ms: int) -> None:
        """Return when something of this run or workspace (of any: None) became durable, or after the time given.

        Where a run and a workspace bear one name, either wakes the waiters of both, who look for themselves.
        """
        waiter = self._loop.create_future()
        waiting = self._waiters.setdefault(run_id, set())
        waiting.add(waiter)
        try:
            async with asyncio.timeout(max(timeout_ms, 0) / 1_000):
                await waiter
        except TimeoutError:
            return
        finally:
            waiting.discard(waiter)
            if not waiting:
                self._waiters.pop(run_id, None)

    def _judge(self, command: Command) -> tuple[list[Gathering], Decision]:
        """Decide a command and gather what it writes. Runs without a pause, so no other command comes between.

        Told with the decision: the batches that it rests on.
        """
        if self.failure is not None:
            raise StoreUnavailable("the store failed and this process must be restarted") from self.failure
        need = needs(command)
        entry = None if need.run_id is None else self._entry(need.run_id)
        if entry is None and isinstance(command, CreateRun):
            entry = RunEntry(self._new_key(), None)
        view = self._view(entry, need.steps, need.effects, need.forgotten)
        shown = () if need.effects else view.steps.values()
        workspace_id = self.places.shown(need.workspace_id, shown)
        place = None if workspace_id is None else self.places.find(workspace_id)
        if workspace_id is not None:
            view = view._replace(workspace=None if place is None else place.head, workspace_id=workspace_id)
        decision = decide(view, command, self.clock.now())
        self._check_guards(entry, place, decision)
        if decision.events and entry is not None and need.run_id is not None:
            self._gather(entry, view, decision, need.run_id)
        if decision.writes and workspace_id is not None:
            place = self._gather_place(workspace_id, decision)
        if isinstance(decision.verdict, Renewed):
            _renew(place if need.run_id is None else entry, decision.verdict)
        found = [] if entry is None else [entry.gathering]
        found += [] if place is None else [place.gathering]
        return [gathering for gathering in dict.fromkeys(found) if gathering is not None], decision

    def _check_guards(self, entry: RunEntry | None, place: Place | None, decision: Decision) -> None:
        run = 0 if entry is None or entry.head is None else entry.head.version
        workspace = 0 if place is None or place.head is None else place.head.version
        for guard in decision.guards:
            if guard.version != (run if isinstance(guard, Guard) else workspace):
                raise InvariantViolation(f"{guard[0]} moved from version {guard.version} during a decision")

    def _gather_place(self, workspace_id: WorkspaceId, decision: Decision) -> Place:
        """Put a decision's events of a workspace into the batch."""
        gathering = self._open_batch()
        place = self.places.gather(workspace_id, decision.writes, gathering.batch)
        place.gathering = gathering
        _, events = gathering.places.setdefault(workspace_id, (place, []))
        events += decision.writes
        return place

    def _entry(self, run_id: RunId) -> RunEntry | None:
        entry = self._runs.get(run_id)
        if entry is None:
            found = self.store.load_head(run_id)
            if found is None:
                return None
            entry = RunEntry(*found)
            if entry.head is not None and entry.head.is_live:
                self._runs[run_id] = entry
        return entry

    def _step(self, entry: RunEntry, step_id: StepId) -> Step | None:
        step = entry.steps.get(step_id)
        if step is not None or (entry.ids is not None and step_id not in entry.ids):
            return step
        return self.store.load_step(entry.key, step_id)

    def _all_ids(self, entry: RunEntry) -> set[StepId] | None:
        """The ids of all steps, durable or not; None if they are too many to keep in memory."""
        stored = self.store.step_ids(entry.key, IDS_KEPT + 1)
        return {*stored, *entry.steps} if len(stored) <= IDS_KEPT else None

    def _view(self, entry: RunEntry | None, ids: Iterable[StepId], effects: bool, forgotten: bool) -> View:
        identity, head = self.identity, None if entry is None else entry.head
        if entry is None or head is None:
            return View(identity.namespace, identity.incarnation, self._instances, recovery=identity.recovery)
        if effects:
            ids = [*self._effects(entry), *(step.step_id for step in head.open)]
        steps: dict[StepId, Step] = {}
        contracts: dict[str, Contract] = {}
        for step_id in ids:
            step = self._step(entry, step_id)
            if step is not None:
                steps[step_id] = step
                if step.contract:
                    contracts[step.contract] = self.contract(step.contract)
        left = self._forgotten(entry, head) if forgotten else ()
        return View(
            identity.namespace, identity.incarnation, self._instances, head, steps, contracts, left, identity.recovery
        )

    def _effects(self, entry: RunEntry) -> list[StepId]:
        """Every mutating step of a run, durable or not."""
        stored = self.store.effects(entry.key)
        in_memory = [step.step_id for step in entry.steps.values() if step.is_mutating]
        return list(dict.fromkeys([*stored, *in_memory]))

    def _forgotten(self, entry: RunEntry, head: RunHead) -> tuple[StepId, ...]:
        """What the store says, corrected by what is not durable yet."""
        in_memory = {
            step.step_id
            for step in entry.steps.values()
            if step.is_mutating and step.settled_seq > head.checkpoint_seq and step.epoch != head.epoch
        }
        stored = self.store.forgotten(entry.key, head.checkpoint_seq, head.epoch)
        return tuple(step for step in stored if step not in entry.steps) + tuple(sorted(in_memory))

    def _gather(self, entry: RunEntry, view: View, decision: Decision, run_id: RunId) -> None:
        """Put a decision's events into the batch: all of them, or none if one can't be applied."""
        before, stored, head = view.steps, [], entry.head
        for event in decision.events:
            view = evolve(view, event, run_id)
            head = view.run
            if head is None:
                raise InvariantViolation(f"the event {event.kind} left run {run_id} without a head")
            stored.append(StoredEvent(entry.key, event, head.digest))
        if head is None:
            raise InvariantViolation(f"a decision about run {run_id} has no events to gather")
        gathering = self._open_batch()
        batch = gathering.batch
        if any(event.kind == "lease_granted" for event in decision.events):
            entry.ids = self._all_ids(entry)
        batch.events += stored
        if self.keeps_notices:
            self._keep_notices(batch, head, decision)
        entry.head = batch.heads[entry.key] = head
        for step_id, step in view.steps.items():
            if step is not before.get(step_id):
                entry.steps[step_id] = step
                batch.steps[entry.key, step_id] = step
                if entry.ids is not None:
                    entry.ids.add(step_id)
                    if len(entry.ids) > IDS_KEPT:
                        entry.ids = None
        if isinstance(decision.verdict, Send):
            self._gather_contract(batch, decision.verdict.contract, decision.verdict.contract_digest)
        if decision.contract is not None:
            self._gather_contract(batch, decision.contract, contract_digest(decision.contract))
        entry.gathering = gathering
        gathering.entries[run_id] = entry
        self._runs[run_id] = entry

    def _keep_notices(self, batch: Batch, head: RunHead, decision: Decision) -> None:
        """Keep a notice with each event that somebody is to be told of, in the same transaction."""
        for event in decision.events:
            notice = notice_of(self.identity.namespace, head, event)
            if notice is not None:
                batch.notices[notice.id] = notice

    def _open_batch(self) -> Gathering:
        """The batch that is being gathered."""
        gathering = self._gathering
        if gathering is None:
            gathering = self._gathering = Gathering()
            if not self._writing:
                self._loop.call_soon(self._hand_over)
        return gathering

    def _gather_contract(self, batch: Batch, contract: Contract, name: str) -> None:
        """A contract is stored with the first intent that names it."""
        if not name or name in self._stored_contracts:
            return
        if contract_digest(contract) != name:
            raise InvariantViolation(f"an intent names the contract {name}, which is not the one it was judged by")
        self._stored_contracts.add(name)
        self._contracts[name] = contract
        batch.contracts[name] = contract.to_json()

    def _new_key(self) -> int:
        key = self._next_key
        self._next_key += 1
        return key

    def _hand_over(self) -> None:
        """Give the gathered batch to the writer; everything that was ready in this turn of the loop is in it."""
        if self._gathering is None or self._writing or self.failure is not None:
            return
        gathering, self._gathering, self._writing = self._gathering, None, True
        now = self.clock.now()
        gathering.batch.mark_ms = max(now.ms, now.wall_ms)  # of both, or a wall clock set back would hide what was said
        if self._inline or (len(gathering.entries) <= 1 and self._flush_s < LONE_FLUSH_S):
            self._written(gathering, self._commit(gathering))
        else:
            self._queue.put(gathering)

    def _commit(self, gathering: Gathering) -> BaseException | None:
        began = time.perf_counter()
        try:
            self.store.commit(gathering.batch)
        except BaseException as error:
            return error
        self._flush_s = time.perf_counter() - began
        return None

    def _write(self) -> None:
        """The writer thread: one batch, one commit."""
        while (gathering := self._queue.get()) is not None:
            failure = self._commit(gathering)
            try:
                self._loop.call_soon_threadsafe(self._written, gathering, failure)
            except RuntimeError:  # the loop is closed: nobody is left to be answered
                return
            if failure is not None:
                return

    def _written(self, gathering: Gathering, failure: BaseException | None) -> None:
        self._writing = False
        if failure is not None:
            self._fail(gathering, failure)
            return
        self.on_commit(gathering.batch, self._flush_s)
        if any(notice is not None for notice in gathering.batch.notices.values()):
            self._notice_kept.set()
        for run_id, entry in gathering.entries.items():
            if entry.gathering is gathering:
                entry.gathering = None
                self._forget_finished(run_id, entry)
        for workspace_id, (place, events) in gathering.places.items():
            if place.gathering is gathering:
                place.gathering = None
                self.places.forget_idle(place, workspace_id)
            self.on_workspace(workspace_id, events)
        for name, budget in gathering.batch.budgets.items():
            if self._budgets.get(name) is budget and not budget.open:
                del self._budgets[name]
        for waiter in gathering.waiting:
            if not waiter.done():
                waiter.set_result(None)
        for head in gathering.batch.heads.values():
            self.claimers.changed(head)
        for changed in (*gathering.entries, *gathering.places, None) if self._waiters else ():
            for waiter in self._waiters.get(changed, ()):
                if not waiter.done():
                    waiter.set_result(None)
        if self._gathering is not None:
            self._loop.call_soon(self._hand_over)

    def _forget_finished(self, run_id: RunId, entry: RunEntry) -> None:
        """What is durable and finished is read again when somebody asks; only live runs stay in memory."""
        if entry.head is not None and not entry.head.is_live:
            del self._runs[run_id]
        elif entry.steps:
            entry.steps = {name: step for name, step in entry.steps.items() if step.state not in FINISHED}

    def _fail(self, gathering: Gathering, failure: BaseException) -> None:
        self._tell_unknown(gathering, failure)
        self._stop_for(failure)

    def _stop_for(self, failure: BaseException) -> None:
        """Judge nothing more. What is gathered will never be written, and who waits for it hears that."""
        self.failure = failure
        if self._gathering is not None:
            self._tell_unknown(self._gathering, failure)
        self.on_failure(failure)

    def _tell_unknown(self, gathering: Gathering, failure: BaseException) -> None:
        for waiter in gathering.waiting:
            if not waiter.done():
                waiter.set_exception(StoreUnavailable(f"the commit's outcome is unknown: {failure}"))


def _renew(entry: RunEntry | Place | None, renewed: Renewed) -> None:
    """A renewal moves the head in memory; it is durable with the next event."""
    if isinstance(entry, Place) and entry.head is not None:
        entry.head = entry.head._replace(expires_at_ms=renewed.expires_at_ms)
    if isinstance(entry, RunEntry) and entry.head is not None:
        entry.head = entry.head._replace(expires_at_ms=renewed.expires_at_ms)
