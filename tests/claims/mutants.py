"""The two designs in common use, as rules that a test can run: they must be caught, or the tests prove nothing."""

import json

from tidefast.protocol.canonical import canonical
from tidefast.protocol.commands import Command, Settle
from tidefast.protocol.ids import StepId, step_key
from tidefast.protocol.machine import decide
from tidefast.protocol.records import Now, View
from tidefast.protocol.verdicts import Decision, Send, Settled


def commit_on_200(view: View, command: Command, now: Now) -> Decision:
    """A success code is taken for a commit: whoever brings a 200 commits its step, whatever epoch is live."""
    decision = decide(view, command, now)
    if not isinstance(command, Settle) or command.outcome != "applied" or not decision.events:
        return decision
    first = decision.events[0]
    if first.kind not in ("step_applied", "late_receipt"):
        return decision
    verdict = Settled("committed", joined=True)
    return decision._replace(verdict=verdict, events=(type(first)(*first[:2], "step_committed", *first[3:]),))


def epoch_in_the_key(view: View, command: Command, now: Now) -> Decision:
    """The idempotency key is made anew with each lease."""
    decision = decide(view, command, now)
    verdict = decision.verdict
    if not isinstance(verdict, Send) or not decision.events:
        return decision
    last = decision.events[-1]
    key = step_key(view.namespace, view.run.run_id if view.run else "", StepId(f"{last.step_id}@{last.epoch}"))  # type: ignore[arg-type]
    data = json.loads(last.data_json)
    if "key" in data:
        data["key"] = key
    changed = type(last)(*last[:5], canonical(data))
    sent = Send(verdict.attempt, key, verdict.contract, verdict.intent_seq, verdict.deadline_ms, verdict.is_replay)
    return decision._replace(verdict=sent, events=(*decision.events[:-1], changed))
