"""What a restore takes away, and how the books live with the gap (law 16).

Commits after the recovery point are lost, and with them intents that may have been sent. So, until an operator closes
the window, whatever a run is about to send is presumed sent once already: as an attempt that is booked as lost,
admitted at the last durable commit, able to land until its timeout after the restore. From there the table of doubts
decides as ever: a keyed call is replayed within its window, a keyless one is held.

The window belongs to the store and comes to a run with its grant. A run that was created in the window under a name of
the authority's own drawing can't be among the lost ones.
"""

from tidefast.protocol.canonical import JSON
from tidefast.protocol.events import object_json
from tidefast.protocol.ids import Epoch, epochs_from, incarnation_of
from tidefast.protocol.records import Attempt, Recovery, RunHead, Step, View

UNKNOWN_OWNER = ""  # of a presumed attempt: whoever sent it, if anybody did, is gone


def recovery_member(window: Recovery | None) -> dict[str, str]:
    """The window as a member of an event's data; none if there is no window."""
    if window is None:
        return {}
    return {"recovery": object_json(**{name: str(value) for name, value in window._asdict().items()})}


def window_of(view: View, head: RunHead) -> Recovery | None:
    """The window that a grant of this run is given in: of a run that was there before the restore, or may have been."""
    window = view.recovery
    if window is None or (head.created_ms >= window.restored_ms and head.recovery is None):
        return None
    return window


def may_be_lost(step: Step, incarnation: int) -> bool:
    """Whether a sending of this step may be among the lost: none of its attempts is of this incarnation."""
    return step.is_mutating and all(incarnation_of(attempt.epoch) < incarnation for attempt in step.attempts)


def presumed(number: int, epoch: Epoch, window: Recovery, timeout_ms: int) -> Attempt:
    """The attempt that nobody can rule out, below every epoch of this incarnation and above all older ones."""
    return Attempt(
        number,
        epochs_from(incarnation_of(epoch)),
        UNKNOWN_OWNER,
        window.point_ms,
        window.point_wall_ms,
        window.restored_ms + timeout_ms,
        False,
        "lost",
    )


def presumed_members(attempt: Attempt) -> dict[str, JSON]:
    """What the event that books it says of the attempt."""
    return {
        "attempt": attempt.number,
        "deadline_ms": attempt.deadline_ms,
        "epoch": attempt.epoch,
        "older_over": attempt.older_over,
        "owner": attempt.owner,
        "sent_ms": attempt.admitted_ms,
        "wall_ms": attempt.admitted_wall_ms,
    }


def is_presumed(attempt: Attempt) -> bool:
    return attempt.owner == UNKNOWN_OWNER
