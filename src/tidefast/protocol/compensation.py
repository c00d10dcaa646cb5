"""Undo: a step of its own, fenced like any other, with a key of its own.

Laws. An undo is admitted only for an effect that the books know (applied or committed), or for a doubt whose contract
calls that safe, once nothing of it can land any more. It closes its target: from then on the target takes no attempt,
no probe and no verdict until the undo is refused. An ending run undoes in its recorded
order, and an undo that can't be written there is held before its first attempt. The undo's commit and the target's
`step_compensated` are one transaction. A preempted undo is finished by the next holder under its own key, once. An undo
that the provider refuses is no answer but held (`undo_refused`): a person must act.
"""

from tidefast.protocol.canonical import JSON, text_json
from tidefast.protocol.commands import Compensate
from tidefast.protocol.doubt import clear_ms
from tidefast.protocol.events import Event, object_json
from tidefast.protocol.ids import step_key
from tidefast.protocol.lease import accept, fence, not_running, record, refuse, unknown_run
from tidefast.protocol.probing import is_owner_silent
from tidefast.protocol.records import Now, RunHead, Step, View
from tidefast.protocol.recovery import may_be_lost
from tidefast.protocol.step import answer_known, blocked_by, first_sending, presume
from tidefast.protocol.verdicts import Decision, Refused, Wait

DOUBTFUL = frozenset(("in_doubt", "held"))


def compensate(view: View, command: Compensate, now: Now) -> Decision:
    """Admit the undo of a step, or answer what the books hold of it."""
    head = view.run
    if head is None:
        return unknown_run(command.right.run_id)
    refusal = fence(head, command.right, now)
    if refusal is not None:
        return refusal
    undo = view.steps.get(command.undo_step_id)
    is_unwritten = undo is not None and undo.state == "pending" and not undo.attempts
    if undo is not None and not is_unwritten:
        if command.is_given and undo.call_digest != command.call_digest:
            return refuse(
                head,
                "step_conflict",
                "other_call",
                step=undo.step_id,
                stored_digest=undo.call_digest,
                asked_digest=command.call_digest,
                stored_tool=undo.tool,
            )
        return answer_known(view, head, undo, command, now)
    refusal = (
        not_running(head)
        or _nothing_to_undo(view, head, view.steps.get(command.step_id), command)
        or _not_due(head, command)
    )
    if refusal is not None:
        return refusal
    target = view.steps[command.step_id]
    if target.state in DOUBTFUL:
        if head.recovery is not None and may_be_lost(target, view.incarnation):  # that sending must be over too
            target, _ = presume(view, head, target, head.recovery, now)
        if now.ms <= clear_ms(target):
            return accept(head, Wait("step_pending", "older_attempt", clear_ms(target) + 1, target.step_id))
    problem = "tool_gone" if command.contract is None else command.problem and "undo_unwritten"
    if command.contract is None or problem:
        return _unwritten(view, head, command, problem, now, is_begun=is_unwritten)
    blocked = blocked_by(head, command.undo_step_id, command.step_id, now)
    if blocked is not None:
        return blocked
    begun = () if is_unwritten else (_begun(head, command, now),)
    return first_sending(view, head, command, command.contract, now, *begun)


def _nothing_to_undo(view: View, head: RunHead, target: Step | None, command: Compensate) -> Decision | None:
    if target is not None and target.is_mutating and target.kind == "tool":
        is_safe = view.contracts[target.contract].undo_safe_if_absent and not is_owner_silent(view, target)
        if target.state in ("applied", "committed") or (target.state in DOUBTFUL and is_safe):
            return None
    state = "unknown" if target is None else target.state
    return refuse(head, "already_decided", "nothing_to_compensate", step=command.step_id, state=state)


def _not_due(head: RunHead, command: Compensate) -> Decision | None:
    """An ending run undoes what its list names, in that order, and nothing else."""
    if not head.ending:
        return None
    if command.step_id not in head.to_undo:
        return refuse(head, "run_ending", head.ending)
    if command.step_id != head.to_undo[0]:
        return refuse(head, "unsettled_effects", "to_undo", steps=list(head.to_undo))
    return None


def _unwritten(view: View, head: RunHead, command: Compensate, problem: str, now: Now, *, is_begun: bool) -> Decision:
    """An undo for which no call can be made. The agent hears why; of an ending run a person is asked."""
    if not head.ending:
        if problem == "tool_gone":
            return refuse(head, "not_found", "tool_unknown", tool=command.tool)
        return refuse(head, "invalid", "undo_args", step=command.step_id, problem=command.problem)
    before = () if is_begun else (_begun(head, command, now),)
    data = object_json(
        attempts="0",
        args=command.args_json,
        key=text_json(step_key(view.namespace, head.run_id, command.undo_step_id)),
        problem=text_json(command.problem),
        reason=text_json(problem),
        tool=text_json(command.tool),
        undo_of=text_json(command.step_id),
    )
    epoch = command.right.epoch
    held = record(head, now, "step_held", data, step=command.undo_step_id, epoch=epoch, after=len(before))
    facts: dict[str, JSON] = {"steps": [command.undo_step_id], "problem": command.problem}
    return accept(head, Refused("step_held", problem, facts), *before, held)


def _begun(head: RunHead, command: Compensate, now: Now) -> Event:
    data = object_json(undo=text_json(command.undo_step_id))
    return record(head, now, "undo_begun", data, step=command.step_id, epoch=command.right.epoch)
