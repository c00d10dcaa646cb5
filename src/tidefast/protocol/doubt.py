"""What to do about an effect that may have happened: a table over the contract stored with the intent.

Unknown is not failed, and time alone never settles a doubt. A replay (same key, stored request) is safe only while the
provider surely remembers the key: the window counts from the admission of the oldest attempt that isn't proved never
sent, must leave room for the attempt's own timeout and the contract's margin, and is open only if the authority's clock
and the wall clock both say so. Where nothing is safe a person is asked.
"""

import json
from typing import Literal

from tidefast.protocol.canonical import JSON
from tidefast.protocol.commands import OutcomeKind
from tidefast.protocol.contracts import Contract
from tidefast.protocol.patterns import WORDS, member
from tidefast.protocol.records import Attempt, Now, Step

Judgement = Literal["ask_again", "replay", "wait", "probe", "hold", "give_up"]

PROBE_PAUSE_FIRST_MS = 1_000  # between two questions about one step; doubled each time, up to
PROBE_PAUSE_MAX_MS = 300_000


def judge(step: Step, stored: Contract, today: Contract | None, now: Now) -> tuple[Judgement, str]:
    """(what to do, reason) for a step in doubt that a live holder asks for.

    | effect   | provider dedups | key surely remembered | tool and scope unchanged | answer               |
    |----------|-----------------|-----------------------|--------------------------|----------------------|
    | none     | any             | any                   | yes                      | ask again            |
    | model    | any             | any                   | yes, asks are left       | ask again: each counts as billed |
    | model    | any             | any                   | yes, none are left       | give up (unanswered) |
    | external | yes             | yes                   | yes                      | replay               |
    | external | yes             | no                    | yes, can be probed       | probe                |
    | external | yes             | no                    | yes, can't be probed     | hold (key_window)    |
    | external | no              | any                   | yes, can be probed       | probe                |
    | external | no              | any                   | yes, can't be probed     | hold (no_key)        |
    | any      | any             | any                   | no                       | hold (tool_gone, scope_changed) |

    *Probe*: found → applied, absent → sent again, unclear → asked again and, after `probe_tries` answers, held; many →
    the run is frozen as diverged. With `ttl_from = "completed"` a replay waits until no older attempt can land.
    """
    changed = scope_change(stored, today)
    if changed:
        return "hold", changed
    if step.effect == "model" and asks_billed(step) > stored.retries:
        return "give_up", "unanswered"
    if not step.is_mutating:
        return "ask_again", "no_effect"
    if not stored.dedups or not window_open(step, stored, now):
        return "hold" if stored.probe is None else "probe", "key_window" if stored.dedups else "no_key"
    if stored.ttl_from == "completed" and any(now.ms < attempt.deadline_ms for attempt in step.doubts):
        return "wait", "older_attempt"
    return "replay", "deduped"


def clear_ms(step: Step) -> int:
    """From when on nothing of the step can land or turn up any more, by the contract's word."""
    return max((attempt.deadline_ms for attempt in step.doubts), default=0) + max(step.lag_ms, 0)


def probe_due_ms(step: Step, *, window_is_over: bool = False) -> int:
    """When the provider may be asked (again) whether the step took effect; 0: never, as things stand.

    Not while a replay is the better answer, not before every attempt's deadline and lag, and with a growing pause.
    """
    if step.lag_ms < 0 or step.state not in ("in_doubt", "held") or step.closed_by is not None:
        return 0
    due = clear_ms(step) + 1
    if step.state == "in_doubt" and step.window_ms and not window_is_over and step.first_sent is not None:
        due = max(due, step.first_sent.admitted_ms + step.window_ms)
    if step.probed_ms:
        due = max(due, step.probed_ms + min(PROBE_PAUSE_FIRST_MS << max(step.probes - 1, 0), PROBE_PAUSE_MAX_MS))
    return due


def asks_billed(step: Step) -> int:
    """How many askings of a model may have been billed without an answer that counts."""
    return len(step.doubts)


