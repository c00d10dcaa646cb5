"""Losing the lease: by a refusal, by this machine's clock, by the heartbeat; and why it can't be swallowed."""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.sdk.house import LEASE_MS, House, with_house

import tidefast as tf
from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.ids import Epoch, RunId
from tidefast.protocol.verdicts import Refused, Renewed
from tidefast.sdk import passes
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.sdk.heartbeat import LoopHeartbeat, ThreadHeartbeat, keep
from tidefast.sdk.lease import HeldLease, LeaseTable, boot_s

GRANT = LeaseGrant(RunId("r1"), "agent", "1", Epoch(5), "w1", LEASE_MS, 0, "null", 0, "null", False, (), token="t")


def test_a_broad_except_does_not_keep_a_zombie_going() -> None:
    app, seen, computed = tf.App(), [], []
    house_of: list[House] = []

    @app.agent
    async def stubborn(run: tf.Run, _: None) -> str:
        for place in range(50):
            try:
                await run.step(f"s{place}", lambda: computed.append(1))
                await house_of[0].authority.preempt("r1", "operator", "", None)
            except Exception:
                seen.append("swallowed")
        return "done"

    async def story(house: House) -> None:
        house_of.append(house)
        await house.create("stubborn")
        assert await house.drive() == "preempted"
        assert (await house.state())[0] == "claimable"
        assert house.seam.verbs("release") == house.seam.verbs("complete") == []

    with_house(app, story)
    assert seen == []


@pytest.mark.parametrize("how", ["return", "raise", "fail"])
def test_what_a_zombie_does_after_preempted_counts_for_nothing(how: str) -> None:
    app, seen = tf.App(), []
    house_of: list[House] = []

    @app.agent
    async def zombie(run: tf.Run, _: None) -> str:
        await house_of[0].authority.preempt("r1", "operator", "", None)
        for step in ("a", "b"):
            try:
                await run.step(step, int)
            except BaseException as error:
                seen.append(type(error).__name__)
        if how == "raise":
            raise RuntimeError("x")
        if how == "fail":
            raise tf.Fail("x")
        return "done"

    async def story(house: House) -> None:
        house_of.append(house)
        await house.create("zombie")
        assert await house.drive() == "preempted"
        assert {verb for verb, _ in house.seam.calls} == {"grant", "save_result"}

    with_house(app, story)
    assert seen == ["Preempted", "Preempted"]


def test_preempted_says_both_epochs_and_the_present_holder() -> None:
    app, facts = tf.App(), []
    house_of: list[House] = []

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        await house_of[0].authority.preempt("r1", "operator", "", None)
        await house_of[0].grant(holder="w2")
        try:
            await run.checkpoint({})
        except tf.Preempted as lost:
            facts.append(lost.facts)
            raise

    async def story(house: House) -> None:
        house_of.append(house)
        await house.create("agent")
        assert await house.drive() == "preempted"

    with_house(app, story)
    assert (facts[0]["holder"], facts[0]["live_epoch"] - facts[0]["epoch"]) == ("w2", 1)


def test_a_refused_renewal_reaches_an_agent_that_waits_for_something_else() -> None:
    app, seen = tf.App(), []
    house_of: list[House] = []

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        waiting = asyncio.create_task(run.tool("slow", "wait_long"))
        try:
            await house_of[0].authority.preempt("r1", "operator", "", None)
            for lease in house_of[0].leases.believed():
                lease.beat_s = 0  # a third of the lease has passed
            house_of[0].leases.on_change()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with pytest.raises(tf.Preempted):
                await run.step("cleanup", int)
            with pytest.raises(tf.Preempted):
                await waiting
            seen.append("told")
            raise

    @app.tool(effect="none")
    async def wait_long() -> None:
        await asyncio.Event().wait()

    async def story(house: House) -> None:
        house_of.append(house)
        await house.create("agent")
        heartbeat = LoopHeartbeat(house.seam)
        heartbeat.start(house.leases)
        assert await house.drive() == "preempted"
        heartbeat.stop()
        for call in house.authority.gateway._calls:
            call.cancel()

    with_house(app, story)
    assert seen == ["told"]


def test_a_worker_that_hears_nothing_stops_by_its_own_clock() -> None:
    app = tf.App()
    house_of: list[House] = []

    def cut_off() -> None:
        house_of[0].seam.is_silent = True
        house_of[0].now_s += LEASE_MS / 1_000 / 4  # each try takes a quarter of the lease

    @app.agent
    async def agent(run: tf.Run, _: None) -> None:
        await run.step("a", int)

    async def story(house: House) -> None:
        house_of.append(house)
        await house.create("agent")
        house.seam.before["save_result"] = cut_off
        assert await house.drive(clock=lambda: house.now_s) == "preempted"
        assert len(house.seam.verbs("save_result")) == 4
        assert (await house.state())[0] == "leased"  # the authority's own clock ends it

    with_house(app, story)


# --- the heartbeat alone --------------------------------------------------------------------------------


class Connection:
    """Renews as a test says, and counts."""

    def __init__(self, answer: Renewed | Refused | Exception, enough: int = 1) -> None:
        self.answer, self.enough = answer, enough
        self.asked: list[list[str]] = []
        self.beaten = threading.Event()
        self.threads: set[int] = set()

    async def renew(self, tokens: Sequence[str]) -> Sequence[Renewed | Refused]:
        self.asked.append(list(tokens))
        self.threads.add(threading.get_ident())
        if len(self.asked) >= self.enough:
            self.beaten.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(tokens)

    async def close(self) -> None:
        return


