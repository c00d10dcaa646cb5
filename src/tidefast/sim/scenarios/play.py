"""Plays scenarios, lets the auditor judge, and compares what happened with what the file says."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from structlog.testing import capture_logs

from tidefast.engine.clock import ManualClock
from tidefast.protocol.laws import LAWS, Violation
from tidefast.sim.audit import AuditReport, audit
from tidefast.sim.scenarios import loop
from tidefast.sim.scenarios.moves import make
from tidefast.sim.scenarios.naive import DESIGNS, design
from tidefast.sim.scenarios.stage import Note, Stage
from tidefast.sim.scenarios.text import Move, Scenario, ScriptError
from tidefast.stores.base import Store
from tidefast.stores.memory import MemoryStore

MakeStore = Callable[[], Store]


@dataclass(slots=True)
class Played:
    """One scenario after it was played."""

    scenario: Scenario
    notes: list[list[Note]] = field(default_factory=list)  # by move
    problems: list[str] = field(default_factory=list)  # expectations that don't hold, moves that can't be made
    audit: AuditReport = field(default_factory=AuditReport)
    effects: int = 0  # net, by the provider's count
    requests: int = 0  # that reached the provider

    @property
    def traces(self) -> list[list[str]]:
        return [[note.line for note in notes if note.mark] for notes in self.notes]

    @property
    def drift(self) -> list[str]:
        """The difference between the file's trace and what happened, as a diff; empty if there is none."""
        lines: list[str] = []
        for move, trace in zip(self.scenario.moves, self.traces, strict=False):
            if move.trace != trace:
                lines.append(f"line {move.line}: {move.text}")
                lines += [row for row in difflib.ndiff(move.trace, trace) if row[0] in "+-"]
        return lines

    @property
    def order(self) -> tuple[str, ...]:
        """The order of events: moves and what followed from them, without what the file says of itself."""
        moves = zip(self.scenario.moves, self.traces, strict=False)
        return tuple(line for move, trace in moves if move.verb != "expect" for line in (move.text, *trace))

    @property
    def broken(self) -> Counter[str]:
        return Counter({law: count for law, count in self.audit.counts.items() if count})

    @property
    def verdict(self) -> list[str]:
        """Why the auditor's judgement isn't what the scenario promises; empty if it is."""
        missing = sorted(self.scenario.breaks - set(self.broken))
        stray = sorted(set(self.broken) - self.scenario.breaks)
        found = [f"the naive design was not caught breaking {law}" for law in missing]
        return found + [_sentence(violation) for violation in self.audit.violations if violation.law in stray]

    @property
    def holds(self) -> bool:
        return not (self.problems or self.drift or self.verdict)


def play(scenario: Scenario, make_store: MakeStore = MemoryStore) -> Played:
    """Play one scenario over a store of its own."""
    played = Played(scenario)
    if scenario.naive and scenario.naive not in DESIGNS:
        played.problems.append(f"no naive design is called {scenario.naive}")
        return played
    strangers = scenario.breaks - LAWS.keys()
    if strangers:
        played.problems.append(f"no law is called {', '.join(sorted(strangers))}")
        return played
    clock, store = ManualClock(), make_store()
    try:
        with design(scenario.naive), capture_logs():
            loop.run(clock, _perform(scenario, store, clock, played))
    finally:
        store.close()
    return played


async def _perform(scenario: Scenario, store: Store, clock: ManualClock, played: Played) -> None:
    stage = Stage(store, clock, epoch_in_key=scenario.naive == "epoch_in_key")
    try:
        for move in scenario.moves:
            before = len(stage.notes)
            problem = await _made(stage, move)
            played.notes.append(stage.notes[before:])
            if problem:
                played.problems.append(f"line {move.line}: {problem}")
        acks = {run: tuple(given) for run, given in stage.acks.items()}
        played.audit = audit(stage.store, stage.provider.ledger(), acks=acks, now_ms=clock.ms)
        played.effects = sum(stage.provider.net.values())
        played.requests = sum(stage.provider.sends.values())
    finally:
        await stage.stop()
        if stage.store is not store:  # a restore has put another one in its place
            stage.store.close()


async def _made(stage: Stage, move: Move) -> str:
    try:
        await make(stage, move)
    except (ScriptError, ValueError, IndexError, KeyError) as error:
        return str(error) or type(error).__name__
    return ""


@dataclass(slots=True)
class Summary:
    """What a set of scenarios came to: denominators first."""

    scenarios: int = 0
    held: int = 0
    moves: int = 0
    orders: set[tuple[str, ...]] = field(default_factory=set)
    events: int = 0
    mutating_steps: int = 0
    preemptions: int = 0
    requests: int = 0
    effects: int = 0
    violations: Counter[str] = field(default_factory=Counter)  # of the product
    convicted: Counter[str] = field(default_factory=Counter)  # of naive designs, as their files promise
    failed: list[Played] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return self.scenarios > 0 and self.held == self.scenarios and not self.violations


def summary(all_played: Iterable[Played]) -> Summary:
    """Add up what was played."""
    total = Summary()
    for played in all_played:
        total.scenarios += 1
        total.held += played.holds
        total.moves += sum(1 for move in played.scenario.moves if move.verb != "expect")
        total.orders.add(played.order)
        total.events += played.audit.events
        total.mutating_steps += played.audit.mutating_steps
        total.preemptions += played.audit.preemptions
        total.requests += played.requests
        total.effects += played.effects
        (total.convicted if played.scenario.naive else total.violations).update(played.broken)
        if not played.holds:
            total.failed.append(played)
    return total


def complaints(played: Played) -> Sequence[str]:
    """Everything that doesn't hold, line by line."""
    return [*played.problems, *played.verdict, *played.drift]


def _sentence(violation: Violation) -> str:
    return f"{violation.law}: {violation.run_id} {violation.step_id or ''}: {violation.why}"
