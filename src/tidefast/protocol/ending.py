"""How a run fails or is cancelled: settle, undo in reverse, end.

Laws. No run ends over an unsettled effect (10). Both ways of ending are states: nothing new begins; a holder asks for
what is open by its stored calls, undoes what can be undone, and then ends the run. The order of the undos is recorded
when the ending begins and never recomputed: newest intent first, every effect that may have happened and whose stored
contract declares an undo. What turns out not to have happened leaves the list, and so does what a person settled.
Cancelling ends the lease at once, and lets a frozen or paused run go on to its end. See Garcia-Molina and Salem,
"Sagas" (SIGMOD 1987).
"""

from collections.abc import Sequence

from tidefast.protocol.canonical import digest, text_json
from tidefast.protocol.commands import Cancel, Fail
from tidefast.protocol.events import Event, Kind, object_json
from tidefast.protocol.ids import StepId, derived_id
from tidefast.protocol.lease import accept, fence, not_running, record, refuse, unknown_run
from tidefast.protocol.oversight import moved, signed
from tidefast.protocol.records import Now, RunHead, Step, View
from tidefast.protocol.recovery import may_be_lost, window_of
from tidefast.protocol.run import same_end
from tidefast.protocol.step import is_undone_in_doubt
from tidefast.protocol.verdicts import Decision, Done

KEPT_MAX = 100  # how many of the effects that stay are named in the log


def fail(view: View, command: Fail, now: Now) -> Decision:
    """The holder ends the run with an error, or says that a run which is ending has nothing left to do."""
    head = view.run
    if head is None:
        return unknown_run(command.right.run_id)
    error_json = text_json(command.error)
    error_digest = digest(error_json)
    if same_end(head, command.right, ("failed", "cancelled"), error_digest):
        return accept(head, Done(head.end, head.end_seq, was_new=False))
    refusal = fence(head, command.right, now) or not_running(head)
    if refusal is not None:
        return refusal
    withdrawn, epoch = _to_withdraw(view, head), command.right.epoch
    if head.ending:
        if _is_left(head, withdrawn):
            told = _not_yet(view, head, withdrawn, error_digest)
            return told._replace(events=tuple(_withdrawing(head, withdrawn, now, epoch)))
    else:
        plan = _undo_plan(view, withdrawn)
        if plan or _unsettled(head, withdrawn):
            data = object_json(error=error_json, error_digest=f'"{error_digest}"', **_planned(view, plan, withdrawn))
            before = _withdrawing(head, withdrawn, now, epoch)
            failing = record(head, now, "run_failing", data, epoch=epoch, after=len(before))
            return accept(head, Done("failing", failing.seq), *before, failing)
    before = _withdrawing(head, withdrawn, now, epoch)
    kind: Kind = "run_cancelled" if head.ending == "cancelling" else "run_failed"
    data = object_json(error=error_json, error_digest=f'"{error_digest}"')
    ended = record(head, now, kind, data, epoch=epoch, after=len(before))
    return accept(head, Done(kind.removeprefix("run_"), ended.seq), *before, ended)


def cancel(view: View, command: Cancel, now: Now) -> Decision:
    """An operator ends the run: at once if nothing is open and nothing is to be undone."""
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    if head.end == "cancelled":
        return accept(head, Done("cancelled", head.end_seq, was_new=False))
    if head.end:
        return refuse(head, "run_ended", head.end, state=head.end)
    if head.ending:
        return accept(head, Done(head.ending, head.ending_seq, was_new=False))
    refusal = moved(head, command.expect_epoch)
    if refusal is not None:
        return refusal
    if head.diverged:
        return refuse(head, "run_frozen", "diverged", steps=list(head.diverged))
    kinds: list[Kind] = ["run_thawed"] if head.frozen else []
    kinds += ["run_resumed"] if head.paused else []
    events = [record(head, now, kind, signed(command), after=place) for place, kind in enumerate(kinds)]
    withdrawn = _to_withdraw(view, head)
    plan = _undo_plan(view, withdrawn)
    is_open = bool(plan or _unsettled(head, withdrawn))
    if is_open and head.is_live:
        events.append(record(head, now, "lease_preempted", signed(command), epoch=head.epoch, after=len(events)))
    events += _withdrawing(head, withdrawn, now, 0, signed(command), after=len(events))
    if not is_open:
        cancelled = record(head, now, "run_cancelled", signed(command), after=len(events))
        return accept(head, Done("cancelled", cancelled.seq), *events, cancelled)
    data = object_json(by=text_json(command.by), note=text_json(command.note), **_planned(view, plan, withdrawn))
    cancelling = record(head, now, "run_cancelling", data, after=len(events))
    return accept(head, Done("cancelling", cancelling.seq), *events, cancelling)


