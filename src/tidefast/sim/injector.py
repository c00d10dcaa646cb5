"""The fault injector: really kills and freezes the processes of a running system, at named points, and counts.

Gateway and SDK report each point over a unix socket (`points.py`) and wait there. The injector follows a seeded plan:
it SIGKILLs a worker, SIGSTOPs one until another has taken its run over and then thaws it, or SIGKILLs the authority in
the middle of a call. A takeover is seen by a point that names a higher epoch of the run, never guessed from time. It
also supervises: what it killed, and what died by itself, is started again. It knows runs, steps, epochs and holders,
and nothing of what the system does with them.
"""

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from tidefast.protocol.points import Point

LINE_BYTES_MAX = 65_536
TAKEOVER_S = 8.0  # without a takeover by then a fault is given up and what waits is let go
QUIET_S = 0.8  # how long the authority's death waits for the calls of other steps to be settled
QUIET_STEP_S = 0.02
QUIET_STEPS = 3  # a call just let go is not seen for a moment: this many looks in a row must find nothing
TAKEOVERS_MAX = 4  # a run that was taken over this often is not struck at its own points any more
CRASHES_MAX = 5  # deaths that nobody injected, before the whole run is given up

Role = Literal["worker", "authority"]
FaultKind = Literal["kill_worker", "freeze_worker", "kill_authority"]
Key = tuple[str, str]  # run, step

PLACES: Mapping[str, str] = {
    "sdk.before_apply": "before intent",
    "gateway.before_intent": "before intent",
    "gateway.after_intent": "between intent and send",
    "gateway.after_send": "between provider commit and receipt",
    "gateway.after_settle": "between receipt and its answer",
    "sdk.after_apply": "between receipt and checkpoint",
    "sdk.before_checkpoint": "between receipt and checkpoint",
    "sdk.after_checkpoint": "after the checkpoint",
}
WORDS: Mapping[FaultKind, str] = {
    "kill_worker": "worker killed",
    "freeze_worker": "worker frozen past its lease, thawed after takeover",
    "kill_authority": "authority killed and restarted",
}


class Process(Protocol):
    """What the injector needs of a child; `asyncio.subprocess.Process` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int, /) -> None: ...

    async def wait(self) -> int: ...


class Fault(NamedTuple):
    """What is done to whom at a point. `is_late`: what waits at the gateway's point goes on only after the takeover."""

    kind: FaultKind
    point: Point
    is_late: bool = False

    @property
    def name(self) -> str:
        return f"{WORDS[self.kind]}, {PLACES[self.point]}"


class Strike(NamedTuple):
    """The authority dies the `nth` time that a step of this name is at this point."""

    point: Point
    step: str
    nth: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Which faults come where: the same seed plans the same ones, whatever order the runs come in.

    `menus` names the faults that a step may meet; the share of steps that meet one is `share`. Where these don't
    suffice, or couldn't be carried out, more are added until the share `least` has met a preemption; and each fault of
    a menu is tried at least once, as long as that doesn't take the share above `most`.
    """

    seed: int
    menus: Mapping[str, Sequence[Fault]]
    strikes: Sequence[Strike] = ()
    share: float = 0.5
    least: float = 0.4
    most: float = 0.65

    def fault(self, run: str, step: str) -> Fault | None:
        """The fault that is planned for a step."""
        chance = random.Random(f"{self.seed}/{run}/{step}")
        menu = self.menus.get(step, ())
        return chance.choice(menu) if menu and chance.random() < self.share else None


class Happening(NamedTuple):
    """Something that the injector did or saw.

    `what`: killed, frozen, thawed, takeover, no takeover, late, struck (the authority), restarted, died (by itself);
    "killed beside" and "frozen beside" name the other runs that a struck worker was driving.
    """

    at_ms: int
    what: str
    run: str
    step: str
    epoch: int
    who: str
    where: str = ""


@dataclass(slots=True)
class Member:
    """A supervised process."""

    name: str
    role: Role
    start: Callable[[], Awaitable[Process]]
    process: Process | None = None
    state: Literal["starting", "up", "frozen", "struck"] = "starting"
    starts: int = 0
    holder: str = ""  # the name on the leases of the process that runs now, once a point has told it

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process has just ended."""
        if self.process is None or self.process.returncode is not None:
            return False
        try:
            self.process.send_signal(number)
        except ProcessLookupError:
            return False
        return True


@dataclass(slots=True)
class Track:
    """What the points say of one run."""

    epoch: int = 0
    first_epoch: int = 0
    holder: str = ""
    step: str = ""  # the mutating step that is under way, until the next one or the checkpoint
    last: str = ""  # the newest point, for whoever asks what is stuck
    order: list[str] = field(default_factory=list)
    is_struck: bool = False
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class Report(NamedTuple):
    """One process at one point."""

    point: Point
    pid: int
    run: str
    step: str
    epoch: int
    holder: str

    @property
    def is_gateway(self) -> bool:
        return self.point.startswith("gateway.")


