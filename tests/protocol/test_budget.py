"""Budgets: reserved before, settled after, and never spent twice."""

import itertools

import pytest

from tidefast.protocol.budget import (
    LATE_MS,
    OPEN_MAX,
    Amount,
    Budget,
    Limit,
    Over,
    Reservation,
    admit,
    raise_limit,
    reserve,
    run_budget,
    settle,
)
from tidefast.protocol.ids import RunId

TWO = Amount(1, 100, 2_000_000)
FIVE = Limit(micros=5_000_000)


def reserved(budget: Budget, name: str, limit: Limit = FIVE, amount: Amount = TWO, until_ms: int = 1_000) -> Budget:
    found = reserve([(budget, limit)], Reservation(name, amount, until_ms), 0)
    assert not isinstance(found, Over), found
    return found[0]


def test_of_four_calls_at_once_two_fit_a_budget_of_five() -> None:
    budget = Budget("agent/a")
    for name in ("1", "2"):
        budget = reserved(budget, name)
    over = reserve([(budget, FIVE)], Reservation("3", TWO, 1_000), 0)
    assert over == Over("agent/a", "micros", 5_000_000, 4_000_000, 2_000_000)


def test_zero_means_zero_and_no_limit_means_none() -> None:
    assert isinstance(reserve([(Budget("run/r"), Limit(calls=0))], Reservation("1", TWO, 9), 0), Over)
    assert isinstance(reserve([(Budget("run/r"), Limit(tokens=0))], Reservation("1", TWO, 9), 0), Over)
    assert not isinstance(reserve([(Budget("run/r"), Limit())], Reservation("1", TWO, 9), 0), Over)
    free = TWO._replace(micros=0)  # a model that costs nothing needs no money
    assert not isinstance(reserve([(Budget("run/r"), Limit(micros=0))], Reservation("1", free, 9), 0), Over)


def test_a_call_that_fits_one_budget_and_not_the_other_is_reserved_in_neither() -> None:
    over = reserve([(Budget("run/r"), Limit()), (Budget("key/k"), Limit(calls=0))], Reservation("1", TWO, 9), 0)
    assert isinstance(over, Over)
    assert over.budget == "key/k"


def test_a_reservation_whose_admit_never_came_returns_at_its_deadline() -> None:
    budget = reserved(reserved(Budget("run/r"), "1"), "2")
    late = reserve([(budget, FIVE)], Reservation("3", TWO, 5_000), 1_000)
    assert not isinstance(late, Over)
    assert [r.name for r in late[0].open] == ["3"]


def test_an_admitted_reservation_never_returns_by_time_alone() -> None:
    budget = admit(reserved(Budget("run/r"), "1"), "1")
    budget = admit(reserved(budget, "2"), "2")
    assert isinstance(reserve([(budget, FIVE)], Reservation("3", TWO, 10**12), LATE_MS), Over)
    found = reserve([(budget, FIVE)], Reservation("3", TWO._replace(micros=1), 10**12), 10**11)
    assert not isinstance(found, Over)  # booked as spent by now, and it counts all the same
    assert (found[0].spent.micros, found[0].estimated.micros, len(found[0].open)) == (4_000_000, 4_000_000, 1)


def test_an_answer_is_booked_at_what_the_provider_says_and_silence_at_the_estimate() -> None:
    said = settle(admit(reserved(Budget("run/r"), "1"), "1"), "1", Amount(1, 7, 50))
    assert (said.spent, said.estimated, said.open) == (Amount(1, 7, 50), Amount(), ())
    silent = settle(admit(reserved(Budget("run/r"), "1"), "1"), "1", None)
    assert (silent.spent, silent.estimated) == (TWO, TWO)
    unsent = settle(reserved(Budget("run/r"), "1"), "1", Amount())
    assert (unsent.spent, unsent.open) == (Amount(), ())


def test_a_second_settling_changes_nothing() -> None:
    once = settle(admit(reserved(Budget("run/r"), "1"), "1"), "1", None)
    assert settle(once, "1", Amount(9, 9, 9)) == once


def test_an_operator_raises_one_limit_and_leaves_the_others() -> None:
    budget = raise_limit(Budget("run/r"), Limit(calls=1), "ops: why")
    budget = raise_limit(budget, Limit(micros=9_000_000), "ops: more")
    assert budget.raised == Limit(calls=1, micros=9_000_000)
    budget = reserved(budget, "1", limit=Limit(micros=0))
    assert isinstance(reserve([(budget, Limit(micros=0))], Reservation("2", TWO, 9), 0), Over)


def test_a_budget_takes_only_so_many_reservations() -> None:
    full = Budget("key/k", open=(Reservation("x", Amount(), 10),) * OPEN_MAX)
    assert reserve([(full, Limit())], Reservation("1", TWO, 9), 0) == Over("key/k", "open", OPEN_MAX, OPEN_MAX, 1)


def test_the_version_rises_with_every_change() -> None:
    budget = reserved(Budget(run_budget(RunId("r"))), "1")
    versions = [budget.version, admit(budget, "1").version, settle(budget, "1", None).version]
    assert (budget.name, versions) == ("run/r", [1, 2, 2])


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_in_no_order_of_reserving_and_settling_is_more_spent_than_the_limit(order: tuple[str, ...]) -> None:
    budget, taken = Budget("run/r"), 0
    for name in order:
        found = reserve([(budget, FIVE)], Reservation(name, TWO, 1_000), 0)
        if isinstance(found, Over):
            continue
        taken += 1
        budget = settle(admit(found[0], name), name, None)
    assert taken == 2
    assert budget.spent.micros <= 5_000_000
