"""The bench: one app over the real engine, gateway and SDK, struck by planned faults, until its run is at rest.

    faults = Faults().kill_worker("pay", "sdk.after_apply")
    result = Bench(app, provider=bank).run("refund", {"order": 7}, faults=faults)
    result.assert_completed()
    assert result.effects == {"pay": 1}

Each run has a store, a loop and an authority of its own. Time is virtual (`loop.py`), processes are lives
(`lives.py`), everything else is the product.
"""

import asyncio
import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import structlog

from tidefast.engine.clock import ManualClock
from tidefast.engine.engine import Engine
from tidefast.protocol.answers import EventInfo, LeaseGrant, RunInfo, StepInfo
from tidefast.protocol.canonical import JSON, canonical
from tidefast.protocol.contract_table import parse_contract
from tidefast.protocol.contracts import Contract
from tidefast.protocol.laws import Ack
from tidefast.protocol.lease import LEASE_DEFAULT_MS
from tidefast.protocol.points import Facts, Point
from tidefast.protocol.verdicts import Refused
from tidefast.sdk.app import App
from tidefast.sdk.errors import Error
from tidefast.sdk.heartbeat import LoopHeartbeat
from tidefast.sdk.line import Backoff
from tidefast.sdk.worker import Worker
from tidefast.services.authority import Authority
from tidefast.services.gateway import Gateway
from tidefast.services.http_sender import HttpSender
from tidefast.services.keeper import Keeper
from tidefast.services.local import LocalAuthority
from tidefast.services.python_runner import LocalRunner, NotSentByTool, RefusedByTool
from tidefast.services.tools import ConfigError, Outcome, ToolBook, load_contracts
from tidefast.sim.audit import audit
from tidefast.stores.base import Store, StoreUnavailable
from tidefast.stores.memory import MemoryStore
from tidefast.stores.sqlite import SqliteStore
from tidefast.testing.faults import BY_PROVIDER, Fault, Faults
from tidefast.testing.lives import Life, task_factory
from tidefast.testing.loop import PATIENCE_S, Stuck, VirtualLoop
from tidefast.testing.provider import Provider, Sending, sending
from tidefast.testing.result import Result
from tidefast.testing.seam import Seam

StoreKind = Literal["memory", "sqlite"]
Tools = Path | str | Mapping[str, Mapping[str, object]]
RUN = "run-1"
AT_REST = frozenset(("completed", "failed", "held", "frozen"))
GIVE_UP_S = 6 * 3_600.0  # of virtual time
SETTLE_S = 300.0  # of virtual time, for what was let go late
WORKERS_MAX = 60
PAGE = 1_000


class Steady(Backoff):
    """Waits without chance, so that a run is the same every time."""

    def delay_s(self, tries: int) -> float:
        return min(self.first_s * 2.0 ** min(tries, 20), self.most_s)


