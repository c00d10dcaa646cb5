"""Who may drive a run: grant, renew, release, lapse, and the fence itself.

Laws. Each grant raises the epoch, and nothing lowers it. An epoch is live while it is the newest and no event has ended
it; the clock alone ends nothing, but past its expiry a holder may not admit, renew, checkpoint or end the run. A
renewal moves the expiry and never revives. A caller that fails the fence is told both epochs, the present holder and
when its lease ended; nothing is booked against it. See Burrows, "The Chubby lock service" (OSDI 2006) for sequencers,
and Gray and Cheriton, "Leases" (SOSP 1989).
"""

from collections.abc import Mapping

from tidefast.protocol.canonical import JSON, text_json
from tidefast.protocol.commands import Grant, Lapse, Release, Renew
from tidefast.protocol.events import Event, Kind, object_json
from tidefast.protocol.ids import Epoch, RunId, StepId, next_epoch
from tidefast.protocol.records import Guard, Now, Right, RunHead, View
from tidefast.protocol.recovery import recovery_member, window_of
from tidefast.protocol.verdicts import Code, Decision, Done, Granted, Refused, Renewed, Verdict

LEASE_MIN_MS = 1_000
LEASE_MAX_MS = 600_000
LEASE_DEFAULT_MS = 15_000
GRANTS_WITHOUT_PROGRESS_MAX = 10
PAUSE_FROM_GRANT = 3  # the first two takeovers are ordinary; from the third on something is wrong
PAUSE_FIRST_MS = 1_000
PAUSE_MAX_MS = 60_000


def refuse(head: RunHead, code: Code, reason: str, **facts: JSON) -> Decision:
    """A refusal that guards what it was judged from and writes nothing."""
    return Decision(Refused(code, reason, facts), (), (Guard(head.run_id, head.version),))


def unknown_run(run_id: str) -> Decision:
    facts: dict[str, JSON] = {"run": run_id}
    return Decision(Refused("not_found", "run_unknown", facts), (), (Guard(RunId(run_id), 0),))


def record(
    head: RunHead,
    now: Now,
    kind: Kind,
    data_json: str,
    *,
    step: StepId | None = None,
    epoch: int = 0,
    after: int = 0,
    known: Mapping[str, JSON] | None = None,
) -> Event:
    """The next event of a run; `after` counts the events that the same decision has before it."""
    event = Event(head.seq + 1 + after, now.ms, kind, Epoch(epoch), step, data_json)
    if known is not None:
        event.known = known
    return event


def accept(head: RunHead, verdict: Verdict, *events: Event) -> Decision:
    """A decision that writes these events under the head's guard."""
    return Decision(verdict, events, (Guard(head.run_id, head.version),))


def expiry_ms(head: RunHead, now: Now) -> int:
    """When this lease lapses: its own expiry, but never within one lease after the authority's own silence."""
    return max(head.expires_at_ms, now.grace_from_ms + head.lease_ms)


def is_lapsed(head: RunHead, now: Now) -> bool:
    return now.ms >= expiry_ms(head, now)


def stale(head: RunHead, right: Right) -> Decision | None:
    """The fence: a refusal if the carried epoch is not the live one, None if it is."""
    if head.is_live and right.epoch == head.epoch and right.holder == head.holder:
        return None
    if head.end and right.epoch == head.epoch:
        return refuse(head, "run_ended", head.end, epoch=right.epoch, state=head.end)
    return refuse(
        head,
        "stale_epoch",
        "superseded" if right.epoch != head.epoch else "lease_ended",
        epoch=right.epoch,
        live_epoch=head.epoch,
        is_live=head.is_live,
        holder=head.holder,
        ended_at_ms=head.lease_ended_ms,
        ended_by=head.lease_end,
    )


def fence(head: RunHead, right: Right, now: Now) -> Decision | None:
    """The fence and the clock's refusal: None if this holder may act now."""
    refusal = stale(head, right)
    if refusal is None and is_lapsed(head, now):
        return refuse(head, "lease_lapsed", "expired", epoch=right.epoch, expires_at_ms=expiry_ms(head, now))
    return refusal


def not_running(head: RunHead) -> Decision | None:
    """The refusal of new work while a run is frozen or paused; None otherwise."""
    if head.frozen:
        return refuse(head, "run_frozen", head.frozen)
    return refuse(head, "run_paused", "operator") if head.paused else None


