"""A step's life: from the intent to the join.

States: pending, fenced, in_doubt, held, applied, committed, rejected, compensated (see `docs/protocol.md` for the table
that this file is).

Laws. The intent is durable before the effect is sent (6). A step is committed only in the transaction that finds the
asking epoch live (2). The stored request is what a replay sends; other arguments are a conflict (5). While a request of
an older epoch may still land, no other mutating step of the run is admitted (7). A late receipt is kept as a fact and
joined by the next holder instead of calling again (8); one that contradicts the books freezes the run.
"""

import json
from collections.abc import Mapping
from typing import assert_never

from tidefast.protocol.canonical import JSON, canonical, text_json
from tidefast.protocol.commands import Admit, Compensate, MarkLost, SaveResult, Settle
from tidefast.protocol.contracts import Contract, contract_digest
from tidefast.protocol.doubt import clear_ms, judge, other_doubt, probe_due_ms, refusal_settles_older, scope_change
from tidefast.protocol.events import Event, object_json
from tidefast.protocol.ids import Epoch, StepId, asked_by, epochs_from, incarnation_of, is_id, step_key
from tidefast.protocol.lease import accept, fence, not_running, record, refuse, unknown_run
from tidefast.protocol.records import (
    HAD_NO_EFFECT,
    MUTATING,
    Attempt,
    Now,
    OpenStep,
    Recovery,
    RunHead,
    Step,
    StepState,
    View,
)
from tidefast.protocol.recovery import is_presumed, may_be_lost, presumed, presumed_members
from tidefast.protocol.verdicts import Answer, Ask, Decision, Refused, Send, Settled, Wait
from tidefast.protocol.write import ask, receipt_refused

RENDERED = frozenset(("http", "smtp", "model"))  # kinds whose intent holds the rendered request


def admit(view: View, command: Admit, now: Now) -> Decision:
    """Let an effect out, or answer what the books already hold."""
    head = view.run
    if head is None:
        return unknown_run(command.right.run_id)
    refusal = fence(head, command.right, now)
    if refusal is not None:
        return refusal
    step = view.steps.get(command.step_id)
    if step is None:
        if command.stored:
            return refuse(head, "not_found", "step_unknown", step=command.step_id)
        return not_running(head) or _first(view, head, command, now)
    if not command.stored and step.call_digest != command.call_digest and not _may_restate(head, step, command):
        return refuse(
            head,
            "step_conflict",
            "other_call",
            step=step.step_id,
            stored_digest=step.call_digest,
            asked_digest=command.call_digest,
            stored_tool=step.tool,
        )
    return answer_known(view, head, step, command, now)


def _may_restate(head: RunHead, step: Step, command: Admit) -> bool:
    """A step whose every attempt is proved never sent may be restated by a newer epoch (law 5)."""
    return (
        step.state == "pending"
        and step.undo_of is None  # what an undo calls follows from its step: `compensate` writes it anew
        and not _is_in_the_gap(head, step)
        and all(attempt.state == "unsent" for attempt in step.attempts)
        and command.right.epoch > step.epoch
    )


def _first(view: View, head: RunHead, command: Admit, now: Now) -> Decision:
    """A step that the books don't know: make its intent durable."""
    if head.ending:
        return refuse(head, "run_ending", head.ending)
    misnamed = _misnamed(view, head, command.step_id)
    if misnamed is not None:
        return misnamed
    if command.contract is None:
        return refuse(head, "not_found", "tool_unknown", tool=command.tool)
    problem = unfit(command, command.contract)
    if problem:
        return refuse(head, "invalid", "args", tool=command.tool, step=command.step_id, problem=problem)
    if command.contract.effect in MUTATING:
        blocked = blocked_by(head, command.step_id, None, now)
        if blocked is not None:
            return blocked
    return first_sending(view, head, command, command.contract, now)