NOWHERE = Report("sdk.before_apply", 0, "", "", 0, "")


class Injector:
    """One listening socket, its members, and what was done to them. `start`, `add` each member, finally `close`."""

    def __init__(self, path: str, plan: Plan, say: Callable[[Happening], None] | None = None, keep_up: int = 2) -> None:
        """`say` hears each happening. `keep_up` workers are never struck at once: somebody has to take over."""
        self.path = path
        self.plan = plan
        self._keep_up = keep_up
        self.faults: Counter[str] = Counter()
        self.preempted: set[Key] = set()  # steps whose worker or gateway was taken away while they were under way
        self.seen: set[Key] = set()  # steps that were asked for
        self.late: dict[tuple[str, str, int], str] = {}  # (run, step, dead epoch) of calls let go after takeover: where
        self.happenings: list[Happening] = []
        self.tracks: dict[str, Track] = {}
        self.members: list[Member] = []
        self.crashes: list[str] = []
        self.broken = asyncio.Event()  # too many deaths that nobody injected
        self._say = say
        self._is_calm = False
        self._is_stopping = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lines: set[asyncio.StreamWriter] = set()
        self.holders: dict[str, Member] = {}
        self._planned: dict[Key, Fault | None] = {}
        self._struck_steps: set[Key] = set()
        self._done: set[tuple[str, Fault]] = set()  # (step name, fault) that were carried out
        self._counts: Counter[tuple[str, str]] = Counter()
        self._strikes_left = list(plan.strikes)
        self._sending: Counter[Key] = Counter()  # calls between intent and settle
        self._kept: set[Key] = set()  # of these, the ones kept until a takeover
        self._gate = asyncio.Event()
        self._gate.set()

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Nothing is struck before a member is added."""
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=LINE_BYTES_MAX)

    async def add(self, name: str, role: Role, start: Callable[[], Awaitable[Process]]) -> Member:
        """Start a process and keep it running. Returns when `start` has returned for the first time."""
        member = Member(name, role, start)
        self.members.append(member)
        await self._start(member)
        self._task(self._supervise(member))
        return member

    def calm(self) -> None:
        """No fault from now on; what waits is let go, what is frozen goes on."""
        self._is_calm = True
        self._gate.set()
        for track in self.tracks.values():
            track.moved.set()
        for member in self.members:
            if member.state == "frozen":
                member.signal(signal.SIGCONT)

    async def close(self, grace_s: float = 5.0) -> None:
        """End the workers in good order, then the authority, then the listening. Kills what doesn't end in time."""
        self.calm()
        self._is_stopping = True
        for role in ("worker", "authority"):
            running = [member for member in self.members if member.role == role and member.process is not None]
            await asyncio.gather(*(end(member.process, grace_s) for member in running if member.process is not None))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for line in list(self._lines):
            line.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def orders(self) -> set[tuple[str, ...]]:
        """The distinct orders of events, faults among them, in which runs were struck: the interleavings."""
        return {tuple(track.order) for track in self.tracks.values() if track.is_struck}

    async def _start(self, member: Member) -> None:
        member.state, member.holder = "starting", ""
        member.process = await member.start()
        member.starts += 1
        member.state = "up"

    async def _supervise(self, member: Member) -> None:
        """Start a member again whenever it has ended, until that is hopeless."""
        while member.process is not None:
            code = await member.process.wait()
            if self._is_stopping:
                return
            if member.state != "struck":
                self._note("died", NOWHERE, member.name)
                self._crashed(f"{member.name} ended by itself with exit code {code}")
            try:
                await self._start(member)
            except Exception as error:  # whatever `start` may raise: nobody else would hear of it
                self._crashed(f"{member.name} can't be started: {error}")
                self.broken.set()
                return
            self._note("restarted", NOWHERE, member.name)

    def _crashed(self, why: str) -> None:
        self.crashes.append(why)
        if len(self.crashes) > CRASHES_MAX:
            self.broken.set()

    def _task(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the points -------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one process's points until it is gone; what it waits for then waits for nobody."""
        mine: set[asyncio.Task[None]] = set()
        self._lines.add(writer)
        try:
            while line := await reader.readline():
                record = json.loads(line)
                task = asyncio.ensure_future(self._answer(writer, record))
                mine.add(task)
                self._tasks.add(task)
                task.add_done_callback(mine.discard)
                task.add_done_callback(self._tasks.discard)
        except (OSError, ValueError):
            writer.close()  # a line that is no report: this process is not held up any further
        finally:
            self._lines.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, record: dict[str, object]) -> None:
        report = Report(
            str(record["point"]),  # type: ignore[arg-type]
            int(str(record["pid"])),
            str(record.get("run", "")),
            str(record.get("step", "")),
            int(str(record.get("epoch", 0))),
            str(record.get("holder", "")),
        )
        try:
            await self._reached(report)
        finally:
            if not writer.is_closing():
                writer.write(json.dumps({"id": record["id"], "go": True}).encode() + b"\n")

    async def _reached(self, report: Report) -> None:
        """Take down what a point says, do there what the plan says, and return when it may go on."""
        track = self._follow(report)
        if self._is_calm:
            return
        strike = self._due_strike(report)
        if strike is not None:
            await self._kill_authority(report)
            return
        fault = None if report.epoch < track.epoch else self._due_fault(report, track)
        if fault is not None:
            await self._inject(fault, report, track)
        if report.point == "gateway.before_intent":
            await self._gate.wait()
        if report.is_gateway and report.epoch < track.epoch:
            self._let_go_late(report, track)

    def _follow(self, report: Report) -> Track:
        """What a point says of its run, its worker and the calls in flight."""
        track = self.tracks.setdefault(report.run, Track())
        if not report.is_gateway:
            member = next((m for m in self.members if m.process is not None and m.process.pid == report.pid), None)
            if member is not None:
                self.holders[report.holder] = member
                member.holder = report.holder
            if report.epoch > track.epoch:
                self._take_over(track, report)
        if report.epoch == track.epoch:
            track.last = f"{report.point} {report.step}".strip()
            if report.point == "sdk.before_apply":
                track.step = report.step
                self.seen.add((report.run, report.step))
            elif report.point == "sdk.after_checkpoint":
                track.step = ""
        key = (report.run, report.step)
        if report.point == "gateway.after_intent":
            self._sending[key] += 1
        elif report.point == "gateway.after_settle":
            self._sending[key] -= 1
        track.order.append(f"{report.epoch - track.first_epoch}:{report.point}:{report.step}")
        return track

    def _take_over(self, track: Track, report: Report) -> None:
        is_first = not track.epoch
        track.first_epoch = track.first_epoch or report.epoch
        track.epoch, track.holder, track.step = report.epoch, report.holder, ""
        track.moved.set()
        track.moved = asyncio.Event()
        if not is_first:
            self._note("takeover", report, self._who(report.holder))

    def _let_go_late(self, report: Report, track: Track) -> None:
        """A call of a dead epoch goes on, after its successor's grant: it must not be let in."""
        name = (report.run, report.step, report.epoch)
        if report.point in ("gateway.before_intent", "gateway.after_send") and name not in self.late:
            self.late[name] = report.point
            self._note("late", report, self._who(report.holder), report.point)

    # --- what is due ------------------------------------------------------------------------------------------------

    def _due_strike(self, report: Report) -> Strike | None:
        """The authority's next death, if this is the moment for it."""
        if not report.is_gateway:
            return None
        place = (report.point, report.step)
        self._counts[place] += 1
        for strike in self._strikes_left:
            if (strike.point, strike.step) == place and self._counts[place] >= strike.nth:
                authority = self._authority()
                if authority is None or authority.state != "up" or not self._gate.is_set():
                    return None
                self._strikes_left.remove(strike)
                return strike
        return None

    def _due_fault(self, report: Report, track: Track) -> Fault | None:
        """The fault planned for this step at this point, or one that is owed."""
        step = report.step or track.step
        key = (report.run, step)
        if not step or key in self._struck_steps or report.epoch - track.first_epoch >= TAKEOVERS_MAX:
            return None
        if key not in self._planned:
            self._planned[key] = self.plan.fault(*key)
        fault = self._planned[key]
        if fault is not None and fault.point == report.point:
            return fault
        if fault is None and len(self.preempted) < self.plan.most * len(self.seen):
            for fresh in self.plan.menus.get(step, ()):
                if fresh.point == report.point and (step, fresh) not in self._done:
                    return fresh
        if report.point == "sdk.after_apply" and self._is_owed(key):
            return Fault("kill_worker", report.point)
        return None

    def _is_owed(self, key: Key) -> bool:
        """Whether too few steps have met a preemption so far."""
        has_menu = bool(self.plan.menus.get(key[1]))
        return has_menu and key not in self.preempted and len(self.preempted) < self.plan.least * len(self.seen)

    def _authority(self) -> Member | None:
        return next((member for member in self.members if member.role == "authority"), None)

    def _may_lose(self, member: Member | None) -> bool:
        up = sum(1 for each in self.members if each.role == "worker" and each.state == "up")
        return member is not None and member.state == "up" and up > self._keep_up

    # --- the faults -------------------------------------------------------------------------------------------------

    async def _inject(self, fault: Fault, report: Report, track: Track) -> None:
        member = self.holders.get(report.holder)
        if member is None or member.holder != report.holder or not self._may_lose(member):
            return
        step = report.step or track.step
        self._struck_steps.add((report.run, step))
        self._done.add((step, fault))
        if fault.kind == "freeze_worker":
            await self._freeze(member, fault, report, track)
        elif self._kill(member, fault, report) and fault.is_late:
            await self._keep(report, track)

    def _kill(self, member: Member, fault: Fault, report: Report) -> bool:
        """SIGKILL a worker. Every step that it had under way has met a preemption."""
        if not member.signal(signal.SIGKILL):
            return False
        member.state = "struck"
        self._count(fault, report, "killed", member)
        for run, track in self._driven_by(member):
            self._preempt(run, track)
            self._note_beside("killed beside", run, track, report, member)
        return True

    async def _freeze(self, member: Member, fault: Fault, report: Report, track: Track) -> None:
        """SIGSTOP a worker, wait until its run has a new holder, and thaw it; what waited at the point goes on then."""
        if not member.signal(signal.SIGSTOP):
            return
        member.state = "frozen"
        driven = [(run, each, each.epoch) for run, each in self._driven_by(member)]
        self._count(fault, report, "frozen", member)
        for run, each, _ in driven:
            self._note_beside("frozen beside", run, each, report, member)
        await self._keep(report, track)
        for run, each, epoch in driven:
            if each.epoch > epoch:
                self._preempt(run, each, report.step if run == report.run else "")
        member.signal(signal.SIGCONT)
        if member.state == "frozen":
            member.state = "up"
            self._note("thawed", report, member.name)

    async def _keep(self, report: Report, track: Track) -> None:
        """Keep what waits at this point until the run has a new holder."""
        key = (report.run, report.step)
        self._kept.add(key)
        try:
            async with asyncio.timeout(TAKEOVER_S):
                while track.epoch <= report.epoch and not self._is_calm:
                    await track.moved.wait()
        except TimeoutError:
            self._note("no takeover", report, self._who(report.holder))
        finally:
            self._kept.discard(key)

    async def _kill_authority(self, report: Report) -> None:
        """SIGKILL the authority in the middle of this call, when the other calls are settled or not begun."""
        authority = self._authority()
        if authority is None:
            return
        self._gate.clear()
        await self._quiet((report.run, report.step))
        if authority.signal(signal.SIGKILL):
            authority.state = "struck"
            self._sending.clear()
            self._count(Fault("kill_authority", report.point), report, "struck", authority)
            self.preempted.add((report.run, report.step))
        self._gate.set()

    async def _quiet(self, mine: Key) -> None:
        """Wait, though not for ever, until no other call is between intent and settle."""
        quiet, until_s = 0, time.monotonic() + QUIET_S
        while quiet < QUIET_STEPS and time.monotonic() < until_s:
            quiet = 0 if self._others_sending(mine) else quiet + 1
            await asyncio.sleep(QUIET_STEP_S)

    def _others_sending(self, mine: Key) -> bool:
        return any(count > 0 for key, count in self._sending.items() if key != mine and key not in self._kept)

    def _driven_by(self, member: Member) -> list[tuple[str, Track]]:
        return [(run, track) for run, track in self.tracks.items() if track.holder == member.holder != ""]

    def _preempt(self, run: str, track: Track, step: str = "") -> None:
        name = step or track.step
        if name:
            self.preempted.add((run, name))

    def _count(self, fault: Fault, report: Report, what: str, member: Member) -> None:
        self.faults[fault.name] += 1
        track = self.tracks[report.run]
        track.is_struck = True
        track.order.append(fault.name)
        self._note(what, report, member.name, PLACES[report.point])

    def _note_beside(self, what: str, run: str, track: Track, report: Report, member: Member) -> None:
        """A run that its worker's fault hit too, though not at a point of its own."""
        if run != report.run:
            track.is_struck = True
            track.order.append(what)
            self._note(what, Report(report.point, 0, run, track.step, track.epoch, track.holder), member.name)

    def _who(self, holder: str) -> str:
        member = self.holders.get(holder)
        return holder if member is None else member.name

    def _note(self, what: str, report: Report, who: str, where: str = "") -> None:
        happening = Happening(time.time_ns() // 1_000_000, what, report.run, report.step, report.epoch, who, where)
        self.happenings.append(happening)
        if self._say is not None:
            self._say(happening)


async def end(process: Process, grace_s: float) -> int:
    """End a process in good order: SIGTERM, and SIGKILL if it isn't gone in time. Returns its exit code."""
    if process.returncode is None:
        try:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(grace_s):
                return await process.wait()
        except ProcessLookupError:
            return await process.wait()
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
    return await process.wait()
