"""Who holds a workspace: grant, renew, release and lapse of a replica, and the events of a workspace.

Laws. A replica is one life of a disk, and each grant raises the workspace's epoch, whoever asks: a process that comes
back with leftover files, a fork, a box restored from a snapshot all get a new epoch, and a plan by what their disk
proves. What was sent to an older epoch never joins. The clock alone ends nothing; it only refuses. `view.workspace` is
the one head that these rules read, and the run of an open write the one other.
"""

import json
from collections.abc import Mapping
from typing import Any

from tidefast.protocol.canonical import JSON, canonical, text_json
from tidefast.protocol.commands import GrantReplica, LapseReplica, ReleaseReplica, RenewReplica
from tidefast.protocol.events import Event, Kind, chain, object_json
from tidefast.protocol.ids import Epoch, RunId, StepId, next_epoch
from tidefast.protocol.records import Now, OpenWrite, ReplicaRight, View, WorkspaceHead
from tidefast.protocol.verdicts import Code, Decision, Done, Refused, Renewed, ReplicaGranted
from tidefast.protocol.workspace import plan_for


def write_down(
    head: WorkspaceHead,
    now: Now,
    kind: Kind,
    data_json: str,
    *,
    step: StepId | None = None,
    epoch: int = 0,
    after: int = 0,
) -> Event:
    """The next event of a workspace; `after` counts the events that the same decision has before it."""
    return Event(head.seq + 1 + after, now.ms, kind, Epoch(epoch), step, data_json)


def expiry_ms(head: WorkspaceHead, now: Now) -> int:
    """When this replica's lease lapses: its own expiry, but never within one lease after the authority's silence."""
    return max(head.expires_at_ms, now.grace_from_ms + head.lease_ms)


def replica_lapsed(head: WorkspaceHead, now: Now) -> bool:
    return now.ms >= expiry_ms(head, now)


def replica_fence(head: WorkspaceHead | None, right: ReplicaRight, now: Now) -> Refused | None:
    """The refusal of a replica whose epoch is not the live one, or is past its expiry; None if it may act now."""
    if head is None:
        return _refused("not_found", "workspace_unknown", workspace=right.workspace_id)
    if not head.is_live or right.epoch != head.epoch or right.boot_id != head.boot_id:
        reason = "superseded" if right.epoch != head.epoch else "lease_ended"
        return _refused(
            "stale_epoch",
            reason,
            workspace=head.workspace_id,
            epoch=right.epoch,
            live_epoch=head.epoch,
            is_live=head.is_live,
            holder=head.boot_id,
            ended_at_ms=head.lease_ended_ms,
            ended_by=head.lease_end,
        )
    if replica_lapsed(head, now):
        return _refused("lease_lapsed", "expired", epoch=right.epoch, expires_at_ms=expiry_ms(head, now))
    return None


def _refused(code: Code, reason: str, **facts: JSON) -> Refused:
    return Refused(code, reason, facts)


def grant_replica(view: View, command: GrantReplica, now: Now) -> Decision:
    """The next epoch, whatever the old one's state: a replica that dials in is the newest life of the disk."""
    head = view.workspace or WorkspaceHead(command.workspace_id)
    ended = []
    if head.is_live:
        kind: Kind = "lease_lapsed" if replica_lapsed(head, now) else "lease_preempted"
        ended.append(write_down(head, now, kind, object_json(holder=text_json(head.boot_id)), epoch=head.epoch))
    plan = plan_for(command.disk, head.log_index, command.chain_there)
    epoch, expires = next_epoch(head.epoch, view.incarnation), now.ms + command.lease_ms
    data: dict[str, JSON] = {
        "boot_id": command.boot_id,
        "disk": list(command.disk),
        "expires_at_ms": expires,
        "lease_ms": command.lease_ms,
        "plan": plan,
        "workspace": command.workspace_id,
    }
    event = write_down(head, now, "lease_granted", canonical(data), epoch=epoch, after=len(ended))
    verdict = ReplicaGranted(epoch, command.lease_ms, expires, plan, head.log_index, head.chain)
    return Decision(verdict, writes=(*ended, event))


def renew_replica(view: View, command: RenewReplica, now: Now) -> Decision:
    head = view.workspace
    refused = replica_fence(head, command.right, now)
    if refused is not None or head is None:
        return Decision(refused or _refused("not_found", "workspace_unknown"))
    return Decision(Renewed(max(head.expires_at_ms, now.ms + head.lease_ms)), must_sync=False)


def release_replica(view: View, command: ReleaseReplica, now: Now) -> Decision:
    """A replica ends, in order or because it can't be believed any more."""
    head, right = view.workspace, command.right
    if head is None or not head.is_live or (right.epoch, right.boot_id) != (head.epoch, head.boot_id):
        return Decision(replica_fence(head, right, now) or Done("released", 0, was_new=False))
    event = write_down(head, now, "lease_released", object_json(reason=text_json(command.reason)), epoch=head.epoch)
    return Decision(Done("released", event.seq), writes=(event,))


def lapse_replica(view: View, command: LapseReplica, now: Now) -> Decision:
    head = view.workspace
    if head is None or not head.is_live or not replica_lapsed(head, now):
        return Decision(_refused("already_decided", "not_lapsed", workspace=command.workspace_id))
    data = object_json(expires_at_ms=str(head.expires_at_ms), holder=text_json(head.boot_id))
    event = write_down(head, now, "lease_lapsed", data, epoch=head.epoch)
    return Decision(Done("lapsed", event.seq), writes=(event,))


_ENDS: Mapping[str, Any] = {
    "lease_lapsed": "lapsed",
    "lease_released": "released",
    "lease_preempted": "replaced",
}


def evolve_workspace(head: WorkspaceHead, event: Event) -> WorkspaceHead:
    """The head of a workspace after one of its events."""
    data: Mapping[str, Any] = json.loads(event.data_json)
    head = head._replace(version=head.version + 1, seq=event.seq, digest=chain(head.digest, event))
    match event.kind:
        case "lease_granted":
            return head._replace(
                created_ms=head.created_ms or event.at_ms,
                epoch=event.epoch,
                is_live=True,
                boot_id=data["boot_id"],
                lease_ms=data["lease_ms"],
                expires_at_ms=data["expires_at_ms"],
                lease_end="",
                lease_ended_ms=0,
            )
        case "lease_lapsed" | "lease_released" | "lease_preempted":
            return head._replace(is_live=False, lease_end=_ENDS[event.kind], lease_ended_ms=event.at_ms)
        case "write_fenced":
            run_id, step_id = RunId(data["run"]), StepId(event.step_id or "")
            return head._replace(open=OpenWrite(run_id, step_id, data["attempt"], event.epoch))
        case "write_applied" if head.open is not None:
            return head._replace(open=head.open._replace(write_seq=event.seq, chain=data["chain"]))
        case "write_committed":
            return head._replace(open=None, log_index=data["index"], chain=data["chain"])
        case "write_dropped":
            return head._replace(open=None)
        case _:
            raise ValueError(f"the event {event.kind} can't happen to a workspace")
