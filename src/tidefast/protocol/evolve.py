"""What each event means: how a view looks after it.

Pure and total over the closed list of kinds. The head's version, seq and digest rise with every event; the list of open
steps on the head is kept here and nowhere else, which is why the rules about a whole run need no scan.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from tidefast.protocol.doubt import probe_due_ms
from tidefast.protocol.events import Event, chain
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.lease import pause_ms
from tidefast.protocol.records import (
    HAD_NO_EFFECT,
    NOT_SETTLED,
    Attempt,
    AttemptState,
    LeaseEnd,
    OpenStep,
    Recovery,
    RunHead,
    Step,
    StepState,
    View,
)
from tidefast.protocol.run import blank

Data = Mapping[str, Any]


def evolve(view: View, event: Event, run_id: RunId | None = None) -> View:
    """The view after this event. `run_id` is needed only where the view holds no run yet."""
    head = view.run if view.run is not None else blank(run_id or RunId(""))
    data: Data = event.known or json.loads(event.data_json)
    step_id = event.step_id
    if step_id is None:
        head = head._replace(version=head.version + 1, seq=event.seq, digest=chain(head.digest, event))
        return view._replace(run=_run_event(head, event, data))
    steps = dict(view.steps)
    before = steps.get(step_id)
    step = steps[step_id] = _step_event(step_id, before, event, data)
    if head.parked and before is not None and before.state == "held" != step.state:
        head = head._replace(parked=False)
    still_open = open_steps(head.open, step, event.at_ms)
    if step.undo_of is not None and event.kind == "step_resolved" and step.state == "rejected":
        target = steps[step.undo_of] = steps[step.undo_of]._replace(closed_by=None)
        still_open = open_steps(still_open, target, event.at_ms)
    return View(
        view.namespace,
        view.incarnation,
        view.instances,
        _moved(head, event, step, still_open),
        steps,
        view.contracts,
        view.forgotten,
        view.recovery,
        view.workspace,
        view.workspace_id,
    )


HAS_RECEIPT = frozenset(("applied", "committed", "compensated"))
_PROGRESS = frozenset(("step_committed", "step_rejected", "step_compensated", "step_resolved", "step_result"))
_PLACE = {name: place for place, name in enumerate(RunHead._fields)}
_VERSION, _SEQ, _DIGEST, _OPEN = _PLACE["version"], _PLACE["seq"], _PLACE["digest"], _PLACE["open"]
_GRANTS, _NOT_BEFORE, _DIVERGED = _PLACE["grants_without_progress"], _PLACE["not_before_ms"], _PLACE["diverged"]
_LAST_STEP, _TO_UNDO = _PLACE["last_step"], _PLACE["to_undo"]


def _moved(head: RunHead, event: Event, step: Step, still_open: tuple[OpenStep, ...]) -> RunHead:
    """The head after a step's event. `_replace` in half its time: this is run for each of them."""
    fields: list[Any] = list(head)
    fields[_VERSION] += 1
    fields[_SEQ] = event.seq
    fields[_DIGEST] = chain(head.digest, event)
    fields[_OPEN] = still_open
    fields[_LAST_STEP] = step.step_id
    if head.to_undo and step.state in ("rejected", "compensated"):
        # A step that had no effect, or none any more, and one whose undo a person has called off.
        fields[_TO_UNDO] = tuple([left for left in head.to_undo if left not in (step.step_id, step.undo_of)])
    if event.kind in _PROGRESS:
        fields[_GRANTS] = fields[_NOT_BEFORE] = 0
        fields[_DIVERGED] = _still_diverged(head.diverged, event)
    return RunHead._make(fields)


def _still_diverged(diverged: tuple[StepId, ...], event: Event) -> tuple[StepId, ...]:
    if not diverged or event.kind != "step_resolved":
        return diverged
    return tuple(other for other in diverged if other != event.step_id)


