"""A workspace's mutating steps: one at a time, joined under two live epochs, gone with the disk that did them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.protocol.site import CASE, DEPLOY, FILE, LEASE_MS, PUT, TIMEOUT_MS, WRITE_FILE, A, B, Site

from tidefast.protocol.commands import LoseWrite
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.laws import judge
from tidefast.protocol.verdicts import Answer, AskReplica, Refused, Send, Settled, Wait
from tidefast.protocol.workspace import Entry

NEXT = StepId("next")


def ready(*runs: RunId) -> Site:
    site = Site(*(runs or (A,)))
    site.replica()
    return site


@pytest.fixture(autouse=True)
def lawful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does, the logs of its runs break no law."""
    sites: list[Site] = []
    honest = Site.__init__

    def watched(site: Site, *runs: RunId) -> None:
        honest(site, *runs)
        sites.append(site)

    monkeypatch.setattr(Site, "__init__", watched)
    yield
    assert sites and not [broken for site in sites for run in site.log for broken in judge(site.history(run))]


def test_a_log_that_takes_an_external_effect_for_gone_breaks_a_law() -> None:
    site = ready()
    site.admit()
    site.release()
    site.lose()
    told = site.history()
    fenced = next(event for event in told.events if event.kind == "step_fenced")
    forged = fenced._replace(data_json=fenced.data_json.replace('"effect":"workspace"', '"effect":"external"'))
    events = tuple(forged if event == fenced else event for event in told.events)
    assert "lost_fact" in {broken.law for broken in judge(told._replace(events=events))}


def kinds(site: Site) -> list[str]:
    return [event.kind for event, _ in site.writes]


def test_a_write_joins_in_the_transaction_that_settles_it() -> None:
    site = ready()
    sent = site.admit().verdict
    assert isinstance(sent, Send) and sent.write == (CASE, site.place.epoch, 0)
    decision = site.settle(site.written())
    assert decision.verdict == Settled("committed", joined=True)
    assert (site.place.log_index, site.place.open, site.step().state) == (1, None, "committed")
    assert kinds(site) == ["lease_granted", "write_fenced", "write_committed"]
    again = site.admit().verdict
    assert isinstance(again, Answer) and again.state == "committed"


@pytest.mark.parametrize("how", ["none", "ended", "away", "lapsed"])
def test_without_a_replica_nothing_is_admitted(how: str) -> None:
    site = Site()
    if how != "none":
        site.replica()
    if how == "ended":
        site.release()
    if how == "lapsed":
        site.ms += LEASE_MS
    decision = site.admit(is_away=how == "away")
    assert isinstance(decision.verdict, Wait) and decision.verdict.code == "no_replica"
    assert decision.events == decision.writes == ()


def test_while_one_runs_write_is_open_anothers_is_pending_and_told_whose() -> None:
    site = ready(A, B)
    site.admit(A)
    blocked = site.admit(B).verdict
    assert isinstance(blocked, Wait)
    assert (blocked.code, blocked.reason, blocked.blocking_run, blocked.blocking_step) == (
        "step_pending",
        "replica",
        A,
        PUT,
    )
    site.settle(site.written())
    assert isinstance(site.admit(B).verdict, Send)


def test_a_late_200_of_a_dead_replica_commits_nothing_and_the_step_is_sent_again_under_the_new_one() -> None:
    site = ready()
    site.admit()
    late = site.written()
    site.replica("r2")
    decision = site.settle(late)
    assert decision.verdict == Settled("pending", joined=False)
    assert [event.kind for event in decision.events] == ["late_receipt", "replica_lost"]
    assert (site.place.log_index, site.place.open) == (0, None)
    again = site.admit().verdict
    assert isinstance(again, Send) and again.attempt == 2 and again.is_replay
    assert site.settle(site.written(), attempt=2).verdict == Settled("committed", joined=True)


