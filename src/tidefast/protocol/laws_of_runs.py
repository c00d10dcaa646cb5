"""The laws about a run as a whole: how it ends, who may act on it, and that there is always a way on.

Part of `laws`, which lists all eighteen. As there, none of these asks the rules.
"""

from collections.abc import Iterator

from tidefast.protocol.ids import StepId, derived_id
from tidefast.protocol.trace import (
    OUTCOMES,
    SETTLED,
    Facts,
    Moment,
    Trace,
    Violation,
    at,
    number,
    text,
    texts,
    unsettled,
    who_was_live,
)

GRANTS_MAX = 10  # grants without progress before a run must be frozen
LOST_LEASE = frozenset(("stale_epoch", "lease_lapsed", "lease_ended", "superseded", "preempted"))
ENDED_BY_OTHERS = ("lease_lapsed", "lease_preempted")
BY_WORKERS = (
    "step_result",
    "undo_begun",
    "step_withdrawn",
    "lease_released",
    "run_failing",
    "run_completed",
    "run_failed",
    "run_cancelled",
)
BY_OPERATORS = ("lease_preempted", "step_resolved", "run_thawed", "run_paused", "run_resumed", "run_cancelling")
BY_EITHER = ("step_withdrawn", "run_cancelled")  # without an epoch they are an operator's
ENDS = ("run_completed", "run_failed", "run_cancelled")


def orphan(trace: Trace) -> Iterator[Violation]:
    """Law 10: no run ends over an unsettled effect, no new effect begins while one ends, a refused undo is held.

    Judged from the events that end a run, from intents after an ending began, and from the undos that it lists: all
    that the stored contracts declare, newest intent first, begun in that order, none left out. Which steps the last
    pass asked for is not in a log, so a step that a run completed without asking for shows here only through what it
    left open.
    """
    for moment in trace.of(*ENDS):
        for step in unsettled(moment):
            why = f"the run ended while it was {step.state}" + (" and its undo open" if step.closed_by else "")
            yield at(trace, "orphan", moment, why, step.step_id)
        for name in moment.run.to_undo:
            yield at(trace, "orphan", moment, "the run ended though it was still to be undone", StepId(name))
        if moment.run.ending and moment.event.kind == "run_completed":
            yield at(trace, "orphan", moment, f"the run completed though it was {moment.run.ending}")
    yield from _undo_plans(trace)
    for moment in trace.of("step_fenced"):
        is_new = moment.step is None or moment.step.state == "pending"
        is_undo = text(moment.data, "undo_of") or (moment.step is not None and moment.step.undo_of is not None)
        if moment.run.ending and is_new and not is_undo:
            yield at(trace, "orphan", moment, f"it was admitted anew though the run was {moment.run.ending}")
    for moment in trace.of("step_rejected", "step_withdrawn"):
        if moment.step is not None and moment.step.undo_of is not None:
            yield at(trace, "orphan", moment, f"the undo of {moment.step.undo_of} was given up without asking a person")


def _undo_plans(trace: Trace) -> Iterator[Violation]:
    """What is wrong with the undos that an ending lists, or with how they were begun."""
    for moment in trace.of("run_failing", "run_cancelling", "run_failed", "run_cancelled"):
        begins = moment.event.kind in ("run_failing", "run_cancelling")
        if moment.run.ending and not begins:
            continue
        listed = texts(moment.data, "undo") if begins else ()
        for step in trace.steps.values():
            if step.step_id not in listed and _should_be_undone(trace, moment, step):
                why = f"{moment.event.kind} left it out of the undos, though its contract declares one"
                yield at(trace, "orphan", moment, why, step.step_id)
        intents = [trace.steps[name].intent_seq for name in map(StepId, listed) if name in trace.steps]
        if intents != sorted(intents, reverse=True):
            yield at(trace, "orphan", moment, "its undos are not listed newest intent first")
    for moment in trace.of("undo_begun"):
        due = moment.run.to_undo[:1]
        if moment.run.ending and (moment.event.step_id or "") not in due:
            why = (
                f"its undo was begun out of turn: the run was {moment.run.ending} and due was {due[0] if due else '-'}"
            )
            yield at(trace, "orphan", moment, why)


