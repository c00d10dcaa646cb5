"""What a decision about a run means for the workspace that its step writes to.

A step's own rules decide about the run. What that means for the workspace is put beside it here, out of the events
alone, so that no way of settling a step, now or later, can leave its workspace behind. Run and workspace are the one
pair of heads that a decision may read, and both are guarded, written or not: a join that guarded the run alone would
let a write of a dead replica in between (law 2).
"""

from dataclasses import replace

from tidefast.protocol.canonical import text_json
from tidefast.protocol.commands import Admit, Command, Settle, Write
from tidefast.protocol.events import Event, object_json
from tidefast.protocol.evolve import evolve
from tidefast.protocol.ids import WorkspaceId
from tidefast.protocol.records import Now, OpenWrite, View, WorkspaceGuard, WorkspaceHead
from tidefast.protocol.replica import replica_lapsed, write_down
from tidefast.protocol.verdicts import Decision, Send, Wait, WriteOrder
from tidefast.protocol.workspace import delta_json

WAIT_MS = 60_000  # what a caller that waits for a workspace is told at most; any change of it comes first
OPEN = frozenset(("fenced", "in_doubt", "held", "applied"))  # states of a step that its workspace waits for


def beside(view: View, command: Command, decision: Decision, now: Now) -> Decision:
    """A decision with what its workspace must write in the same transaction, and with the guard of that head."""
    decision = _sent(view, command, decision, now)
    place = view.workspace
    if place is not None and place.open is not None and decision.events:
        decision = decision._replace(writes=_open_write_after(view, place, place.open, command, decision.events, now))
    guard = WorkspaceGuard(view.workspace_id or WorkspaceId(""), 0 if place is None else place.version)
    return decision._replace(guards=(*decision.guards, guard))


def _sent(view: View, command: Command, decision: Decision, now: Now) -> Decision:
    """An admission that would send: to the live replica, connected and restored, and if no other write is open."""
    send = decision.verdict
    if not isinstance(send, Send) or send.contract.effect != "workspace" or not isinstance(command, Admit):
        return decision
    place, right = view.workspace, command.right
    hindrance = _hindrance(place, command, now)
    if hindrance is not None or place is None:
        return Decision(hindrance or _no_replica(command, "none", now), guards=decision.guards)
    data = object_json(
        attempt=str(send.attempt),
        run=text_json(right.run_id),
    )
    fenced = write_down(place, now, "write_fenced", data, step=command.step_id, epoch=place.epoch)
    order = WriteOrder(place.workspace_id, place.epoch, place.log_index)
    return decision._replace(verdict=replace(send, write=order), writes=(fenced,))


def _hindrance(place: WorkspaceHead | None, command: Admit, now: Now) -> Wait | None:
    if place is None or not place.is_live:
        return _no_replica(command, "none", now)
    if place.open is not None and place.open[:2] != (command.right.run_id, command.step_id):
        other = place.open
        return Wait("step_pending", "replica", now.ms + WAIT_MS, other.step_id, other.run_id, place.workspace_id)
    if replica_lapsed(place, now):
        return _no_replica(command, "lapsed", now)
    if command.replica != place.epoch:
        return _no_replica(command, "away", now)
    return None


def _no_replica(command: Admit, reason: str, now: Now) -> Wait:
    return Wait("no_replica", reason, now.ms + WAIT_MS, command.step_id, workspace_id=command.workspace_id)


def _open_write_after(
    view: View, place: WorkspaceHead, write: OpenWrite, command: Command, events: tuple[Event, ...], now: Now
) -> tuple[Event, ...]:
    """What becomes of the open write by the events of its run."""
    after = view
    for event in events:
        after = evolve(after, event)
    step = after.steps.get(write.step_id)
    if after.run is None or after.run.run_id != write.run_id or step is None:
        return ()
    sent = command.write if isinstance(command, Settle) and command.step_id == write.step_id else None
    if step.state == "committed":
        return (_commit(place, write, sent, now),)
    if step.state == "applied" and sent is not None and not write.write_seq:
        data = object_json(
            attempt=str(write.attempt),
            chain=text_json(sent.chain),
            delta=delta_json(sent.delta),
            index=str(sent.log_index),
            run=text_json(write.run_id),
        )
        return (write_down(place, now, "write_applied", data, step=write.step_id, epoch=write.epoch),)
    return () if step.state in OPEN else (_drop(place, write, events[-1].kind, now),)


def _commit(place: WorkspaceHead, write: OpenWrite, sent: Write | None, now: Now) -> Event:
    """The write joins: with the delta that came just now, or the one that waited; a person's word brings none."""
    index = place.log_index + 1
    if not place.is_live or write.epoch != place.epoch or (sent is None and not write.write_seq):
        return _drop(place, write, "step_resolved", now)
    members = {"attempt": str(write.attempt), "index": str(index), "run": text_json(write.run_id)}
    if sent is not None:
        members |= {"chain": text_json(sent.chain), "delta": delta_json(sent.delta)}
    else:
        members |= {"chain": text_json(write.chain), "write_seq": str(write.write_seq)}
    return write_down(place, now, "write_committed", object_json(**members), step=write.step_id, epoch=write.epoch)


def _drop(place: WorkspaceHead, write: OpenWrite, why: str, now: Now) -> Event:
    data = object_json(attempt=str(write.attempt), reason=text_json(why), run=text_json(write.run_id))
    return write_down(place, now, "write_dropped", data, step=write.step_id, epoch=write.epoch)
