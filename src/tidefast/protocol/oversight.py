"""What the person in charge may do to a run: preempt, pause, resume, freeze, thaw. (`ending` has cancel.)

Laws. Each verb acts on the state at commit, records who and why, and says nothing new when it is repeated. A verb that
names the epoch which its sender saw is refused as `moved` if a newer one was granted since. Neither pausing nor
freezing ends the epoch: what is in flight settles, facts are taken, and nothing new is admitted or granted. A run that
diverged goes on only after a person has settled each step that contradicts the books.
"""

from tidefast.protocol.canonical import text_json
from tidefast.protocol.commands import Freeze, OperatorVerb, Pause, Preempt, Resume, Thaw
from tidefast.protocol.events import Kind, object_json
from tidefast.protocol.ids import Epoch
from tidefast.protocol.lease import accept, record, refuse, unknown_run
from tidefast.protocol.records import Now, RunHead, View
from tidefast.protocol.verdicts import Decision, Done


def signed(command: OperatorVerb) -> str:
    """The data of an operator's event: who and why."""
    return object_json(by=text_json(command.by), note=text_json(command.note))


def moved(head: RunHead, expect_epoch: Epoch | None) -> Decision | None:
    """The refusal of a verb whose sender saw another epoch."""
    if expect_epoch is None or expect_epoch == head.epoch:
        return None
    return refuse(head, "moved", "epoch", expected_epoch=expect_epoch, live_epoch=head.epoch)


def preempt(view: View, command: Preempt, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    refusal = _not_open(head, command)
    if refusal is not None:
        return refusal
    if not head.is_live:
        return _nothing_new(head)
    event = record(head, now, "lease_preempted", signed(command), epoch=head.epoch)
    return accept(head, Done("preempted", event.seq), event)


def pause(view: View, command: Pause, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    return _not_open(head, command) or _switch(head, command, now, "run_paused", "paused", is_so=head.paused)


def resume(view: View, command: Resume, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    return _not_open(head, command) or _switch(head, command, now, "run_resumed", "resumed", is_so=not head.paused)


def freeze(view: View, command: Freeze, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    refusal = _not_open(head, command)
    if refusal is not None:
        return refusal
    if head.frozen:
        return _nothing_new(head)
    data = object_json(by=text_json(command.by), note=text_json(command.note), reason='"operator"')
    event = record(head, now, "run_frozen", data)
    return accept(head, Done("frozen", event.seq), event)


def thaw(view: View, command: Thaw, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    refusal = _not_open(head, command)
    if refusal is not None:
        return refusal
    if head.diverged:
        return refuse(head, "run_frozen", "diverged", steps=list(head.diverged))
    return _switch(head, command, now, "run_thawed", "thawed", is_so=not head.frozen)


def _not_open(head: RunHead, command: OperatorVerb) -> Decision | None:
    """Why no verb of an operator is taken: the run has ended, or was granted anew since they looked."""
    if head.end:
        return refuse(head, "run_ended", head.end, state=head.end)
    return moved(head, command.expect_epoch)


def _switch(head: RunHead, command: OperatorVerb, now: Now, kind: Kind, told: str, *, is_so: bool) -> Decision:
    if is_so:
        return _nothing_new(head)
    event = record(head, now, kind, signed(command))
    return accept(head, Done(told, event.seq), event)


def _nothing_new(head: RunHead) -> Decision:
    return accept(head, Done(head.state, head.seq, was_new=False))