def first_sending(
    view: View, head: RunHead, command: Admit | Compensate, contract: Contract, now: Now, *before: Event
) -> Decision:
    """The intent of a step that the books don't know. In the window after a restore it may have been sent already."""
    step_id, undo_of = command.step_id, None
    if isinstance(command, Compensate):
        step_id, undo_of = command.undo_step_id, command.step_id
    key = step_key(view.namespace, head.run_id, step_id)
    send, fenced = new_intent(head, command, contract, key, 1, now, len(before))
    if head.recovery is None or contract.effect not in MUTATING:
        return accept(head, send, *before, fenced)
    lost = presumed(1, head.epoch, head.recovery, contract.timeout_ms)
    data = canonical({**fenced.data, **presumed_members(lost)})
    event = record(head, now, "step_presumed", data, step=step_id, epoch=head.epoch, after=len(before))
    step = Step(
        step_id=step_id,
        kind="tool" if undo_of is None else "undo",
        state="in_doubt",
        tool=command.tool,
        effect=contract.effect,
        call_digest=command.call_digest,
        key=key,
        contract=send.contract_digest,
        scope=contract.scope,
        dedups=contract.dedups,
        attempts=(lost,),
        intent_seq=event.seq,
        receipt_seq=0,
        epoch=head.epoch,
        undo_of=undo_of,
        closed_by=None,
        reason="",
        settled_seq=0,
        lag_ms=-1 if contract.probe is None else contract.probe.lag_ms,
        window_ms=contract.window_ms,
        is_independent=contract.independent,
        probes=0,
        probed_ms=0,
    )
    known = view._replace(contracts={**view.contracts, step.contract: contract})
    return _ask_in_doubt(known, head, step, command, now, *before, event)._replace(contract=contract)


def _is_in_the_gap(head: RunHead, step: Step) -> bool:
    """Whether the commits that a restore has lost may hold a sending of this step."""
    return head.recovery is not None and may_be_lost(step, incarnation_of(head.epoch))


def presume(view: View, head: RunHead, step: Step, window: Recovery, now: Now, after: int = 0) -> tuple[Step, Event]:
    """A known step with the attempt that may be among the lost, and the event that books it. A held one stays held."""
    epoch = epochs_from(view.incarnation)
    lost = presumed(len(step.attempts) + 1, epoch, window, view.contracts[step.contract].timeout_ms)
    data = canonical(presumed_members(lost))
    event = record(head, now, "step_presumed", data, step=step.step_id, epoch=head.epoch, after=after)
    state: StepState = "held" if step.state == "held" else "in_doubt"
    return step._replace(state=state, attempts=(*step.attempts, lost)), event


def _misnamed(view: View, head: RunHead, step_id: StepId) -> Decision | None:
    """The refusal of a name that nobody may give: derived ones are minted here, calls of an answer by its commit."""
    if is_id(step_id):
        return None
    asking = asked_by(step_id)
    model = None if asking is None else view.steps.get(asking)
    if model is None or model.effect != "model":
        return refuse(head, "invalid", "derived_id", step=step_id)
    if model.state != "committed":
        return refuse(head, "invalid", "answer_not_committed", step=step_id, asked_by=asking, state=model.state)
    return None


def unfit(command: Admit | Compensate, contract: Contract) -> str:
    """Why no intent can be made of this call: its arguments don't fit, or nothing was rendered that could be stored."""
    if isinstance(command, Admit) and command.args_problem:
        return command.args_problem
    return "no request was rendered" if contract.kind in RENDERED and command.request is None else ""


def answer_known(view: View, head: RunHead, step: Step, command: Admit | Compensate, now: Now) -> Decision:
    """A step that the books know: what its state allows."""
    if step.closed_by is not None:
        return accept(head, answer(step))
    stopped = not_running(head)
    match step.state:
        case "committed" | "compensated":
            return accept(head, answer(step))
        case _ if stopped is not None:
            return stopped
        case "applied" | "fenced" | "in_doubt" if step.effect == "workspace" and (told := ask(view, head, step, now)):
            return told
        case "applied":
            return join(head, step, command.right.epoch, now)
        case "rejected":
            return refuse(head, "step_rejected", step.reason, step=step.step_id, receipt_seq=step.receipt_seq)
        case "held":
            return refuse(head, "step_held", step.reason, **held_facts(step))
        case "fenced":
            return _ask_fenced(view, head, step, command, now)
        case "in_doubt":
            return _ask_in_doubt(view, head, step, command, now)
        case "pending":
            return _ask_pending(view, head, step, command, now)
        case _:
            assert_never(step.state)


