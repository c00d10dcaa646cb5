"""What one run on the bench came to: its end, the provider's count, its log, and what the auditor says of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidefast.protocol.answers import EventInfo
from tidefast.protocol.laws import Violation
from tidefast.sim.report import sentence
from tidefast.testing.faults import Fault
from tidefast.testing.provider import Effect

SHOWN_MAX = 60  # events of a log that a message spells out


class Unlawful(AssertionError):
    """A run broke a law, or did not come to the end that was asked for. The message tells what happened."""


@dataclass(frozen=True)
class Result:
    """One run, at rest: ended, held or frozen.

    `effects` counts, per step, what the provider did net of undos; steps that it never heard of are not in it.
    """

    run_id: str
    state: str
    result: Any
    error: str  # why the run failed or is frozen, or what its agent last raised; empty if nothing went wrong
    held: Mapping[str, str]  # step -> reason
    effects: Mapping[str, int]
    calls: Sequence[Effect]
    events: Sequence[EventInfo]
    violations: Sequence[Violation]
    faults: Sequence[Fault]  # as planned
    struck: Sequence[Fault]  # those of them that struck
    places: Sequence[tuple[str, str]]  # (point, step) in the order in which the run came there
    passes: int

    @property
    def is_lawful(self) -> bool:
        return not self.violations

    def assert_lawful(self) -> "Result":
        """Raise `Unlawful` with law, step, event and the whole story, unless every law holds."""
        __tracebackhide__ = True
        if self.violations:
            raise Unlawful(self.story("breaks a law"))
        return self

    def assert_completed(self) -> "Result":
        """Raise `Unlawful` unless the run is completed and every law holds."""
        __tracebackhide__ = True
        self.assert_lawful()
        if self.state != "completed":
            raise Unlawful(self.story(f"is {self.state}, not completed"))
        return self

    def story(self, what: str = "") -> str:
        """What happened, for a person: the faults, the breaches, the provider's count, the log."""
        lines = [f"run {self.run_id} {what}" if what else f"run {self.run_id} is {self.state}"]
        lines += [f"  fault: {fault}" + ("" if fault in self.struck else " (never came up)") for fault in self.faults]
        lines += [f"  {sentence(violation)}" for violation in self.violations]
        if self.error:
            lines.append(f"  error: {self.error}")
        lines += [f"  held: step {step} ({reason})" for step, reason in self.held.items()]
        lines.append("the provider did:")
        lines += [f"  {_spelled(effect)}" for effect in self.calls] or ["  nothing"]
        lines.append("the log:")
        lines += [f"  {_event(event)}" for event in self.events[:SHOWN_MAX]]
        if len(self.events) > SHOWN_MAX:
            lines.append(f"  and {len(self.events) - SHOWN_MAX} more events")
        return "\n".join(lines)


def _spelled(effect: Effect) -> str:
    where = f"for step {effect.step}" if effect.step else "for no step: it was called outside run.tool"
    return f"{effect.call} {where}" + (f", key {effect.key}" if effect.key else ", no key")


def _event(event: EventInfo) -> str:
    step = f" {event.step_id}" if event.step_id else ""
    return f"{event.seq:>3}  {event.at_ms:>9} ms  epoch {event.epoch}  {event.kind}{step}"