def _run_event(head: RunHead, event: Event, data: Data) -> RunHead:
    match event.kind:
        case "run_created":
            return head._replace(
                agent=data["agent"],
                agent_version=data["agent_version"],
                created_ms=event.at_ms,
                input_digest=data["input_digest"],
                recovery=_recovery(data),
            )
        case "lease_granted":
            return _granted(head, event, data)
        case "lease_lapsed":
            return _lease_ended(head, event, "lapsed")
        case "lease_preempted":
            return _lease_ended(head, event, "preempted")
        case "lease_released":
            parked = data["reason"] == "held" and bool(head.held_steps)
            return _lease_ended(head, event, "released")._replace(parked=parked)
        case "checkpoint_saved":
            return head._replace(
                checkpoint=data["number"],
                checkpoint_seq=event.seq,
                checkpoint_epoch=event.epoch,
                checkpoint_digest=data["state_digest"],
                grants_without_progress=0,
                not_before_ms=0,
            )
        case "run_frozen":
            step = () if data.get("step") is None else (StepId(data["step"]),)
            return head._replace(frozen=data["reason"], diverged=(*head.diverged, *step))
        case "run_thawed":
            return head._replace(frozen="", grants_without_progress=0, not_before_ms=0)
        case "run_paused" | "run_resumed":
            return head._replace(paused=event.kind == "run_paused")
        case "run_failing" | "run_cancelling":
            return head._replace(
                ending="failing" if event.kind == "run_failing" else "cancelling",
                ending_seq=event.seq,
                end_digest=data.get("error_digest", ""),
                to_undo=tuple(map(StepId, data["undo"])),
            )
        case "run_completed":
            ended = _lease_ended(head, event, "completed")
            return ended._replace(end="completed", end_seq=event.seq, end_digest=data["result_digest"])
        case "run_failed" | "run_cancelled":
            how: Literal["failed", "cancelled"] = "failed" if event.kind == "run_failed" else "cancelled"
            ended = _lease_ended(head, event, how)
            return ended._replace(end=how, end_seq=event.seq, end_digest=data.get("error_digest", ""))
        case _:
            raise ValueError(f"the event {event.kind} belongs to a step, but names none")


def _granted(head: RunHead, event: Event, data: Data) -> RunHead:
    grants = head.grants_without_progress + 1
    return head._replace(
        epoch=event.epoch,
        is_live=True,
        holder=data["holder"],
        request_id=data["request_id"],
        lease_ms=data["lease_ms"],
        expires_at_ms=data["expires_at_ms"],
        lease_end="",
        lease_end_seq=0,
        lease_ended_ms=0,
        parked=False,
        grants_without_progress=grants,
        not_before_ms=event.at_ms + pause_ms(grants),
        recovery=_recovery(data),
    )


def _recovery(data: Data) -> Recovery | None:
    window = data.get("recovery")
    return None if window is None else Recovery(window["point_ms"], window["point_wall_ms"], window["restored_ms"])


def _lease_ended(head: RunHead, event: Event, how: LeaseEnd) -> RunHead:
    return head._replace(is_live=False, lease_end=how, lease_end_seq=event.seq, lease_ended_ms=event.at_ms)


def _step_event(step_id: StepId, step: Step | None, event: Event, data: Data) -> Step:
    if step is None:
        return _new_step(step_id, event, data)
    match event.kind:
        case "step_fenced":
            return _fenced_again(step, event, data)
        case "step_presumed":
            state: StepState = "held" if step.state == "held" else "in_doubt"
            return _with_call(step._replace(state=state, attempts=(*step.attempts, _presumed(data))), event, data)
        case "step_committed":
            has_receipt = "attempt" in data
            return step._replace(
                state="committed",
                epoch=event.epoch,
                settled_seq=event.seq,
                attempts=_with_outcome(step.attempts, data, "applied") if has_receipt else step.attempts,
                receipt_seq=event.seq if has_receipt else step.receipt_seq,
            )
        case "step_applied":
            return _with_receipt(step._replace(state="applied"), event, data)
        case "step_unsent":
            return _booked(step, data, "unsent")._replace(state=data["state"])
        case "step_refused":
            booked = _booked(step, data, "refused")
            if data["state"] != "pending":
                return booked._replace(state=data["state"])
            # Sent again only if nothing older can have applied: then this refusal speaks for the older attempts too.
            return booked._replace(state="pending", attempts=_all_open(booked.attempts, "refused"))
        case "step_rejected":
            attempts = _all_open(_booked(step, data, "refused").attempts, "refused")
            return step._replace(
                state="rejected",
                attempts=attempts,
                receipt_seq=event.seq,
                reason="precondition" if data["reason"] == "precondition" else "refused",
                settled_seq=event.seq,
            )
        case "step_doubted":
            booked = _booked(step, data, "lost" if data.get("is_lost") else "doubted")
            return booked._replace(state=data.get("state", "in_doubt"))
        case "step_held":
            held = _booked(step, data, "refused") if "attempt" in data else step
            return held._replace(state="held", reason=data["reason"])
        case "probe_answered":
            return _probed(step, event, data)
        case "step_resolved":
            return _resolved(step, event, data)
        case _:
            return _closing_event(step, event, data)