def answer(step: Step) -> Answer:
    """The stored answer of a settled step."""
    return Answer(step.step_id, step.state, step.epoch, step.key, step.receipt_seq, True, step.closed_by)


def join(head: RunHead, step: Step, epoch: Epoch, now: Now) -> Decision:
    """A live holder asks for an applied step: it is committed with the receipt that is already there."""
    events = committing(head, step, epoch, object_json(receipt_seq=str(step.receipt_seq)), now)
    verdict = Answer(step.step_id, "committed", epoch, step.key, step.receipt_seq, replayed=True)
    return accept(head, verdict, *events)


def committing(
    head: RunHead, step: Step, epoch: Epoch, data: str, now: Now, known: Mapping[str, JSON] | None = None
) -> tuple[Event, ...]:
    """The event that commits a step, and with an undo the one that compensates its target in the same transaction."""
    committed = record(head, now, "step_committed", data, step=step.step_id, epoch=epoch, known=known)
    if step.undo_of is None:
        return (committed,)
    undone = object_json(undo=text_json(step.step_id))
    return committed, record(head, now, "step_compensated", undone, step=step.undo_of, epoch=epoch, after=1)


def _ask_fenced(view: View, head: RunHead, step: Step, command: Admit | Compensate, now: Now) -> Decision:
    last = step.attempts[-1]
    if last.owner in view.instances and now.ms < last.deadline_ms:
        return accept(head, Wait("step_in_flight", "in_flight", last.deadline_ms, step.step_id))
    lost = lost_event(head, step, now)
    doubted = step._replace(state="in_doubt", attempts=(*step.attempts[:-1], last._replace(state="lost")))
    return _ask_in_doubt(view, head, doubted, command, now, lost)


def _ask_in_doubt(
    view: View, head: RunHead, step: Step, command: Admit | Compensate, now: Now, *before: Event
) -> Decision:
    stored = view.contracts[step.contract]
    if head.recovery is not None and may_be_lost(step, view.incarnation):
        step, event = presume(view, head, step, head.recovery, now, len(before))
        before = (*before, event)
    verb, reason = judge(step, stored, command.contract, now)
    if verb == "hold" and is_undone_in_doubt(head, step, stored):
        facts: dict[str, JSON] = {"step": step.step_id, "state": "in_doubt"}
        return accept(head, Refused("already_decided", "undo_instead", facts), *before)
    if verb == "hold":
        if is_presumed(step.attempts[-1]) and reason in ("no_key", "key_window"):
            reason = "lost_commits"
        return _hold(head, step, reason, command.right.epoch, now, *before)
    if verb == "give_up":
        return _give_up(head, step, reason, command.right.epoch, now, *before)
    if verb == "probe":
        return accept(head, Ask(step.step_id, len(step.attempts), probe_due_ms(step, window_is_over=True)), *before)
    if verb == "wait":
        return accept(head, Wait("step_pending", reason, clear_ms(step), step.step_id), *before)
    blocked = blocked_by(head, step.step_id, step.undo_of, now) if step.is_mutating else None
    if blocked is not None:
        return blocked
    return _send_again(head, step, stored, command, now, *before)


