"""A mutating step in its workspace: sent to the live replica, joined there or not at all.

Laws. One write of a workspace is open at a time, whoever's run it is. It joins only in the transaction that finds the
run's epoch and the replica's epoch live: a success code of a disk that is gone commits nothing (law 2). When the epoch
that was asked ends first, what it did is gone with its disk or rolled back from it, so the step is *absent* and sent
again under the next epoch; unless it may have had effects elsewhere (`escapes`), for then it is held.

What a step's settling means for its workspace is put beside it by `join.py`.
"""

from tidefast.protocol.canonical import JSON, text_json
from tidefast.protocol.commands import LoseWrite, Settle, Write
from tidefast.protocol.events import Event, object_json
from tidefast.protocol.ids import WorkspaceId
from tidefast.protocol.lease import accept, record, refuse, unknown_run
from tidefast.protocol.records import Attempt, Now, RunHead, Step, View, WorkspaceHead
from tidefast.protocol.verdicts import AskReplica, Decision, Refused, Settled, Wait
from tidefast.protocol.workspace import delta_json, delta_problem, write_chain

SCOPE = "workspace:"


def workspace_of(step: Step) -> WorkspaceId | None:
    """The workspace that a mutating step of one writes to."""
    return WorkspaceId(step.scope.removeprefix(SCOPE)) if step.effect == "workspace" else None


def is_open_write(view: View, head: RunHead, step: Step) -> bool:
    """Whether this step is the one that its workspace has open."""
    place = view.workspace
    return place is not None and place.open is not None and place.open[:2] == (head.run_id, step.step_id)


def replica_lives(view: View) -> bool:
    """Whether the epoch that the open write was sent to is the live one."""
    place = view.workspace
    return place is not None and place.open is not None and place.is_live and place.open.epoch == place.epoch


def ask(view: View, head: RunHead, step: Step, now: Now) -> Decision | None:
    """What a live holder hears of a fenced, doubtful or applied step of a workspace; None: the usual rule answers.

    The replica lives: its journal is asked, unless the attempt's own sender still waits for it, or the receipt is
    there. The replica is gone: so is what it did.
    """
    if step.reason.startswith("resolved:"):
        return None
    if not is_open_write(view, head, step) or not replica_lives(view):
        return lose(view, head, step, now)
    last = step.attempts[-1]
    is_waited_for = step.state == "fenced" and last.owner in view.instances and now.ms < last.deadline_ms
    if step.state == "applied" or is_waited_for:
        return None
    place = _place(view)
    return accept(head, AskReplica(place.workspace_id, place.epoch, last.number, last.deadline_ms))


def lose(view: View, head: RunHead, step: Step, now: Now, *before: Event) -> Decision:
    """The replica that was asked is gone before the join: absent and sent again, or held if it may have escaped."""
    open_write = _place(view).open
    if view.contracts[step.contract].escapes:
        data = object_json(attempts=str(len(step.attempts)), reason='"escaped"')
        epoch = step.attempts[-1].epoch
        held = record(head, now, "step_held", data, step=step.step_id, epoch=epoch, after=len(before))
        facts: dict[str, JSON] = {"steps": [step.step_id]}
        return accept(head, Refused("step_held", "escaped", facts), *before, held)
    data = object_json(
        attempt=str(step.attempts[-1].number),
        replica_epoch=str(0 if open_write is None else open_write.epoch),
        workspace=text_json(_place(view).workspace_id),
    )
    lost = record(head, now, "replica_lost", data, step=step.step_id, after=len(before))
    wait = Wait("step_pending", "replica", now.ms, step.step_id, workspace_id=_place(view).workspace_id)
    return accept(head, wait, *before, lost)


def lose_write(view: View, command: LoseWrite, now: Now) -> Decision:
    """The sweep's word for `lose`; it is judged again here."""
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    step = view.steps.get(command.step_id)
    if step is None or not is_open_write(view, head, step) or replica_lives(view) or step.state == "held":
        return refuse(head, "already_decided", "replica_lives", step=command.step_id)
    if step.reason.startswith("resolved:"):
        return refuse(head, "already_decided", step.reason, step=command.step_id)
    return _as_settled(lose(view, head, step, now))


def _as_settled(lost: Decision) -> Decision:
    return lost._replace(verdict=Settled("held" if isinstance(lost.verdict, Refused) else "pending", joined=False))


def receipt_refused(
    view: View, head: RunHead, step: Step, attempt: Attempt, command: Settle, now: Now
) -> Decision | None:
    """What becomes of a receipt that is not of the live replica, or that doesn't follow the log; None if it may count.

    A receipt of an epoch that has ended is kept as a late one and has no right; nothing contradicts the books by it,
    because what it tells of is gone.
    """
    write, place = command.write, _place(view)
    open_write = place.open
    is_ours = is_open_write(view, head, step) and open_write is not None and open_write.attempt == attempt.number
    if write is None or not is_ours or not replica_lives(view) or write.epoch != place.epoch:
        data = object_json(
            attempt=str(attempt.number),
            is_gone="true",
            receipt=command.receipt_json,
            replica_epoch=str(0 if write is None else write.epoch),
        )
        late = record(head, now, "late_receipt", data, step=step.step_id, epoch=attempt.epoch)
        if not is_ours or step.state == "held" or replica_lives(view):
            return accept(head, Settled(step.state, joined=False), late)
        return _as_settled(lose(view, head, step, now, late))
    problem = _receipt_problem(place, head, step, write)
    return refuse(head, "invalid", "receipt_invalid", step=step.step_id, problem=problem) if problem else None


def _receipt_problem(place: WorkspaceHead, head: RunHead, step: Step, write: Write) -> str:
    if write.log_index != place.log_index + 1:
        return f"the write has index {write.log_index}, the next one is {place.log_index + 1}"
    problem = delta_problem(write.delta)
    if problem:
        return problem
    text = delta_json(write.delta)
    if write.chain != write_chain(place.chain, write.log_index, head.run_id, step.step_id, text):
        return "the chain's digest doesn't follow from the log and the delta"
    return ""


def _place(view: View) -> WorkspaceHead:
    """The workspace of a step that is known to have one; of a view that doesn't show it, one without anything open."""
    return view.workspace or WorkspaceHead(view.workspace_id or WorkspaceId(""))
