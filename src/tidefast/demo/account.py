"""The account of a finished desk: the providers' ledgers against the log, what is held, and the acceptance lines."""

import json
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tidefast.protocol.trace import SETTLED, Facts, Trace, text
from tidefast.sim.audit import AuditReport, audit
from tidefast.sim.books import Books, Effect, compare, read_effects, read_traces, to_ledger
from tidefast.sim.injector import Injector
from tidefast.sim.report import Report, from_audit, sentence, to_json
from tidefast.stores.base import Store

TOOLS: Mapping[str, str] = {"card": "refund", "mail": "send_mail"}
PREEMPTED_LEAST = 1 / 3
THE_FOUR = ("double_apply", "stale_checkpoint", "dead_commit")
WIDTH = 108


@dataclass(frozen=True, slots=True)
class Hops:
    """The model's own bill against the log. `extra`: askings that were billed without an answer that counts."""

    billed: int
    answers: int
    extra: int
    uncounted: Sequence[str]  # steps that cost more askings than the log knows

    @classmethod
    def of(cls, bill: Sequence[Mapping[str, Any]], traces: Mapping[str, Trace]) -> "Hops":
        billed = Counter(str(row["step"]) for row in bill)
        steps = {
            f"{run}/{step.step_id}": step
            for run, trace in traces.items()
            for step in trace.steps.values()
            if step.effect == "model"
        }
        counted = {name: sum(sent.state != "unsent" for sent in step.attempts) for name, step in steps.items()}
        uncounted = [name for name, count in sorted(billed.items()) if count > counted.get(name, 0)]
        answers = sum(step.state == "committed" for step in steps.values())
        extra = sum(max(0, count - 1) for count in billed.values())
        return cls(billed.total(), answers, extra, uncounted)


@dataclass(frozen=True, slots=True)
class Account:
    """Everything that the desk can say once it has closed."""

    audit: AuditReport
    report: Report
    traces: Mapping[str, Trace]
    books: Mapping[str, Books]  # by provider
    outcomes: Mapping[str, str]  # by run: refunded, refused: …, held, or what is wrong
    mutating: int
    preempted: int
    late_answers: int
    crashes: Sequence[str]
    needs_faults: bool
    hops: Hops = Hops(0, 0, 0, ())

    @property
    def share(self) -> float:
        return self.preempted / self.mutating if self.mutating else 0.0

    def problems(self) -> Iterator[str]:
        """Why the exit code is not 0, in sentences."""
        for violation in self.report.named:
            yield sentence(violation)
        if self.report.rejected_unanswered:
            yield f"{self.report.rejected_unanswered} calls were rejected as stale and never answered"
        for name, books in self.books.items():
            if not books.is_ok:
                yield f"the ledger of the {name} provider doesn't fit the log"
        for step in self.hops.uncounted:
            yield f"the model billed {step} more often than the log knows"
        for run, outcome in self.outcomes.items():
            if not is_good(outcome):
                yield f"{run}: {outcome}"
        if self.needs_faults and self.share < PREEMPTED_LEAST:
            yield f"only {self.preempted} of {self.mutating} mutating steps met a preemption; a third was wanted"
        yield from self.crashes


def is_good(outcome: str) -> bool:
    return outcome == "refunded" or outcome.startswith(("refused: ", "held", "failed: "))


def settle_account(
    store: Store,
    injector: Injector,
    ledgers: Mapping[str, Sequence[Mapping[str, Any]]],
    runs: Sequence[str],
    seed: int | None,
    bill: Sequence[Mapping[str, Any]] = (),
) -> Account:
    """Read the closed store and judge it against the ledgers and what the injector saw."""
    effects = {name: read_effects(rows) for name, rows in ledgers.items()}
    everything: list[Effect] = [effect for found in effects.values() for effect in found]
    audited = audit(store, to_ledger(everything))
    traces: dict[str, Trace] = {str(trace.history.run_id): trace for trace in read_traces(store)}
    books = {name: compare(found, traces.values(), {TOOLS[name]}) for name, found in effects.items()}
    rejected = [name for name, point in injector.late.items() if point == "gateway.before_intent"]
    report = from_audit(
        audited,
        interleavings=len(injector.orders()),
        rejected=len(rejected),
        rejected_unanswered=sum(1 for name in rejected if not is_answered(traces, *name)),
        seed=seed,
        faults=dict(injector.faults),
    )
    mutating = {(run, str(step.step_id)) for run, trace in traces.items() for step in mutating_steps(trace)}
    return Account(
        audit=audited,
        report=report,
        traces=traces,
        books=books,
        hops=Hops.of(bill, traces),
        outcomes={run: outcome_of(traces.get(run)) for run in runs},
        mutating=len(mutating),
        preempted=len(mutating & injector.preempted),
        late_answers=len(injector.late) - len(rejected),
        crashes=list(injector.crashes),
        needs_faults=bool(injector.plan.menus),
    )