def test_a_receipt_that_comes_after_the_loss_is_kept_and_freezes_nothing() -> None:
    site = ready()
    site.admit()
    late = site.written()
    site.replica("r2")
    assert site.lose().verdict == Settled("pending", joined=False)
    decision = site.settle(late)
    assert [event.kind for event in decision.events] == ["late_receipt"] and decision.writes == ()
    head = site.views[A].run
    assert head is not None and not head.frozen
    assert site.step().attempts[0].state == "absent"
    site.admit()
    site.settle(late)
    assert site.step().state == "fenced", "the old receipt says nothing about the new attempt"


def test_a_receipt_whose_run_moved_on_is_kept_and_joined_by_the_next_holder() -> None:
    site = ready()
    site.admit()
    site.take()
    assert site.settle(site.written()).verdict == Settled("applied", joined=False)
    assert site.place.open is not None and site.place.open.write_seq == site.place.seq
    joined = site.admit()
    assert isinstance(joined.verdict, Answer) and joined.verdict.state == "committed"
    assert kinds(site)[-2:] == ["write_applied", "write_committed"]
    assert site.place.log_index == 1


def test_an_accepted_write_that_was_not_joined_is_gone_with_its_replica() -> None:
    site = ready()
    site.admit()
    site.take()
    site.settle(site.written())
    site.replica("r2")
    asked = site.admit()
    assert isinstance(asked.verdict, Wait) and asked.verdict.reason == "replica"
    assert [event.kind for event in asked.events] == ["replica_lost"]
    assert (site.step().state, site.step().receipt_seq, site.place.log_index) == ("pending", 0, 0)
    assert isinstance(site.admit().verdict, Send)


def test_a_doubt_is_put_to_the_journal_of_a_replica_that_lives() -> None:
    site = ready()
    site.admit()
    waiting = site.admit().verdict
    assert isinstance(waiting, Wait) and waiting.code == "step_in_flight"
    site.instances = frozenset(("boot-2",))
    asked = site.admit().verdict
    assert asked == AskReplica(CASE, site.place.epoch, 1, site.ms + TIMEOUT_MS)
    site.mark_lost()
    assert isinstance(site.admit().verdict, AskReplica)
    site.settle(None, outcome="unsent")
    assert (site.step().state, site.place.open) == ("pending", None)
    assert isinstance(site.admit().verdict, Send)


@pytest.mark.parametrize("outcome", ["refused", "unsent"])
def test_a_call_that_changed_nothing_frees_the_workspace(outcome: str) -> None:
    site = ready()
    site.admit()
    site.settle(None, outcome=outcome)
    assert site.place.open is None and kinds(site)[-1] == "write_dropped"
    assert site.place.log_index == 0


def test_what_may_have_escaped_is_held_when_its_replica_is_lost() -> None:
    site = ready(A, B)
    site.admit(contract=DEPLOY)
    site.replica("r2")
    assert site.lose().verdict == Settled("held", joined=False)
    told = site.admit(contract=DEPLOY).verdict
    assert isinstance(told, Refused) and (told.code, told.reason) == ("step_held", "escaped")
    assert isinstance(site.admit(B).verdict, Wait), "a held step keeps its workspace"
    assert site.lose().verdict == Refused("already_decided", "replica_lives", {"step": PUT})


@pytest.mark.parametrize(
    ("verdict", "state"), [("not_applied", "pending"), ("refused", "rejected"), ("compensated",) * 2]
)
def test_a_persons_verdict_frees_the_workspace(verdict: str, state: str) -> None:
    site = ready()
    site.admit(contract=DEPLOY)
    site.replica("r2")
    site.lose()
    site.resolve(verdict)
    assert (site.step().state, site.place.open) == (state, None)


