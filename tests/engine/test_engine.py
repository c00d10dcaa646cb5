"""The engine answers nothing before it is durable, gathers what is ready into one commit, and stops when unsure."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tidefast.engine import engine as engine_room
from tidefast.engine.clock import ManualClock, SystemClock
from tidefast.engine.engine import Engine, InvariantViolation
from tidefast.protocol.canonical import call_digest
from tidefast.protocol.commands import (
    Admit,
    Complete,
    CreateRun,
    Grant,
    Preempt,
    Release,
    Renew,
    SaveCheckpoint,
    Settle,
)
from tidefast.protocol.contracts import Contract
from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Answer, Done, Granted, Refused, Renewed, Send, Settled
from tidefast.services.python_runner import python_receipt
from tidefast.stores.base import Batch, StoreUnavailable, start_ms
from tidefast.stores.memory import MemoryStore

CHARGE = Contract("charge", "python", key="field:key", key_ttl_ms=10**8)
PAY = StepId("pay")


class SlowStore(MemoryStore):
    """A store whose commits wait for permission, and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.may_commit = threading.Event()
        self.commits: list[int] = []
        self.fails = False

    def commit(self, batch: Batch) -> None:
        assert self.may_commit.wait(30)
        if self.fails:
            raise StoreUnavailable("the disk is gone")
        self.commits.append(len(batch.events))
        super().commit(batch)


@pytest.fixture(autouse=True)
def _no_commit_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """These stores block: a lone run's commits go through the thread too."""
    monkeypatch.setattr(engine_room, "LONE_FLUSH_S", 0.0)


def with_engine(test: Callable[[Engine, SlowStore], Awaitable[None]]) -> None:
    async def run() -> None:
        store = SlowStore()
        engine = Engine(store, ManualClock(), "boot-1")
        engine.start()
        try:
            await test(engine, store)
        finally:
            store.may_commit.set()
            await engine.stop()

    asyncio.run(run())


def create(name: str) -> CreateRun:
    return CreateRun(RunId(name), "agent", "1", "{}")


def admit(right: Right, args: str = "{}") -> Admit:
    digest = call_digest("charge", args)
    return Admit(right, PAY, "charge", args, digest, CHARGE, None, "boot-1", 10**9)


async def granted(engine: Engine, name: str = "r") -> Right:
    await engine.submit(create(name))
    verdict = await engine.submit(Grant(RunId(name), "w1", 15_000, ""))
    assert isinstance(verdict, Granted)
    return Right(RunId(name), verdict.epoch, "w1")


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_nothing_is_answered_before_the_flush_that_holds_it() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        asking = asyncio.create_task(engine.submit(create("r")))
        await turns()
        assert not asking.done()
        store.may_commit.set()
        assert isinstance(await asking, Done)
        assert store.load_head(RunId("r")) is not None

    with_engine(test)


def test_a_duplicate_waits_for_the_flush_that_its_answer_rests_on() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        first = asyncio.create_task(engine.submit(create("r")))
        again = asyncio.create_task(engine.submit(create("r")))
        conflict = asyncio.create_task(engine.submit(CreateRun(RunId("r"), "other", "1", "{}")))
        await turns()
        assert not first.done()
        assert not again.done()
        assert not conflict.done()
        store.may_commit.set()
        assert (await first, await again) == (Done("claimable", 1), Done("claimable", 1, was_new=False))
        assert isinstance(await conflict, Refused)

    with_engine(test)


def test_what_is_ready_together_is_committed_together() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        await asyncio.gather(*(engine.submit(create(f"r{n}")) for n in range(50)))
        assert sum(store.commits) == 50
        assert len(store.commits) <= 2

    with_engine(test)


def test_cancelling_one_caller_cancels_no_other_and_loses_nothing() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        first = asyncio.create_task(engine.submit(create("a")))
        second = asyncio.create_task(engine.submit(create("b")))
        await turns()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        store.may_commit.set()
        assert isinstance(await second, Done)
        assert store.load_head(RunId("a")) is not None

    with_engine(test)