def mutating_steps(trace: Trace) -> list[Facts]:
    return [step for step in trace.steps.values() if step.is_mutating]


def is_answered(traces: Mapping[str, Trace], run: str, step: str, dead_epoch: int) -> bool:
    """Whether a rejected call's step was asked for again under a newer epoch, is settled, or ended with its run."""
    trace = traces.get(run)
    if trace is None:
        return False
    facts = next((each for each in trace.steps.values() if each.step_id == step), None)
    return bool(trace.run.end) or (
        facts is not None and (facts.state in SETTLED or facts.state == "held" or facts.epoch > dead_epoch)
    )


def outcome_of(trace: Trace | None) -> str:
    """How a ticket ended, from its log."""
    if trace is None:
        return "the authority has no run of this ticket"
    for moment in trace.of("run_completed"):
        result = moment.data.get("result")
        return str(result.get("outcome", "")) if isinstance(result, dict) else "completed without an outcome"
    for moment in trace.of("run_failed"):
        return f"failed: {text(moment.data, 'error')}"
    held = [str(step.step_id) for step in trace.steps.values() if step.state == "held"]
    if held:
        return f"held: {', '.join(held)}"
    return f"frozen: {trace.run.frozen}" if trace.run.frozen else "neither completed, failed nor held"


# --- in words -------------------------------------------------------------------------------------------------------


def tell_tickets(account: Account) -> Iterator[str]:
    kinds = Counter(
        outcome.partition(":")[0] if is_good(outcome) else "NOT DONE" for outcome in account.outcomes.values()
    )
    yield f"{len(account.outcomes)} tickets: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    reasons = Counter(outcome for outcome in account.outcomes.values() if outcome.startswith(("refused", "failed")))
    for reason, count in sorted(reasons.items()):
        yield f"  {count} x {reason}"


def tell_books(account: Account) -> Iterator[str]:
    """Each provider's count beside the log's."""
    words = {"card": ("refunds", "the card provider applied"), "mail": ("mails", "the mail service sent")}
    for name, books in account.books.items():
        things, said = words[name]
        landed = sum(entry.net for entry in books.open)
        committed = books.count("committed", "applied")
        yield f"{things:8}{said} {books.applied}; the log has {committed} committed" + (
            f" and {len(books.open)} held, of which {landed} went out" if books.open else ""
        )
        yield (
            f"{'':8}doubles {len(books.doubles)}, missing {len(books.missing)}, not booked {len(books.unbooked)},"
            f" from nowhere {len(books.strangers)}; refused for good {books.count('rejected')}"
        )
        for label, entries in (("DOUBLE", books.doubles), ("MISSING", books.missing), ("NOT BOOKED", books.unbooked)):
            for entry in entries:
                yield f"{'':8}{label}: {entry.run} {entry.step} ({entry.key}): {entry.net} effects, log: {entry.state}"
        for effect in books.strangers:
            yield f"{'':8}FROM NOWHERE: {effect.name}, key {effect.key or '-'}, step {effect.run}/{effect.step}"


def tell_hops(account: Account) -> Iterator[str]:
    """What the model would be paid for, beside the answers that the log holds."""
    hops = account.hops
    if hops.billed:
        yield (
            f"answers the model billed {hops.billed} askings; the log has {hops.answers} committed"
            f" and {hops.extra} billed beside them, each of them counted"
        )


@dataclass(frozen=True, slots=True)
class Held:
    """A step that waits for a person: what the log and the provider say about it, and the command that settles it."""

    name: str
    doubt: str
    evidence: str
    command: str


