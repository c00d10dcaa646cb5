"""Many simulated worlds, on as many processes as there are cores: the campaign behind `tidefast sim`.

A campaign from seed N plays the worlds N, N+1, … of two hours each, until its hours are full. Each world can be played
again alone, by its own seed. The figures are added up; the hash of a campaign is the hash over its worlds' hashes.
"""

import gc
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

from tidefast.protocol.events import Event
from tidefast.protocol.ids import RunId
from tidefast.sim.audit import NAMED_MAX, AuditReport
from tidefast.sim.judging import SOMETIMES, WorldResult, judge_world
from tidefast.sim.report import Report, from_audit, to_json, to_text
from tidefast.sim.simulate import Simulation, simulate
from tidefast.stores.base import Store
from tidefast.stores.memory import MemoryStore

WORLD_HOURS = 2.0
SOMETIMES_FROM_HOURS = 60.0  # a shorter campaign names what it hasn't seen, and isn't failed for it
GATE_HOURS, GATE_CALLS, GATE_PREEMPTIONS = 1_000.0, 200_000, 60_000
LOG_MAX = 10_000
FAULTED_SHARE = 3  # at least one in three mutating steps is faulted


@dataclass
class Campaign:
    """The sum of all worlds."""

    seed: int
    asked_hours: float
    hours: float = 0.0
    worlds: int = 0
    calls: int = 0
    sent: int = 0
    faulted_steps: int = 0
    interleavings: int = 0
    audit: AuditReport = field(default_factory=AuditReport)
    rejected: int = 0
    rejected_unanswered: int = 0
    orders: set[int] = field(default_factory=set)
    sometimes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    needless: list[str] = field(default_factory=list)
    bad_seeds: list[int] = field(default_factory=list)
    log_hash: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def never(self) -> list[str]:
        """Sometimes-properties that were not reached."""
        return [name for name in SOMETIMES if not self.sometimes[name]]

    @property
    def is_faulted(self) -> bool:
        """Whether enough steps met a fault; a piece of a world is too small to ask."""
        is_enough = FAULTED_SHARE * self.faulted_steps >= self.audit.mutating_steps
        return is_enough or self.asked_hours < WORLD_HOURS

    @property
    def is_large_enough(self) -> bool:
        """Whether a campaign of the gate's hours held what the gate asks for."""
        has_enough = self.calls >= GATE_CALLS and self.audit.preemptions >= GATE_PREEMPTIONS
        return has_enough or self.asked_hours < GATE_HOURS

    @property
    def is_ok(self) -> bool:
        has_seen = not self.never or self.asked_hours < SOMETIMES_FROM_HOURS
        went_well = self.audit.is_ok and not self.rejected_unanswered and not self.needless
        return went_well and self.is_faulted and has_seen and self.is_large_enough

    @property
    def report(self) -> Report:
        return from_audit(
            self.audit,
            interleavings=self.interleavings,
            rejected=self.rejected,
            rejected_unanswered=self.rejected_unanswered,
            seed=self.seed,
            faults=self.faults,
        )

    @property
    def command(self) -> str:
        """What reproduces this campaign, or the first world of it that went wrong."""
        if self.bad_seeds:
            return f"tidefast sim --seed {self.bad_seeds[0]} --hours {min(self.asked_hours, WORLD_HOURS):g} --log"
        return f"tidefast sim --seed {self.seed} --hours {self.asked_hours:g}"

    def add(self, result: WorldResult) -> None:
        self.worlds += 1
        self.hours += result.hours
        for name in ("calls", "sent", "faulted_steps", "interleavings", "rejected", "rejected_unanswered", "cpu_s"):
            setattr(self, name, getattr(self, name) + getattr(result, name))
        self.orders |= result.orders
        self.sometimes += result.sometimes
        self.faults += result.faults
        self.needless += [f"world {result.seed}, {why}" for why in result.needless]
        for name in ("runs", "events", "mutating_steps", "preemptions", "held"):
            setattr(self.audit, name, getattr(self.audit, name) + getattr(result.audit, name))
        self.audit.has_ledger = True
        for law, count in result.audit.counts.items():
            self.audit.counts[law] += count
        room = NAMED_MAX - len(self.audit.violations)
        for violation in result.audit.violations[:room]:
            name = RunId(f"{violation.run_id} of world {result.seed}")
            self.audit.violations.append(violation._replace(run_id=name))
        if not result.is_ok:
            self.bad_seeds.append(result.seed)


def play(seed: int, hours: float, store: Store | None = None) -> tuple[WorldResult, Simulation]:
    """One world, played and judged."""
    start = time.process_time()
    world = simulate(seed, hours, store or MemoryStore())
    result = judge_world(world, seed)
    gc.collect()
    result.cpu_s = time.process_time() - start
    return result, world


def play_world(seed: int, hours: float) -> WorldResult:
    """One world's figures: what the processes of a campaign run."""
    return play(seed, hours)[0]


