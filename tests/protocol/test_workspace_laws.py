"""The laws of a workspace convict a log that lies, and clear the ones that the rules wrote."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.protocol.site import CASE, DEPLOY, PUT, A, B, Site

from tidefast.protocol.events import CHAIN_START, Event, chain
from tidefast.protocol.ids import Epoch, StepId
from tidefast.protocol.trace import Violation
from tidefast.protocol.workspace_laws import WorkspaceHistory, committed_writes, judge_workspace


def history(site: Site, events: tuple[Event, ...] | None = None) -> WorkspaceHistory:
    """What an auditor reads, the digests worked out again where a test has changed an event."""
    committed = {
        key: seq
        for run in site.log
        for name, key, seq in committed_writes(run, (event for event, _ in site.log[run]))
        if name == CASE
    }
    place = site.place
    if events is None:
        events, digests = zip(*site.writes, strict=True)
        return WorkspaceHistory(CASE, events, digests, committed, place.digest, place.seq, place.log_index, place.chain)
    digest, digests = CHAIN_START, ()
    for event in events:
        digest = chain(digest, event)
        digests = (*digests, digest)
    return WorkspaceHistory(CASE, events, digests, committed)


def busy() -> Site:
    """Two runs, a takeover, a lost replica, a refusal and a person's word, all in one workspace."""
    site = Site(A, B)
    site.replica()
    site.admit(A)
    site.settle(site.written())
    site.admit(B)
    site.take(B)
    site.settle(site.written(B), B)
    site.admit(B)
    site.admit(A, StepId("no"))
    site.settle(None, A, StepId("no"), outcome="refused")
    site.admit(A, StepId("lost"))
    site.replica("r2")
    site.lose(A, StepId("lost"))
    site.admit(A, StepId("deploy"), DEPLOY)
    site.release()
    site.lose(A, StepId("deploy"))
    site.resolve("applied", A, StepId("deploy"))
    site.admit(A, StepId("deploy"), DEPLOY)
    return site


def laws(found: tuple[Violation, ...]) -> set[str]:
    return {violation.law for violation in found}


def test_what_the_rules_write_breaks_no_law() -> None:
    site = busy()
    told = history(site)
    assert judge_workspace(told) == ()
    assert site.place.log_index == 2 and set(told.committed or ()) == {(A, PUT), (B, PUT)}


def test_without_the_runs_logs_only_the_workspaces_own_are_judged() -> None:
    assert judge_workspace(history(busy())._replace(committed=None)) == ()


def test_an_event_that_no_workspace_has_convicts_its_log() -> None:
    site = busy()
    (*events, last) = (event for event, _ in site.writes)
    assert "altered_log" in laws(judge_workspace(history(site, (*events, last._replace(kind="run_paused")))))


def _forged(kind: str, change: Callable[[Event], Event]) -> Callable[[tuple[Event, ...]], tuple[Event, ...]]:
    def forge(events: tuple[Event, ...]) -> tuple[Event, ...]:
        place = next(n for n, event in enumerate(events) if event.kind == kind)
        return (*events[:place], change(events[place]), *events[place + 1 :])

    return forge


def _without(kind: str) -> Callable[[tuple[Event, ...]], tuple[Event, ...]]:
    return lambda events: tuple(event for event in events if event.kind != kind)


@pytest.mark.parametrize(
    ("law", "forge"),
    [
        ("dead_commit", _forged("write_committed", lambda e: e._replace(epoch=Epoch(9)))),
        ("dead_commit", _forged("write_committed", lambda e: e._replace(step_id=StepId("other")))),
        ("unlogged_effect", _forged("write_fenced", lambda e: e._replace(epoch=Epoch(9)))),
        ("unlogged_effect", _forged("write_fenced", lambda e: e._replace(step_id=StepId("other")))),
        ("overlap", _without("write_dropped")),
        ("reissued_epoch", lambda events: (*events, events[0])),
        ("lost_fact", _without("write_committed")),
        ("altered_log", _forged("write_committed", lambda e: e._replace(data_json=e.data_json.replace('"f"', '"g"')))),
        ("altered_log", _forged("write_committed", lambda e: e._replace(data_json="not json"))),
        ("altered_log", _forged("write_committed", lambda e: e._replace(data_json='{"delta":1e400,"index":1}'))),
    ],
)
def test_a_log_that_lies_is_convicted_by_name(law: str, forge: Any) -> None:
    site = busy()
    events = tuple(event for event, _ in site.writes)
    assert law in laws(judge_workspace(history(site, forge(events))))


def test_a_write_joined_twice_is_a_double_apply() -> None:
    site = busy()
    events = tuple(event for event, _ in site.writes)
    first = next(event for event in events if event.kind == "write_committed")
    assert "double_apply" in laws(judge_workspace(history(site, (*events, first))))


@pytest.mark.parametrize(
    "change",
    [
        {"head_seq": 3},
        {"head_digest": "0" * 64},
        {"head_index": 7},
        {"head_chain": "0" * 64},
        {"digests": ()},
    ],
)
def test_a_cut_or_swapped_log_shows(change: dict[str, Any]) -> None:
    assert laws(judge_workspace(history(busy())._replace(**change))) == {"altered_log"}
