"""Undo: a step of its own, fenced like any other, with a key of its own.

Laws. An undo is admitted only for an effect that the books know (applied or committed), and closes its target: from
then on the target takes no attempt and no verdict until the undo is refused. The undo's commit and the target's
`step_compensated` are one transaction. A preempted undo is finished by the next holder under its own key, once. An undo
that the provider refuses is no answer but held (`undo_refused`): a person must act.
"""

from tidefast.protocol.canonical import text_json
from tidefast.protocol.commands import Compensate
from tidefast.protocol.events import object_json
from tidefast.protocol.lease import fence, record, refuse, unknown_run
from tidefast.protocol.records import Now, View
from tidefast.protocol.step import answer_known, blocked_by, first_sending
from tidefast.protocol.verdicts import Decision


def compensate(view: View, command: Compensate, now: Now) -> Decision:
    """Admit the undo of a step, or answer what the books hold of it."""
    head = view.run
    if head is None:
        return unknown_run(command.right.run_id)
    refusal = fence(head, command.right, now)
    if refusal is not None:
        return refusal
    undo = view.steps.get(command.undo_step_id)
    if undo is not None:
        return answer_known(view, head, undo, command, now)
    target = view.steps.get(command.step_id)
    if head.frozen:
        return refuse(head, "run_frozen", head.frozen)
    if (
        target is None
        or target.state not in ("applied", "committed")
        or not target.is_mutating
        or target.kind == "undo"
    ):
        state = "unknown" if target is None else target.state
        return refuse(head, "already_decided", "nothing_to_compensate", step=command.step_id, state=state)
    if command.contract is None:
        return refuse(head, "not_found", "tool_unknown", tool=command.tool)
    blocked = blocked_by(head, command.undo_step_id, command.step_id, now)
    if blocked is not None:
        return blocked
    begun_data = object_json(undo=text_json(command.undo_step_id))
    begun = record(head, now, "undo_begun", begun_data, step=command.step_id, epoch=command.right.epoch)
    return first_sending(view, head, command, command.contract, now, begun)
