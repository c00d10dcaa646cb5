"""Checkpoints: numbered, fenced by epoch, and never ahead of an effect whose outcome is open.

Laws. A checkpoint is accepted only under the live epoch and with a number larger than the stored one; the right next
number under an old epoch is refused like any other, because only the epoch shows that it is old. While a mutating step
of the run is unsettled none is accepted: a snapshot that says "paid" must not outlive a payment that nobody can prove.
"""

from tidefast.protocol.canonical import digest
from tidefast.protocol.commands import SaveCheckpoint
from tidefast.protocol.events import object_json
from tidefast.protocol.lease import accept, fence, not_running, record, refuse, unknown_run
from tidefast.protocol.records import Now, RunHead, View
from tidefast.protocol.verdicts import Decision, Done


def save_checkpoint(view: View, command: SaveCheckpoint, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.right.run_id)
    refusal = fence(head, command.right, now)
    if refusal is not None:
        return refusal
    state_digest = digest(command.state_json)
    if (command.number, command.right.epoch, state_digest) == (
        head.checkpoint,
        head.checkpoint_epoch,
        head.checkpoint_digest,
    ):
        return accept(head, Done("saved", head.checkpoint_seq, was_new=False))
    stopped = not_running(head)
    if stopped is not None:
        return stopped
    if command.number <= head.checkpoint:
        return refuse(head, "checkpoint_stale", "number", number=command.number, stored=head.checkpoint)
    if head.ending:
        return refuse(head, "run_ending", head.ending)
    unsettled = unsettled_effects(head)
    if unsettled:
        return refuse(head, "unsettled_effects", "unsettled", steps=unsettled)
    data = object_json(number=str(command.number), state=command.state_json, state_digest=f'"{state_digest}"')
    event = record(head, now, "checkpoint_saved", data, epoch=command.right.epoch)
    return accept(head, Done("saved", event.seq), event)


def unsettled_effects(head: RunHead) -> list[str]:
    """The mutating steps whose outcome is open."""
    return [step.step_id for step in head.open if step.is_mutating and step.is_unsettled]
