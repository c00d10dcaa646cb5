"""The SDK's view of the stage's authority: real tokens, and a connection that breaks when the authority is killed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from tidefast.protocol.answers import JournalPage, LeaseGrant, RunCreated, StepAnswer
from tidefast.protocol.records import Right
from tidefast.protocol.verdicts import Done, Refused, Renewed
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.services.authority import Authority
from tidefast.stores.base import StoreUnavailable
from tidefast.wire.tokens import mint, verify

T = TypeVar("T")
BAD_TOKEN = Refused("stale_epoch", "bad_token", {})


class Line:
    """The connections to one life of the authority: what isn't answered when it dies is never answered."""

    def __init__(self) -> None:
        self._died = asyncio.Event()

    def die(self) -> None:
        self._died.set()

    async def call(self, question: Coroutine[Any, Any, T]) -> T:
        """The answer. Raises `AuthorityUnavailable` if the authority dies first; what it has begun goes on."""
        asked, died = asyncio.ensure_future(question), asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait((asked, died), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        except StoreUnavailable as error:
            raise AuthorityUnavailable(str(error)) from error
        finally:
            died.cancel()
        raise AuthorityUnavailable("the authority was killed")


class Seam:
    """See `sdk.authority.Authority`. `reach` gives the authority that lives now, with the line to it."""

    def __init__(
        self,
        holder: str,
        namespace: bytes,
        reach: Callable[[], tuple[Authority, Line]],
        awake: Callable[[str], Awaitable[None]],
    ) -> None:
        self._holder, self._namespace, self._reach, self._awake = holder, namespace, reach, awake

    def token(self, right: Right) -> str:
        return mint(bytes(32), self._namespace, right)

    async def _ask(self, token: str, verb: str, *args: Any) -> Any:
        """One question under a token: not while the worker is frozen, and its answer isn't read while it is."""
        await self._awake(self._holder)
        right = verify(bytes(32), self._namespace, token)
        if right is None:
            return BAD_TOKEN
        authority, line = self._reach()
        answer = await line.call(getattr(authority, verb)(right, *args))
        await self._awake(self._holder)
        return answer

    async def create_run(
        self, run_id: str | None, agent: str, agent_version: str, input_json: str
    ) -> RunCreated | Refused:
        raise NotImplementedError

    async def claim(
        self,
        agents: Mapping[str, Sequence[str]],
        holder: str,
        lease_ms: int,
        max_runs: int,
        wait_ms: int,
        request_id: str,
    ) -> Sequence[LeaseGrant]:
        raise NotImplementedError

    async def grant(self, run_id: str, holder: str, lease_ms: int, request_id: str) -> LeaseGrant | Refused:
        raise NotImplementedError

    async def journal(self, token: str, after: int) -> JournalPage | Refused:
        answer: JournalPage | Refused = await self._ask(token, "journal", after)
        return answer

    async def renew(self, tokens: Sequence[str]) -> Sequence[Renewed | Refused]:
        raise NotImplementedError

    async def release(self, token: str, reason: str, detail: str) -> Done | Refused:
        answer: Done | Refused = await self._ask(token, "release", reason, detail)
        return answer

    async def apply(
        self, token: str, step_id: str, tool: str, args_json: str | None, wait_ms: int
    ) -> StepAnswer | Refused:
        answer: StepAnswer | Refused = await self._ask(token, "apply", step_id, tool, args_json, wait_ms)
        return answer

    async def chat(self, token: str, step_id: str, body: str, wait_ms: int) -> StepAnswer | Refused:
        answer: StepAnswer | Refused = await self._ask(token, "chat", step_id, body, wait_ms)
        return answer

    async def save_result(self, token: str, step_id: str, value_json: str) -> StepAnswer | Refused:
        answer: StepAnswer | Refused = await self._ask(token, "save_result", step_id, value_json)
        return answer

    async def compensate(
        self, token: str, step_id: str, wait_ms: int, given: tuple[str, str] | None = None
    ) -> StepAnswer | Refused:
        answer: StepAnswer | Refused = await self._ask(token, "compensate", step_id, wait_ms, given)
        return answer

    async def checkpoint(self, token: str, number: int, state_json: str) -> Done | Refused:
        answer: Done | Refused = await self._ask(token, "checkpoint", number, state_json)
        return answer

    async def complete(
        self, token: str, result_json: str, asked: Sequence[str], dropped: Sequence[str]
    ) -> Done | Refused:
        answer: Done | Refused = await self._ask(token, "complete", result_json, asked, dropped)
        return answer

    async def fail(self, token: str, error: str) -> Done | Refused:
        answer: Done | Refused = await self._ask(token, "fail", error)
        return answer
