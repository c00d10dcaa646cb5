"""What a simulated world has shown, once it is at rest: the laws, the sometimes-properties, holds that were needless.

The laws say what never happens. The sometimes-properties say what must have happened at least once in a campaign, or
the simulation has not been where it matters. A hold is needless if the stored contract would have allowed a safe
answer without a person; that is judged here from the log and the clocks, without the rules.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tidefast.protocol.laws import Violation
from tidefast.protocol.records import Now
from tidefast.protocol.trace import HARMLESS, Facts, Moment, Trace, number, text
from tidefast.sim.acceptance import unanswered
from tidefast.sim.audit import AuditReport, audit
from tidefast.sim.simulate import Mark, Simulation

PROMISED = frozenset(("committed", "compensated"))
SOMETIMES = (
    "late receipt recorded after the lease had moved",
    "call in flight across a takeover",
    "receipt of a dead epoch joined by its successor",
    "doubt resolved by a replay",
    "refused replay settled the older attempts",
    "attempt proved never sent, and sent again",
    "step restated in other words before it was ever sent",
    "step held: the provider knows no keys",
    "step held: the key may be forgotten",
    "step held: an answer that no contract lists",
    "undo refused and held",
    "undo begun under one epoch and finished under another",
    "run failing while an effect is open",
    "checkpoint after a takeover",
    "authority died between intent and answer",
    "lease outlived a restart of the authority",
    "call of a dead epoch refused",
    "checkpoint of a dead epoch refused",
    "checkpoint refused over an open effect",
    "other words for a stored call refused",
    "verb repeated and answered as the first time",
    "duplicate arrives while the first is in flight",
    "duplicate arrives after the first was answered",
    "provider recognised a key",
    "provider was still busy with the key",
    "frozen run thawed (no_progress)",
    "person says applied",
    "person says not_applied",
    "person says refused",
    "person says compensated",
    "verdict refused: too early or the step has moved",
)


@dataclass
class WorldResult:
    """One world's figures, small enough to be sent between processes."""

    seed: int
    hours: float
    log_hash: str = ""
    calls: int = 0
    sent: int = 0
    faulted_steps: int = 0
    interleavings: int = 0
    audit: AuditReport = field(default_factory=AuditReport)
    rejected: int = 0
    rejected_unanswered: int = 0
    orders: set[int] = field(default_factory=set)
    sometimes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    needless: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.audit.is_ok and not self.rejected_unanswered and not self.needless


def judge_world(world: Simulation, seed: int) -> WorldResult:
    """Everything that one world has shown."""
    result = WorldResult(seed, world.hours, calls=world.calls, sent=world.providers.truth.sent)
    marks: dict[str, list[Mark]] = {}
    for mark in world.marks:
        marks.setdefault(mark.run_id, []).append(mark)
    result.sometimes.update(world.seen)
    truth = world.providers.truth
    result.sometimes["provider recognised a key"] += truth.replays
    result.sometimes["provider was still busy with the key"] += truth.collisions

    def on_trace(trace: Trace) -> None:
        run_id = trace.history.run_id
        for moment in trace.moments:
            result.sometimes.update(_seen_at(moment))
            why = _needless(world, trace, moment)
            if why:
                result.needless.append(why)
        result.faulted_steps += sum(
            1 for step in trace.steps.values() if step.is_mutating and (run_id, step.step_id) in world.faulted
        )
        if run_id in marks:
            result.interleavings += 1
            result.orders.add(order_of(trace, marks[run_id]))

    acks = {run_id: tuple(found) for run_id, found in world.acks.items()}
    result.audit = audit(world.store, truth.ledger(), acks=acks, on_trace=on_trace)
    for violation in (*world.violations, *_broken_promises(world)):
        result.audit.add(violation)
    result.rejected = len(world.rejected)
    result.rejected_unanswered = unanswered(world.store, world.rejected)
    result.faults = world.faults
    world.log.update(repr((sorted(truth.net.items()), sorted(truth.net_by_step.items()), world.calls)).encode())
    result.log_hash = world.log.hexdigest()
    return result


def _broken_promises(world: Simulation) -> Iterator[Violation]:
    """A worker was told that a step was committed: then it is, for ever."""
    for run_id, step_id in world.promises:
        found = world.store.load_head(run_id)
        step = None if found is None else world.store.load_step(found[0], step_id)
        if step is None or step.state not in PROMISED:
            state = "nothing" if step is None else step.state
            yield Violation("lost_ack", run_id, step_id, 0, f"its worker was told of a receipt, the store says {state}")


