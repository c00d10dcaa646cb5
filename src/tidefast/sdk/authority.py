"""What the SDK needs of an authority, whether it is reached over HTTP or lives in the same process.

Every method answers or returns `Refused`; it raises `AuthorityUnavailable` when nobody knows whether the call arrived,
and every method here is safe to repeat then. `token` is the capability that came with the grant; it is carried, never
looked up.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tidefast.protocol.answers import JournalPage, LeaseGrant, RunCreated, StepAnswer
from tidefast.protocol.verdicts import Done, Refused, Renewed


class AuthorityUnavailable(Exception):
    """The authority could not be reached, or did not answer in time. Whether it acted is unknown; ask again."""


class Authority(Protocol):
    async def create_run(
        self, run_id: str | None, agent: str, agent_version: str, input_json: str
    ) -> RunCreated | Refused: ...

    async def claim(
        self,
        agents: Mapping[str, Sequence[str]],
        holder: str,
        lease_ms: int,
        max_runs: int,
        wait_ms: int,
        request_id: str,
    ) -> Sequence[LeaseGrant]: ...

    async def grant(self, run_id: str, holder: str, lease_ms: int, request_id: str) -> LeaseGrant | Refused: ...

    async def journal(self, token: str, after: int) -> JournalPage | Refused: ...

    async def renew(self, tokens: Sequence[str]) -> Sequence[Renewed | Refused]: ...

    async def release(self, token: str, reason: str, detail: str) -> Done | Refused: ...

    async def apply(
        self, token: str, step_id: str, tool: str, args_json: str | None, wait_ms: int
    ) -> StepAnswer | Refused:
        """`args_json` None asks for the stored call, whatever its arguments were."""

    async def chat(self, token: str, step_id: str, body: str, wait_ms: int) -> StepAnswer | Refused:
        """A model's answer to this request, sent as it is written. Of the receipt only `body` may be there."""

    async def save_result(self, token: str, step_id: str, value_json: str) -> StepAnswer | Refused: ...

    async def compensate(
        self, token: str, step_id: str, wait_ms: int, given: tuple[str, str] | None = None
    ) -> StepAnswer | Refused:
        """`given`: tool and arguments of the undo, where the step's contract isn't to say them."""

    async def checkpoint(self, token: str, number: int, state_json: str) -> Done | Refused: ...

    async def complete(
        self, token: str, result_json: str, asked: Sequence[str], dropped: Sequence[str]
    ) -> Done | Refused: ...

    async def fail(self, token: str, error: str) -> Done | Refused: ...
