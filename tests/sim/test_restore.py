"""An old copy is restored while everything older still speaks: real files, a real engine and gateway, zombies.

The provider counts for itself, across the restore; the auditor judges the restored logs by that count.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tidefast.engine.clock import ManualClock
from tidefast.protocol.answers import LeaseGrant, StepAnswer
from tidefast.protocol.ids import RunId, StepId, step_key
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Refused, Settled
from tidefast.sim.audit import audit
from tidefast.sim.world import DAY_MS, LEASE_MS, TIMEOUT_MS, World
from tidefast.stores import sqlite_recovery
from tidefast.stores.sqlite import SqliteStore
from tidefast.wire import tokens

RUN, PAY, MAIL = RunId("refund-7"), StepId("pay"), StepId("mail")
SECRET = bytes(32)


class Site:
    """A store that is served, backed up, goes on, is lost, and comes back from the backup."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock(1_796_000_000_000)
        self.world = World(SqliteStore.open(folder / "s.db", create=True), self.clock)
        self.rights: list[Right] = []

    async def grant(self, holder: str) -> Right:
        await self.world.authority.preempt(RUN, "ops", "", None)
        self.clock.advance(10_000)  # whatever pause the run is in
        granted = await self.world.authority.grant(RUN, holder, LEASE_MS, "")
        assert isinstance(granted, LeaseGrant), granted
        right = Right(RUN, granted.epoch, holder)
        self.rights.append(right)
        return right

    async def apply(self, right: Right, step: StepId, tool: str) -> StepAnswer | Refused:
        return await self.world.gateway.apply(right, step, tool, "{}", 0)

    def back_up(self) -> None:
        sqlite_recovery.backup(self.folder / "s.db", self.folder / "b.db")

    async def lose_and_restore(self, days: int = 0) -> None:
        """The machine is gone, with all that was committed after the backup; the providers are not."""
        await self.world.stop()
        self.clock.advance(1_000 + days * DAY_MS)
        identity = sqlite_recovery.restore(self.folder / "b.db", self.folder / "new" / "s.db", self.clock.wall_ms)
        assert identity.recovery is not None
        self.clock.ms = max(self.clock.ms, identity.recovery.restored_ms)
        store = SqliteStore.open(self.folder / "new" / "s.db", create=False)
        self.world = World(store, self.clock, self.world.provider)
        await self.world.keeper.take_over()

    def count(self, step: StepId) -> int:
        return self.world.provider.net[step_key(self.world.engine.identity.namespace, RUN, step)]

    def sends(self, step: StepId) -> int:
        return self.world.provider.sends[step_key(self.world.engine.identity.namespace, RUN, step)]

    def is_lawful(self) -> bool:
        report = audit(self.world.store, self.world.provider.ledger(), now_ms=self.clock.ms)
        assert report.is_ok, report.violations
        return True


def at(folder: Path, test: Callable[[Site], Awaitable[None]]) -> None:
    async def run() -> None:
        site = Site(folder)
        await site.world.authority.create_run(RUN, "agent", "1", "{}")
        await test(site)
        await site.world.stop()
        site.world.store.close()

    asyncio.run(run())


