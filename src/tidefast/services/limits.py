"""Limits of tools: how much is let out in a minute, a day and a run, and what it may add up to.

Each limit is a budget, a head of its own (`protocol/budget.py`), with three decisions: *reserve* before the intent,
*admit* in the intent's own batch, *settle* in that of the outcome. A reservation whose admit never came returns at the
attempt's deadline. Only a first sending takes a place; an undo takes none, because nothing may stand in its way.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tidefast.engine.engine import Engine
from tidefast.protocol.budget import Amount, Budget, Limit, Over, Reservation, admit, reserve, returned, settle
from tidefast.protocol.canonical import JSON, canonical, digest
from tidefast.protocol.contracts import Contract, Limits
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.patterns import member
from tidefast.protocol.verdicts import Refused, Send, Settled, Verdict, Wait

MINUTE_MS, DAY_MS = 60_000, 86_400_000
MICROS = 1_000_000
DESTINATION_LENGTH = (
    16  # of the digest that stands for a value of `by`: a budget's name tells nobody whom a mail was for
)
MEMBER_FLAGS = {"calls": "--calls", "tokens": "--tokens", "micros": "--money", "open": "--calls"}


class Reserved(NamedTuple):
    """A step's places: the name of its reservation and the budgets that hold it."""

    name: str
    budgets: tuple[str, ...]


class Limiter:
    """The limits of one engine's tools."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reserve(
        self, run_id: RunId, step_id: StepId, contract: Contract, args: JSON, deadline_ms: int
    ) -> Reserved | Refused | Wait:
        """Room in each limit of a tool for one first sending, or why there is none; booked with the next batch."""
        limits = contract.limits or Limits()
        spend = _whole(args, limits.spend) if limits.spend else 0
        found, destination = member({"args": args}, limits.by) if limits.by else (True, None)
        if spend is None or not found:
            name = limits.spend if spend is None else limits.by
            problem = f"the tool's limits need {name}" + (" as a whole number of 0 or more" if spend is None else "")
            return Refused("invalid", "args", {"tool": contract.tool, "step": step_id, "problem": problem})
        place, now_ms = _place(contract, limits, destination), self._engine.clock.now().ms
        name, booked = f"{run_id}/{step_id}", list[Budget]()
        for budget_name, limit, until_ms in _budgets(limits, place, run_id, now_ms, deadline_ms):
            budget = self._engine.budget(budget_name)
            changed = reserve([(budget, limit)], Reservation(name, Amount(1, 0, spend * MICROS), until_ms), now_ms)
            if isinstance(changed, Over) and budget_name.startswith("minute/"):
                free_ms = min(place.until_ms for place in returned(budget, now_ms).open)
                return Wait("step_pending", "limit", free_ms, step_id)
            if isinstance(changed, Over):
                return told_over(changed, "tool")
            booked += changed
        self._engine.book(booked)
        return Reserved(name, tuple(budget.name for budget in booked))

    def admit(self, reserved: Reserved, verdict: Verdict) -> None:
        """The intent was made; or it was not, and the places return at once."""
        for budget in map(self._engine.budget, reserved.budgets):
            if not isinstance(verdict, Send):
                self._engine.book([settle(budget, reserved.name, Amount())])
            elif not budget.name.startswith("minute/"):
                self._engine.book([admit(budget, reserved.name)])

    def settle(self, run_id: RunId, step_id: StepId, contract: Contract, args: JSON, verdict: Verdict) -> None:
        """What became of a step: its places are used up, or returned if it was finally refused."""
        limits, name, now_ms = contract.limits, f"{run_id}/{step_id}", self._engine.clock.now().ms
        state = verdict.state if isinstance(verdict, Settled) else ""
        if limits is None or state not in ("committed", "applied", "rejected"):
            return
        place = _place(contract, limits, member({"args": args}, limits.by)[1] if limits.by else None)
        for budget_name, _, _ in _budgets(limits, place, run_id, now_ms, now_ms):
            budget = self._engine.budget(budget_name)
            held = next((r.amount for r in budget.open if r.name == name), None)
            if held is not None and not budget_name.startswith("minute/"):
                self._engine.book([settle(budget, name, Amount() if state == "rejected" else held)])


def _place(contract: Contract, limits: Limits, destination: JSON) -> str:
    """What a tool's limits are counted by: the tool, and the value of `by` where they are counted apart."""
    return f"{contract.tool}/{digest(canonical(destination))[:DESTINATION_LENGTH]}" if limits.by else contract.tool


def _budgets(
    limits: Limits, place: str, run_id: RunId, now_ms: int, deadline_ms: int
) -> Iterator[tuple[str, Limit, int]]:
    """(budget, what it allows, until when a place in it is held without an admit) for each limit that is set.

    A minute slides: its places are never admitted and return by themselves after 60 s.
    """
    if limits.per_minute:
        yield f"minute/{place}", Limit(calls=limits.per_minute), now_ms + MINUTE_MS
    if limits.per_day or limits.spend_per_day:
        money = limits.spend_per_day * MICROS if limits.spend_per_day else None
        yield f"day/{now_ms // DAY_MS}/{place}", Limit(limits.per_day or None, None, money), deadline_ms
    if limits.per_run or limits.spend_per_run:
        money = limits.spend_per_run * MICROS if limits.spend_per_run else None
        yield f"tool/{run_id}/{place}", Limit(limits.per_run or None, None, money), deadline_ms


def _whole(args: JSON, path: str) -> int | None:
    found, value = member({"args": args}, path)
    is_whole = found and isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_whole and isinstance(value, int) else None


def told_over(over: Over, reason: str) -> Refused:
    """The refusal of what doesn't fit a budget, with the figures and the command that raises it."""
    unit = MICROS if over.member == "micros" else 1
    wanted = (over.committed + over.asked + unit - 1) // unit
    facts: dict[str, JSON] = {
        "budget": over.budget,
        "member": "money" if over.member == "micros" else over.member,
        "limit": over.limit / unit if unit > 1 else over.limit,
        "committed": over.committed / unit if unit > 1 else over.committed,
        "asked": over.asked / unit if unit > 1 else over.asked,
        "command": f"tidefast budgets {over.budget} {MEMBER_FLAGS[over.member]} {wanted}",
    }
    return Refused("limit_reached", reason, facts)