def test_after_a_failed_flush_nobody_is_told_anything_but_that_it_is_unknown() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        failures: list[BaseException] = []
        engine.on_failure = failures.append
        store.fails = True
        waiting = [asyncio.create_task(engine.submit(create(name))) for name in "ab"]
        await turns()
        waiting.append(asyncio.create_task(engine.submit(create("c"))))
        await turns()
        store.may_commit.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 3
        assert len(failures) == 1
        store.fails = False
        with pytest.raises(StoreUnavailable):
            await engine.submit(create("d"))

    with_engine(test)


def test_a_renewal_is_answered_at_once_and_moves_no_version() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        right = await granted(engine)
        before = engine.head(right.run_id)
        store.may_commit.clear()
        writing = asyncio.create_task(engine.submit(create("other")))
        await turns()
        assert isinstance(await engine.submit(Renew(right)), Renewed)
        after = engine.head(right.run_id)
        assert before is not None
        assert after is not None
        assert after.version == before.version
        store.may_commit.set()
        await writing

    with_engine(test)


def test_commands_of_one_run_in_one_batch_are_judged_in_order() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        right = await granted(engine)
        sent, preempted, late = await asyncio.gather(
            engine.submit(admit(right)),
            engine.submit(Preempt(right.run_id, "anna")),
            engine.submit(admit(right)),
        )
        assert isinstance(sent, Send)
        assert isinstance(preempted, Done)
        assert isinstance(late, Refused)
        assert late.code == "stale_epoch"

    with_engine(test)


def test_a_new_engine_over_the_store_goes_on_where_the_old_one_died() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        right = await granted(engine)
        sent = await engine.submit(admit(right))
        assert isinstance(sent, Send)
        successor = Engine(store, ManualClock(), "boot-2")
        successor.start()
        settled = await successor.submit(Settle(right.run_id, PAY, 1, "applied", python_receipt({"id": 1})))
        assert settled == Settled("committed", joined=True)
        assert isinstance(await successor.submit(admit(right)), Answer)
        assert successor.contract(sent.contract_digest) == CHARGE
        await successor.stop()

    with_engine(test)


def test_a_contract_that_an_intent_names_wrongly_stops_the_engine_from_storing_it() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        right = await granted(engine)
        command: Any = admit(right)
        forged = Admit(**{**{name: getattr(command, name) for name in command.__slots__}, "contract_digest": "0" * 64})
        with pytest.raises(InvariantViolation):
            await engine.submit(forged)

    with_engine(test)


def test_a_run_that_nobody_holds_is_read_again_and_not_kept() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        for number in range(20):
            await engine.submit(create(f"r{number}"))
        assert engine.live_runs() == []
        assert not engine._runs
        assert engine.head(RunId("r7")) is not None

    with_engine(test)


def test_the_authoritys_clock_never_starts_behind_the_stores_mark() -> None:
    ahead = SystemClock(0).now().ms + 10**9
    now = SystemClock(ahead).now()
    assert now.ms >= ahead
    assert now.mark_ms == ahead
    assert now.wall_ms < ahead


def test_a_wall_clock_set_back_does_not_let_the_next_life_of_an_authority_go_back_in_time() -> None:
    """Found by the simulation: the mark followed the wall clock alone, so after a restart events were dated earlier."""

    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        assert isinstance(engine.clock, ManualClock)
        engine.clock.ms += 7_200_000
        engine.clock.wall_ms += 3_600_000
        await engine.submit(create("r"))
        assert start_ms(engine.clock.wall_ms, store.identity().mark_ms) > engine.clock.ms

    with_engine(test)


def test_a_wait_ends_with_a_change_of_that_run() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        waiting = asyncio.create_task(engine.wait_for_change(RunId("r"), 60_000))
        await turns()
        store.may_commit.set()
        await engine.submit(create("other"))
        await turns()
        assert not waiting.done()
        await engine.submit(create("r"))
        await waiting

    with_engine(test)


