"""What a proof reports: every denominator by name, then violations by law, then what was refused and never answered.

One record for simulator, checker, chaos and audit, as JSON for machines and as plain text for people.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidefast.protocol.laws import LAWS, Violation
from tidefast.sim.audit import AuditReport

WIDTH = 100
SHOWN_MAX = 20  # violations that the text form spells out


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of one proof. A call is *rejected* when it was refused because its epoch was dead."""

    interleavings: int
    preemptions: int
    mutating_steps: int
    violations: Mapping[str, int]
    rejected: int
    rejected_unanswered: int  # neither retried under a new epoch, nor compensated, nor ended with its run
    held: int
    seed: int | None = None
    runs: int = 0
    events: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    named: Sequence[Violation] = ()

    @property
    def is_ok(self) -> bool:
        return not any(self.violations.values()) and not self.rejected_unanswered

    def counts(self) -> Mapping[str, int]:
        """Every law's name with its count, laws that were kept included."""
        return {law: self.violations.get(law, 0) for law in (*LAWS, *sorted(self.violations.keys() - LAWS.keys()))}


def from_audit(
    audit: AuditReport,
    *,
    interleavings: int = 0,
    rejected: int = 0,
    rejected_unanswered: int = 0,
    seed: int | None = None,
    faults: Mapping[str, int] | None = None,
) -> Report:
    """The report of a proof whose store was audited."""
    return Report(
        interleavings=interleavings,
        preemptions=audit.preemptions,
        mutating_steps=audit.mutating_steps,
        violations=dict(audit.counts),
        rejected=rejected,
        rejected_unanswered=rejected_unanswered,
        held=audit.held,
        seed=seed,
        runs=audit.runs,
        events=audit.events,
        faults=faults or {},
        named=tuple(audit.violations),
    )


def to_json(report: Report) -> str:
    """The report as one line of JSON. `violations` names every law."""
    return json.dumps(
        {
            "interleavings": report.interleavings,
            "preemptions": report.preemptions,
            "mutating_steps": report.mutating_steps,
            "violations": report.counts(),
            "rejected": report.rejected,
            "rejected_unanswered": report.rejected_unanswered,
            "held": report.held,
            "seed": report.seed,
            "ok": report.is_ok,
            "runs": report.runs,
            "events": report.events,
            "faults": dict(sorted(report.faults.items())),
        }
    )


def to_text(report: Report) -> str:
    """The report for people, in lines of at most 100 characters."""
    rows = [
        ("interleavings", report.interleavings),
        ("runs", report.runs),
        ("events judged", report.events),
        ("mutating steps", report.mutating_steps),
        ("epochs ended by others", report.preemptions),
        *((f"fault injected: {kind}", count) for kind, count in sorted(report.faults.items())),
        *((f"violations of {law}", count) for law, count in report.counts().items()),
        ("calls rejected as stale", report.rejected),
        ("  of these unanswered", report.rejected_unanswered),
        ("steps held for a person", report.held),
    ]
    lines = [] if report.seed is None else [_row("seed", str(report.seed))]
    lines += [_row(name, f"{count:,}") for name, count in rows]
    for violation in report.named[:SHOWN_MAX]:
        lines += textwrap.wrap(sentence(violation), WIDTH, subsequent_indent="  ")
    hidden = sum(report.violations.values()) - len(report.named[:SHOWN_MAX])
    if hidden > 0:
        lines.append(f"{hidden:,} more violations are not spelled out here")
    broken = [law for law, count in report.counts().items() if count]
    if report.is_ok:
        lines.append("ok: no law was broken, no rejected call was left unanswered")
    elif broken:
        lines += textwrap.wrap(f"NOT OK: broken were {', '.join(broken)}", WIDTH, subsequent_indent="  ")
    else:
        lines.append(f"NOT OK: {report.rejected_unanswered:,} rejected calls were left unanswered")
    return "\n".join(lines) + "\n"


def sentence(violation: Violation) -> str:
    """One violation, told: law, run, step, event and why."""
    where = f"run {violation.run_id}" if violation.run_id else "no run"
    if violation.step_id:
        where += f", step {violation.step_id}"
    if violation.seq:
        where += f", event {violation.seq}"
    return f"{violation.law}: {where}: {violation.why}"


def _row(name: str, value: str) -> str:
    kept = textwrap.shorten(name, 60, placeholder=" …")
    return f"{kept:<40} {value:>20}" if len(kept) <= 40 else f"{kept} {value}"
