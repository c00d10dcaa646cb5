"""What must hold: the shared laws at each event, and what no log can show.

The predicates of `protocol/laws.py` judge the events of one decision against a fold that starts from the books before
it. That fold knows nothing of the rules, and must arrive where `evolve` arrives. Beyond the log: every worker's verb
under a right that is not live is refused and writes nothing, an accepted verb told twice is answered alike, nothing is
sent without its intent, and the books are true to the provider's own count.
"""

from collections.abc import Mapping

from tidefast.protocol import laws
from tidefast.protocol.commands import (
    Admit,
    AnswerProbe,
    Command,
    Compensate,
    Complete,
    Fail,
    Lapse,
    MarkLost,
    OperatorVerb,
    Release,
    Resolve,
    Settle,
)
from tidefast.protocol.contracts import Contract
from tidefast.protocol.events import Event
from tidefast.protocol.ids import Epoch, StepId, step_key
from tidefast.protocol.records import HAD_NO_EFFECT, Right, RunHead, Step
from tidefast.protocol.recovery import may_be_lost
from tidefast.protocol.trace import Facts, History, RunFacts, Sending, Start, Trace, fold
from tidefast.protocol.verdicts import Answer, Decision, Done, Granted, Refused, Send, Settled, Verdict, Wait
from tidefast.sim.check.world import (
    FIRST_OF_RESTORED,
    LANDING,
    NAMESPACE,
    NOW,
    PASSED,
    READY,
    RUN,
    UNHEARD,
    WIRE,
    Book,
    Broken,
    Shape,
    Truths,
)

# Judged at commit: no token, so no promise to answer alike.
OF_OPERATORS = (AnswerProbe, Lapse, MarkLost, OperatorVerb, Resolve)
AFTER_THE_TIME = frozenset(("stale_epoch", "run_ended", "lease_lapsed"))
# Which laws an event of a kind can break; the others have nothing to say of it.
EVERY = ("unfenced_verb", "forged_right", "time_allowed", "lost_fact", "unlogged_effect")
BY_KIND: Mapping[str, tuple[str, ...]] = {
    "step_fenced": ("double_apply", "unstable_key", "changed_bytes", "overlap", "orphan", "reissued_epoch"),
    "step_presumed": ("unstable_key", "changed_bytes"),
    "step_committed": ("dead_commit",),
    "step_compensated": ("double_apply", "stuck"),
    "undo_begun": ("double_apply", "stuck", "orphan"),
    "checkpoint_saved": ("stale_checkpoint",),
    "lease_granted": ("stuck", "reissued_epoch"),
    "run_frozen": ("stuck",),
    "run_completed": ("orphan",),
    "run_failed": ("orphan", "superseded_as_failed"),
    "run_failing": ("superseded_as_failed", "orphan"),
    "run_cancelling": ("orphan",),
    "run_cancelled": ("orphan",),
    "step_rejected": ("doubt_as_failure", "orphan", "superseded_as_failed", "stuck"),
    "step_withdrawn": ("doubt_as_failure", "orphan", "superseded_as_failed"),
    "step_refused": ("doubt_as_failure", "superseded_as_failed"),
    "step_unsent": ("doubt_as_failure", "superseded_as_failed"),
    "step_held": ("doubt_as_failure", "stuck"),
    "step_resolved": ("stuck",),
}


def is_live(book: Book, right: Right) -> bool:
    """The fence, said a second time and without the clock: the newest epoch, not ended, in its holder's hands."""
    head = book.head
    return head.is_live and (right.epoch, right.holder) == (head.epoch, head.holder)


# --- the log


def start_of(book: Book) -> Start:
    """What a log would have come to that led to these books."""
    steps = {step.step_id: _facts(step) for step in book.steps if step is not None}
    still = {name: facts for name, facts in steps.items() if facts.is_unsettled or any(facts.on_the_wire(NOW))}
    newest = book.head.epoch
    since = FIRST_OF_RESTORED if newest > FIRST_OF_RESTORED else 0
    granted = {Epoch(epoch): 0 for epoch in (*((1, 2, 3) if since else ()), *range(since + 1, newest + 1))}
    newest = max(newest, FIRST_OF_RESTORED) if book.window else newest  # lost commits may hold any older grant
    return Start(_run_facts(book.head)._replace(newest=newest), steps, still, granted)


def _run_facts(head: RunHead) -> RunFacts:
    return RunFacts(
        live=head.epoch if head.is_live else Epoch(0),
        newest=head.epoch,
        holder=head.holder,
        expires_at_ms=head.expires_at_ms,
        checkpoint=head.checkpoint,
        frozen=head.frozen,
        paused=head.paused,
        ending=head.ending,
        to_undo=head.to_undo,
        end=head.end,
        grants=head.grants_without_progress,
        last_ms=PASSED,
        is_recovered=head.recovery is not None,
    )