def _ask_pending(view: View, head: RunHead, step: Step, command: Admit | Compensate, now: Now) -> Decision:
    """A step that is proved to have had no effect so far: sent again as stored, or restated."""
    if not step.contract:  # an undo that no call was written for; `compensate` writes it
        return refuse(head, "not_found", "tool_unknown", tool=step.tool)
    if _is_in_the_gap(head, step):
        return _ask_in_doubt(view, head, step, command, now)
    if head.ending and step.undo_of is None:
        return refuse(head, "run_ending", head.ending)
    is_mutating = step.is_mutating or (command.contract is not None and command.contract.effect in MUTATING)
    blocked = blocked_by(head, step.step_id, step.undo_of, now) if is_mutating else None
    if blocked is not None:
        return blocked
    stored = view.contracts[step.contract]
    changed = scope_change(stored, command.contract)
    wants_stored = isinstance(command, Admit) and command.stored
    if step.first_sent is None and not wants_stored and (changed or step.call_digest != command.call_digest):
        return _restate(head, step, command, now)
    if changed:
        return _hold(head, step, changed, command.right.epoch, now)
    return _send_again(head, step, stored, command, now)


def is_undone_in_doubt(head: RunHead, step: Step, stored: Contract) -> bool:
    """Whether an ending run undoes this doubt instead of asking a person: its undo does no harm if nothing happened."""
    return bool(head.ending) and stored.undo_safe_if_absent and step.step_id in head.to_undo


def _hold(head: RunHead, step: Step, reason: str, epoch: Epoch, now: Now, *before: Event) -> Decision:
    """Nothing may be done automatically: a person is asked."""
    data = object_json(attempts=str(len(step.attempts)), reason=text_json(reason))
    held = record(head, now, "step_held", data, step=step.step_id, epoch=epoch, after=len(before))
    return accept(head, Refused("step_held", reason, held_facts(step)), *before, held)


def held_facts(step: Step) -> dict[str, JSON]:
    """What a holder hears of a held step: which one, and whether the run may go on without it."""
    return {"steps": [step.step_id], **({"independent": True} if step.is_independent else {})}


def _give_up(head: RunHead, step: Step, reason: str, epoch: Epoch, now: Now, *before: Event) -> Decision:
    """A model was asked as often as its contract allows: the run goes on without its answer; nothing took effect."""
    data = object_json(reason=text_json(reason))
    event = record(head, now, "step_withdrawn", data, step=step.step_id, epoch=epoch, after=len(before))
    facts: dict[str, JSON] = {"step": step.step_id, "attempts": len(step.attempts), "receipt_seq": 0}
    return accept(head, Refused("step_rejected", reason, facts), *before, event)


def _restate(head: RunHead, step: Step, command: Admit | Compensate, now: Now) -> Decision:
    if command.contract is None and head.ending:  # an undo: nobody is left to call it otherwise, so a person is asked
        return _hold(head, step, "tool_gone", command.right.epoch, now)
    if command.contract is None:
        return refuse(head, "not_found", "tool_unknown", tool=command.tool)
    problem = unfit(command, command.contract)
    if problem:
        return refuse(head, "invalid", "args", tool=command.tool, step=step.step_id, problem=problem)
    verdict, event = new_intent(head, command, command.contract, step.key, len(step.attempts) + 1, now)
    return accept(head, verdict, event)


def _send_again(
    head: RunHead, step: Step, stored: Contract, command: Admit | Compensate, now: Now, *before: Event
) -> Decision:
    """Attempt n+1 of a stored call: same key, stored request; only the attempt is new."""
    number = len(step.attempts) + 1
    deadline_ms = min(command.deadline_ms, now.ms + stored.timeout_ms)  # the window was judged by the stored timeout
    lag_ms = max(step.lag_ms, 0)  # a request that still queues at the provider can land until then (law 14)
    older_over = all(now.ms >= attempt.deadline_ms + lag_ms for attempt in step.attempts if attempt.state != "unsent")
    data = object_json(
        attempt=str(number),
        deadline_ms=str(deadline_ms),
        intent_seq=str(step.intent_seq),
        older_over="true" if older_over else "false",
        owner=text_json(command.owner),
        wall_ms=str(now.wall_ms),
    )
    event = record(head, now, "step_fenced", data, step=step.step_id, epoch=command.right.epoch, after=len(before))
    is_first = step.first_sent is None
    verdict = Send(number, step.key, stored, step.intent_seq, deadline_ms, is_replay=True, is_first=is_first)
    return accept(head, verdict, *before, event)


