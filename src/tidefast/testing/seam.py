"""One worker's connection to the authority of a bench, which may die in the middle of a call.

A call runs as work of the authority's life. Once that is over the caller hears `AuthorityUnavailable`, as it does over
a broken connection, and may ask again; the authority that is started in its place knows the leases from its store.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from tidefast.protocol.answers import JournalPage, LeaseGrant, RunCreated, StepAnswer
from tidefast.protocol.laws import Ack
from tidefast.protocol.verdicts import Done, Refused, Renewed
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.services.local import LocalAuthority
from tidefast.stores.base import StoreUnavailable
from tidefast.testing.lives import Life

T = TypeVar("T")


class Seam:
    """What a worker of the bench sees as its authority. `life` gives the authority's life of the moment."""

    def __init__(
        self,
        local: LocalAuthority,
        life: Callable[[], Life],
        on_grant: Callable[[LeaseGrant], None],
        acks: list[Ack],
    ) -> None:
        self._local, self._life, self._on_grant, self._acks = local, life, on_grant, acks
        self._epochs: dict[str, LeaseGrant] = {}
        self.is_retired = False  # its worker lost the run, and is not to take it again

    async def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        life = self._life()
        if life.is_stopped:
            work.close()
            raise AuthorityUnavailable("the authority is being started again")
        task: asyncio.Task[T] = life.start(work)
        await asyncio.wait((task, life.stopped), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise AuthorityUnavailable("the authority was killed before it answered")
        try:
            return task.result()
        except StoreUnavailable as error:
            raise AuthorityUnavailable("the authority was killed before it answered") from error

    async def create_run(
        self, run_id: str | None, agent: str, agent_version: str, input_json: str
    ) -> RunCreated | Refused:
        return await self._ask(self._local.create_run(run_id, agent, agent_version, input_json))

    async def claim(
        self,
        agents: Mapping[str, Sequence[str]],
        holder: str,
        lease_ms: int,
        max_runs: int,
        wait_ms: int,
        request_id: str,
    ) -> Sequence[LeaseGrant]:
        return await self._ask(self._local.claim(agents, holder, lease_ms, max_runs, wait_ms, request_id))

    async def grant(self, run_id: str, holder: str, lease_ms: int, request_id: str) -> LeaseGrant | Refused:
        if self.is_retired:
            await asyncio.get_running_loop().create_future()
        answer = await self._ask(self._local.grant(run_id, holder, lease_ms, request_id))
        if isinstance(answer, LeaseGrant):
            self._epochs[answer.token] = answer
            self._on_grant(answer)
        return answer

    async def journal(self, token: str, after: int) -> JournalPage | Refused:
        return await self._ask(self._local.journal(token, after))

    async def renew(self, tokens: Sequence[str]) -> Sequence[Renewed | Refused]:
        return await self._ask(self._local.renew(tokens))

    async def release(self, token: str, reason: str, detail: str) -> Done | Refused:
        return await self._ask(self._local.release(token, reason, detail))

    async def apply(
        self, token: str, step_id: str, tool: str, args_json: str | None, wait_ms: int
    ) -> StepAnswer | Refused:
        return await self._ask(self._local.apply(token, step_id, tool, args_json, wait_ms))

    async def chat(self, token: str, step_id: str, body: str, wait_ms: int) -> StepAnswer | Refused:
        return await self._ask(self._local.chat(token, step_id, body, wait_ms))

    async def save_result(self, token: str, step_id: str, value_json: str) -> StepAnswer | Refused:
        return await self._ask(self._local.save_result(token, step_id, value_json))

    async def compensate(
        self, token: str, step_id: str, wait_ms: int, given: tuple[str, str] | None = None
    ) -> StepAnswer | Refused:
        return await self._ask(self._local.compensate(token, step_id, wait_ms, given))

    async def checkpoint(self, token: str, number: int, state_json: str) -> Done | Refused:
        answer = await self._ask(self._local.checkpoint(token, number, state_json))
        return self._noted("checkpoint", token, answer, number)

    async def complete(
        self, token: str, result_json: str, asked: Sequence[str], dropped: Sequence[str]
    ) -> Done | Refused:
        return self._noted("complete", token, await self._ask(self._local.complete(token, result_json, asked, dropped)))

    async def fail(self, token: str, error: str) -> Done | Refused:
        return self._noted("fail", token, await self._ask(self._local.fail(token, error)))

    def _noted(self, verb: str, token: str, answer: Done | Refused, number: int = 0) -> Done | Refused:
        """Keep what the caller was told had been done; the auditor looks for it in the log."""
        grant = self._epochs.get(token)
        if isinstance(answer, Done) and grant is not None:
            self._acks.append(Ack(verb, grant.epoch, answer.seq, None, number))
        return answer
