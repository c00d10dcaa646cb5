"""Who holds a workspace: each grant a new epoch, and nothing that brings an old one back."""

import pytest
from tests.protocol.site import CASE, LEASE_MS, Site

from tidefast.protocol.events import Event
from tidefast.protocol.ids import Epoch
from tidefast.protocol.records import ReplicaRight, WorkspaceHead
from tidefast.protocol.replica import evolve_workspace
from tidefast.protocol.verdicts import Done, Refused, Renewed, ReplicaGranted
from tidefast.protocol.workspace import CHAIN_START, Disk


def test_the_first_grant_makes_the_workspace() -> None:
    site = Site()
    granted = site.replica().verdict
    assert granted == ReplicaGranted(Epoch(1), LEASE_MS, site.ms + LEASE_MS, "keep", 0, CHAIN_START)
    assert (site.place.workspace_id, site.place.created_ms, site.place.is_live) == (CASE, site.ms, True)


def test_each_grant_is_a_new_epoch_even_for_the_same_process() -> None:
    site = Site()
    site.replica("r1")
    site.replica("r1")
    assert site.place.epoch == 2
    assert [event.kind for event, _ in site.writes] == ["lease_granted", "lease_preempted", "lease_granted"]


def test_a_revived_replica_with_leftover_files_is_told_by_its_chain_what_they_are_worth() -> None:
    site = Site()
    site.replica()
    site.admit()
    site.settle(site.written())
    old = Disk(Epoch(1), 1, site.place.chain)
    assert _plan(site, old, site.place.chain) == "keep"
    assert _plan(site, old._replace(is_ahead=True), site.place.chain) == "rollback"
    assert _plan(site, old._replace(chain="f" * 64), site.place.chain) == "fetch_all"
    assert _plan(site, old._replace(log_index=2), None) == "fetch_all"


def _plan(site: Site, disk: Disk, there: str | None) -> str:
    granted = site.replica("again", disk, there).verdict
    assert isinstance(granted, ReplicaGranted)
    return granted.plan


def test_a_renewal_moves_the_expiry_and_revives_nothing() -> None:
    site = Site()
    site.replica()
    site.ms += 1_000
    assert site.renew().verdict == Renewed(site.ms + LEASE_MS)
    site.ms += LEASE_MS
    told = site.renew().verdict
    assert isinstance(told, Refused) and told.code == "lease_lapsed"
    site.lapse()
    told = site.renew().verdict
    assert isinstance(told, Refused) and (told.code, told.reason) == ("stale_epoch", "lease_ended")


@pytest.mark.parametrize("right", [ReplicaRight(CASE, Epoch(1), "r1"), ReplicaRight(CASE, Epoch(2), "r1")])
def test_a_superseded_replica_is_told_by_whom(right: ReplicaRight) -> None:
    site = Site()
    site.replica("r1")
    site.replica("r2")
    for told in (site.renew(right).verdict, site.release(right).verdict):
        assert isinstance(told, Refused) and told.code == "stale_epoch"
        assert (told.facts["live_epoch"], told.facts["holder"]) == (2, "r2")
    assert site.place.is_live


def test_of_an_unknown_workspace_nothing_is_renewed_released_or_lapsed() -> None:
    site = Site()
    right = ReplicaRight(CASE, Epoch(1), "r1")
    for decision in (site.renew(right), site.release(right)):
        assert decision.verdict == Refused("not_found", "workspace_unknown", {"workspace": CASE})
    assert isinstance(site.lapse().verdict, Refused)


def test_a_release_ends_the_epoch_once() -> None:
    site = Site()
    site.replica()
    right = site.right()
    assert site.release(right).verdict == Done("released", 2)
    assert isinstance(site.release(right).verdict, Refused)
    assert (site.place.is_live, site.place.lease_end) == (False, "released")


def test_a_lease_lapses_by_the_sweep_or_by_the_next_grant_only_past_its_time() -> None:
    site = Site()
    site.replica()
    assert isinstance(site.lapse().verdict, Refused)
    site.ms += LEASE_MS
    assert site.lapse().verdict == Done("lapsed", 2)
    site.replica("r2")
    site.ms += LEASE_MS
    site.replica("r3")
    assert [event.kind for event, _ in site.writes][-3:] == ["lease_granted", "lease_lapsed", "lease_granted"]


def test_an_event_that_can_not_happen_to_a_workspace_is_refused() -> None:
    with pytest.raises(ValueError, match="can't happen"):
        evolve_workspace(WorkspaceHead(CASE), Event(1, 1, "run_created", Epoch(0), None, "{}"))