def _to_withdraw(view: View, head: RunHead) -> list[StepId]:
    """Steps that had no effect so far and won't be sent again. An undo is not given up without a person.

    In the window after a restore a step may have been sent after all, in commits that are lost: that is a doubt, also
    before the window has come to the run with a grant. A step that is being undone is settled by its undo.
    """
    is_in_window = (head.recovery or window_of(view, head)) is not None
    pending = [view.steps[step.step_id] for step in head.open if step.state == "pending" and step.undo_of is None]
    return [
        step.step_id
        for step in pending
        if step.closed_by is None and not (is_in_window and may_be_lost(step, view.incarnation))
    ]


def _withdrawing(
    head: RunHead, withdrawn: Sequence[StepId], now: Now, epoch: int, data: str = "{}", after: int = 0
) -> list[Event]:
    return [
        record(head, now, "step_withdrawn", data, step=step, epoch=epoch, after=after + place)
        for place, step in enumerate(withdrawn)
    ]


def _unsettled(head: RunHead, withdrawn: Sequence[StepId]) -> list[StepId]:
    return [step.step_id for step in head.open if step.is_unsettled and step.step_id not in withdrawn]


def _is_left(head: RunHead, withdrawn: Sequence[StepId]) -> bool:
    return bool(_unsettled(head, withdrawn) or set(head.to_undo) - set(withdrawn))


def _is_undone_in_doubt(view: View, head: RunHead, step_id: StepId) -> bool:
    step = view.steps[step_id]
    is_doubt = step.kind == "tool" and step.state == "in_doubt"
    return is_doubt and is_undone_in_doubt(head, step, view.contracts[step.contract])


def _not_yet(view: View, head: RunHead, withdrawn: Sequence[StepId], error_digest: str) -> Decision:
    """What an ending run still owes: first what is open, then the undos in their order."""
    if head.ending == "failing" and head.end_digest == error_digest:
        return accept(head, Done("failing", head.ending_seq, was_new=False))
    unsettled = [step for step in _unsettled(head, withdrawn) if not _is_undone_in_doubt(view, head, step)]
    if unsettled:
        return refuse(head, "unsettled_effects", "unsettled", steps=list(unsettled))
    return refuse(head, "unsettled_effects", "to_undo", steps=[step for step in head.to_undo if step not in withdrawn])


def _undo_plan(view: View, withdrawn: Sequence[StepId]) -> list[Step]:
    """Every effect that may have happened and can be undone, newest intent first."""
    return [step for step in _effects(view, withdrawn) if _can_be_undone(view, step)]


def _effects(view: View, withdrawn: Sequence[StepId]) -> list[Step]:
    """The steps that changed the world, or may have, newest intent first."""
    found = [
        step
        for step in view.steps.values()
        if step.kind == "tool"
        and step.is_mutating
        and step.state not in ("rejected", "compensated")
        and step.step_id not in withdrawn
    ]
    return sorted(found, key=lambda step: step.intent_seq, reverse=True)


def _can_be_undone(view: View, step: Step) -> bool:
    """Whether its undo has begun, or one is declared and was neither called off by a person nor used up before."""
    if derived_id(step.step_id, "undo") in view.steps:
        return step.closed_by is not None
    return view.contracts[step.contract].undo is not None


def _planned(view: View, plan: Sequence[Step], withdrawn: Sequence[StepId]) -> dict[str, str]:
    """The order of the undos, and the effects that stay, for the log."""
    undone = {step.step_id for step in plan}
    kept = [step.step_id for step in _effects(view, withdrawn) if step.step_id not in undone]
    return {"kept": _names(kept[:KEPT_MAX]), "undo": _names([step.step_id for step in plan])}


def _names(steps: Sequence[StepId]) -> str:
    return "[" + ",".join(text_json(step) for step in steps) + "]"
