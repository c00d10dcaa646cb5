"""Breadth first through every state of a configuration, then backwards from the ends.

A state is a number, so that a million of them fit into memory and none is taken for another. The first state that
breaks a law ends the search, if wanted, and the moves that led there are the shortest possible.
"""

import gc
import resource
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from tidefast.protocol.records import RunHead
from tidefast.sim.check.configs import Config
from tidefast.sim.check.moves import Move, Moves, State
from tidefast.sim.check.world import Broken

STATES_MAX = 20_000_000


class Finding(NamedTuple):
    """A broken law, and the moves from the beginning to where it breaks."""

    law: str
    why: str
    moves: tuple[Move, ...]


class Result(NamedTuple):
    """What a search came to."""

    config: Config
    states: int
    transitions: int  # every move and every refused verb of every state
    changes: int  # of these, moves that led to another state
    depth: int
    is_closed: bool
    wedged: int  # states from which no end can be reached without a further fault
    findings: tuple[Finding, ...]
    seen: Counter[str]
    moves: Counter[str]
    faults: Counter[str]
    stale: int
    held: int
    ended: int
    seconds: float
    cpu_seconds: float
    memory_mb: int

    @property
    def is_ok(self) -> bool:
        return self.is_closed and not self.findings and not self.wedged


class _Search:
    def __init__(self, config: Config, limit: int) -> None:
        self.moves = Moves(config)
        self.limit = limit
        self.index: dict[State, int] = {}
        self.order: list[State] = []
        self.parent, self.by = array("q"), array("q")
        self.move_ids: dict[Move, int] = {}
        self.free, self.free_from = array("I"), array("Q")
        self.seen: Counter[tuple[str, ...]] = Counter()
        self.counts: Counter[int] = Counter()
        self.stays = self.stale = self.changes = self.depth = 0
        self.findings: list[Finding] = []

    def add(self, state: State, parent: int, move: Move | None) -> int:
        place = self.index[state] = len(self.order)
        self.order.append(state)
        self.parent.append(parent)
        self.by.append(-1 if move is None else self.move_ids.setdefault(move, len(self.move_ids)))
        return place

    def run(self, stop_at_first: bool, on_level: Callable[[int, int], None] | None) -> bool:
        """Whether the frontier was closed."""
        self.add(self.moves.first(), -1, None)
        level_end, place = 1, 0
        while place < len(self.order):
            if place == level_end:
                self.depth += 1
                level_end = len(self.order)
                if on_level is not None:
                    on_level(self.depth, level_end)
            try:
                self.expand(place)
            except Broken as broken:
                self.findings.append(Finding(broken.law, broken.why, (*self.trail(place), self.moves.asking)))
                if stop_at_first:
                    return False
            place += 1
            if len(self.order) > self.limit:
                return False
        return True

    def expand(self, place: int) -> None:
        state = self.order[place]
        self.free_from.append(len(self.free))
        index, ids, counts = self.index, self.move_ids, self.counts
        for move, after, seen in self.moves.successors(state):
            if after == state:
                self.stays += 1
                continue
            target = index.get(after)
            if target is None:
                target = self.add(after, place, move)
            self.changes += 1
            number = ids.setdefault(move, len(ids))
            counts[number] += 1
            if not move.cost:
                self.free.append(target)
            if seen:
                self.seen[seen] += 1
        stays, stale = self.moves.stays(state)
        self.stays += stays
        self.stale += stale

    def trail(self, place: int) -> tuple[Move, ...]:
        names = list(self.move_ids)
        trail: list[Move] = []
        while self.parent[place] >= 0:
            trail.append(names[self.by[place]])
            place = self.parent[place]
        return tuple(reversed(trail))

    def wedged(self) -> list[int]:
        """The states from which no ended run can be reached by moves that are no fault, found backwards."""
        good = bytearray(len(self.order))
        for place, state in enumerate(self.order):
            good[place] = bool(self.head_of(state).end)
        left = [place for place in range(len(self.order) - 1, -1, -1) if not good[place]]
        starts, free = [*self.free_from, len(self.free)], self.free
        while True:
            still: list[int] = []
            for place in left:
                for edge in range(starts[place], starts[place + 1]):
                    if good[free[edge]]:
                        good[place] = 1
                        break
                else:
                    still.append(place)
            if len(still) == len(left):
                return sorted(still)
            left = still

    def head_of(self, state: State) -> RunHead:
        return self.moves.books[self.moves.parts(state)[0]].head


def search(
    config: Config,
    *,
    stop_at_first: bool = True,
    states_max: int = STATES_MAX,
    on_level: Callable[[int, int], None] | None = None,
) -> Result:
    """Visit every state of a configuration; judge each move; then ask of each state whether a run can still end."""
    began, cpu = time.perf_counter(), time.process_time()
    work = _Search(config, states_max)
    collects = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and walking millions of records again and again costs a third of the time
    try:
        is_closed = work.run(stop_at_first, on_level)
    finally:
        if collects:
            gc.enable()
    stuck = work.wedged() if is_closed and not work.findings else []
    if stuck:
        why = f"{len(stuck):,} states have no way forward without one more fault"
        work.findings.append(Finding("stuck", why, work.trail(stuck[0])))
    return _result(config, work, is_closed, len(stuck), time.perf_counter() - began, time.process_time() - cpu)


def _result(config: Config, work: _Search, is_closed: bool, wedged: int, seconds: float, cpu: float) -> Result:
    seen: Counter[str] = Counter(work.moves.seen)
    for names, count in work.seen.items():
        for name in names:
            seen[name] += count
    listed = list(work.move_ids)
    moves: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for number, count in work.counts.items():
        word = str(listed[number].key[0])
        moves[word] += count
        if listed[number].cost:
            faults[word] += count
    heads = [work.head_of(state) for state in work.order]
    return Result(
        config,
        len(work.order),
        work.changes + work.stays,
        work.changes,
        work.depth,
        is_closed,
        wedged,
        tuple(work.findings),
        seen,
        moves,
        faults,
        work.stale,
        sum(1 for head in heads if head.held_steps),
        sum(1 for head in heads if head.end),
        seconds,
        cpu,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )
