"""The auditor: folds every log of a store again, without the rules, and says what doesn't hold.

For each run: the laws, the chain, and the store's projections (head and steps) against the log, which is the truth. A
projection that says something else is a breach of `altered_log`. Effects that a provider's ledger counts and no log
knows never passed the gateway: `unlogged_effect`. One run is held in memory at a time. The store may be in use: a run
that moves while it is read is read again, and if it never rests its log alone is judged. A ledger is a picture of one
moment: judge by it a store that is at rest.

Contracts are part of the evidence: one that an intent names and the store has lost, or holds with other words, is a
breach too. A store that was rewritten whole contradicts nothing but an anchor (`anchor.py`) that was taken before.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidefast.protocol.canonical import digest
from tidefast.protocol.events import Event, first_broken
from tidefast.protocol.ids import RunId, StepId, WorkspaceId
from tidefast.protocol.laws import LAWS, Ack, Violation
from tidefast.protocol.records import RunHead, Step, WorkspaceHead
from tidefast.protocol.trace import INTENTS, SETTLED, Facts, Trace, fold
from tidefast.protocol.workspace_laws import Key, WorkspaceHistory, committed_writes, judge_workspace
from tidefast.sim.history import Ledger, Reader
from tidefast.stores.base import Store

if TYPE_CHECKING:
    from tidefast.sim.anchor import Anchor

NAMED_MAX = 1_000  # violations that are kept with their sentences; all are counted
TRIES = 5  # readings of a run that moves
PAGE_STEPS = 500


@dataclass(slots=True)
class AuditReport:
    """What was looked at and what was found. `violations` are the first ones; `counts` has them all, by law."""

    runs: int = 0
    events: int = 0
    mutating_steps: int = 0
    preemptions: int = 0  # epochs that something else than their holder ended
    held: int = 0  # steps that a person was asked about
    workspaces: int = 0
    moving: int = 0  # runs whose projections could not be compared, because they never rested
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAWS, 0))
    violations: list[Violation] = field(default_factory=list)
    first_bad: dict[RunId, int] = field(default_factory=dict)  # of each altered log: its first event that is not true
    has_ledger: bool = False

    @property
    def is_ok(self) -> bool:
        return not any(self.counts.values())

    def add(self, violation: Violation) -> None:
        self.counts[violation.law] += 1
        if len(self.violations) < NAMED_MAX:
            self.violations.append(violation)


def audit(
    store: Store,
    ledger: Ledger | None = None,
    *,
    acks: Mapping[RunId, tuple[Ack, ...]] | None = None,
    now_ms: int = 0,
    anchors: "Sequence[Anchor]" = (),
    on_trace: Callable[[Trace], None] | None = None,
) -> AuditReport:
    """Judge every run of a store. `now_ms` is the authority's clock, if events dated after it should be named.

    `on_trace` is given each run's folded log, for whoever wants to know more than the laws do. Raises `EvidenceRefused`
    for an anchor that can't be trusted.
    """
    report = AuditReport(has_ledger=ledger is not None)
    reader = Reader(store, ledger, acks)
    resting = {head.workspace_id: head.seq for head in _workspaces(store)}
    committed: dict[WorkspaceId, dict[Key, int]] = {}

    def each(trace: Trace) -> None:
        for name, key, seq in committed_writes(trace.history.run_id, trace.history.events):
            committed.setdefault(name, {})[key] = seq
        if on_trace is not None:
            on_trace(trace)

    for run_id in reader.run_ids():
        _audit_run(store, reader, run_id, now_ms, report, each)
    for head in _workspaces(store):
        is_at_rest = resting.get(head.workspace_id) == head.seq and not report.moving
        _audit_workspace(store, head, committed.get(head.workspace_id, {}) if is_at_rest else None, report)
    for run_id, step_id, name, count in reader.strays():
        why = f"the provider counts {count} for {name}, which never passed this gateway"
        report.add(Violation("unlogged_effect", run_id, step_id, 0, why))
    if anchors:
        from tidefast.sim.anchor import against_anchors  # only here: signatures take a while to import

        for violation in against_anchors(store, anchors):
            # A broken chain has named the event itself; an anchor knows only how far a log was true.
            if violation.run_id not in report.first_bad:
                report.first_bad[violation.run_id] = violation.seq
                report.add(violation)
    return report


def _workspaces(store: Store) -> Iterator[WorkspaceHead]:
    after = ""
    while page := store.workspaces(after, PAGE_STEPS):
        yield from page
        after = page[-1].workspace_id


def _audit_workspace(
    store: Store, head: WorkspaceHead, committed: Mapping[Key, int] | None, report: AuditReport
) -> None:
    """Judge a workspace's log, and its content against it. Of one that moved meanwhile only the log is judged."""
    found = store.load_workspace(head.workspace_id)
    if found is None:
        return
    events: list[Event] = []
    digests: list[str] = []
    while page := store.load_events(found[0], len(events), PAGE_STEPS):
        events += [stored.event for stored in page]
        digests += [stored.digest for stored in page]
    report.workspaces += 1
    report.events += len(events)
    whole = (head.digest, head.seq, head.log_index, head.chain) if committed is not None else (None,) * 4
    history = WorkspaceHistory(head.workspace_id, tuple(events), tuple(digests), committed, *whole)
    for violation in (*judge_workspace(history), *_compare_content(store, found[0], head, events, digests, committed)):
        report.add(violation)


def _compare_content(
    store: Store,
    key: int,
    head: WorkspaceHead,
    events: Sequence[Event],
    digests: Sequence[str],
    committed: Mapping[Key, int] | None,
) -> Iterator[Violation]:
    """The stored content of the newest index against the fold of all deltas."""
    if committed is None or first_broken(zip(events, digests, strict=True)):
        return
    folded: dict[str, object] = {}
    for event in events:
        if event.kind != "write_committed":
            continue
        data = json.loads(event.data_json)
        delta = data["delta"] if "delta" in data else json.loads(events[data["write_seq"] - 1].data_json)["delta"]
        for path, entry in delta.items():
            folded.pop(path, None)
            if entry is not None:
                folded[path] = entry
    stored = {path: list(entry) for path, entry in store.manifest(key, head.log_index, "", len(folded) + 1)}
    if stored != folded:
        why = f"the content kept of workspace {head.workspace_id} is not the fold of its writes"
        yield Violation("altered_log", RunId(head.workspace_id), None, len(events), why)


def _audit_run(
    store: Store,
    reader: Reader,
    run_id: RunId,
    now_ms: int,
    report: AuditReport,
    on_trace: Callable[[Trace], None] | None,
) -> None:
    for _ in range(TRIES):
        reading = reader.read(run_id, now_ms)
        steps = {} if reading is None else {step.step_id: step for step in _steps(store, reading.run_key)}
        after = store.load_head(run_id)
        if reading is not None and after is not None and after[1].seq == reading.head.seq:
            trace = fold(reading.history)
            judge_log(report, trace, reading.history.events, store)
            if on_trace is not None:
                on_trace(trace)
            for violation in (*_compare_head(trace, reading.head), *_compare_steps(trace, steps)):
                report.add(violation)
            return
    report.moving += 1
    if reading is not None:
        # The log may be longer than the head that was read before it.
        history = reading.history._replace(head_seq=None, head_digest=None)
        judge_log(report, fold(history), history.events, store)


def judge_log(report: AuditReport, trace: Trace, events: Sequence[Event], store: Store | None = None) -> None:
    """Count a log and judge it by every law. Without a store its contracts are those of its history."""
    _count(report, trace)
    first = _first_bad(trace, events)
    if first:
        report.first_bad[trace.history.run_id] = first
    for seq, step_id, why in _lost_contracts(trace, events, store):
        report.add(Violation("altered_log", trace.history.run_id, step_id, seq, why))


def _first_bad(trace: Trace, events: Sequence[Event]) -> int:
    """The first event that is not the one that was written, as far as the log alone can tell; 0 if it can't."""
    history = trace.history
    if trace.moments and trace.moments[0].data.get("run") != history.run_id:
        return 1  # another run's beginning, whose own chain may be whole
    first = first_broken(zip(events, (*history.digests, *("",) * len(events)), strict=False))
    is_cut = history.head_seq is not None and history.head_seq > len(events)
    return first or (len(events) + 1 if is_cut else 0)


