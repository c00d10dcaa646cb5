"""How answers and events are worded: exactly, for the trace; and for people, in the drawing."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tidefast.protocol.answers import LeaseGrant, RunCreated, StepAnswer
from tidefast.protocol.events import Event
from tidefast.protocol.ids import Epoch, epochs_from, incarnation_of
from tidefast.protocol.verdicts import Done, Refused, Renewed, Settled
from tidefast.wire.refusals import ROWS

# What a trace tells of an event's data and of a refusal's facts, in this order; all else is left out.
DATA = (
    *(
        "agent",
        "holder",
        "attempt",
        "number",
        "undo",
        "by",
        "verdict",
        "answer",
        "asked_ms",
        "state",
        "reason",
        "is_lost",
        "dropped",
    ),
    *("not_before_ms", "expires_at_ms", "value", "error"),
)
FACTS = (
    *("epoch", "live_epoch", "holder", "ended_by", "ended_at_ms", "expires_at_ms", "until_ms", "step", "steps"),
    *("state", "attempts", "expected", "expected_epoch", "number", "stored", "stored_tool", "grants", "run"),
    *("look_after_ms",),
)
# What people read of an event: braces are filled from its step, epoch and data.
TOLD: Mapping[str, str] = {
    "run_created": "run created",
    "lease_granted": "epoch {epoch} begins: {holder}",
    "lease_lapsed": "epoch {epoch} has lapsed",
    "lease_released": "epoch {epoch} is given back",
    "lease_preempted": "epoch {epoch} is ended",
    "step_fenced": "{step}: intent stored, attempt {attempt}",
    "step_committed": "{step}: COMMITTED, epoch {epoch}",
    "step_applied": "{step}: receipt kept, not committed",
    "step_unsent": "{step}: never left",
    "step_refused": "{step}: attempt refused",
    "step_rejected": "{step}: refused for good",
    "step_doubted": "{step}: in doubt",
    "step_presumed": "{step}: may have been sent in lost commits",
    "step_held": "{step}: HELD for a person",
    "probe_answered": "{step}: its provider says {answer}",
    "step_resolved": "{step}: {by} says {verdict}",
    "step_withdrawn": "{step}: withdrawn",
    "undo_begun": "{step}: its undo begins",
    "step_compensated": "{step}: compensated",
    "late_receipt": "{step}: late receipt, kept as a fact",
    "step_result": "{step}: result kept",
    "checkpoint_saved": "checkpoint {number} saved",
    "run_frozen": "run FROZEN: {reason}",
    "run_thawed": "run goes on",
    "run_paused": "run is paused",
    "run_resumed": "run is resumed",
    "run_failing": "run is failing",
    "run_cancelling": "run is being cancelled",
    "run_completed": "run COMPLETED",
    "run_failed": "run FAILED",
    "run_cancelled": "run CANCELLED",
}


def spelled(epoch: int) -> str:
    """An epoch as people read it: after its incarnation, once a restore has raised that."""
    incarnation, count = incarnation_of(Epoch(epoch)), epoch - epochs_from(incarnation_of(Epoch(epoch)))
    return f"{incarnation}.{count}" if incarnation else str(count)


class Words:
    """Words relative to the moment at which a scenario began."""

    def __init__(self, start_ms: int) -> None:
        self._start_ms = start_ms

    def moment(self, ms: int) -> str:
        return f"{(ms - self._start_ms) / 1_000:+g}s"

    def event(self, event: Event) -> str:
        """One event, as the trace has it."""
        facts = [f"epoch {spelled(event.epoch)}"] if event.epoch else []
        facts += self._facts(event.data, DATA)
        step = f" {event.step_id}" if event.step_id else ""
        return f"{event.kind}{step}" + (f": {', '.join(facts)}" if facts else "")

    def told(self, event: Event) -> str:
        """One event, as people read it."""
        known = {**event.data, "step": event.step_id, "epoch": spelled(event.epoch)}
        return TOLD[event.kind].format_map({name: str(value) for name, value in known.items()})

    def answer(self, answer: object) -> str:
        """What a caller was told."""
        match answer:
            case StepAnswer():
                source = f"{'from the books, ' if answer.replayed else ''}epoch {spelled(answer.epoch)}"
                undo = f", undone by {answer.undo}" if answer.undo else ""
                return f"{answer.state} ({source}){undo}"
            case Refused():
                facts = self._facts(answer.facts, FACTS)
                return f"refused {answer.code} ({answer.reason})" + (f": {', '.join(facts)}" if facts else "")
            case LeaseGrant():
                return self._lease(answer)
            case RunCreated():
                return f"{answer.state}, {'new' if answer.was_new else 'the same run'}"
            case Done():
                return answer.state if answer.was_new else f"{answer.state}, as before"
            case Settled():
                return f"{answer.state}{', the books disagree' if answer.is_diverged else ''}"
            case Renewed():
                return f"renewed until {self.moment(answer.expires_at_ms)}"
            case _:
                return str(answer)

    def heard(self, answer: object) -> str:
        """What a caller was told, as people read it."""
        match answer:
            case Refused():
                title = ROWS[answer.code].title
                return f"NO: {title[0].lower()}{title[1:]} ({answer.code})"
            case LeaseGrant():
                return f"granted: epoch {spelled(answer.epoch)}"
            case StepAnswer():
                return f"{answer.state}{', from the books' if answer.replayed else ''}"
            case _:
                return self.answer(answer)

    def _lease(self, grant: LeaseGrant) -> str:
        parts = [f"epoch {spelled(grant.epoch)} until {self.moment(grant.expires_at_ms)}"]
        if grant.checkpoint:
            parts.append(f"checkpoint {grant.checkpoint}")
        if grant.journal:
            parts.append("journal " + " ".join(f"{entry.step_id}={entry.state}" for entry in grant.journal))
        if grant.unsettled:
            parts.append(f"unsettled {' '.join(grant.unsettled)}")
        return "granted " + ", ".join(parts + ["the run is ending"] * grant.is_ending)

    def _facts(self, data: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
        found = []
        for name in names:
            value = data.get(name)
            if value in (None, "", [], 0) or value is False:
                continue
            if name.endswith("epoch"):
                found.append(f"{name} {spelled(int(value))}")
            elif name.endswith("_ms"):
                found.append(f"{name.removesuffix('_ms')} {self.moment(int(value))}")
            else:
                found.append(f"{name} {value if isinstance(value, str) else msgspec.json.encode(value).decode()}")
        return found
