"""Asking the provider whether it happened: how an answer is read, and what follows from it.

Laws. An answer is dated by when it was asked for: it counts only if the question was sent after deadline and lag of
every attempt that it is to clear, and after the newest answer's; it is dropped if the step has had another attempt,
another state or the beginning of an undo since (14). For a tool without a key *absent* counts only once the instance
that owned a lost attempt has ended or spoken. *Found* is a receipt; *absent* sends the step again under a live epoch;
*many* contradicts the books and freezes the run; all else is unclear, and after `probe_tries` unclear answers a
person is asked, while questions go on.
"""

from collections.abc import Mapping

from tidefast.protocol.canonical import JSON, text_json
from tidefast.protocol.commands import AnswerProbe, ProbeWord
from tidefast.protocol.contracts import Probe
from tidefast.protocol.doubt import clear_ms
from tidefast.protocol.events import Event, object_json
from tidefast.protocol.lease import accept, record, refuse, unknown_run
from tidefast.protocol.patterns import Pattern
from tidefast.protocol.records import Now, RunHead, Step, View
from tidefast.protocol.recovery import may_be_lost
from tidefast.protocol.step import presume
from tidefast.protocol.verdicts import Decision, Settled


def answer_probe(view: View, command: AnswerProbe, now: Now) -> Decision:
    """Take what a provider said, if it still speaks of what the books hold."""
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    step = view.steps.get(command.step_id)
    if step is None:
        return refuse(head, "not_found", "step_unknown", step=command.step_id)
    if step.state not in ("in_doubt", "held") or step.closed_by is not None or step.lag_ms < 0:
        return refuse(head, "already_decided", step.state, step=step.step_id, state=step.state)
    if command.attempts != len(step.attempts):
        count = len(step.attempts)
        return refuse(head, "moved", "attempts", step=step.step_id, expected=command.attempts, attempts=count)
    before: tuple[Event, ...] = ()
    if view.recovery is not None and may_be_lost(step, view.incarnation):  # the answer must be about that sending too
        step, presuming = presume(view, head, step, view.recovery, now)
        before = (presuming,)
    if not max(clear_ms(step), step.probed_ms) < command.asked_ms <= now.ms:
        return refuse(head, "moved", "looked_too_early", step=step.step_id, look_after_ms=clear_ms(step))
    if command.answer == "absent" and is_owner_silent(view, step):
        return refuse(head, "step_in_flight", "owner_silent", step=step.step_id)
    return _taken(view, head, step, command, now, *before)


def is_owner_silent(view: View, step: Step) -> bool:
    """Whether an instance that lives has not said yet what became of a lost attempt; asked of tools without a key."""
    return not step.dedups and any(
        attempt.state == "lost" and attempt.owner in view.instances for attempt in step.doubts
    )


def _taken(view: View, head: RunHead, step: Step, command: AnswerProbe, now: Now, *before: Event) -> Decision:
    state = {"found": "applied", "absent": "pending"}.get(command.answer, step.state)
    data = object_json(
        answer=f'"{command.answer}"',
        asked_ms=str(command.asked_ms),
        attempts=str(len(step.attempts)),
        reason=text_json(command.reason),
        receipt=command.receipt_json,
        state=f'"{state}"',
    )
    place = len(before)
    answered = record(head, now, "probe_answered", data, step=step.step_id, after=place)
    if command.answer == "many" and step.step_id not in head.diverged:
        why = object_json(reason='"diverged"', step=text_json(step.step_id))
        frozen = record(head, now, "run_frozen", why, after=place + 1)
        return accept(head, Settled(step.state, joined=False, is_diverged=True), *before, answered, frozen)
    tries = view.contracts[step.contract].probe_tries
    if command.answer == "unclear" and step.state == "in_doubt" and step.probes + 1 >= tries:
        why = object_json(attempts=str(len(step.attempts)), reason='"probe_unclear"')
        held = record(head, now, "step_held", why, step=step.step_id, after=place + 1)
        return accept(head, Settled("held", joined=False), *before, answered, held)
    return accept(head, Settled(state, joined=False), *before, answered)  # type: ignore[arg-type]


def read_answer(probe: Probe, sources: Mapping[str, JSON], status: int | None, body: JSON) -> ProbeWord:
    """What a whole answer says: matched as the contract says, and unclear wherever that doesn't tell it apart.

    `sources` are `key` and `args`; `status` is None where a tool answered that has none. Raises `RenderError`.
    """

    def fits(pattern: Pattern | None) -> bool:
        if pattern is None:
            return False
        is_meant = bool(pattern.status) or status is None or 200 <= status <= 299
        return is_meant and pattern.filled(sources).matches(status or 0, body)

    if fits(probe.many):
        return "unclear" if fits(probe.absent) else "many"
    is_found, is_absent = fits(probe.found), fits(probe.absent)
    if is_found == is_absent:
        return "unclear"
    return "found" if is_found else "absent"