def blocked_by(head: RunHead, step_id: StepId, undo_of: StepId | None, now: Now) -> Decision | None:
    """Why no mutating step may be sent now: a held step holds its run; older requests must be off the wire (law 7)."""
    for other in head.open:
        if not other.is_mutating or other.step_id == step_id:
            continue
        if other.state == "held" and other.step_id != undo_of and not other.is_independent:
            return refuse(head, "step_held", "run_held", steps=[other.step_id])
        if _may_land(other, head.epoch, now):
            return accept(head, Wait("step_pending", "older_attempt", other.wire_until_ms, other.step_id))
    return None


def _may_land(other: OpenStep, epoch: Epoch, now: Now) -> bool:
    return other.wire_epoch < epoch and now.ms < other.wire_until_ms


def new_intent(
    head: RunHead, command: Admit | Compensate, contract: Contract, key: str, number: int, now: Now, after: int = 0
) -> tuple[Send, Event]:
    """The intent: everything that every attempt will need, once. No older attempt of it can still land."""
    name = command.contract_digest or contract_digest(contract)
    step_id, undo_of = command.step_id, None
    if isinstance(command, Compensate):
        step_id, undo_of = command.undo_step_id, command.step_id
    known: dict[str, JSON] = {
        "attempt": number,
        "call_digest": command.call_digest,
        "contract": name,
        "deadline_ms": command.deadline_ms,
        "dedups": contract.dedups,
        "effect": contract.effect,
        "key": key,
        "older_over": True,
        "owner": command.owner,
        "scope": contract.scope,
        "tool": command.tool,
        "undo_of": undo_of,
        "wall_ms": now.wall_ms,
    }
    independent = lag = window = ""  # only where the contract says so: most don't
    if contract.independent:
        known["independent"], independent = True, '"independent":true,'
    if contract.probe is not None:
        known["lag_ms"], known["window_ms"] = contract.probe.lag_ms, contract.window_ms
        lag, window = f'"lag_ms":{contract.probe.lag_ms},', f',"window_ms":{contract.window_ms}'
    request = "null" if command.request is None else command.request.to_json()
    data = (  # in the order of the names, so that this is the canonical text
        f'{{"args":{command.args_json},"attempt":{number},"call_digest":"{command.call_digest}","contract":"{name}",'
        f'"deadline_ms":{command.deadline_ms},"dedups":{"true" if contract.dedups else "false"},'
        f'"effect":"{contract.effect}",{independent}"key":"{key}",{lag}"older_over":true,'
        f'"owner":{text_json(command.owner)},'
        f'"request":{request},"scope":{text_json(contract.scope)},"tool":{text_json(command.tool)},'
        f'"undo_of":{"null" if undo_of is None else text_json(undo_of)},"wall_ms":{now.wall_ms}{window}}}'
    )
    event = record(head, now, "step_fenced", data, step=step_id, epoch=command.right.epoch, after=after, known=known)
    return Send(number, key, contract, event.seq, command.deadline_ms, False, name, is_first=True), event


def lost_event(head: RunHead, step: Step, now: Now) -> Event:
    """The newest attempt is given up: its owner has ended or its deadline has passed. Not a failure: a doubt."""
    last = step.attempts[-1]
    data = object_json(attempt=str(last.number), is_lost="true")
    return record(head, now, "step_doubted", data, step=step.step_id, epoch=last.epoch)