def test_what_a_person_says_was_applied_is_committed_without_a_write() -> None:
    site = ready()
    site.admit(contract=DEPLOY)
    late = site.written()
    site.replica("r2")
    site.lose()
    site.settle(late)
    site.resolve("applied")
    assert site.lose().verdict == Refused("already_decided", "resolved:applied", {"step": PUT})
    site.replica("r3")
    told = site.admit(contract=DEPLOY).verdict
    assert isinstance(told, Answer) and told.state == "committed"
    assert (site.place.log_index, site.place.open) == (0, None)


def test_an_escaping_command_that_is_in_doubt_with_a_replica_that_lives_is_asked_about() -> None:
    site = ready()
    site.admit(contract=DEPLOY)
    site.instances = frozenset(("boot-2",))
    assert isinstance(site.admit(contract=DEPLOY).verdict, AskReplica)
    assert site.settle(site.written()).verdict == Settled("committed", joined=True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"log_index": 7}, "index 7"),
        ({"chain": "0" * 64}, "digest"),
        ({"delta": {"../f": None}}, "no path"),
        ({"delta": {"g": Entry("file", 0o644, "b" * 64, 1)}}, "digest"),
    ],
)
def test_a_receipt_that_does_not_follow_the_log_is_refused(change: dict[str, object], problem: str) -> None:
    site = ready()
    site.admit()
    told = site.settle(replace(site.written(), **change)).verdict  # type: ignore[arg-type]
    assert isinstance(told, Refused) and (told.code, told.reason) == ("invalid", "receipt_invalid")
    assert problem in str(told.facts["problem"])
    assert site.step().state == "fenced"


def test_a_receipt_without_a_write_or_of_another_epoch_is_evidence_only() -> None:
    site = ready()
    site.admit()
    for write in (None, replace(site.written(), epoch=Epoch(99))):
        assert site.settle(write).verdict == Settled("fenced", joined=False)
    assert site.settle(site.written()).verdict == Settled("committed", joined=True)
    assert site.settle(site.written()).verdict == Settled("committed", joined=False)


def test_a_step_is_lost_only_once_its_replica_is() -> None:
    site = ready()
    site.admit()
    assert isinstance(site.lose().verdict, Refused)
    assert isinstance(site.submit(LoseWrite(CASE, RunId("nobody"), PUT)).verdict, Refused)
    assert isinstance(site.lose(step=NEXT).verdict, Refused)
    site.release()
    assert site.lose().verdict == Settled("pending", joined=False)
    assert isinstance(site.lose().verdict, Refused)


def test_a_second_loss_loses_nothing_more() -> None:
    site = ready()
    for attempt in (1, 2, 3):
        assert isinstance(site.admit().verdict, Send)
        site.replica(f"r{attempt + 1}")
        site.lose()
    assert [attempt.state for attempt in site.step().attempts] == ["absent"] * 3
    site.admit()
    site.settle(site.written(), attempt=4)
    assert (site.place.log_index, len(site.chains)) == (1, 1)


def test_a_joined_write_stands_whatever_becomes_of_its_replica() -> None:
    site = ready()
    site.admit()
    site.settle(site.written())
    chain = site.place.chain
    site.release()
    assert (site.place.log_index, site.place.chain) == (1, chain)
    told = site.admit(is_away=True).verdict
    assert isinstance(told, Answer) and told.state == "committed"


def test_the_workspace_of_a_step_that_nobody_shows_counts_as_gone() -> None:
    site = ready()
    site.admit()
    site.workspace = None
    told = site.admit(is_away=True)
    assert isinstance(told.verdict, Wait) and [event.kind for event in told.events] == ["replica_lost"]


def test_reads_take_no_place_in_the_log() -> None:
    site = ready(A, B)
    site.admit(A)
    look = WRITE_FILE._replace(tool="workspace.read_file", effect="none")
    sent = site.admit(B, contract=look).verdict
    assert isinstance(sent, Send) and sent.write is None
    site.settle(None, B)
    assert site.step(B).state == "committed" and FILE and site.place.open is not None
