"""How a run begins and completes. (`ending` has how it fails or is cancelled.)

Laws. Creating a run twice is one run; the same id with another agent or input is a conflict. No run ends over an
unsettled effect (10), and none completes while a mutating step that was settled since the newest checkpoint was not
asked for in this pass: a deploy that renamed a step must not lose it.
"""

from collections.abc import Collection

from tidefast.protocol.canonical import digest, text_json
from tidefast.protocol.checkpoint import unsettled_effects
from tidefast.protocol.commands import Complete, CreateRun
from tidefast.protocol.events import object_json
from tidefast.protocol.ids import Epoch, RunId, derived_id
from tidefast.protocol.lease import accept, fence, not_running, record, refuse, unknown_run
from tidefast.protocol.records import Now, Right, RunHead, View
from tidefast.protocol.recovery import recovery_member
from tidefast.protocol.verdicts import Decision, Done


def blank(run_id: RunId) -> RunHead:
    """The head before a run's first event: version 0 says that there is no such run yet."""
    return RunHead(
        run_id=run_id,
        agent="",
        agent_version="",
        created_ms=0,
        input_digest="",
        version=0,
        seq=0,
        digest="0" * 64,
        epoch=Epoch(0),
        is_live=False,
        holder="",
        request_id="",
        lease_ms=0,
        expires_at_ms=0,
        lease_end="",
        lease_end_seq=0,
        lease_ended_ms=0,
        parked=False,
        checkpoint=0,
        checkpoint_seq=0,
        checkpoint_epoch=Epoch(0),
        checkpoint_digest="",
        grants_without_progress=0,
        not_before_ms=0,
        last_step=None,
        paused=False,
        frozen="",
        diverged=(),
        ending="",
        ending_seq=0,
        to_undo=(),
        end="",
        end_seq=0,
        end_digest="",
        open=(),
    )


def create(view: View, command: CreateRun, now: Now) -> Decision:
    head = view.run
    input_digest = digest(command.input_json)
    if head is not None:
        same = (head.agent, head.input_digest) == (command.agent, input_digest)
        if same:
            return accept(head, Done(head.state, 1, was_new=False))
        return refuse(head, "run_conflict", "other_input", run=head.run_id, agent=head.agent)
    fresh = blank(command.run_id)
    window = {} if command.is_minted else recovery_member(view.recovery)
    data = object_json(
        agent=text_json(command.agent),
        agent_version=text_json(command.agent_version),
        input=command.input_json,
        input_digest=f'"{input_digest}"',
        run=text_json(command.run_id),  # binds the chain to the run: another run's whole log can't stand in for it
        **window,
    )
    return accept(fresh, Done("claimable", 1), record(fresh, now, "run_created", data))


def complete(view: View, command: Complete, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.right.run_id)
    result_digest = digest(command.result_json)
    if same_end(head, command.right, ("completed",), result_digest):
        return accept(head, Done("completed", head.end_seq, was_new=False))
    refusal = fence(head, command.right, now) or not_running(head)
    if refusal is not None:
        return refusal
    if head.ending:
        return refuse(head, "run_ending", head.ending)
    unsettled = unsettled_effects(head)
    if unsettled:
        return refuse(head, "unsettled_effects", "unsettled", steps=unsettled)
    named = command.asked | command.dropped  # who asked for the undo of a step has asked for the step
    forgotten: list[str] = [
        step for step in view.forgotten if step not in named and derived_id(step, "undo") not in command.asked
    ]
    if forgotten:
        return refuse(head, "unsettled_effects", "not_asked", steps=forgotten)
    dropped = sorted(set(view.forgotten) & command.dropped)
    data = object_json(
        dropped="[" + ",".join(text_json(str(step)) for step in dropped) + "]",
        result=command.result_json,
        result_digest=f'"{result_digest}"',
    )
    event = record(head, now, "run_completed", data, epoch=command.right.epoch)
    return accept(head, Done("completed", event.seq), event)


def same_end(head: RunHead, right: Right, ends: Collection[str], end_digest: str) -> bool:
    """Whether this very verb, with this body, is what ended the run (law 17)."""
    return head.end in ends and (head.epoch, head.holder, head.end_digest) == (right.epoch, right.holder, end_digest)
