"""What the outside is told by itself: that a step is held, a run frozen, a run failed.

A notice is made in the transaction that writes the event, so that a crash neither loses nor invents one. Its id is a
function of the event's place in the log: however often it is sent, it is the same notice. It holds names and reasons
and no body of a call, a receipt or a result.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from tidefast.protocol.canonical import JSON, canonical
from tidefast.protocol.events import Event
from tidefast.protocol.ids import RunId
from tidefast.protocol.records import RunHead

TYPES: Mapping[str, str] = {"step_held": "step.held", "run_frozen": "run.frozen", "run_failed": "run.failed"}


class Notice(NamedTuple):
    """One notice that was not delivered yet. `body` is what is signed and sent, every time the same bytes."""

    id: str
    body: str
    tries: int
    due_ms: int  # of the authority's clock: when it is sent (again)


def notice_of(namespace: bytes, head: RunHead, event: Event) -> Notice | None:
    """The notice of an event, None for one that nobody is told of by itself."""
    kind = TYPES.get(event.kind)
    if kind is None:
        return None
    data = event.data
    told: dict[str, JSON] = {
        "agent": head.agent,
        "epoch": head.epoch,
        "reason": data.get("reason") or data.get("error"),
        "run": head.run_id,
        "seq": event.seq,
        "step": event.step_id or data.get("step") or data.get("last_step"),
    }
    moment = datetime.fromtimestamp(event.at_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    body = canonical({"data": told, "timestamp": moment, "type": kind})
    return Notice(notice_id(namespace, head.run_id, event.seq), body, 0, event.at_ms)


def notice_id(namespace: bytes, run: RunId, seq: int) -> str:
    """The name of the notice of one event: the same for every sending, another one in every store."""
    parts = (namespace, run.encode(), seq.to_bytes(8, "big"))
    return "n_" + hashlib.sha256(b"".join([len(part).to_bytes(4, "big") + part for part in parts])).hexdigest()[:32]
