"""What is said between the services and a replica's socket, whatever the wire's form of it.

Light: the server loads this, and nothing of the services behind it, when it starts.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from tidefast.protocol.canonical import JSON
from tidefast.protocol.commands import Write
from tidefast.protocol.ids import Epoch, RunId, StepId
from tidefast.protocol.records import ReplicaRight
from tidefast.protocol.workspace import Plan


class Proof(NamedTuple):
    """What a replica's token proves: this right, and the session number that it was handed out with."""

    right: ReplicaRight
    number: int


class Opened(NamedTuple):
    """A session's right, as the replica is told of it."""

    right: ReplicaRight
    number: int
    lease_ms: int
    expires_at_ms: int
    plan: Plan
    log_index: int
    chain: str
    is_resumed: bool


class Order(NamedTuple):
    """A call to a replica. `run_id` None: it only reads."""

    request_id: str
    epoch: Epoch
    log_index: int
    verb: str
    args: Mapping[str, JSON]
    within_ms: int
    run_id: RunId | None = None
    step_id: StepId | None = None
    attempt: int = 0
    run_epoch: Epoch = Epoch(0)


class Wrote(NamedTuple):
    """A mutating call was applied. `inline` are small contents of the delta."""

    write: Write
    result: JSON
    inline: Mapping[str, bytes] = {}
    unrestorable: Sequence[tuple[str, str]] = ()


class Told(NamedTuple):
    """What a reading call found."""

    result: JSON


class NotDone(NamedTuple):
    """Refused for good, nothing changed."""

    refusal: Mapping[str, JSON]


class NotBegun(NamedTuple):
    """Not begun, for a reason that isn't the call's."""

    reason: str


class Absent(NamedTuple):
    """The journal knows nothing of the attempt, and it will never begin."""


Reply = Wrote | Told | NotDone | NotBegun | Absent


class Link(Protocol):
    """One socket, in the direction of the replica. Sending never waits and never raises."""

    def do(self, order: Order) -> None: ...

    def ask(self, request_id: str, epoch: Epoch, run_id: RunId, step_id: StepId, attempt: int) -> None: ...

    def want(self, request_id: str, digests: Sequence[str]) -> None: ...

    def renewed(self, epoch: Epoch, lease_ms: int, expires_at_ms: int) -> None: ...

    def joined(self, run_id: RunId, step_id: StepId, epoch: Epoch, log_index: int, chain: str) -> None: ...

    def rollback(self, epoch: Epoch, log_index: int, chain: str) -> None: ...

    def superseded(self, epoch: Epoch, live_epoch: Epoch, reason: str) -> None:
        """Tell it, and close."""

    def close(self) -> None: ...