def grant(view: View, command: Grant, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    if head.is_live and command.request_id and head.request_id == command.request_id and head.holder == command.holder:
        return accept(head, granted(head))
    refusal = not_claimable(head, now)
    if refusal is not None:
        return refusal
    lapsed = [record(head, now, "lease_lapsed", _lapsed_data(head), epoch=head.epoch)] if head.is_live else []
    if head.grants_without_progress >= GRANTS_WITHOUT_PROGRESS_MAX:
        data = object_json(
            reason='"no_progress"',
            grants=str(head.grants_without_progress),
            last_step="null" if head.last_step is None else text_json(head.last_step),
        )
        frozen = record(head, now, "run_frozen", data, after=len(lapsed))
        facts: dict[str, JSON] = {"grants": head.grants_without_progress, "last_step": head.last_step}
        return accept(head, Refused("run_frozen", "no_progress", facts), *lapsed, frozen)
    epoch = next_epoch(head.epoch, view.incarnation)
    expires = now.ms + command.lease_ms
    data = object_json(
        **recovery_member(window_of(view, head)),
        holder=text_json(command.holder),
        lease_ms=str(command.lease_ms),
        expires_at_ms=str(expires),
        request_id=text_json(command.request_id),
    )
    event = record(head, now, "lease_granted", data, epoch=epoch, after=len(lapsed))
    verdict = Granted(
        epoch,
        command.holder,
        command.lease_ms,
        expires,
        head.checkpoint,
        head.checkpoint_seq,
        bool(head.ending),
    )
    return accept(head, verdict, *lapsed, event)


def granted(head: RunHead) -> Granted:
    """The grant that a head records, told again."""
    return Granted(
        head.epoch,
        head.holder,
        head.lease_ms,
        head.expires_at_ms,
        head.checkpoint,
        head.checkpoint_seq,
        bool(head.ending),
    )


def not_claimable(head: RunHead, now: Now) -> Decision | None:
    """Why no one can be granted this run now; None if someone can."""
    if head.end:
        return refuse(head, "run_ended", head.end, state=head.end)
    stopped = not_running(head)
    if stopped is not None:
        return stopped
    if head.is_live and not is_lapsed(head, now):
        return refuse(
            head,
            "lease_held",
            "live",
            holder=head.holder,
            live_epoch=head.epoch,
            until_ms=expiry_ms(head, now),
        )
    if head.holding:
        return refuse(head, "step_held", "held", steps=list(head.holding))
    if now.ms < head.not_before_ms:
        return refuse(head, "lease_held", "pause", until_ms=head.not_before_ms)
    return None


def pause_ms(grants_without_progress: int) -> int:
    """How long a run rests after its n-th grant without progress: nothing at first, then doubling up to a minute."""
    beyond = grants_without_progress - PAUSE_FROM_GRANT
    return 0 if beyond < 0 else min(PAUSE_FIRST_MS << beyond, PAUSE_MAX_MS)


def renew(view: View, command: Renew, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.right.run_id)
    refusal = fence(head, command.right, now)
    if refusal is not None:
        return refusal
    guards = (Guard(head.run_id, head.version),)
    return Decision(Renewed(now.ms + head.lease_ms), (), guards, must_sync=False)


def release(view: View, command: Release, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.right.run_id)
    if head.lease_end == "released" and (command.right.epoch, command.right.holder) == (
        head.epoch,
        head.holder,
    ):
        return accept(head, Done("released", head.lease_end_seq, was_new=False))
    refusal = stale(head, command.right)
    if refusal is not None:
        return refusal
    data = object_json(reason=text_json(command.reason), detail=text_json(command.detail))
    released = record(head, now, "lease_released", data, epoch=command.right.epoch)
    if command.reason != "drift":
        return accept(head, Done("released", released.seq), released)
    frozen_data = object_json(reason='"drift"', detail=text_json(command.detail))
    frozen = record(head, now, "run_frozen", frozen_data, after=1)
    return accept(head, Done("released", released.seq), released, frozen)


def lapse(view: View, command: Lapse, now: Now) -> Decision:
    head = view.run
    if head is None:
        return unknown_run(command.run_id)
    if not head.is_live or not is_lapsed(head, now):
        return refuse(head, "already_decided", "not_lapsed")
    event = record(head, now, "lease_lapsed", _lapsed_data(head), epoch=head.epoch)
    return accept(head, Done("lapsed", event.seq), event)


def _lapsed_data(head: RunHead) -> str:
    return object_json(expires_at_ms=str(head.expires_at_ms), holder=text_json(head.holder))
