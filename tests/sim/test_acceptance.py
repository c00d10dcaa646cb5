"""The two acceptance rules hold, and the rig that says so turns red when the product is broken on purpose."""

import asyncio
from pathlib import Path

import pytest

from tidefast.protocol import checkpoint, step
from tidefast.protocol.verdicts import Send
from tidefast.services.gateway import Gateway
from tidefast.sim.acceptance import AcceptanceReport, plans, run
from tidefast.stores.memory import MemoryStore
from tidefast.stores.sqlite import SqliteStore


def campaign(interleavings: int, seed: int = 1) -> AcceptanceReport:
    return asyncio.run(run(MemoryStore(), interleavings, seed))


def test_two_hundred_late_acknowledgements_double_nothing_and_no_stale_checkpoint_is_accepted() -> None:
    result = campaign(200)
    assert result.late_acks == 200
    assert result.distinct_orders >= 20
    assert result.report.violations["double_apply"] == 0
    assert result.report.violations["stale_checkpoint"] == 0
    assert result.is_ok


def test_with_a_third_of_all_steps_preempted_nothing_commits_under_a_dead_epoch(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "store.db", create=True)
    result = asyncio.run(run(store, 40, seed=2))
    store.close()
    assert 3 * result.preempted_steps >= result.report.mutating_steps > 60
    assert result.report.violations["dead_commit"] == 0
    assert result.report.rejected > 0
    assert result.report.rejected_unanswered == 0
    assert result.is_ok


def test_the_same_seed_plays_the_same_interleavings() -> None:
    assert list(plans(50, 7)) == list(plans(50, 7))
    assert list(plans(50, 7)) != list(plans(50, 8))


def test_memory_and_sqlite_give_the_same_report(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "store.db", create=True)
    on_sqlite = asyncio.run(run(store, 20, seed=3))
    store.close()
    assert on_sqlite == campaign(20, seed=3)


def test_committing_on_a_bare_200_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first naive design: a success answer commits the step, whoever's epoch is live by then."""
    honest = step._settle_applied

    def commit_on_200(view, head, known, attempt, command, now):  # type: ignore[no-untyped-def]
        if known.state in ("fenced", "in_doubt"):
            data = step.object_json(attempt=str(attempt.number), receipt=command.receipt_json)
            events = step.committing(head, known, attempt.epoch, data, now)
            return step.accept(head, step.Settled("committed", joined=True), *events)
        return honest(view, head, known, attempt, command, now)

    monkeypatch.setattr(step, "_settle_applied", commit_on_200)
    assert campaign(20).report.violations["dead_commit"] > 0


def test_an_epoch_in_the_key_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second naive design: each lease makes a key of its own, so the provider can't know the charge again."""
    honest = Gateway._send

    async def with_epoch(self, right, step_id, send, args_json, request):  # type: ignore[no-untyped-def]
        fresh = Send(
            send.attempt,
            f"{send.key[:24]}{right.epoch:08}",
            send.contract,
            send.intent_seq,
            send.deadline_ms,
            send.is_replay,
        )
        return await honest(self, right, step_id, fresh, args_json, request)

    monkeypatch.setattr(Gateway, "_send", with_epoch)
    violations = campaign(20).report.violations
    assert violations["double_apply"] + violations["unlogged_effect"] > 0


def test_a_checkpoint_without_a_fence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfenced(head, right, now):  # type: ignore[no-untyped-def]
        return None

    monkeypatch.setattr(checkpoint, "fence", unfenced)
    assert campaign(20).report.violations["stale_checkpoint"] > 0


def test_admission_without_a_fence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfenced(head, right, now):  # type: ignore[no-untyped-def]
        return None

    monkeypatch.setattr(step, "fence", unfenced)
    assert not campaign(20).report.is_ok
