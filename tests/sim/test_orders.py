"""Orders of eight events on one step: none breaks a law, over memory and over SQLite, and a broken product is seen."""

import math
from pathlib import Path
from typing import Any

import pytest

from tidefast.protocol import step
from tidefast.sim.orders import ALL, CHARGE, EVENTS, MAIL, all_orders, play_some, run, sample
from tidefast.stores.sqlite import SqliteStore


def test_there_are_as_many_orders_as_eight_events_have() -> None:
    assert ALL == math.factorial(len(EVENTS)) == sum(1 for _ in all_orders())


@pytest.mark.parametrize("contract", [CHARGE, MAIL], ids=["knows keys", "knows no keys"])
def test_no_order_breaks_a_law_and_a_third_of_the_steps_is_preempted(contract: Any) -> None:
    found = run(sample(600, seed=1), contract)
    assert found.audit.violations == [] and found.stuck == []
    assert found.orders == found.audit.mutating_steps == 600
    assert 3 * found.preempted >= found.audit.mutating_steps
    assert found.late_acks > 100 and found.rejected > 0 and found.unanswered == 0
    assert found.is_ok


def test_a_sample_over_sqlite_shows_the_same_as_over_memory(tmp_path: Path) -> None:
    orders = sample(60, seed=2)
    store = SqliteStore.open(tmp_path / "store.db", create=True)
    on_sqlite = play_some(store, orders)
    store.close()
    assert on_sqlite == run(orders, CHARGE)
    assert on_sqlite.is_ok


def test_committing_on_a_bare_200_is_seen_in_the_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(view: Any, head: Any, known: Any, attempt: Any, command: Any, now: Any) -> Any:
        data = step.object_json(attempt=str(attempt.number), receipt=command.receipt_json)
        return step.accept(
            head, step.Settled("committed", joined=True), *step.committing(head, known, attempt.epoch, data, now)
        )

    monkeypatch.setattr(step, "_settle_applied", settle)
    assert run(sample(100, seed=1), CHARGE).audit.counts["dead_commit"] > 0