def order_of(trace: Trace, marks: list[Mark]) -> int:
    """A number for the order of a run's events and faults: steps and epochs by their first appearance, no times."""
    names: dict[object, int] = {}
    parts: list[tuple[int, int, str, str | None, int]] = [
        (m.event.at_ms, 1, m.event.kind, m.event.step_id, m.event.epoch) for m in trace.moments
    ]
    parts += [(mark.at_ms, 0, mark.kind, mark.step_id, 0) for mark in marks]
    told = [
        f"{kind} {names.setdefault(step, len(names))} {names.setdefault(epoch, len(names))}"
        for _, _, kind, step, epoch in sorted(parts, key=lambda part: part[:2])
    ]
    return int.from_bytes(hashlib.blake2b("\n".join(told).encode(), digest_size=8).digest(), "big")


def _seen_at(moment: Moment) -> Iterator[str]:
    """The sometimes-properties that show at one event."""
    kind, step, event = moment.event.kind, moment.step, moment.event
    if kind == "lease_granted":
        flying = [sent for each in moment.open.values() for sent in _flying(each, event.at_ms)]
        yield from ("call in flight across a takeover" for _ in flying)
    elif kind == "step_fenced" and step is not None:
        yield from _seen_sending(moment, step)
    elif kind in ("step_committed", "step_applied", "late_receipt") and step is not None:
        yield from _seen_receipt(moment, step)
    elif kind == "step_rejected" and step is not None:
        if any(each.state in ("doubted", "lost") for each in step.attempts[:-1]):
            yield "refused replay settled the older attempts"
    elif kind == "step_doubted" and moment.data.get("is_lost") is True:
        yield "authority died between intent and answer"
    elif kind == "step_held":
        yield {
            "no_key": "step held: the provider knows no keys",
            "key_window": "step held: the key may be forgotten",
            "unlisted_answer": "step held: an answer that no contract lists",
            "undo_refused": "undo refused and held",
            "lost_commits": "step held: lost commits may hold a sending",
        }.get(text(moment.data, "reason"), "step held: another reason")
    elif kind == "run_failing":
        yield "run failing while an effect is open"
    elif kind == "checkpoint_saved" and moment.run.newest > 1:
        yield "checkpoint after a takeover"


def _flying(step: Facts, at_ms: int) -> Iterator[object]:
    return (sent for sent in step.attempts if sent.state == "out" and at_ms < sent.deadline_ms)


def _seen_sending(moment: Moment, step: Facts) -> Iterator[str]:
    if step.attempts and all(each.state == "unsent" for each in step.attempts):
        yield "attempt proved never sent, and sent again"
        if "tool" in moment.data and text(moment.data, "call_digest") != step.call_digest:
            yield "step restated in other words before it was ever sent"


def _seen_receipt(moment: Moment, step: Facts) -> Iterator[str]:
    kind, attempt = moment.event.kind, number(moment.data, "attempt")
    sent = step.attempt(attempt)
    if kind == "step_committed" and "attempt" not in moment.data:
        yield "receipt of a dead epoch joined by its successor"
    if sent is not None and kind != "step_committed":
        yield "late receipt recorded after the lease had moved"
    if sent is not None and attempt > 1 and any(each.state not in HARMLESS for each in step.attempts[: attempt - 1]):
        yield "doubt resolved by a replay"
    if kind == "step_committed" and step.undo_of is not None and step.attempts[0].epoch < moment.event.epoch:
        yield "undo begun under one epoch and finished under another"


def _needless(world: Simulation, trace: Trace, moment: Moment) -> str:
    """Why a hold was needless; empty for any other event, and for a hold that had to be."""
    step = moment.step
    if moment.event.kind != "step_held" or step is None:
        return ""
    place, reason = (trace.history.run_id, step.step_id), text(moment.data, "reason")
    where = f"run {place[0]}, step {place[1]}, event {moment.event.seq}: held ({reason})"
    contract = trace.history.contracts[step.contract]
    now = world.hold_times.get((trace.history.run_id, moment.event.seq))
    truth = world.providers.truth
    match reason:
        case "no_key" if not contract.dedups:
            return ""
        case "key_window" if contract.dedups and (now is None or not _surely_remembered(step, now, contract)):
            return ""
        case "unlisted_answer" if place in truth.unlisted:
            return ""
        case "undo_refused" if place in truth.refused:
            return ""
    return f"{where}, though its contract allowed a safe answer"


def _surely_remembered(step: Facts, now: Now, contract: object) -> bool:
    """Whether one more attempt would have found the key remembered, by both clocks."""
    first = next((each for each in step.attempts if each.state != "unsent"), None)
    if first is None:
        return True
    ttl, margin, timeout = (getattr(contract, name) for name in ("key_ttl_ms", "margin_ms", "timeout_ms"))
    is_wall_sound = now.wall_ms + margin >= now.mark_ms
    elapsed = max(now.ms - first.at_ms, now.wall_ms - first.wall_ms)
    return bool(is_wall_sound and elapsed + timeout + margin < ttl)