def worlds_of(seed: int, hours: float) -> list[tuple[int, float]]:
    """(seed, hours) of each world of a campaign."""
    found: list[tuple[int, float]] = []
    left = hours
    while left > 1e-9:
        found.append((seed + len(found), min(left, WORLD_HOURS)))
        left -= WORLD_HOURS
    return found


def run(
    seed: int, hours: float, processes: int | None = None, on_world: Callable[[Campaign], None] | None = None
) -> Campaign:
    """Play a campaign. With one process it stays in this one."""
    campaign, start = Campaign(seed, hours), time.monotonic()
    hashes: dict[int, str] = {}
    worlds = worlds_of(seed, hours)
    processes = min(processes or os.cpu_count() or 1, len(worlds))
    for result in _results(worlds, processes):
        campaign.add(result)
        hashes[result.seed] = result.log_hash
        campaign.wall_s = time.monotonic() - start
        if on_world is not None:
            on_world(campaign)
    campaign.bad_seeds.sort()
    campaign.log_hash = hashlib.sha256("\n".join(hashes[each] for each, _ in worlds).encode()).hexdigest()
    return campaign


def _results(worlds: Sequence[tuple[int, float]], processes: int) -> Iterator[WorldResult]:
    if processes == 1:
        yield from (play_world(*world) for world in worlds)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting: set[Future[WorldResult]] = set()
        ahead = iter(worlds)
        while True:
            for world in ahead:
                waiting.add(pool.submit(play_world, *world))
                if len(waiting) > 2 * processes:
                    break
            if not waiting:
                return
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in finished)


def as_json(campaign: Campaign) -> str:
    """The report as one line of JSON: the common members, and what only a simulation has."""
    return json.dumps({**json.loads(to_json(campaign.report)), **_figures(campaign)})


def _figures(campaign: Campaign) -> dict[str, object]:
    return {
        "ok": campaign.is_ok,
        "hours": campaign.hours,
        "worlds": campaign.worlds,
        "tool_calls": campaign.calls,
        "requests_sent": campaign.sent,
        "faulted_steps": campaign.faulted_steps,
        "distinct_orders": len(campaign.orders),
        "needless_holds": len(campaign.needless),
        "sometimes": {name: campaign.sometimes[name] for name in SOMETIMES},
        "log_hash": campaign.log_hash,
        "bad_seeds": campaign.bad_seeds,
        "cpu_s": round(campaign.cpu_s, 1),
        "reproduce": campaign.command,
    }


def as_text(campaign: Campaign) -> str:
    """The report for people."""
    rows: list[tuple[str, str]] = [
        ("simulated hours under fire", f"{campaign.hours:,.1f}"),
        ("worlds", f"{campaign.worlds:,}"),
        ("tool calls", f"{campaign.calls:,}"),
        ("requests sent to providers", f"{campaign.sent:,}"),
        ("mutating steps with a fault of their own", f"{campaign.faulted_steps:,}"),
        ("distinct orders of events and faults", f"{len(campaign.orders):,}"),
        ("needless holds", f"{len(campaign.needless):,}"),
        *((f"sometimes: {name}", f"{campaign.sometimes[name]:,}") for name in SOMETIMES),
        ("CPU seconds", f"{campaign.cpu_s:,.1f}"),
    ]
    text = "".join(f"{name:<64} {value:>14}\n" for name, value in rows)
    text += f"hash of all logs  {campaign.log_hash}\n" + to_text(campaign.report)
    text += "".join(f"needless: {why}\n" for why in campaign.needless[:10])
    text += "".join(f"never happened: {name}\n" for name in campaign.never)
    if not campaign.is_faulted:
        text += "NOT OK: fewer than a third of the mutating steps met a fault\n"
    if campaign.never and campaign.asked_hours >= SOMETIMES_FROM_HOURS:
        text += "NOT OK: the simulation has not been where it matters\n"
    if not campaign.is_large_enough:
        text += f"NOT OK: too small; expected {GATE_CALLS:,} tool calls and {GATE_PREEMPTIONS:,} preemptions\n"
    return text + f"reproduce: {campaign.command}\n"


def broken_logs(world: Simulation, campaign: Campaign) -> Iterator[str]:
    """The log of each run of a world that broke a law, event by event, with the faults that struck it."""
    named = {str(violation.run_id).partition(" of world ")[0] for violation in campaign.audit.violations}
    for run_id in sorted(named - {""}):
        found = world.store.load_head(RunId(run_id))
        if found is None:
            continue
        rows = [(each.event.at_ms, _told(each.event)) for each in world.store.load_events(found[0], 0, LOG_MAX)]
        rows += [
            (mark.at_ms, f"   ! {mark.kind} {mark.step_id}") for mark in world.marks if mark.run_id in (run_id, "")
        ]
        yield f"log of run {run_id}"
        start = rows[0][0]
        for at_ms, told in sorted(rows, key=lambda row: row[0]):
            if at_ms >= start:
                yield f"{(at_ms - start) / 1_000:>+11.3f}s {told}"


def _told(event: Event) -> str:
    return f"{event.seq:>4} {event.kind} epoch {event.epoch} {event.step_id or '-'} {event.data_json}"
