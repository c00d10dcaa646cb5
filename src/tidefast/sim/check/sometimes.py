"""What must happen at least once, or the search went past the trouble that it is there for."""

from tidefast.protocol.commands import Command, Settle
from tidefast.protocol.records import NOT_SETTLED, Step
from tidefast.protocol.verdicts import Answer, Decision, Refused
from tidefast.sim.check.properties import is_live
from tidefast.sim.check.world import Book

WANTED = (
    *("zombie_refused", "never_granted_refused", "lease_lapsed_refused"),
    *("call_in_flight_across_a_takeover", "late_ack_after_takeover", "late_receipt_joined", "late_receipt_kept"),
    *("doubt_resolved_by_replay", "doubt_resolved_by_a_person", "older_doubt_settled_by_a_refused_replay"),
    *("preempted_compensation", "compensated", "undo_refused"),
    *("held", "held_no_key", "held_key_window", "held_tool_gone", "held_scope_changed", "held_unlisted_answer"),
    *("diverged", "thawed", "failing", "run_completed", "run_failed", "step_withdrawn", "checkpoint_saved"),
    *("checkpoint_stale", "unsettled_effects", "step_conflict", "restated", "older_attempt_waited_for"),
    *("death_between_intent_and_send", "death_between_send_and_receipt", "exiled", "restarted"),
    *("deduped", "doubled_request", "declined", "error_after_commit", "lost_request", "unsent"),
    *("landed_unheard", "deadline_in_flight", "gave_up", "spoke_late", "spoke_too_late", "day_passed"),
    *("restored", "restored_over_a_lost_effect", "lost_landed", "held_lost_commits", "lost_sending_replayed"),
    *("probe_found", "probe_absent", "probe_unclear", "probe_heard_late", "held_probe_unclear"),
    *("run_paused", "run_resumed", "run_cancelling", "run_cancelled", "to_undo"),
    *("no_progress", "strange_answer", "not_asked", "drift", "owner_silent", "retried"),
)
KINDS_SEEN = frozenset(
    (
        *("run_completed", "run_failed", "step_withdrawn", "checkpoint_saved"),
        *("run_paused", "run_resumed", "run_cancelling", "run_cancelled"),
    )
)
REASONS_SEEN = frozenset(("not_asked", "owner_silent", "to_undo"))
CODES_SEEN = frozenset(("checkpoint_stale", "unsettled_effects", "step_conflict"))


def seen_in(book: Book, command: Command, decision: Decision, after: Book | None) -> tuple[str, ...]:
    """The named things that one decision shows."""
    names: list[str] = []
    verdict = decision.verdict
    if isinstance(verdict, Refused):
        names += _refusals(book, command, verdict)
    for event in decision.events:
        step = None if event.step_id is None else _step(book, event.step_id)
        match event.kind:
            case "lease_granted" if any(a.state == "out" for s in book.steps if s for a in s.attempts):
                names.append("call_in_flight_across_a_takeover")
            case "step_fenced" if step is not None:
                data = event.data
                names += ["restated"] if "tool" in data and data["call_digest"] != step.call_digest else []
                names += ["retried"] if step.state == "pending" else []
            case "step_fenced" if any(before.kind == "step_presumed" for before in decision.events):
                names.append("lost_sending_replayed")
            case "lease_preempted" | "lease_lapsed" if any(s and s.undo_of and s.state == "fenced" for s in book.steps):
                names.append("preempted_compensation")
            case "step_held":
                reason = str(event.data["reason"])
                names += ["held", reason if reason == "undo_refused" else f"held_{reason}"]
            case "run_frozen":
                names.append(str(event.data["reason"]))
            case "run_thawed":
                names.append("thawed")
            case "run_failing":
                names.append("failing")
            case "step_resolved":
                names.append("doubt_resolved_by_a_person")
            case "step_compensated":
                names.append("compensated")
            case kind if kind in KINDS_SEEN:
                names.append(kind)
    return (*names, *_outcomes(book, command, decision))


def _refusals(book: Book, command: Command, verdict: Refused) -> list[str]:
    names: list[str] = [verdict.code] if verdict.code in CODES_SEEN else []
    names += [verdict.reason] if verdict.reason in REASONS_SEEN else []
    right = getattr(command, "right", None)
    if right is not None and not is_live(book, right):
        names.append("never_granted_refused" if right.epoch > book.head.epoch else "zombie_refused")
    elif verdict.code == "lease_lapsed":
        names.append("lease_lapsed_refused")
    return names


def _outcomes(book: Book, command: Command, decision: Decision) -> list[str]:
    """What became of a doubt."""
    kinds = {event.kind for event in decision.events}
    if isinstance(command, Settle):
        step = _step(book, command.step_id)
        attempt = step.attempts[command.attempt - 1] if step is not None else None
        if step is None or attempt is None:
            return []
        doubts = [a for a in step.attempts if a.state in NOT_SETTLED and a.number != attempt.number]
        names = []
        if command.outcome == "applied" and attempt.epoch != book.head.epoch and kinds:
            names.append("late_ack_after_takeover")
        if "late_receipt" in kinds:
            names.append("late_receipt_kept")
        if kinds & {"step_committed", "step_applied"} and any(a.number < attempt.number for a in doubts):
            names.append("doubt_resolved_by_replay")
        final = {"step_rejected"} & kinds or any(e.data.get("state") == "pending" for e in decision.events)
        if command.outcome == "refused" and final and doubts:
            names.append("older_doubt_settled_by_a_refused_replay")
        return names
    if isinstance(decision.verdict, Answer) and kinds:
        return ["late_receipt_joined"]
    if type(decision.verdict).__name__ == "Wait" and getattr(decision.verdict, "reason", "") == "older_attempt":
        return ["older_attempt_waited_for"]
    return []


def _step(book: Book, name: str) -> Step | None:
    return next((step for step in book.steps if step is not None and step.step_id == name), None)


__all__ = ["WANTED", "seen_in"]
