"""The report names every law and every denominator, and is ok only if nothing was broken or left unanswered."""

import json
from typing import Any

import pytest

from tidefast.protocol.ids import RunId, StepId
from tidefast.protocol.laws import LAWS, Violation
from tidefast.sim.audit import AuditReport
from tidefast.sim.report import WIDTH, Report, from_audit, sentence, to_json, to_text


def report(**changed: Any) -> Report:
    given: dict[str, Any] = {
        "interleavings": 20_000,
        "preemptions": 7_000,
        "mutating_steps": 19_000,
        "violations": {},
        "rejected": 12,
        "rejected_unanswered": 0,
        "held": 3,
        "seed": 7,
        "runs": 20_000,
        "events": 240_000,
        "faults": {"kill": 5, "answer_lost": 6},
    }
    return Report(**(given | changed))


def test_the_json_names_every_law() -> None:
    told = json.loads(to_json(report(violations={"orphan": 2})))
    assert set(told) >= {
        *("interleavings", "preemptions", "mutating_steps", "violations", "rejected", "rejected_unanswered"),
        *("held", "seed", "ok", "runs", "events", "faults"),
    }
    assert set(told["violations"]) == set(LAWS) and told["violations"]["orphan"] == 2
    assert told["ok"] is False and told["faults"] == {"answer_lost": 6, "kill": 5}


@pytest.mark.parametrize(
    ("changed", "ok", "last"),
    [
        ({}, True, "ok: no law was broken"),
        ({"violations": {"stuck": 1}}, False, "NOT OK: broken were stuck"),
        ({"rejected_unanswered": 1_000}, False, "NOT OK: 1,000 rejected calls were left unanswered"),
        ({"violations": {"stuck": 1, "of_tomorrow": 1}}, False, "NOT OK: broken were stuck, of_tomorrow"),
    ],
)
def test_ok_means_nothing_broken_and_nothing_unanswered(changed: dict[str, Any], ok: bool, last: str) -> None:
    assert report(**changed).is_ok is ok
    assert json.loads(to_json(report(**changed)))["ok"] is ok
    assert to_text(report(**changed)).splitlines()[-1].startswith(last)


def test_the_text_is_narrow_and_names_its_denominators() -> None:
    long = Violation("orphan", RunId("r" * 128), StepId("s" * 160), 7, "why " * 60)
    named = (long, *(Violation("stuck", RunId(""), None, 0, "why") for _ in range(30)))
    counts = {"orphan": 1, **{name: 40 for name in LAWS if name != "orphan"}}
    text = to_text(report(named=named, violations=counts, faults={"k" * 90: 1, "kill at " * 7: 10**9}))
    assert all(len(line) <= WIDTH for line in text.splitlines()), text
    for word in ("interleavings", "runs", "events judged", "mutating steps", "epochs ended by others", "unanswered"):
        assert word in text
    assert "661 more violations are not spelled out" in text
    assert "240,000" in text and "seed" in text
    assert "seed" not in to_text(report(seed=None))


def test_a_violation_is_one_sentence() -> None:
    whole = Violation("orphan", RunId("r"), StepId("pay"), 7, "it was open")
    assert sentence(whole) == "orphan: run r, step pay, event 7: it was open"
    assert sentence(whole._replace(run_id=RunId(""), step_id=None, seq=0)) == "orphan: no run: it was open"


def test_an_audit_becomes_a_report() -> None:
    audit = AuditReport(runs=1, events=9, mutating_steps=2, preemptions=1, held=1)
    audit.add(Violation("stuck", RunId("r"), None, 1, "why"))
    made = from_audit(audit, interleavings=5, rejected=2, rejected_unanswered=1, seed=3, faults={"kill": 1})
    assert (made.runs, made.events, made.mutating_steps, made.preemptions, made.held) == (1, 9, 2, 1, 1)
    assert (made.interleavings, made.rejected, made.seed, made.faults) == (5, 2, 3, {"kill": 1})
    assert made.violations["stuck"] == 1 and made.named[0].law == "stuck" and not made.is_ok
    assert from_audit(AuditReport()).is_ok