def scope_change(stored: Contract, today: Contract | None) -> str:
    """Why the stored call can't be sent to today's provider; empty if it can."""
    if today is None:
        return "tool_gone"
    return "scope_changed" if today.scope != stored.scope else ""


def window_open(step: Step, contract: Contract, now: Now) -> bool:
    """Whether the provider surely still remembers the key while one more attempt is on its way."""
    first = step.first_sent
    if first is None:
        return True
    if now.wall_ms + contract.margin_ms < now.mark_ms:
        return False
    return max(now.ms - first.admitted_ms, now.wall_ms - first.admitted_wall_ms) < contract.window_ms


def next_move(step: Step, contract: Contract, now: Now) -> tuple[str, int]:
    """(what comes next for a step in doubt or held, when at the earliest; 0: as soon as a holder asks)."""
    if step.state not in ("in_doubt", "held"):
        return "", 0
    if step.closed_by is not None:
        return "undo", 0
    verb = "hold" if step.state == "held" else judge(step, contract, contract, now)[0]
    due_ms = probe_due_ms(step, window_is_over=verb == "probe")
    if verb == "probe" or (verb == "hold" and due_ms):
        return "probe", due_ms
    return ("person", clear_ms(step) + 1) if verb == "hold" else ("replay", clear_ms(step) if verb == "wait" else 0)


def other_doubt(step: Step, attempt: Attempt) -> tuple[Attempt, ...]:
    """The other attempts of the step that may still have had an effect."""
    return tuple(other for other in step.doubts if other.number != attempt.number)


def refusal_settles_older(step: Step, attempt: Attempt, contract: Contract, now: Now) -> bool:
    """Whether a refused replay proves that no older attempt applied (law 9).

    Had one applied, a provider that dedups and still remembers the key would have answered with it; and none can apply
    later, because each one's deadline had passed when this attempt was admitted. Of a newer attempt a refusal says
    nothing.
    """
    return contract.dedups and attempt.older_over and window_open(step, contract, now)


# A key still running, too early, too many: not an answer about the effect.
REPLAY_LATER = frozenset((408, 409, 425, 429))


def is_expected(contract: Contract, body: JSON) -> bool:
    """Whether a success looks as the contract says: a page that somebody put between isn't the provider's word."""
    return contract.expect is None or contract.expect.matches(contract.expect.status, body)


def line_to_add(status: int, body: JSON) -> str:
    """The entry of `refusals` that would make an unlisted answer a definite one, should it be that."""
    for path in ("error.code", "error.type", "code", "type", "error", "errors.0.code"):
        found, value = member(body, path)
        if found and isinstance(value, str | int) and value not in ("", *WORDS):
            return f'{{ status = {status}, "{path}" = {json.dumps(value)} }}'
    return str(status)


def outcome_of(contract: Contract, status: int, body: JSON, is_whole: bool = True) -> tuple[OutcomeKind, str]:
    """What an HTTP answer says about the effect: (outcome, reason).

    | status                        | outcome                                                        |
    |-------------------------------|----------------------------------------------------------------|
    | 2xx                           | applied                                                        |
    | 2xx that isn't as `expect`    | unlisted: in doubt and held at once                            |
    | listed in `refusals`          | refused                                                        |
    | listed in `payload_bound`     | key_reused: in doubt, and the run is frozen as diverged        |
    | 408, 409, 425, 429, 5xx       | doubted: replayed where the doubt table allows                 |
    | any other (3xx, unlisted 4xx) | unlisted: in doubt and held at once; redirects are not followed |
    """
    if 200 <= status <= 299:
        return ("applied", "") if not is_whole or is_expected(contract, body) else ("unlisted", "unexpected_answer")
    if any(refusal.matches(status, body) for refusal in contract.refusals):
        return "refused", f"status_{status}"
    if any(pattern.matches(status, body) for pattern in contract.payload_bound):
        return "key_reused", f"status_{status}"
    if status in REPLAY_LATER or status >= 500:
        return "doubted", f"status_{status}"
    return "unlisted", f"status_{status}"