def _closing_event(step: Step, event: Event, data: Data) -> Step:
    match event.kind:
        case "step_withdrawn":
            return step._replace(state="rejected", reason=data.get("reason", "withdrawn"), settled_seq=event.seq)
        case "undo_begun":
            # Of a held doubt: somebody does something about it, so it doesn't hold the run any longer.
            return step._replace(
                closed_by=StepId(data["undo"]), state="in_doubt" if step.state == "held" else step.state
            )
        case "step_compensated":
            return step._replace(state="compensated", settled_seq=event.seq)
        case "late_receipt":
            return step if data.get("is_gone") else _booked(step, data, "applied")
        case "replica_lost":
            absent = tuple(
                attempt._replace(state="absent") if attempt.state not in HAD_NO_EFFECT else attempt
                for attempt in step.attempts
            )
            return step._replace(state="pending", attempts=absent, receipt_seq=0, reason="replica_lost")
        case _:
            raise ValueError(f"the event {event.kind} can't happen to the step {step.step_id}")


def _new_step(step_id: StepId, event: Event, data: Data) -> Step:
    if event.kind == "step_result":
        return _local_step(step_id, event)
    if event.kind == "step_held" and "undo_of" in data:
        return _unwritten_undo(step_id, event, data)
    if event.kind not in ("step_fenced", "step_presumed"):
        raise ValueError(f"the event {event.kind} names a step that no intent made")
    is_sent = event.kind == "step_fenced"
    undo_of = data.get("undo_of")
    return Step(  # by position: this line is run once a step, and names cost a third of it
        step_id,
        "tool" if undo_of is None else "undo",
        "fenced" if is_sent else "in_doubt",
        data["tool"],
        data["effect"],
        data["call_digest"],
        data["key"],
        data["contract"],
        data["scope"],
        data["dedups"],
        (_attempt(event, data) if is_sent else _presumed(data),),
        event.seq,  # intent_seq
        0,  # receipt_seq
        event.epoch,
        None if undo_of is None else StepId(undo_of),
        None,  # closed_by
        "",  # reason
        0,  # settled_seq
        data.get("lag_ms", -1),
        data.get("window_ms", 0),
        data.get("independent", False),
        0,  # probes
        0,  # probed_ms
    )


def _local_step(step_id: StepId, event: Event) -> Step:
    return Step(
        step_id=step_id,
        kind="local",
        state="committed",
        tool="",
        effect="none",
        call_digest="",
        key="",
        contract="",
        scope="",
        dedups=False,
        attempts=(),
        intent_seq=0,
        receipt_seq=event.seq,
        epoch=event.epoch,
        undo_of=None,
        closed_by=None,
        reason="",
        settled_seq=event.seq,
        lag_ms=-1,
        window_ms=0,
        is_independent=False,
        probes=0,
        probed_ms=0,
    )


def _unwritten_undo(step_id: StepId, event: Event, data: Data) -> Step:
    """An undo that can't be written as a call: held before its first attempt."""
    return Step(
        step_id=step_id,
        kind="undo",
        state="held",
        tool=data["tool"],
        effect="external",
        call_digest="",
        key=data["key"],
        contract="",
        scope="",
        dedups=False,
        attempts=(),
        intent_seq=0,
        receipt_seq=0,
        epoch=event.epoch,
        undo_of=StepId(data["undo_of"]),
        closed_by=None,
        reason=data["reason"],
        settled_seq=0,
        lag_ms=-1,
        window_ms=0,
        is_independent=False,
        probes=0,
        probed_ms=0,
    )


def _fenced_again(step: Step, event: Event, data: Data) -> Step:
    attempts = (*step.attempts, _attempt(event, data))
    step = step._replace(state="fenced", attempts=attempts, epoch=event.epoch, reason="", probes=0, probed_ms=0)
    return _with_call(step, event, data)