class Bench:
    """Runs agents of one app under faults. `results` keeps what it ran, for the failure section of pytest."""

    def __init__(
        self,
        app: App,
        *,
        provider: Provider | None = None,
        tools: Tools | None = None,
        clock: ManualClock | None = None,
        store: StoreKind = "memory",
        lease_ms: int = LEASE_DEFAULT_MS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`tools`: contracts beside those of the app, a TOML file or tables. `patience_s` is real time: after it a
        tool that blocks its thread counts as hanging."""
        self.app = app
        self.provider = provider or Provider()
        self.clock = clock or ManualClock()
        self.lease_ms = lease_ms
        self.results: list[Result] = []
        self._store: StoreKind = store
        self._patience_s = patience_s
        self.contracts = [*(tool.contract for tool in app.tools.values()), *contracts_of(tools)]
        ToolBook(self.contracts, "the bench's tools")  # every problem is said here, not in the first run

    def run(self, agent: str, input: JSON = None, *, faults: Faults | Fault | None = None) -> Result:
        """Run an agent until its run has ended, is held or is frozen. The provider's effects add up over runs.

        Raises `Stuck` if the run never comes to rest, and `ValueError` for an agent that the app doesn't have.
        """
        if agent not in self.app.agents:
            raise ValueError(f"the app has no agent {agent}; it has {', '.join(sorted(self.app.agents)) or 'none'}")
        planned = Faults(faults) if isinstance(faults, Fault) else faults or Faults()
        name = RUN if not self.results else f"run-{len(self.results) + 1}"
        with opened(self._store) as reopen, structlog.testing.capture_logs() as logs:
            loop = VirtualLoop(self.clock, self._patience_s)
            loop.set_task_factory(task_factory)
            self.provider.open(loop)
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                stage = runner.run(_staged(self, loop, reopen, planned))
                try:
                    result = runner.run(stage.play(name, agent, canonical(input), logs))
                finally:
                    self.provider.close()
                    stage.end()
        self.results.append(result)
        return result


def contracts_of(tools: Tools | None) -> list[Contract]:
    """Contracts from a TOML file or from tables like those of one. Raises `ConfigError` with every problem."""
    if tools is None:
        return []
    if isinstance(tools, Path | str):
        return load_contracts(Path(tools))
    found = [(name, *parse_contract(name, table)) for name, table in tools.items()]
    problems = [f"tools.{name}.{fault}" for name, _, faults in found for fault in faults]
    if problems:
        raise ConfigError("\n".join(problems))
    return [contract for _, contract, _ in found if contract is not None]


@contextlib.contextmanager
def opened(kind: StoreKind) -> Iterator[Callable[[], Store]]:
    """A function that opens the store of one run, and opens it again as after a restart."""
    if kind == "memory":
        memory = MemoryStore()
        yield lambda: memory
        return
    current: list[Store] = []
    with tempfile.TemporaryDirectory(prefix="tidefast-") as folder:

        def reopen() -> Store:
            if current:
                current.pop().close()
            current.append(SqliteStore.open(Path(folder) / "store.db", create=True))
            return current[0]

        try:
            yield reopen
        finally:
            for store in current:
                store.close()


async def _staged(bench: Bench, loop: VirtualLoop, reopen: Callable[[], Store], faults: Faults) -> "Stage":
    return Stage(bench, loop, reopen, faults)


class Sender(HttpSender):
    """The gateway's sender, which tells the loop what is under way."""

    def __init__(self, clock: ManualClock, loop: VirtualLoop, tools: dict[str, str]) -> None:
        super().__init__(clock)
        self._loop, self._tools = loop, tools

    async def send(self, contract: Contract, *args: Any, step: str, **more: Any) -> Outcome:
        self._tools[step] = contract.tool
        self._loop.requests.add(step)
        try:
            return await super().send(contract, *args, step=step, **more)
        finally:
            self._loop.requests.discard(step)
            self._loop.parked.discard(step)


class Crew:
    """One worker process: its life, its connection, and whether somebody else is to take its run."""

    def __init__(self, life: Life, seam: Seam, worker: Worker) -> None:
        self.life, self.seam, self.worker = life, seam, worker
        self.task: asyncio.Task[Any] | None = None
        self.is_struck = asyncio.Event()
        self.is_frozen = False


class Stage:
    """One run on the bench: its authority, its workers, and what strikes them."""

    def __init__(self, bench: Bench, loop: VirtualLoop, reopen: Callable[[], Store], faults: Faults) -> None:
        self._bench, self._loop, self._reopen = bench, loop, reopen
        self._clock, self._provider, self._faults = bench.clock, bench.provider, faults
        self._tools: dict[str, str] = {}  # tool of each request under way
        self._book = ToolBook(bench.contracts, "the bench's tools")
        self._lives: list[Life] = []
        self._crews: dict[str, Crew] = {}
        self._acks: list[Ack] = []
        self._visits: Counter[tuple[str, str]] = Counter()
        self._places: list[tuple[str, str]] = []
        self._struck: list[Fault] = []
        self._takeover = asyncio.Event()
        self._passes = 0
        self._jobs: set[asyncio.Task[None]] = set()
        self._base = Life("bench")  # never stopped: what strikes the others
        self._boots = 0
        self._start_authority()
        self._local = LocalAuthority(self.authority)

    # --- the authority ----------------------------------------------------------------------------------------------

    def _start_authority(self) -> None:
        self._boots += 1
        self.store = self._reopen()
        self.life = Life(f"authority-{self._boots}")
        self._lives.append(self.life)
        self.engine = Engine(self.store, self._clock, self.life.name, inline=True)
        self.engine.start()
        self.http = Sender(self._clock, self._loop, self._tools)
        self.gateway = Gateway(self.engine, self._book, self.http, self._runner(), self._reach)
        self.authority = Authority(self.engine, self.gateway)
        self.keeper = Keeper(self.engine, self._bench.lease_ms // 3, self.gateway.prober)

    def _runner(self) -> Callable[..., Coroutine[Any, Any, Outcome]]:
        """Runs the app's tools in the name of the step that asked for them."""
        tools = self._bench.app.tools
        functions = {name: tool.raising(RefusedByTool, NotSentByTool) for name, tool in tools.items()}
        takes_key = frozenset(name for name, tool in tools.items() if tool.takes_key)
        local = LocalRunner(self._clock, functions, takes_key)

        async def run(tool: str, args: Mapping[str, JSON], key: str, deadline_ms: int) -> Outcome:
            source = sending.get()
            if source is not None:
                sending.set(source._replace(tool=tool))
            return await local(tool, args, key, deadline_ms)

        return run

    async def _restart(self) -> None:
        """The authority has died: what it had made durable is there, whom it owed an answer hears nothing."""
        engine, http = self.engine, self.http
        while not engine.is_idle:  # noqa: ASYNC110 - virtual time: a turn of the loop is no wait
            await asyncio.sleep(0)
        engine.failure = StoreUnavailable("the authority was killed")
        await http.close()
        self._start_authority()
        self._local.follow(self.authority)
        await self.life.start(self.keeper.start())

    # --- the points -------------------------------------------------------------------------------------------------

    async def _reach(self, point: Point, facts: Facts) -> None:
        """Where gateway and SDK report: note the place, strike if it is due, and let go."""
        step = str(facts["step"]) or f"checkpoint {facts['number']}"
        if point == "gateway.after_intent":
            sending.set(Sending(str(facts["run"]), step, ""))  # type: ignore[arg-type]
        self._places.append((point, step))
        self._visits[point, step] += 1
        nth = self._visits[point, step]
        for fault in self._faults:
            if (fault.point, fault.step, fault.nth) == (point, step, nth):
                await self._strike(fault, str(facts["run"]), str(facts["holder"]))

    async def _strike(self, fault: Fault, run_id: str, holder: str) -> None:
        self._struck.append(fault)
        crew = self._crews[holder]
        match fault.kind:
            case "kill_worker":
                crew.life.end()
                crew.is_struck.set()
            case "freeze_worker":
                crew.life.stop()
                crew.is_frozen = True
                crew.is_struck.set()
            case "kill_authority":
                self.life.end()
                self._job(self._restart())
            case "preempt" | "late_answer":
                crew.seam.is_retired = True
                self._takeover.clear()
                await self._job(self._preempt(run_id))
                crew.is_struck.set()
        await asyncio.sleep(0)  # whoever was killed or frozen stops here
        if fault.kind == "late_answer":
            await self._takeover.wait()

    async def _preempt(self, run_id: str) -> None:
        await self.authority.preempt(run_id, "the test", "planned fault", None)

    def _job(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Work of the bench itself, which no life ends."""
        task = self._base.start(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    def _granted(self, grant: LeaseGrant) -> None:
        """Somebody has the run: late calls go on, and frozen workers wake up."""
        self._passes += 1
        self._takeover.set()
        for crew in self._crews.values():
            if crew.is_frozen and crew.worker.holder != grant.holder:
                crew.is_frozen = False
                crew.seam.is_retired = True
                crew.life.thaw()

    # --- the run ----------------------------------------------------------------------------------------------------

    async def play(self, run_id: str, agent: str, input_json: str, logs: Sequence[Mapping[str, Any]]) -> Result:
        """Drive the run until it is at rest, let everything late arrive, then ask the auditor."""
        for fault in self._faults:
            if fault.kind in BY_PROVIDER:
                self._provider.plan(fault.step, fault.nth, fault.kind)  # type: ignore[arg-type]
        server = await self._provider.serve(self._tools)
        await self.life.start(self.keeper.start())
        spec = self._bench.app.agents[agent]
        await self.authority.create_run(run_id, agent, spec.version, input_json)
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await self._drive(run_id)
        except TimeoutError:
            raise Stuck(f"run {run_id} did not come to rest within {GIVE_UP_S / 3_600:.0f} h of virtual time") from None
        await self._settle()
        self._provider.close()
        result = await self._result(run_id, logs)
        await self.keeper.stop()
        await self.http.close()
        if server is not None:
            await server.cleanup()
        return result

    async def _drive(self, run_id: str) -> None:
        """One worker after the other, until the run is at rest."""
        for number in range(1, WORKERS_MAX + 1):
            if (await self._info(run_id)).state in AT_REST:
                return
            crew = self._hire(f"worker-{number}")
            crew.task = crew.life.start(self._finish(crew.worker, run_id))
            struck = asyncio.ensure_future(crew.is_struck.wait())
            await asyncio.wait((crew.task, struck), return_when=asyncio.FIRST_COMPLETED)
            struck.cancel()
        raise Stuck(f"run {run_id} is not at rest after {WORKERS_MAX} workers")

    @staticmethod
    async def _finish(worker: Worker, run_id: str) -> None:
        try:
            await worker.finish(run_id)
        except Error:
            return  # it can't be granted now: the run's state says why

    def _hire(self, name: str) -> Crew:
        life = Life(name)
        self._lives.append(life)
        seam = Seam(self._local, lambda: self.life, self._granted, self._acks)
        worker = Worker(
            seam,
            self._bench.app,
            LoopHeartbeat(seam, self._loop.time),
            holder=name,
            lease_ms=self._bench.lease_ms,
            max_runs=1,
            hook=self._reach,
            backoff=Steady(0.5),
            clock=self._loop.time,
        )
        crew = self._crews[name] = Crew(life, seam, worker)
        return crew

    async def _settle(self) -> None:
        """Whatever was kept back arrives: late answers, frozen workers, calls in flight."""
        self._takeover.set()
        for crew in self._crews.values():
            if crew.is_frozen:
                crew.is_frozen, crew.seam.is_retired = False, True
                crew.life.thaw()
        await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self.gateway.drain()
        woken = [crew.task for crew in self._crews.values() if crew.task is not None and not crew.life.is_stopped]
        if woken:
            await asyncio.wait(woken, timeout=2 * self._bench.lease_ms / 1_000)

    def end(self) -> None:
        """Nothing of any process runs again."""
        for life in self._lives:
            life.end()

    # --- what came of it --------------------------------------------------------------------------------------------

    async def _info(self, run_id: str) -> RunInfo:
        while self.life.is_stopped or self._jobs:  # noqa: ASYNC110 - it is being started again
            await asyncio.sleep(0)
        info = await self.authority.run(run_id)
        if isinstance(info, Refused):
            raise Stuck(f"run {run_id} is gone: {info.reason}")
        return info

    async def _result(self, run_id: str, logs: Sequence[Mapping[str, Any]]) -> Result:
        info = await self._info(run_id)
        events: list[EventInfo] = []
        while isinstance(page := await self.authority.events(run_id, len(events), PAGE), Sequence) and page:
            events += page
        steps = [await self.authority.step(run_id, step) for step in info.held]
        found = audit(self.store, self._provider.ledger(), acks={info.run_id: tuple(self._acks)}, now_ms=self._clock.ms)
        calls = [effect for effect in self._provider.effects if effect.run in ("", run_id)]
        names = {effect.step.removesuffix("~undo") for effect in calls if effect.step}
        struck = [*self._struck, *(f for f in self._faults if (f.step, f.nth) in self._provider.met and not f.point)]
        ended = json.loads(info.result_json)
        return Result(
            run_id=run_id,
            state=info.state,
            result=ended if info.state == "completed" else None,
            error=_error(info, ended, logs),
            held={step.step_id: step.reason for step in steps if isinstance(step, StepInfo)},
            effects={name: self._provider.count(name, run_id) for name in sorted(names)},
            calls=calls,
            events=events,
            violations=found.violations,
            faults=tuple(self._faults),
            struck=struck,
            places=self._places,
            passes=self._passes,
        )


def _error(info: RunInfo, ended: Any, logs: Sequence[Mapping[str, Any]]) -> str:
    if info.state == "failed":
        return str(ended)
    raised = [str(entry["error"]) for entry in logs if entry["event"] in ("agent_raised", "pass_misused")]
    if info.state == "frozen":
        return f"frozen ({info.frozen})" + (f"; the agent last raised {raised[-1]}" if raised else "")
    return raised[-1] if raised and info.state != "completed" else ""