@pytest.mark.parametrize("kept", [0, 2, 2_000])
def test_a_finished_step_answers_however_few_ids_are_kept(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr("tidefast.engine.engine.IDS_KEPT", kept)

    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        right = await granted(engine)
        for name in map(StepId, "abcd"):
            assert isinstance(await engine.submit(replace(admit(right), step_id=name)), Send)
            await engine.submit(Settle(right.run_id, name, 1, "applied", python_receipt({})))
            assert isinstance(await engine.submit(replace(admit(right), step_id=name)), Answer)
        assert (engine._runs[right.run_id].ids is None) is (kept < 4)
        await engine.submit(Preempt(right.run_id, "anna"))
        again = await engine.submit(Grant(right.run_id, "w2", 15_000, ""))
        assert isinstance(again, Granted)
        second = Right(right.run_id, again.epoch, "w2")
        for name in map(StepId, "abcd"):
            assert isinstance(await engine.submit(replace(admit(second), step_id=name)), Answer)
        assert isinstance(await engine.submit(replace(admit(second), step_id=StepId("e"))), Send)

    with_engine(test)


def test_a_new_step_of_a_live_run_is_not_looked_for_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        right = await granted(engine)
        looked: list[StepId] = []
        monkeypatch.setattr(store, "load_step", lambda key, step_id: looked.append(step_id))
        assert isinstance(await engine.submit(admit(right)), Send)
        assert not looked

    with_engine(test)


def test_a_lone_run_on_a_quick_disk_commits_without_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_room, "LONE_FLUSH_S", 60.0)
    threads: list[int] = []

    class Watched(MemoryStore):
        def commit(self, batch: Batch) -> None:
            threads.append(threading.get_ident())
            super().commit(batch)

    async def run() -> None:
        engine = Engine(Watched(), ManualClock(), "boot-1")
        engine._flush_s = 0.0
        engine.start()
        await granted(engine)
        together = [create("a"), create("b")]
        await asyncio.gather(*(engine.submit(command) for command in together))
        await engine.stop()

    asyncio.run(run())
    assert threads[:2] == [threading.get_ident()] * 2
    assert threads[2] != threading.get_ident()


def test_a_view_that_is_durable_says_nothing_that_came_while_it_was_waited_for() -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        right = await granted(engine)
        store.may_commit.clear()
        first = asyncio.create_task(engine.submit(SaveCheckpoint(right, 1, "{}")))
        await turns()
        viewing = asyncio.create_task(engine.settled_view(right.run_id))
        await turns()
        second = asyncio.create_task(engine.submit(Complete(right, "null")))
        await turns()
        store.may_commit.set()
        view = await viewing
        assert view is not None
        assert (view.checkpoint, view.end) == (1, "")
        await asyncio.gather(first, second)

    with_engine(test)


def test_a_decision_that_can_not_be_applied_leaves_nothing_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: Engine, store: SlowStore) -> None:
        store.may_commit.set()
        right = await granted(engine)
        before = engine.head(right.run_id)
        honest = engine_room.evolve

        def fails_on_a_freeze(view: Any, event: Any, run_id: Any = None) -> Any:
            if event.kind == "run_frozen":
                raise KeyError("reason")
            return honest(view, event, run_id)

        monkeypatch.setattr(engine_room, "evolve", fails_on_a_freeze)
        with pytest.raises(KeyError):
            await engine.submit(Release(right, "drift"))
        assert engine.head(right.run_id) == before

    with_engine(test)


def test_after_its_end_an_engine_answers_nobody() -> None:
    async def run() -> None:
        engine = Engine(MemoryStore(), ManualClock(), "boot-1")
        engine.start()
        await engine.stop()
        with pytest.raises(StoreUnavailable):
            await engine.submit(create("r"))

    asyncio.run(run())
