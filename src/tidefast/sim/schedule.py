"""What a simulation draws: the work of its runs, and the faults that are aimed at their steps.

Everything comes from one seeded `random.Random`, in the order in which the simulation asks. A run's work is a list of
operations, kept in its input, so that every pass plays the same one.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidefast.protocol.points import Point
from tidefast.sdk.app import App
from tidefast.sdk.errors import Fail, Misuse, Rejected
from tidefast.sdk.line import Backoff
from tidefast.sdk.run import Run

AIMED_AT_CHECKPOINT = 0.15
AIMED = 0.55  # share of mutating steps at which a fault is aimed, beside what network and provider do
POINTS: tuple[Point, ...] = (
    "sdk.before_apply",
    "sdk.after_apply",
    "gateway.before_intent",
    "gateway.after_intent",
    "gateway.after_send",
    "gateway.after_settle",
    "sdk.before_checkpoint",
    "sdk.after_checkpoint",
)
BLOWS = {
    "preempt": 38,
    "kill_worker": 20,
    "freeze_worker": 16,
    "cut_worker": 9,
    "kill_authority": 12,
    "freeze_authority": 5,
}
MUTATING_TOOLS = {"charge": 5, "ship": 3, "report": 2, "mail": 3}
THINK_S, LONG_S = 40.0, 240.0


class Aim(NamedTuple):
    """A fault waiting for a step: at which point it strikes, what it is, and after how many callbacks more."""

    point: Point
    blow: str
    callbacks: int


class SeededBackoff(Backoff):
    """The SDK's backoff with the simulation's own chance."""

    chance: random.Random

    def delay_s(self, tries: int) -> float:
        full = min(self.first_s * 2.0 ** min(tries, 20), self.most_s)
        return full * self.chance.uniform(0.5, 1.0)


def backoff(chance: random.Random) -> SeededBackoff:
    made = SeededBackoff(0.2, 10.0)
    made.chance = chance
    return made


def draw_aim(chance: random.Random, *, is_step: bool) -> Aim | None:
    """The fault that waits for a step, or for a checkpoint, if one does."""
    if chance.random() >= (AIMED if is_step else AIMED_AT_CHECKPOINT):
        return None
    blow = chance.choices(list(BLOWS), list(BLOWS.values()))[0]
    point = chance.choice(POINTS[:6] if is_step else POINTS[6:])
    return Aim(point, blow, chance.choice((1, 1, 2, 3, 4, 6, 9, 14)))


def draw_work(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """(agent, input) of a new run: two to seven mutating steps, with thinking, branches, checkpoints and undos."""
    agent = chance.choice(("walker", "walker", "resumer", "talker"))
    ops: list[list[Any]] = []
    calls: list[str] = []
    for place in range(chance.randint(2, 6)):
        ops.append(["think", round(chance.expovariate(1 / THINK_S), 3)])
        kind = chance.random()
        if kind < 0.14:
            branches = [_call(chance, f"s{place}.{branch}", calls) for branch in range(chance.randint(2, 3))]
            ops.append(["branches", branches])
        elif kind < 0.24:
            ops.append(["local", f"l{place}"])
        elif kind < 0.31:
            ops.append(["call", f"r{place}", "read", False])
        elif kind < 0.38:  # an agent that doesn't always ask for the same: each second pass leaves this step out
            ops += [["fickle", f"s{place}", chance.choice(("charge", "report"))], ["save"]]
        elif agent == "talker" and kind < 0.6:
            ops.append(["words", f"w{place}", chance.choice(("charge", "report"))])
        else:
            ops.append(_call(chance, f"s{place}", calls))
        if chance.random() < 0.4:
            ops.append(["save"])
        if chance.random() < 0.06:
            ops.append(["trip", f"t{place}", chance.randint(1, 3)])
    undoable = [each for each in calls if each.endswith("u")]
    if undoable and chance.random() < 0.35:
        ops.append(["undo", chance.choice(undoable)])
        ops.append(["think", round(chance.expovariate(1 / 10), 3)])
    if chance.random() < 0.08:  # half of them while another branch is out
        last = _call(chance, "last", [])
        ops.append(["branches", [last, ["fail"]]] if chance.random() < 0.5 else ["fail"])
    if chance.random() < 0.01:
        ops.insert(0, ["trip", "t-first", 12])  # a run that makes no progress until it is frozen
    return agent, {"ops": ops}


def _call(chance: random.Random, name: str, calls: list[str]) -> list[Any]:
    tool = chance.choices(list(MUTATING_TOOLS), list(MUTATING_TOOLS.values()))[0]
    step = name + ("u" if tool in ("charge", "ship") else "")
    calls.append(step)
    return ["call", step, tool, chance.random() < 0.12]


class Memory:
    """What agents know that no pass can lose: how often each of them still stumbles. The world outside the runs."""

    def __init__(self) -> None:
        self.trips: dict[tuple[str, str], int] = {}
        self.misused = 0

    def stumbles(self, run_id: str, name: str, times: int) -> bool:
        left = self.trips.get((run_id, name), times)
        self.trips[run_id, name] = left - 1
        return left > 0


class Player:
    """Plays the operations of one run in one pass."""

    def __init__(self, run: Run, memory: Memory) -> None:
        self._run, self._memory = run, memory
        self.refused: set[str] = set()

    async def play(self, ops: Sequence[Sequence[Any]], start: int = 0) -> dict[str, Any]:
        for place, op in enumerate(ops[start:], start):
            await self._one(op, place)
        return {"done": len(ops)}

    async def _one(self, op: Sequence[Any], place: int) -> None:
        match op:
            case ["think", seconds]:
                await asyncio.sleep(min(seconds, LONG_S))
            case ["call", step, tool, is_fatal]:
                await self._call(step, tool, {"of": step, "n": place}, is_fatal)
            case ["words", step, tool]:
                await self._call(step, tool, {"of": step, "words": f"as told in pass {self._run.epoch}"}, False)
            case ["fickle", step, tool]:
                if self._run.epoch % 2:
                    await self._call(step, tool, {"of": step, "n": place}, False)
            case ["branches", branches]:
                async with asyncio.TaskGroup() as group:
                    for branch in branches:
                        group.create_task(self._one(branch, place))
            case ["local", step]:
                await self._run.step(step, lambda: {"n": place})
            case ["save"]:
                await self._run.checkpoint({"at": place + 1, "refused": sorted(self.refused)})
            case ["undo", step]:
                await self._undo(step)
            case ["trip", name, times]:
                if self._memory.stumbles(self._run.id, name, times):
                    raise RuntimeError("the agent stumbled")
            case ["fail"]:
                raise Fail("planned")
            case _:
                raise ValueError(f"no such operation: {op}")

    async def _call(self, step: str, tool: str, args: dict[str, Any], is_fatal: bool) -> None:
        try:
            await self._run.tool(step, tool, **args)
        except Rejected as rejected:
            self.refused.add(step)
            if is_fatal:
                raise Fail(f"{step} was refused") from rejected

    async def _undo(self, step: str) -> None:
        if step in self.refused:
            return
        try:
            await self._run.compensate(step)
        except Misuse:
            self._memory.misused += 1  # a person's verdict: the receipt that the undo needs is not there


def build_app(memory: Memory) -> App:
    """Three agents: one that always starts from the top, one that starts from its checkpoint, one that talks."""
    app = App()

    @app.agent(version="1")
    async def walker(run: Run, work: dict[str, Any]) -> Any:
        return await Player(run, memory).play(work["ops"])

    @app.agent(version="1")
    async def resumer(run: Run, work: dict[str, Any]) -> Any:
        player, state = Player(run, memory), run.state or {"at": 0, "refused": []}
        player.refused.update(state["refused"])
        return await player.play(work["ops"], state["at"])

    @app.agent(version="1", on_drift="stored")
    async def talker(run: Run, work: dict[str, Any]) -> Any:
        return await Player(run, memory).play(work["ops"])

    return app
