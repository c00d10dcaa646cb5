"""Budgets: what may still be spent, decided before a call and settled after it.

A budget is a head of its own, never part of a run's. Three decisions: `reserve` before the call, `admit` with the
intent, `settle` after the answer. A reservation whose admit never came returns at its deadline. One that was admitted
never returns by time alone: what an answer that nobody heard has cost is unknown, so the estimate counts until the
provider's own usage says otherwise. Zero means zero; no limit is spelled None.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tidefast.protocol.ids import RunId

LATE_MS = 3_600_000  # after this long past its deadline, what nobody settled is booked at its estimate
OPEN_MAX = 10_000  # reservations of one budget; beyond it nothing more is let in


class Amount(NamedTuple):
    """Calls, tokens, and money in millionths of the price table's unit."""

    calls: int = 0
    tokens: int = 0
    micros: int = 0

    def plus(self, other: "Amount") -> "Amount":
        return Amount(*(mine + its for mine, its in zip(self, other, strict=True)))


class Limit(NamedTuple):
    """The most that may be spent of each; None: no limit."""

    calls: int | None = None
    tokens: int | None = None
    micros: int | None = None

    def over(self, other: "Limit") -> "Limit":
        """This limit where it says something, the other one elsewhere."""
        return Limit(*(its if mine is None else mine for mine, its in zip(self, other, strict=True)))


class Reservation(NamedTuple):
    """What one attempt may come to cost. `until_ms`: when it returns if it was not admitted."""

    name: str
    amount: Amount
    until_ms: int
    is_admitted: bool = False


class Budget(NamedTuple):
    """The one row of a budget. `estimated` is the part of `spent` that no provider has confirmed.

    `note` says who raised the limit last, and why.
    """

    name: str  # run/RUN, agent/AGENT, key/KEY
    version: int = 0
    spent: Amount = Amount()
    estimated: Amount = Amount()
    raised: Limit = Limit()  # what an operator set; it stands above the configuration
    open: tuple[Reservation, ...] = ()
    note: str = ""

    @property
    def committed(self) -> Amount:
        """Spent and reserved together: what a further call has to fit beside."""
        total = self.spent
        for reservation in self.open:
            total = total.plus(reservation.amount)
        return total


class Over(NamedTuple):
    """A call that does not fit: in which budget, which of its limits, and the figures."""

    budget: str
    member: str
    limit: int
    committed: int
    asked: int


def run_budget(run_id: RunId) -> str:
    return f"run/{run_id}"


def returned(budget: Budget, now_ms: int) -> Budget:
    """The budget without the reservations whose admit never came in time; silence of an hour is booked as spent."""
    for silent in [r.name for r in budget.open if r.is_admitted and now_ms >= r.until_ms + LATE_MS]:
        budget = settle(budget, silent, None)
    left = tuple(r for r in budget.open if r.is_admitted or now_ms < r.until_ms)
    return budget if len(left) == len(budget.open) else budget._replace(open=left)


def reserve(
    budgets: Sequence[tuple[Budget, Limit]], reservation: Reservation, now_ms: int
) -> tuple[Budget, ...] | Over:
    """Every budget with the reservation in it, or the first one that it doesn't fit; never some of them."""
    changed: list[Budget] = []
    for budget, configured in budgets:
        budget = returned(budget, now_ms)
        limit, committed = budget.raised.over(configured), budget.committed
        for member in Amount._fields:
            most, used = getattr(limit, member), getattr(committed, member)
            asked = getattr(reservation.amount, member)
            if most is not None and asked and used + asked > most:
                return Over(budget.name, member, most, used, asked)
        if len(budget.open) >= OPEN_MAX:
            return Over(budget.name, "open", OPEN_MAX, len(budget.open), 1)
        changed.append(_moved(budget, (*budget.open, reservation)))
    return tuple(changed)


def admit(budget: Budget, name: str) -> Budget:
    """The attempt's intent was made: from now on only its settling moves the reservation."""
    return _moved(budget, tuple(r._replace(is_admitted=True) if r.name == name else r for r in budget.open))


def settle(budget: Budget, name: str, actual: Amount | None) -> Budget:
    """Book what an attempt has cost; None: nobody knows, so the estimate counts. A second settling changes nothing."""
    reservation = next((r for r in budget.open if r.name == name), None)
    if reservation is None:
        return budget
    amount = reservation.amount if actual is None else actual
    estimated = budget.estimated.plus(amount) if actual is None else budget.estimated
    left = tuple(r for r in budget.open if r.name != name)
    return _moved(budget._replace(spent=budget.spent.plus(amount), estimated=estimated), left)


def raise_limit(budget: Budget, limit: Limit, note: str) -> Budget:
    """An operator's word; what it leaves out stays as it was."""
    return _moved(budget._replace(raised=limit.over(budget.raised), note=note), budget.open)


def _moved(budget: Budget, still_open: tuple[Reservation, ...]) -> Budget:
    return budget._replace(open=still_open, version=budget.version + 1)