def held_steps(account: Account, store: Path) -> Iterator[Held]:
    mails = account.books["mail"]
    for run, trace in account.traces.items():
        for step in trace.steps.values():
            if step.state != "held":
                continue
            entry = next((each for each in mails.open if (each.run, each.step) == (run, step.step_id)), None)
            verdict, found = "not_applied --looked 0s", "no such mail: it never went out; the run will send it"
            if entry is not None and entry.effects:
                verdict, found = "applied", f"mail {entry.effects[0].name} to this customer: it went out"
            command = f"tidefast resolve {run} {step.step_id} {verdict} --expect-attempts {len(step.attempts)}"
            command += f" --note 'seen in the outbox' --store {shlex.quote(str(store))}"
            yield Held(
                f"{run} {step.step_id}", _doubt(trace, step), f"the mail service's outbox shows {found}", command
            )


def tell_held(account: Account, store: Path) -> Iterator[str]:
    """Every held step: the evidence, and the command that settles it."""
    for held in held_steps(account, store):
        yield f"{held.name}: {held.doubt}"
        yield f"  {held.evidence}"
        yield f"  {held.command}"


def _doubt(trace: Trace, step: Facts) -> str:
    """What the log says about a doubt: when it went out, and why nobody knows."""
    sent = step.attempts[-1]
    clock = datetime.fromtimestamp(sent.at_ms / 1_000, UTC).strftime("%H:%M:%S")
    doubts = [moment.data for moment in trace.of("step_doubted") if moment.event.step_id == step.step_id]
    is_lost = any(data.get("is_lost") is True or text(data, "reason") == "lost" for data in doubts)
    why = "the authority died during the call" if is_lost else "no answer came"
    return f"held. Attempt {sent.number} was let out at {clock} UTC, {why}, and this service knows no keys"


def tell_acceptance(account: Account) -> Iterator[str]:
    """The rules that must hold, each with its denominator."""
    report, counts = account.report, account.report.counts()
    committed = sum(1 for trace in account.traces.values() for m in trace.of("step_committed") if _is_effect(m.step))
    checkpoints = sum(1 for trace in account.traces.values() for _ in trace.of("checkpoint_saved"))
    yield (
        f"double applies {counts['double_apply']} of {account.mutating} mutating steps"
        f" ({account.preempted} preempted, {account.share:.0%})"
    )
    yield f"accepted stale checkpoints {counts['stale_checkpoint']} of {checkpoints} checkpoints"
    yield (
        f"commits under a dead epoch {counts['dead_commit']} of {committed} commits"
        f" (providers' answers that came after their epoch had died: {account.late_answers})"
    )
    yield f"rejected calls unanswered {report.rejected_unanswered} of {report.rejected} late calls"
    others = {law: count for law, count in counts.items() if law not in THE_FOUR}
    yield (
        f"other laws broken {sum(others.values())} of {len(others)}, judged over {report.events} events"
        f" in {report.interleavings} distinct orders of events with faults"
    )


def _is_effect(step: Facts | None) -> bool:
    return step is not None and step.is_mutating


def tell_faults(account: Account) -> Iterator[str]:
    for name, count in sorted(account.report.faults.items()):
        yield f"{count:3} x {name}"


def tell_problems(account: Account) -> Iterator[str]:
    for problem in account.problems():
        yield from textwrap.wrap(problem, WIDTH, initial_indent="NOT OK: ", subsequent_indent="  ")


def json_report(account: Account, store: Path, seconds: float) -> str:
    """The report of `sim.report`, with what the desk adds."""
    record: dict[str, Any] = json.loads(to_json(account.report))
    problems = list(account.problems())
    record["ok"] = not problems
    record["preempted_steps"] = account.preempted
    record["late_answers"] = account.late_answers
    record["seconds"] = round(seconds, 1)
    record["tickets"] = dict(account.outcomes)
    record["problems"] = problems
    record["settle"] = [held.command for held in held_steps(account, store)]
    hops = account.hops
    record["model"] = {"billed": hops.billed, "answers": hops.answers, "extra": hops.extra}
    record["books"] = {
        name: {
            "applied": books.applied,
            "committed": books.count("committed", "applied"),
            "rejected": books.count("rejected"),
            "open": len(books.open),
            "doubles": len(books.doubles),
            "missing": len(books.missing),
            "unbooked": len(books.unbooked),
            "strangers": len(books.strangers),
        }
        for name, books in account.books.items()
    }
    return json.dumps(record, ensure_ascii=True)
