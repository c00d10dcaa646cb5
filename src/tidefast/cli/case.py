"""What a person needs before they decide: the evidence about a held step, what each verdict will do, why a run stands.

Everything here is read from the log: the stored call (with its secrets masked, as the server shows it), each attempt
with its epoch and what the provider said to it, and what providers and people have said since.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tidefast.cli import show as out
from tidefast.cli.desk import Reader, all_events
from tidefast.cli.place import command
from tidefast.protocol.answers import EventInfo, RunInfo, StepInfo
from tidefast.protocol.records import NOT_SETTLED

ANSWERS = (
    "step_doubted",
    "step_refused",
    "step_unsent",
    "step_held",
    "late_receipt",
    "step_rejected",
    "probe_answered",
)
TEXT_LENGTH = 300


async def history(desk: Reader, step: StepInfo) -> list[EventInfo]:
    """What the log says of a step since its intent."""
    return [event for event in await all_events(desk, step.run_id) if event.step_id == step.step_id]


def tell_held(step: StepInfo, events: Sequence[EventInfo], url: str | None, store: str) -> None:
    """A held step for people: what was asked, what was answered, and what to say once the provider was looked at."""
    reason = step.reason or "in doubt"
    out.line(("held", "bold red"), f"  run {step.run_id}, step {step.step_id}: {step.tool} ({reason})")
    out.line(f"  key       {step.key}")
    out.line(f"  call      {out.short(_member(step.intent_json, 'args'), 400)}")
    if step.undo_of is not None:
        out.line(f"  undoes    {step.undo_of}")
    for attempt in step.attempts:
        sent = out.moment(attempt.admitted_wall_ms)
        told = f"{attempt.state}, sent {sent} UTC under epoch {out.epoch(attempt.epoch)}"
        out.line(f"  attempt   {attempt.number}: {told}")
    for event in events:
        if event.kind in ANSWERS:
            for line in _answers(event):
                out.line(f"  {line}")
    until_ms = wire_until_ms(step)
    if until_ms >= step.now_ms:
        out.line(f"  until     {out.moment(until_ms)} UTC its request may still land; only then look for the last time")
    if step.doubt_since_ms:
        out.line(f"  in doubt  since {out.moment(step.doubt_since_ms)} UTC")
    if step.next_move == "probe":
        out.line(f"  next      its provider is asked by itself, not before {out.moment(step.next_at_ms)} UTC")
    if step.refusals_line:
        out.line(f"  refusals  if that answer is always a definite no, add {step.refusals_line} to the tool's refusals")
    out.line("  look at the provider, then say what is so:")
    for verdict, meaning in verdicts(step):
        looked = [] if verdict == "applied" else ["--looked", "0s"]
        rest = [verdict, *looked, "--expect-attempts", str(len(step.attempts)), "--note", "WHY"]
        settle = command("resolve", step.run_id, step.step_id, *rest, url=url, store=store)
        out.line(f"    {settle}", (f"   # {meaning}", "dim"))


def wire_until_ms(step: StepInfo) -> int:
    """Until when a request of the step may land; *it did not happen* can't be said before. 0 if none can."""
    return max((attempt.deadline_ms for attempt in step.attempts if attempt.state in NOT_SETTLED), default=0)


def verdicts(step: StepInfo) -> list[tuple[str, str]]:
    """Each verdict, with what it will do."""
    if step.undo_of is not None:
        return [
            ("applied", f"it is undone: {step.undo_of} counts as compensated"),
            ("not_applied", "it is not undone yet: the undo is sent again under its key"),
            ("refused", f"never undo it: {step.undo_of} stays as it is, and the run goes on"),
        ]
    return [
        ("applied", "it happened: nothing is sent, the agent gets what --receipt says"),
        ("not_applied", "it did not happen: it is sent again under the same key"),
        ("refused", "never do it: rejected for good, the agent gets tf.Rejected"),
        ("compensated", "it happened and was undone by hand: nothing is sent"),
    ]