def named_contracts(events: Iterable[Event]) -> Iterator[tuple[str, Event]]:
    """The digest of each contract that an intent names, with the event."""
    for event in events:
        if event.kind not in INTENTS:
            continue
        try:
            data: object = json.loads(event.data_json)
        except (ValueError, RecursionError):
            continue
        name = data.get("contract") if isinstance(data, dict) else None
        if isinstance(name, str) and name:
            yield name, event


def _lost_contracts(
    trace: Trace, events: Sequence[Event], store: Store | None
) -> Iterator[tuple[int, StepId | None, str]]:
    """Intents whose contract is gone or says something else: each contract once, where it is named first."""
    seen = set(trace.history.contracts)
    for name, event in named_contracts(events):
        if name in seen:
            continue
        seen.add(name)
        text = None if store is None else store.load_contract(name)
        if text is None:
            yield event.seq, event.step_id, f"the contract {name} that its intent names is gone"
        elif digest(text) != name:
            yield event.seq, event.step_id, f"the contract {name} that its intent names was altered"


def _steps(store: Store, run_key: int) -> Iterator[Step]:
    after: StepId | None = None
    while True:
        page = store.load_steps(run_key, after, PAGE_STEPS)
        yield from page
        if len(page) < PAGE_STEPS:
            return
        after = page[-1].step_id


def _count(report: AuditReport, trace: Trace) -> None:
    report.runs += 1
    report.events += len(trace.moments)
    report.mutating_steps += sum(1 for step in trace.steps.values() if step.is_mutating)
    report.preemptions += sum(1 for _ in trace.of("lease_lapsed", "lease_preempted"))
    report.held += sum(1 for step in trace.steps.values() if step.was_held)
    for law in LAWS.values():
        for violation in law(trace):
            report.add(violation)


def _compare_head(trace: Trace, head: RunHead) -> Iterator[Violation]:
    """The store's head against the log, fact by fact. Seq and digest are compared by law 18 itself."""
    run = trace.run
    saved = max(trace.of("checkpoint_saved"), key=lambda moment: moment.event.seq, default=None)
    facts: tuple[tuple[str, object, object], ...] = (
        ("epoch", head.epoch, run.newest),
        ("is_live", head.is_live, bool(run.live)),
        ("holder", head.holder, run.holder),
        ("checkpoint", head.checkpoint, run.checkpoint),
        ("checkpoint_seq", head.checkpoint_seq, 0 if saved is None else saved.event.seq),
        ("frozen", head.frozen, run.frozen),
        ("paused", head.paused, run.paused),
        ("ending", head.ending, run.ending),
        ("to_undo", head.to_undo, run.to_undo),
        ("end", head.end, run.end),
        ("unsettled", sorted(head.unsettled), sorted(s.step_id for s in trace.steps.values() if s.is_unsettled)),
    )
    for name, stored, logged in facts:
        if stored != logged:
            why = f"the head says {name} {stored!r}, the log says {logged!r}"
            yield Violation("altered_log", trace.history.run_id, None, head.seq, why)


def _compare_steps(trace: Trace, stored: Mapping[StepId, Step]) -> Iterator[Violation]:
    run_id = trace.history.run_id
    for step_id in sorted(trace.steps.keys() | stored.keys()):
        logged, row = trace.steps.get(step_id), stored.get(step_id)
        if logged is None:
            yield Violation("altered_log", run_id, step_id, 0, "the store has a step that the log doesn't know")
        elif row is None:
            why = "the log has a step that the store doesn't know"
            yield Violation("altered_log", run_id, step_id, logged.since_seq, why)
        else:
            for name, says, truth in _step_facts(row, logged):
                if says != truth:
                    why = f"the step's row says {name} {says!r}, the log says {truth!r}"
                    yield Violation("altered_log", run_id, step_id, logged.since_seq, why)


def _step_facts(row: Step, logged: Facts) -> Iterator[tuple[str, object, object]]:
    yield "state", row.state, logged.state
    yield "key", row.key, logged.key
    yield "call_digest", row.call_digest, logged.call_digest
    yield "attempts", len(row.attempts), len(logged.attempts)
    yield "closed_by", row.closed_by, logged.closed_by
    if logged.state in SETTLED:
        yield "settled_seq", row.settled_seq, logged.settled_seq
    if logged.state == "committed":
        yield "epoch", row.epoch, logged.epoch