def _with_call(step: Step, event: Event, data: Data) -> Step:
    """The step with the call that an intent holds; as it was, if the intent only points at the stored one."""
    if "tool" not in data:
        return step
    return step._replace(
        tool=data["tool"],
        effect=data["effect"],
        call_digest=data["call_digest"],
        contract=data["contract"],
        scope=data["scope"],
        dedups=data["dedups"],
        intent_seq=event.seq,
        lag_ms=data.get("lag_ms", -1),
        window_ms=data.get("window_ms", 0),
        is_independent=data.get("independent", False),
    )


def _probed(step: Step, event: Event, data: Data) -> Step:
    asked = step._replace(probed_ms=data["asked_ms"], state=data["state"])
    match data["answer"]:
        case "found":
            return asked._replace(receipt_seq=event.seq)
        case "absent":
            return asked._replace(attempts=_all_open(step.attempts, "absent"))
        case _:
            return asked._replace(probes=step.probes + 1)


def _attempt(event: Event, data: Data) -> Attempt:
    return Attempt(
        data["attempt"],
        event.epoch,
        data["owner"],
        event.at_ms,
        data["wall_ms"],
        data["deadline_ms"],
        data["older_over"],
        "out",
    )


def _presumed(data: Data) -> Attempt:
    """An attempt that nobody is known to have made (law 16), dated when it can have been made first."""
    return Attempt(
        data["attempt"],
        Epoch(data["epoch"]),
        data["owner"],
        data["sent_ms"],
        data["wall_ms"],
        data["deadline_ms"],
        data["older_over"],
        "lost",
    )


def _booked(step: Step, data: Data, state: AttemptState) -> Step:
    """The step with one attempt given its outcome."""
    return step._replace(attempts=_with_outcome(step.attempts, data, state))


def _with_outcome(attempts: tuple[Attempt, ...], data: Data, state: AttemptState) -> tuple[Attempt, ...]:
    number = data["attempt"]
    return (*attempts[: number - 1], attempts[number - 1]._replace(state=state), *attempts[number:])


def _with_receipt(step: Step, event: Event, data: Data) -> Step:
    return _booked(step, data, "applied")._replace(receipt_seq=event.seq)


def _all_open(attempts: tuple[Attempt, ...], state: AttemptState) -> tuple[Attempt, ...]:
    return tuple(attempt._replace(state=state) if attempt.state in NOT_SETTLED else attempt for attempt in attempts)


def _resolved(step: Step, event: Event, data: Data) -> Step:
    verdict, state = data["verdict"], data["state"]
    attempts = _all_open(step.attempts, "not_applied") if verdict in ("not_applied", "refused") else step.attempts
    return step._replace(
        state=state,
        attempts=attempts,
        closed_by=None if verdict == "applied" else step.closed_by,
        reason=f"resolved:{verdict}",
        receipt_seq=event.seq if verdict == "applied" and step.state not in HAS_RECEIPT else step.receipt_seq,
        settled_seq=event.seq if state in ("rejected", "compensated", "committed") else step.settled_seq,
    )


def open_steps(before: tuple[OpenStep, ...], step: Step, at_ms: int) -> tuple[OpenStep, ...]:
    """The head's list of open steps after one of them changed."""
    kept = before and tuple(
        [o for o in before if o.step_id != step.step_id and (o.is_unsettled or o.wire_until_ms > at_ms)]
    )
    is_unsettled = step.is_unsettled
    on_wire = [a for a in step.attempts if a.state in NOT_SETTLED and a.deadline_ms > at_ms]
    if on_wire and step.dedups and step.state in ("applied", "committed"):
        on_wire = []  # whatever lands now lands on a key that the provider knows
    if not is_unsettled and not on_wire:
        return kept
    entry = OpenStep(
        step.step_id,
        step.state,
        step.is_mutating,
        is_unsettled,
        step.undo_of,
        min([attempt.epoch for attempt in on_wire], default=Epoch(0)),  # wire_epoch
        max([attempt.deadline_ms for attempt in on_wire], default=0),  # wire_until_ms
        probe_due_ms(step),
        step.is_independent,
    )
    return (*kept, entry)