def _should_be_undone(trace: Trace, moment: Moment, step: Facts) -> bool:
    """Whether a step's effect stood, or may have, when an ending began, and its contract declares an undo."""
    contract = trace.history.contracts.get(step.contract)
    if contract is None or contract.undo is None or not step.is_mutating or step.undo_of is not None:
        return False
    if not 0 < step.intent_seq < moment.event.seq:
        return False
    undo = trace.steps.get(derived_id(step.step_id, "undo"))
    had_undo = undo is not None and undo.state in SETTLED and undo.settled_seq < moment.event.seq
    is_over = step.state in ("rejected", "compensated") and 0 < step.settled_seq < moment.event.seq
    return not had_undo and not is_over


def unfenced_verb(trace: Trace) -> Iterator[Violation]:
    """Law 11: each worker's verb acts under the live epoch that it names; an operator's verb says who.

    Judged from every event that a worker's, the sweep's or an operator's verb writes, save commits of mutating steps,
    checkpoints and intents under a dead epoch, which have laws of their own (2, 3, 6). Verbs that write nothing (renew,
    read for resume) leave no trace.
    """
    for moment in trace.of(*BY_WORKERS, *ENDED_BY_OTHERS, "step_committed", "checkpoint_saved", "step_fenced"):
        standing, kind = trace.standing(moment), moment.event.kind
        has_own_law = kind in ("checkpoint_saved", "step_fenced") or (
            kind == "step_committed" and moment.step is not None and moment.step.is_mutating
        )
        if standing == "missing" and not (kind in BY_EITHER and text(moment.data, "by")):
            yield at(trace, "unfenced_verb", moment, f"{kind} names no epoch")
        elif standing == "dead" and not has_own_law:
            yield at(
                trace,
                "unfenced_verb",
                moment,
                f"{kind} was taken from epoch {moment.event.epoch}, {who_was_live(moment)}",
            )
    for moment in trace.of(*sorted((OUTCOMES | {"late_receipt"}) - {"step_committed"})):
        sent = None if moment.step is None else moment.step.attempt(number(moment.data, "attempt"))
        if sent is not None and moment.event.epoch != sent.epoch and trace.standing(moment) != "forged":
            why = f"attempt {sent.number} of epoch {sent.epoch} was settled in the name of epoch {moment.event.epoch}"
            yield at(trace, "unfenced_verb", moment, why)
    for moment in trace.of(*BY_OPERATORS, "run_frozen"):
        is_theirs = moment.event.kind != "run_frozen" or text(moment.data, "reason") == "operator"
        if is_theirs and not text(moment.data, "by"):
            yield at(trace, "unfenced_verb", moment, f"{moment.event.kind} does not say who did it")


def superseded_as_failed(trace: Trace) -> Iterator[Violation]:
    """Law 12: losing a lease is not a failure; nothing is booked against a step or a run because of it.

    Judged from the reasons that attempts and runs were failed with. What a stale caller was told is not in a log.
    """
    for moment in trace.of(
        *("step_refused", "step_rejected", "step_unsent", "step_withdrawn", "run_failing", "run_failed")
    ):
        said = text(moment.data, "error" if moment.event.kind.startswith("run_") else "reason")
        if said in LOST_LEASE:
            why = f"{moment.event.kind} was booked because a lease was lost ({said})"
            yield at(trace, "superseded_as_failed", moment, why)


def stuck(trace: Trace) -> Iterator[Violation]:
    """Law 13: there is always a way forward, and ten grants without progress freeze the run.

    Judged from the grants since the last progress, from holds and freezes that name no reason, and from steps closed by
    an undo that can't end any more. That somebody really goes the way forward is for the simulator to show.
    """
    for moment in trace.of("lease_granted"):
        if moment.run.grants >= GRANTS_MAX:
            why = f"the run was granted again after {moment.run.grants} grants without progress"
            yield at(trace, "stuck", moment, why)
    for moment in trace.of("run_frozen"):
        if text(moment.data, "reason") == "no_progress" and moment.run.grants < GRANTS_MAX:
            why = f"the run was frozen for no progress after {moment.run.grants} grants"
            yield at(trace, "stuck", moment, why)
    for moment in trace.of("run_frozen", "step_held"):
        if not text(moment.data, "reason"):
            yield at(trace, "stuck", moment, f"{moment.event.kind} names no reason, so nobody can know what to do")
    for step in trace.steps.values():
        undo = None if step.closed_by is None else trace.steps.get(step.closed_by)
        if step.closed_by is None or step.state == "compensated" or (undo is not None and undo.state not in SETTLED):
            continue
        state = "does not exist" if undo is None else f"is {undo.state}"
        seq = step.since_seq if undo is None else undo.since_seq
        why = f"it is closed by its undo {step.closed_by}, which {state}: nothing can open it again"
        yield Violation("stuck", trace.history.run_id, step.step_id, seq, why)