def test_every_older_token_is_refused_by_every_verb_and_the_first_new_epoch_is_above_them_all(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        await site.grant("w1")
        site.back_up()
        for number in range(2, 6):  # grants that the backup doesn't know
            await site.grant(f"w{number}")
        namespace = site.world.engine.identity.namespace
        old = [tokens.mint(SECRET, namespace, right) for right in site.rights]
        await site.lose_and_restore()
        for attempt in range(2):
            authority, gateway = site.world.authority, site.world.gateway
            for token in old:
                right = tokens.verify(SECRET, namespace, token)
                assert right is not None, "the secret is the same: only the fence stands between"
                answers = [
                    await authority.fence(right),
                    (await authority.renew([right]))[0],
                    await gateway.apply(right, MAIL, "mail", "{}", 0),
                    await gateway.compensate(right, PAY, 0),
                    await authority.save_result(right, StepId("sum"), "1"),
                    await authority.checkpoint(right, 1, "{}"),
                    await authority.complete(right, "1", frozenset(), frozenset()),
                    await authority.fail(right, "no"),
                ]
                assert all(isinstance(answer, Refused) and answer.code == "stale_epoch" for answer in answers), answers
            if not attempt:
                fresh = await site.grant("w1")  # the same holder's name again
                assert fresh.epoch > max(right.epoch for right in site.rights[:-1])
        assert site.count(MAIL) == 0 and site.is_lawful()

    at(tmp_path, test)


def test_a_mail_that_was_sent_after_the_backup_is_not_sent_again(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        right = await site.grant("w1")
        site.back_up()
        assert isinstance(await site.apply(right, MAIL, "mail"), StepAnswer)
        await site.lose_and_restore()
        right = await site.grant("w2")
        held = await site.apply(right, MAIL, "mail")
        assert isinstance(held, Refused) and (held.code, held.reason) == ("step_held", "lost_commits")
        assert (site.count(MAIL), site.sends(MAIL)) == (1, 1)
        verdict = await site.world.authority.resolve(RUN, MAIL, "applied", "ops", "it is in the mailbox", "1", None, 1)
        assert isinstance(verdict, Settled)
        joined = await site.apply(await site.grant("w3"), MAIL, "mail")
        assert isinstance(joined, StepAnswer) and joined.state == "committed"
        assert site.count(MAIL) == 1 and site.is_lawful()

    at(tmp_path, test)


def test_a_charge_that_was_made_after_the_backup_is_replayed_under_its_key_and_made_once(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        right = await site.grant("w1")
        site.back_up()
        await site.apply(right, PAY, "charge")
        await site.lose_and_restore()
        again = await site.apply(await site.grant("w2"), PAY, "charge")
        assert isinstance(again, StepAnswer) and again.state == "committed"
        assert (site.count(PAY), site.sends(PAY)) == (1, 2)
        assert site.is_lawful()

    at(tmp_path, test)


def test_a_charge_is_held_when_its_key_may_be_forgotten_by_the_time_of_the_restore(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        right = await site.grant("w1")
        site.back_up()
        await site.apply(right, PAY, "charge")
        await site.lose_and_restore(days=2)
        held = await site.apply(await site.grant("w2"), PAY, "charge")
        assert isinstance(held, Refused) and held.reason == "lost_commits"
        assert (site.count(PAY), site.sends(PAY)) == (1, 1) and site.is_lawful()

    at(tmp_path, test)


def test_a_run_that_was_created_and_driven_after_the_backup_is_not_driven_twice(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        site.back_up()  # of an empty run; the next one is lost whole
        name = RunId("refund-8")
        await site.world.authority.create_run(name, "agent", "1", "{}")
        granted = await site.world.authority.grant(name, "w1", LEASE_MS, "")
        assert isinstance(granted, LeaseGrant)
        await site.world.gateway.apply(Right(name, granted.epoch, "w1"), MAIL, "mail", "{}", 0)
        await site.lose_and_restore()
        await site.world.authority.create_run(name, "agent", "1", "{}")  # its client asks again
        granted = await site.world.authority.grant(name, "w2", LEASE_MS, "")
        assert isinstance(granted, LeaseGrant)
        held = await site.world.gateway.apply(Right(name, granted.epoch, "w2"), MAIL, "mail", "{}", 0)
        assert isinstance(held, Refused) and held.reason == "lost_commits"
        assert sum(site.world.provider.net.values()) == 1
        named = await site.world.authority.create_run(None, "agent", "1", "{}")
        assert not isinstance(named, Refused)
        granted = await site.world.authority.grant(named.run_id, "w2", LEASE_MS, "")
        assert isinstance(granted, LeaseGrant)
        sent = await site.world.gateway.apply(Right(RunId(named.run_id), granted.epoch, "w2"), MAIL, "mail", "{}", 0)
        assert isinstance(sent, StepAnswer), "no lost commit can hold a run whose name was drawn after the restore"

    at(tmp_path, test)


def test_a_worker_of_the_lost_store_that_wakes_up_can_do_nothing_and_its_request_still_lands_once(
    tmp_path: Path,
) -> None:
    async def test(site: Site) -> None:
        right = await site.grant("w1")
        site.back_up()
        sent = site.world.provider.script("charge", "withhold_request")
        asking = asyncio.create_task(site.apply(right, PAY, "charge"))
        await sent.wait()  # the lost gateway has it on the wire
        asking.cancel()
        lost = dict(site.world.provider.held)
        site.world.provider.held.clear()
        await site.world.quiet()
        await site.world.engine.stop()
        site.clock.advance(1_000)
        await site.lose_and_restore()
        fresh = await site.grant("w2")
        again = await site.apply(fresh, PAY, "charge")
        assert isinstance(again, StepAnswer)
        for call in lost.values():
            call.may_go_on.set()  # it lands only now, on a key that the provider knows
        await site.world.quiet()
        assert isinstance(await site.apply(right, PAY, "charge"), Refused)
        assert (site.count(PAY), site.sends(PAY)) == (1, 2)
        assert isinstance(await site.world.authority.complete(fresh, "1", frozenset((PAY,)), frozenset()), Done)
        assert site.is_lawful()

    at(tmp_path, test)


def test_closing_the_window_lets_first_sendings_go_without_a_question(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        await site.grant("w1")
        site.back_up()
        await site.lose_and_restore()
        store = site.world.store
        await site.world.stop()
        assert isinstance(store, SqliteStore)
        store.close_window("ops", "the old machine's log was whole", site.clock.wall_ms)
        site.world = World(store, site.clock, site.world.provider)
        site.clock.advance(TIMEOUT_MS)
        assert isinstance(await site.apply(await site.grant("w2"), MAIL, "mail"), StepAnswer)
        assert site.count(MAIL) == 1 and site.is_lawful()

    at(tmp_path, test)


def test_a_restore_that_forgot_its_window_would_send_the_mail_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: the incarnation is raised, but first sendings are judged as if nothing had been lost."""
    monkeypatch.setattr("tidefast.protocol.lease.window_of", lambda view, head: None)

    async def test(site: Site) -> None:
        right = await site.grant("w1")
        site.back_up()
        await site.apply(right, MAIL, "mail")
        await site.lose_and_restore()
        await site.apply(await site.grant("w2"), MAIL, "mail")
        report = audit(site.world.store, site.world.provider.ledger())
        assert site.count(MAIL) == 2 and report.counts["double_apply"] == 1

    at(tmp_path, test)