def mark_lost(view: View, command: MarkLost, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    step = view.steps.get(command.step_id)
    if step is None or step.state != "fenced":
        return refuse(head, "already_decided", "not_fenced", step=command.step_id)
    last = step.attempts[-1]
    if last.owner in view.instances and now.ms < last.deadline_ms:
        return refuse(head, "step_in_flight", "in_flight", step=command.step_id, until_ms=last.deadline_ms)
    return accept(head, Settled("in_doubt", joined=False), lost_event(head, step, now))


def settle(view: View, command: Settle, now: Now) -> Decision:
    """Give an attempt its outcome. Facts are taken whatever the run's state; only the join asks for a live epoch."""
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    step = view.steps.get(command.step_id)
    if step is None or not 1 <= command.attempt <= len(step.attempts):
        return refuse(head, "not_found", "attempt_unknown", step=command.step_id, attempt=command.attempt)
    attempt = step.attempts[command.attempt - 1]
    if command.outcome == "applied":
        return _settle_applied(view, head, step, attempt, command, now)
    if attempt.state not in ("out", "lost") or step.state not in ("fenced", "in_doubt", "held"):
        return accept(head, _standing(step))
    match command.outcome:
        case "refused" | "unmet":
            return _settle_refused(view, head, step, attempt, command, now)
        case "unsent":
            return _settled(head, step, attempt, "step_unsent", command, now, _after_harmless(step, attempt, "pending"))
        case "unlisted" if _found_nothing(view, step, command):
            return _settle_refused(view, head, step, attempt, command, now)
        case "doubted" | "unlisted" | "key_reused":
            return _settle_doubted(head, step, attempt, command, now)
        case _:
            assert_never(command.outcome)


def _standing(step: Step) -> Settled:
    """Nothing changes: the books already say more than this outcome does. Whoever asks again hears them."""
    return Settled(step.state, joined=False)


def _settle_applied(view: View, head: RunHead, step: Step, attempt: Attempt, command: Settle, now: Now) -> Decision:
    data = object_json(attempt=str(attempt.number), receipt=command.receipt_json)
    if attempt.state == "applied":
        return accept(head, _standing(step))
    if step.effect == "workspace":
        refused = receipt_refused(view, head, step, attempt, command, now)
        if refused is not None:
            return refused
    # Two sendings of a call without a key have both applied: it happened twice.
    is_second = step.is_mutating and not step.dedups and step.state in ("applied", "committed")
    is_second = is_second and any(other.state == "applied" for other in step.attempts)
    if is_second or attempt.state in HAD_NO_EFFECT or step.state in ("rejected", "compensated"):
        late = record(head, now, "late_receipt", data, step=step.step_id, epoch=attempt.epoch)
        if not step.is_mutating:
            return accept(head, _standing(step), late)  # two readings may differ
        frozen = _diverged(head, step, attempt, now, after=1)
        return accept(head, Settled(step.state, joined=False, is_diverged=True), late, frozen)
    if step.state in ("applied", "committed"):
        late = record(head, now, "late_receipt", data, step=step.step_id, epoch=attempt.epoch)
        return accept(head, _standing(step), late)
    if head.is_live and attempt.epoch == head.epoch:
        events = committing(head, step, attempt.epoch, data, now, {"attempt": attempt.number})
        return accept(head, Settled("committed", joined=True), *events)
    applied = record(head, now, "step_applied", data, step=step.step_id, epoch=attempt.epoch)
    return accept(head, Settled("applied", joined=False), applied)


def _diverged(head: RunHead, step: Step, attempt: Attempt, now: Now, after: int) -> Event:
    """Facts contradict each other: nothing goes on until a person has looked."""
    why = object_json(reason='"diverged"', step=text_json(step.step_id), attempt=str(attempt.number))
    return record(head, now, "run_frozen", why, after=after)


def _settle_refused(view: View, head: RunHead, step: Step, attempt: Attempt, command: Settle, now: Now) -> Decision:
    contract, others = view.contracts[step.contract], other_doubt(step, attempt)
    is_newest = all(other.number < attempt.number for other in others)
    settles_older = is_newest and (not step.is_mutating or refusal_settles_older(step, attempt, contract, now))
    if others and not settles_older:
        return _settled(head, step, attempt, "step_refused", command, now, _doubtful(step, attempt))
    tries = sum(1 for other in step.attempts if other.state == "refused")
    if command.outcome == "refused" and tries < contract.retries and not contract.stored_failures:
        return _settled(head, step, attempt, "step_refused", command, now, "pending")
    if step.undo_of is not None:
        data = object_json(
            attempt=str(attempt.number),
            reason='"undo_nothing"' if _found_nothing(view, step, command) else '"undo_refused"',
            receipt=command.receipt_json,
            attempts=str(len(step.attempts)),
        )
        held = record(head, now, "step_held", data, step=step.step_id, epoch=attempt.epoch)
        return accept(head, Settled("held", joined=False), held)
    return _settled(head, step, attempt, "step_rejected", command, now, "rejected")


def _found_nothing(view: View, undo: Step, command: Settle) -> bool:
    """Whether an undo was answered that there is nothing to undo, as the contract of its target says."""
    target = None if undo.undo_of is None else view.steps.get(undo.undo_of)
    declared = None if target is None else view.contracts[target.contract].undo
    if declared is None or declared.nothing is None:
        return False
    receipt: JSON = json.loads(command.receipt_json)
    if not isinstance(receipt, Mapping):
        return False
    status = receipt.get("status")
    return declared.nothing.matches(status if isinstance(status, int) else 0, receipt.get("body"))


def _settle_doubted(head: RunHead, step: Step, attempt: Attempt, command: Settle, now: Now) -> Decision:
    """A doubt, said by the owner itself. An unlisted answer is held at once, so that a person sees it today.

    Of an attempt that was given up as lost it moves nothing, but is kept: its owner is silent no longer.
    """
    state = step.state if attempt.state == "lost" else "in_doubt"
    doubted = _settled(head, step, attempt, "step_doubted", command, now, state)
    if command.outcome == "key_reused" and step.is_mutating:  # can't come from us: a replay sends the stored request
        frozen = _diverged(head, step, attempt, now, after=1)
        return accept(head, Settled(state, joined=False, is_diverged=True), *doubted.events, frozen)
    if command.outcome != "unlisted" or attempt.state == "lost" or not step.is_mutating:
        return doubted
    data = object_json(reason='"unlisted_answer"', attempts=str(len(step.attempts)))
    held = record(head, now, "step_held", data, step=step.step_id, epoch=attempt.epoch, after=1)
    return accept(head, Settled("held", joined=False), *doubted.events, held)


def _after_harmless(step: Step, attempt: Attempt, otherwise: str) -> str:
    return _doubtful(step, attempt) if other_doubt(step, attempt) else otherwise


def _doubtful(step: Step, attempt: Attempt) -> str:
    """Where a step stands after a harmless outcome of one attempt, while another may still have had an effect."""
    is_newest = attempt.number == len(step.attempts)
    return "in_doubt" if is_newest and step.state == "fenced" else step.state


def _settled(head: RunHead, step: Step, attempt: Attempt, kind: str, command: Settle, now: Now, state: str) -> Decision:
    data = object_json(
        attempt=str(attempt.number),
        reason=text_json(command.reason),
        receipt=command.receipt_json,
        state=f'"{state}"',
    )
    event = record(head, now, kind, data, step=step.step_id, epoch=attempt.epoch)  # type: ignore[arg-type]
    return accept(head, Settled(state, joined=False), event)  # type: ignore[arg-type]


def save_result(view: View, command: SaveResult, now: Now) -> Decision:
    """Journal a local step's value. The first value stands: a successor answers with it instead of computing anew."""
    head = view.run
    if head is None:
        return unknown_run(command.right.run_id)
    refusal = fence(head, command.right, now)
    if refusal is not None:
        return refusal
    step = view.steps.get(command.step_id)
    if step is not None:
        if step.kind != "local":
            return refuse(head, "step_conflict", "other_kind", step=step.step_id, stored_tool=step.tool)
        return accept(head, answer(step))
    stopped = not_running(head)
    if stopped is not None:
        return stopped
    if head.ending:
        return refuse(head, "run_ending", head.ending)
    misnamed = _misnamed(view, head, command.step_id)
    if misnamed is not None:
        return misnamed
    data, epoch = object_json(value=command.value_json), command.right.epoch
    event = record(head, now, "step_result", data, step=command.step_id, epoch=epoch)
    return accept(head, Answer(command.step_id, "committed", epoch, "", event.seq, replayed=False), event)