def test_heartbeats_go_on_while_agent_code_blocks_the_loop() -> None:
    app = tf.App()
    connection = Connection(Renewed(0), enough=3)

    @app.agent
    async def blocks(run: tf.Run, _: None) -> bool:
        return connection.beaten.wait(timeout=10)  # nothing else of this loop runs meanwhile

    async def story(house: House) -> None:
        await house.create("blocks")
        heartbeat = ThreadHeartbeat(lambda: connection)
        heartbeat.start(house.leases)
        house.clock.advance(61_000)
        grant = await house.seam.grant("r1", "w1", 1_000, "")
        assert isinstance(grant, LeaseGrant)
        assert await house.begin(grant).drive() == "completed"
        heartbeat.stop()
        assert await house.state() == ("completed", "true")

    with_house(app, story)
    assert threading.get_ident() not in connection.threads


def test_one_call_renews_all_leases_and_moves_their_belief_to_before_it_was_sent() -> None:
    connection = Connection(Renewed(0))
    table, now = LeaseTable(), [5.0]
    leases = [HeldLease(GRANT, 0.0), HeldLease(GRANT.with_token("u"), 0.0)]
    leases[1].epoch = 6
    for lease in leases:
        table.add(lease)
    asyncio.run(_until(table, connection, now, lambda: bool(connection.asked)))
    assert connection.asked == [["t", "u"]]
    assert [lease.until_s for lease in leases] == [20.0, 20.0]


@pytest.mark.parametrize(
    ("answer", "is_lost"),
    [
        (Refused("stale_epoch", "superseded", {"live_epoch": 9}), True),
        (Refused("lease_lapsed", "expired"), True),
        (Refused("run_ended", "completed"), True),
        (Refused("invalid", "http_invalid", {"code": "unsupported"}), False),  # of the whole call, not of the lease
        (Refused("overloaded", "queue"), False),  # type: ignore[arg-type]
        (AuthorityUnavailable("cut off"), False),
        (RuntimeError("a bug"), False),
    ],
)
def test_only_a_refusal_of_the_lease_itself_loses_it(answer: Any, is_lost: bool) -> None:
    table, lease = LeaseTable(), HeldLease(GRANT, 0.0)
    table.add(lease)
    connection = Connection(answer)
    asyncio.run(_until(table, connection, [5.0], lambda: lease.lost is not None or lease.beat_s > 5.0))
    assert (lease.lost is not None) is is_lost
    assert lease.until_s == 15.0


def test_a_lease_is_lost_when_its_time_is_over_by_the_local_clock() -> None:
    table, lease, told = LeaseTable(), HeldLease(GRANT, 0.0), []
    lease.on_lost = told.append
    table.add(lease)
    connection = Connection(AuthorityUnavailable("cut off"))
    now = [5.0]

    def is_over() -> bool:
        if connection.asked:
            now[0] = 15.0
        return lease.lost is not None

    asyncio.run(_until(table, connection, now, is_over))
    assert told == [lease.lost]
    assert told[0].facts == {"ended_by": "own_clock"}


async def _until(table: LeaseTable, connection: Connection, now: list[float], is_over: Any) -> None:
    """Beat with a clock of our own until something holds."""
    wake = asyncio.Event()
    async with asyncio.timeout(10):
        beating = asyncio.create_task(keep(table, connection, wake, lambda: now[0]))
        while not is_over():
            wake.set()
            await asyncio.sleep(0)
        beating.cancel()
        await asyncio.wait((beating,))


def test_a_lease_that_is_being_given_back_does_not_interrupt_its_own_end() -> None:
    lease, told = HeldLease(GRANT, boot_s()), []
    lease.on_lost = told.append
    lease.is_ending = True
    assert lease.lose(tf.Preempted("r1", 5, "ended")) is lease.lose(tf.Preempted("r1", 5, "again"))
    assert told == []


def test_a_broken_connection_is_made_anew_and_the_thread_ends_when_told() -> None:
    connection, tries = Connection(Renewed(0)), []

    def connect() -> Connection:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("no route")
        return connection

    table = LeaseTable()
    heartbeat = ThreadHeartbeat(connect)
    heartbeat.start(table)
    table.add(HeldLease(GRANT, boot_s() - 6))
    assert connection.beaten.wait(timeout=10)
    heartbeat.stop()
    assert not any(thread.name == "tidefast heartbeat" for thread in threading.enumerate())


def test_an_agent_that_swallows_its_end_is_left_behind_and_its_lease_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "RECANCEL_S", 0.01)
    app = tf.App()
    may_end, swallowed = [False], [0]

    @app.agent
    async def clings(run: tf.Run, _: None) -> str:
        while not may_end[0]:
            try:
                await house_of[0].authority.oversee("pause", "r1", "operator", "", None)
                await run.step("a", lambda: 1)
            except BaseException:
                swallowed[0] += 1
                with contextlib.suppress(BaseException):
                    await asyncio.get_running_loop().create_future()
        return "late"

    house_of: list[House] = []

    async def story(house: House) -> None:
        house_of.append(house)
        await house.create("clings")
        assert await house.drive() == "held"
        assert (await house.state())[0] == "paused"
        may_end[0] = True
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    with_house(app, story)
    assert swallowed[0] >= 1


def test_leases_of_a_worker_whose_loop_is_blocked_are_not_renewed_for_ever() -> None:
    connection = Connection(Renewed(0))
    table, now = LeaseTable(), [0.0]
    gone, other = HeldLease(GRANT, 0.0), HeldLease(GRANT.with_token("u"), 0.0)
    other.epoch = 6
    for lease in (gone, other):
        table.add(lease)
    gone.lose(tf.Preempted("r1", 5, "taken"))
    assert table.unheard(0.0) == []
    other.renewed(14.0)
    now[0] = 16.0
    asyncio.run(_until(table, connection, now, lambda: other.lost is not None))
    assert other.lost is not None and other.lost.facts == {"ended_by": "blocked_loop"}
    assert connection.asked == []
