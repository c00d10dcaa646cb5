"""An authority in this process, as the SDK wants to see one: the seam of `sdk.authority` over `services.authority`.

A token is drawn at grant and stands for the right that came with it; there is no signature, because it never leaves the
process. This lies on the path of every step of an embedded run, so each method is one look into a dict and one call.
Nothing here ever says that the authority is unavailable: a program whose store fails ends.
"""

import secrets
from collections.abc import Mapping, Sequence

from tidefast.protocol.answers import JournalPage, LeaseGrant, RunCreated, StepAnswer
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Refused, Renewed
from tidefast.services.authority import Authority

UNKNOWN_TOKEN = Refused("stale_epoch", "bad_token", {})


class LocalAuthority:
    """One authority for the workers of its own process."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._rights: dict[str, Right] = {}

    def follow(self, authority: Authority) -> None:
        """Ask another authority from now on, started anew over the same store; rights stay what they were."""
        self._authority = authority

    async def create_run(
        self, run_id: str | None, agent: str, agent_version: str, input_json: str
    ) -> RunCreated | Refused:
        return await self._authority.create_run(run_id, agent, agent_version, input_json)

    async def claim(
        self,
        agents: Mapping[str, Sequence[str]],
        holder: str,
        lease_ms: int,
        max_runs: int,
        wait_ms: int,
        request_id: str,
    ) -> Sequence[LeaseGrant]:
        grants = await self._authority.claim(agents, holder, lease_ms, max_runs, wait_ms, request_id)
        return [self._with_token(grant) for grant in grants]

    async def grant(self, run_id: str, holder: str, lease_ms: int, request_id: str) -> LeaseGrant | Refused:
        grant = await self._authority.grant(run_id, holder, lease_ms, request_id)
        return grant if isinstance(grant, Refused) else self._with_token(grant)

    def _with_token(self, grant: LeaseGrant) -> LeaseGrant:
        token = secrets.token_hex(16)
        self._rights[token] = Right(grant.run_id, grant.epoch, grant.holder)
        return grant.with_token(token)

    async def journal(self, token: str, after: int) -> JournalPage | Refused:
        right = self._rights.get(token)
        return UNKNOWN_TOKEN if right is None else await self._authority.journal(right, after)

    async def renew(self, tokens: Sequence[str]) -> Sequence[Renewed | Refused]:
        rights = [self._rights.get(token) for token in tokens]
        answers = iter(await self._authority.renew([right for right in rights if right is not None]))
        return [UNKNOWN_TOKEN if right is None else next(answers) for right in rights]

    async def release(self, token: str, reason: str, detail: str) -> Done | Refused:
        right = self._rights.get(token)
        if right is None:
            return UNKNOWN_TOKEN
        return self._ended(token, await self._authority.release(right, reason, detail))

    async def apply(
        self, token: str, step_id: str, tool: str, args_json: str | None, wait_ms: int
    ) -> StepAnswer | Refused:
        right = self._rights.get(token)
        if right is None:
            return UNKNOWN_TOKEN
        return await self._authority.apply(right, step_id, tool, args_json, wait_ms)

    async def chat(self, token: str, step_id: str, body: str, wait_ms: int) -> StepAnswer | Refused:
        right = self._rights.get(token)
        return UNKNOWN_TOKEN if right is None else await self._authority.chat(right, step_id, body, wait_ms)

    async def save_result(self, token: str, step_id: str, value_json: str) -> StepAnswer | Refused:
        right = self._rights.get(token)
        return UNKNOWN_TOKEN if right is None else await self._authority.save_result(right, step_id, value_json)

    async def compensate(
        self, token: str, step_id: str, wait_ms: int, given: tuple[str, str] | None = None
    ) -> StepAnswer | Refused:
        right = self._rights.get(token)
        return UNKNOWN_TOKEN if right is None else await self._authority.compensate(right, step_id, wait_ms, given)

    async def checkpoint(self, token: str, number: int, state_json: str) -> Done | Refused:
        right = self._rights.get(token)
        return UNKNOWN_TOKEN if right is None else await self._authority.checkpoint(right, number, state_json)

    async def complete(
        self, token: str, result_json: str, asked: Sequence[str], dropped: Sequence[str]
    ) -> Done | Refused:
        right = self._rights.get(token)
        if right is None:
            return UNKNOWN_TOKEN
        return self._ended(token, await self._authority.complete(right, result_json, asked, dropped))

    async def fail(self, token: str, error: str) -> Done | Refused:
        right = self._rights.get(token)
        if right is None:
            return UNKNOWN_TOKEN
        answer = await self._authority.fail(right, error)
        return answer if isinstance(answer, Done) and answer.state == "failing" else self._ended(token, answer)

    def _ended(self, token: str, answer: Done | Refused) -> Done | Refused:
        """Forget a token with its lease, so that a program which runs for years doesn't gather them."""
        if isinstance(answer, Done) or answer.code in ("stale_epoch", "run_ended"):
            self._rights.pop(token, None)
        return answer
