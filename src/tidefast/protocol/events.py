"""Facts: what has happened, in the order in which it became durable.

An event's `data` is kept as canonical text, because the digest chain and the store need exactly those bytes. The chain
is digest(n) = SHA-256(digest(n-1) || canonical event), so an edit, a swap or a splice shows at the event where it was
done (law 18). Event data never holds a token or a credential.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from tidefast.protocol.canonical import JSON
from tidefast.protocol.ids import Epoch, StepId

Kind = Literal[
    "run_created",
    "lease_granted",
    "lease_lapsed",
    "lease_released",
    "lease_preempted",
    "step_fenced",
    "step_committed",
    "step_applied",
    "step_unsent",
    "step_refused",
    "step_rejected",
    "step_doubted",
    "step_presumed",
    "step_held",
    "probe_answered",
    "step_resolved",
    "step_withdrawn",
    "undo_begun",
    "step_compensated",
    "late_receipt",
    "step_result",
    "checkpoint_saved",
    "run_frozen",
    "run_thawed",
    "run_paused",
    "run_resumed",
    "run_failing",
    "run_cancelling",
    "run_completed",
    "run_failed",
    "run_cancelled",
    "replica_lost",
    "write_fenced",
    "write_applied",
    "write_committed",
    "write_dropped",
]

CHAIN_START = "0" * 64  # the digest before a run's first event


class EventFields(NamedTuple):
    """What an event is made of, and what two events are compared by."""

    seq: int
    at_ms: int
    kind: Kind
    epoch: Epoch  # the epoch in whose name it happened; 0 for an event that needs none
    step_id: StepId | None
    data_json: str


class Event(EventFields):
    """One fact of one run. `seq` is dense from 1; `at_ms` is the authority's clock when it was decided.

    `known` may hold members of `data` that the rule which made the event had at hand, so that `evolve` needn't decode
    what was encoded a moment before. It is a hint: never compared, never stored, and absent from an event read back.
    """

    known: Mapping[str, JSON] | None = None

    @property
    def data(self) -> Mapping[str, JSON]:
        """The event's members, decoded anew at each access."""
        decoded: Mapping[str, JSON] = json.loads(self.data_json)
        return decoded

    def canonical(self) -> str:
        """The text that the chain digests; the same as `canonical` of the whole event, put together from its parts."""
        step = "null" if self.step_id is None else f'"{self.step_id}"'
        return (
            f'{{"at_ms":{self.at_ms},"data":{self.data_json},"epoch":{self.epoch},'
            f'"kind":"{self.kind}","seq":{self.seq},"step_id":{step}}}'
        )


def object_json(**members: str) -> str:
    """The canonical text of an object whose members are canonical texts already. Names must be ASCII."""
    return "{" + ",".join([f'"{name}":{members[name]}' for name in sorted(members)]) + "}"


def chain(digest: str, event: Event) -> str:
    """The digest after this event, as 64 hex digits."""
    return hashlib.sha256((digest + event.canonical()).encode()).hexdigest()


def first_broken(events: Iterable[tuple[Event, str]]) -> int:
    """The seq of the first event whose stored digest or number doesn't follow from those before; 0 if all do."""
    digest, expected = CHAIN_START, 1
    for event, stored in events:
        digest = chain(digest, event)
        if event.seq != expected or digest != stored:
            return expected
        expected += 1
    return 0