def _answers(event: EventInfo) -> list[str]:
    """What one event tells of an attempt or of a question to the provider."""
    data: Mapping[str, Any] = msgspec.json.decode(event.data_json)
    receipt, reason = data.get("receipt"), data.get("reason") or ""
    said = ""
    if isinstance(receipt, Mapping):
        status = f"status {receipt['status']}, " if receipt.get("status") else ""
        said = f"{status}{out.short(_spelled(receipt.get('body')), TEXT_LENGTH)}"
    if event.kind == "probe_answered":
        return [
            f"asked     {out.moment(data.get('asked_ms') or event.at_ms)} UTC: {data.get('answer')} {said}".rstrip()
        ]
    if event.kind == "step_held" and "problem" in data:
        return [f"problem   {data['problem'] or reason}"]
    if "attempt" not in data:
        return []
    told = "given up as lost: its sender died, or its time was over" if data.get("is_lost") else reason
    return [f"answer    {data['attempt']}: {said or told or 'none'}" + (f" ({reason})" if said and reason else "")]


def why_stopped(info: RunInfo, events: Sequence[EventInfo], url: str | None, store: str) -> list[str]:
    """Why a run is frozen or paused, and what to do, in sentences."""
    if info.state == "paused":
        return [f"paused by an operator; let it go on: {command('resume', info.run_id, url=url, store=store)}"]
    if not info.frozen:
        return []
    thaw = command("thaw", info.run_id, "--note", "WHY", url=url, store=store)
    cancel = command("cancel", info.run_id, "--note", "WHY", url=url, store=store)
    if info.frozen == "diverged":
        return _diverged(info, events, url, store, thaw)
    told = {
        "no_progress": "frozen: no_progress: grant after grant settled no step and saved no checkpoint",
        "drift": "frozen: drift: the agent asked for another call than the stored one",
        "operator": "frozen by an operator",
    }.get(info.frozen, f"frozen: {info.frozen}")
    frozen, ended = _last(events, "run_frozen"), _last(events, "lease_released")
    if info.frozen == "no_progress":
        where = _data(frozen).get("last_step") or "none"
        told += f"; its last step was {where}"
    lines = [told]
    if info.frozen == "operator":
        lines[0] += f": {_data(frozen).get('by')}, {_data(frozen).get('note') or 'without a reason'}"
    elif _data(ended).get("detail"):
        lines.append(f"  its last pass ended with {_data(ended).get('reason')}: {_data(ended)['detail']}")
    what = {"no_progress": "mend the agent or its tool", "drift": "release code that makes the stored call"}
    first = what.get(info.frozen)
    lines.append(f"  {f'{first}, then ' if first else ''}let it go on: {thaw}")
    return [*lines, f"  or end it: {cancel}"]


def _diverged(info: RunInfo, events: Sequence[EventInfo], url: str | None, store: str, thaw: str) -> list[str]:
    lines = ["frozen: diverged: what a provider said contradicts the books"]
    for event in events:
        step = _data(event).get("step")
        if event.kind != "run_frozen" or _data(event).get("reason") != "diverged" or not isinstance(step, str):
            continue
        said = _last([each for each in events if each.step_id == step and each.seq < event.seq], "step_resolved")
        lines.append(
            f"  step {step}: a receipt came {out.moment(event.at_ms)} UTC for an attempt that is booked otherwise"
        )
        if said is not None:
            who = f"{_data(said).get('by')} had said {_data(said).get('verdict')} {out.moment(said.at_ms)} UTC"
            lines.append(f"    {who}: {_data(said).get('note') or 'without a reason'}")
        for verdict in ("applied", "compensated"):
            looked = [] if verdict == "applied" else ["--looked", "0s"]
            lines.append(
                f"    {command('resolve', info.run_id, step, verdict, *looked, '--note', 'WHY', url=url, store=store)}"
            )
    return [*lines, f"  once each step is settled: {thaw}"]


def _last(events: Sequence[EventInfo], kind: str) -> EventInfo | None:
    return next((event for event in reversed(events) if event.kind == kind), None)


def _data(event: EventInfo | None) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {} if event is None else msgspec.json.decode(event.data_json)
    return found


def _member(record_json: str, name: str) -> str:
    record: Mapping[str, Any] = msgspec.json.decode(record_json) or {}
    return _spelled(record.get(name))


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