def _facts(step: Step) -> Facts:
    sent = tuple(
        Sending(a.number, 0, a.epoch, a.admitted_ms, a.admitted_wall_ms, a.deadline_ms, a.state) for a in step.attempts
    )
    return Facts(
        step_id=step.step_id,
        state=step.state,
        tool=step.tool,
        effect=step.effect,
        call_digest=step.call_digest,
        key=step.key,
        contract=step.contract,
        dedups=step.dedups,
        attempts=sent,
        intent_seq=step.intent_seq,
        epoch=step.epoch,
        undo_of=step.undo_of,
        closed_by=step.closed_by,
        receipts=frozenset((step.receipt_seq,)) if step.receipt_seq else frozenset(),
        settled_seq=step.settled_seq,
    )


def judge_events(start: Start, events: tuple[Event, ...], after: Book, contracts: Mapping[str, Contract]) -> None:
    """The shared laws over the events of one decision; and the fold and `evolve` must agree."""
    trace = fold(History(RUN, events, (), NAMESPACE, contracts), start)
    names = dict.fromkeys(EVERY)
    for event in events:
        names.update(dict.fromkeys(BY_KIND.get(event.kind, ())))
    for name in names:
        for violation in laws.LAWS[name](trace):
            raise Broken(name, f"{violation.step_id or 'the run'}: {violation.why}")
    _agree(trace, after)


def _agree(trace: Trace, after: Book) -> None:
    head, run = after.head, trace.run
    stopped = (head.frozen, head.paused)
    told = ((head.is_live and head.epoch) or 0, head.checkpoint, *stopped, head.ending, head.to_undo, head.end)
    read = (run.live, run.checkpoint, run.frozen, run.paused, run.ending, run.to_undo, run.end)
    if told != read:
        raise Broken("altered_log", f"the head says {told}, but its log says {read}")
    for step in after.steps:
        if step is None or step.kind == "local":
            continue
        facts = trace.steps.get(step.step_id)
        booked = (step.state, step.closed_by, step.key, tuple((a.state, a.epoch) for a in step.attempts))
        folded = facts and (facts.state, facts.closed_by, facts.key, tuple((a.state, a.epoch) for a in facts.attempts))
        if booked != folded:
            raise Broken("altered_log", f"{step.step_id} is booked as {booked}, but its log says {folded}")


# --- verdicts


def judge_verdict(book: Book, command: Command, decision: Decision, is_lapsed: bool) -> None:
    """Every worker's verb is fenced, and nothing is let out without a durable intent."""
    verdict, events = decision.verdict, decision.events
    right: Right | None = getattr(command, "right", None)
    if right is not None:
        live = is_live(book, right)
        may_act = live and (not is_lapsed or isinstance(command, Release))
        if not may_act:
            _refused(book, command, right, verdict, events)
    if isinstance(verdict, Send):
        _intent_first(book, command, verdict, events)
    if isinstance(verdict, Refused | Wait) and events and not _says_what_it_wrote(verdict, events):
        raise Broken("superseded_as_failed", f"a refusal ({verdict.code}) wrote {', '.join(e.kind for e in events)}")


def _refused(book: Book, command: Command, right: Right, verdict: Verdict, events: tuple[Event, ...]) -> None:
    if events:
        what = ", ".join(event.kind for event in events)
        raise Broken("unfenced_verb", f"epoch {right.epoch} of {right.holder} is not live, but its verb wrote {what}")
    if isinstance(verdict, Refused):
        if verdict.code not in AFTER_THE_TIME:
            raise Broken("superseded_as_failed", f"a caller without a live lease was told {verdict.code}")
        return
    ended_it = isinstance(command, Release | Complete | Fail) and isinstance(verdict, Done) and not verdict.was_new
    if not ended_it or right.epoch != book.head.epoch or book.head.is_live:
        raise Broken("unfenced_verb", f"a caller without a live lease got {type(verdict).__name__}")


def _says_what_it_wrote(verdict: Refused | Wait, events: tuple[Event, ...]) -> bool:
    kinds = {event.kind for event in events}
    said = {"step_held": "step_held", "step_rejected": "step_withdrawn", "unsettled_effects": "step_withdrawn"}
    return said.get(verdict.code, "run_frozen") in kinds


