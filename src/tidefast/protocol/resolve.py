"""The person in charge says what became of a step.

Laws. A verdict acts on the state at commit; `expect_attempts` refuses it if the step has had another attempt since the
person looked. *It did not happen* rests on the contract's word that nothing lands after an attempt's deadline, so it is
refused while a request may still be on the wire, and the look must be later than every deadline (law 14). Evidence is
dated by when it was asked for. Of a step that diverged, applied and compensated are accepted from any state.
"""

from tidefast.protocol.canonical import text_json
from tidefast.protocol.commands import Resolve
from tidefast.protocol.doubt import clear_ms
from tidefast.protocol.events import Event, object_json
from tidefast.protocol.lease import accept, record, refuse, unknown_run
from tidefast.protocol.oversight import moved
from tidefast.protocol.probing import is_owner_silent
from tidefast.protocol.records import Now, RunHead, Step, StepState, View
from tidefast.protocol.recovery import may_be_lost
from tidefast.protocol.step import presume
from tidefast.protocol.verdicts import Decision, Settled

RESOLVED_STATE: dict[str, StepState] = {
    "applied": "applied",
    "not_applied": "pending",
    "refused": "rejected",
    "compensated": "compensated",
}


def resolve(view: View, command: Resolve, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    step = view.steps.get(command.step_id)
    if step is None:
        return refuse(head, "not_found", "step_unknown", step=command.step_id)
    is_said = step.reason == f"resolved:{command.verdict}" and step.step_id not in head.diverged
    if is_said and step.state in (RESOLVED_STATE[command.verdict], "committed"):
        return accept(head, Settled(step.state, joined=False))
    looked_before = moved(head, command.expect_epoch)
    if looked_before is not None:
        return looked_before
    if command.expect_attempts is not None and command.expect_attempts != len(step.attempts):
        return refuse(
            head,
            "moved",
            "attempts",
            step=step.step_id,
            expected=command.expect_attempts,
            attempts=len(step.attempts),
        )
    refusal = _not_decidable(head, step, command)
    if refusal is not None:
        return refusal
    before: tuple[Event, ...] = ()
    is_written = bool(step.contract)  # an undo without a call is judged when one is written for it
    is_applied = command.verdict == "applied"
    if view.recovery is not None and is_written and not is_applied and may_be_lost(step, view.incarnation):
        step, presuming = presume(view, head, step, view.recovery, now)
        before = (presuming,)
    refusal = _too_early(view, head, step, command, now)
    if refusal is not None:
        return refusal
    # A committed step whose other attempt turned out to have applied as well has nothing left to be joined.
    state = (
        "committed" if (command.verdict, step.state) == ("applied", "committed") else RESOLVED_STATE[command.verdict]
    )
    data = object_json(
        by=text_json(command.by),
        note=text_json(command.note),
        receipt=command.receipt_json,
        state=f'"{state}"',
        verdict=f'"{command.verdict}"',
    )
    event = record(head, now, "step_resolved", data, step=step.step_id, after=len(before))
    return accept(head, Settled(state, joined=False), *before, event)


def _not_decidable(head: RunHead, step: Step, command: Resolve) -> Decision | None:
    """A verdict is taken on a step in doubt or held, and on a step whose receipts contradict the books."""
    if step.kind == "local":
        return refuse(head, "already_decided", "is_local", step=step.step_id, state=step.state)
    if step.undo_of is not None and command.verdict == "compensated":
        return refuse(head, "already_decided", "is_an_undo", step=step.step_id, state=step.state)
    if step.step_id in head.diverged and command.verdict in ("applied", "compensated"):
        return None
    if step.state not in ("in_doubt", "held") or step.closed_by is not None:
        return refuse(head, "already_decided", step.state, step=step.step_id, state=step.state)
    return None


def _too_early(view: View, head: RunHead, step: Step, command: Resolve, now: Now) -> Decision | None:
    """*It did not happen* can be said once nothing of the step can land any more, by someone who looked after that."""
    if command.verdict == "applied":
        return None
    clear_at = clear_ms(step)
    if now.ms <= clear_at:
        return refuse(head, "step_in_flight", "on_the_wire", step=step.step_id, until_ms=clear_at)
    if command.looked_at_ms is None or command.looked_at_ms > now.ms:
        return refuse(head, "invalid", "looked_at", step=step.step_id, now_ms=now.ms, look_after_ms=clear_at)
    if command.looked_at_ms <= clear_at:
        return refuse(head, "moved", "looked_too_early", step=step.step_id, look_after_ms=clear_at)
    if is_owner_silent(view, step):
        return refuse(head, "step_in_flight", "owner_silent", step=step.step_id)
    return None