def _intent_first(book: Book, command: Command, verdict: Send, events: tuple[Event, ...]) -> None:
    fenced = next((event for event in events if event.kind == "step_fenced"), None)
    if fenced is None:
        raise Broken("unlogged_effect", "it was let out, but no intent was written")
    right = step_key(NAMESPACE, RUN, fenced.step_id or StepId(""))
    if verdict.key != right:
        raise Broken("unstable_key", f"it was sent with the key {verdict.key}, but the step's key is {right}")
    if fenced.epoch != getattr(command, "right", Right(RUN, Epoch(0), "")).epoch or not book.head.is_live:
        raise Broken("unlogged_effect", f"it was admitted under epoch {fenced.epoch}, which did not ask or is dead")


def judge_repeat(first: Decision, again: Decision, command: Command) -> None:
    """Law 17: an accepted verb, told again with the same right and body, is answered alike and writes nothing."""
    if isinstance(first.verdict, Refused | Wait):
        return
    if again.events:
        what = ", ".join(event.kind for event in again.events)
        raise Broken("lost_ack", f"{type(command).__name__} told twice wrote {what} the second time")
    if isinstance(command, OF_OPERATORS):
        return
    one, two = _said(first.verdict), _said(again.verdict)
    if isinstance(command, Admit | Compensate) and isinstance(first.verdict, Send):
        if isinstance(again.verdict, Wait) and again.verdict.code == "step_in_flight":
            return
    elif one == two:
        return
    raise Broken("lost_ack", f"{type(command).__name__} was answered {one}, and told twice {two}")


def _said(verdict: Verdict) -> object:
    match verdict:
        case Done():
            return verdict.state, verdict.seq
        case Settled():
            return verdict.state
        case Answer():
            return verdict.step_id, verdict.state, verdict.key, verdict.receipt_seq, verdict.closed_by
        case Granted():
            return verdict.epoch, verdict.holder, verdict.expires_at_ms
        case Refused():
            return verdict.code, verdict.reason
        case _:
            return type(verdict).__name__


def judge_receipt(before: Step, command: Settle, after: Step) -> None:
    """Law 8: a receipt is a fact; once told, the books hold it."""
    booked = after.attempts[command.attempt - 1].state
    if command.outcome == "applied" and booked != "applied":
        raise Broken("lost_fact", f"the receipt of {before.step_id}, attempt {command.attempt}, was dropped ({booked})")
    for old, new in zip(before.attempts, after.attempts, strict=False):
        if old.state == "applied" and new.state != "applied":
            raise Broken("lost_fact", f"{before.step_id}: the receipt of attempt {old.number} became {new.state}")


# --- the provider's own count


def judge_truth(shape: Shape, book: Book, truths: Truths) -> None:
    """Law 1: net one, and the books are true; law 10: nothing is open when a run has ended."""
    for place in range(len(shape.tools)):
        step = book.steps[place]
        if step is None or not step.is_mutating:
            if step is None and truths[place].applied and not book.window:
                raise Broken("unlogged_effect", f"{shape.names[place]} took effect, but the books don't know it")
            continue
        net = shape.net(truths, place)
        if not 0 <= net <= 1:
            raise Broken("double_apply", f"{step.step_id} has a net effect of {net}")
        for attempt, request in zip(step.attempts, truths[place].requests, strict=True):
            if request.had_effect and attempt.state in HAD_NO_EFFECT:
                why = f"{step.step_id}: attempt {attempt.number} is booked {attempt.state}, but it took effect"
                raise Broken("double_apply", why)
        undo = shape.undone_by.get(place)
        may_land = can_land(book, truths, place) or (undo is not None and can_land(book, truths, undo))
        is_open = step.state == "pending" and bool(book.window) and may_be_lost(step, book.incarnation)
        is_open = is_open or (undo is not None and truths[undo].lost is not None)  # undone in lost commits
        if not may_land and not is_open:
            _true_book(step, net)
        if book.head.end and step.is_unsettled:
            raise Broken("orphan", f"the run has {book.head.end}, but {step.step_id} is {step.state}")


def _true_book(step: Step, net: int) -> None:
    if step.state in ("committed", "applied") and step.closed_by is None and net != 1:
        raise Broken("double_apply", f"{step.step_id} is booked {step.state}, but its net effect is {net}")
    if step.state in ("compensated", "rejected", "pending") and net != 0:
        raise Broken("double_apply", f"{step.step_id} is booked {step.state}, but its net effect is {net}")


def can_land(book: Book, truths: Truths, place: int) -> bool:
    """Whether a request of a step may still reach its provider."""
    step, lost = book.steps[place], truths[place].lost
    if lost is not None and lost.place == UNHEARD and book.window == LANDING:
        return True
    return step is not None and any(
        request.place in (READY, WIRE, UNHEARD) and attempt.deadline_ms > NOW
        for attempt, request in zip(step.attempts, truths[place].requests, strict=True)
    )
