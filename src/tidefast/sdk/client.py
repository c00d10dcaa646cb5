"""The client: start runs, wait for their results, look at them, and decide about what is held.

`AsyncClient` is for programs with an event loop, `Client` for all others: the same verbs with the same types, run on a
thread of its own (`blocking.py`). Workers don't need either; they speak to the authority under their leases.

What is repeated when nobody answers, for as long as `patience_s` says:

| verbs                                                      | repeated                     | because               |
|------------------------------------------------------------|------------------------------|-----------------------|
| `run` `result` `runs` `steps` `step` `events` `held`       | always                       | they change nothing   |
| `start`                                                    | always                       | the id is drawn first |
| `resolve` and the verbs on a run: `OutcomeUnknown` if lost | while no connection was made | it may have been done |
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from tidefast.protocol.answers import EventInfo, RunCreated, RunInfo, StepInfo
from tidefast.protocol.canonical import BODY_BYTES_MAX, CanonicalError, canonical
from tidefast.protocol.commands import ResolveVerdict, RunVerb
from tidefast.protocol.records import RunState
from tidefast.protocol.verdicts import Done, Refused, Settled
from tidefast.sdk.authority import AuthorityUnavailable
from tidefast.sdk.errors import (
    CallRefused,
    Conflict,
    Misuse,
    NotAllowed,
    NotFound,
    NotYet,
    OutcomeUnknown,
    RunFailed,
    Unavailable,
)
from tidefast.sdk.http import HttpAuthority, RequestRefused
from tidefast.sdk.lease import boot_s
from tidefast.sdk.line import Backoff
from tidefast.wire.place import KEY_VARIABLE, URL_DEFAULT, URL_VARIABLE
from tidefast.wire.problem import problem

PAGE = 500
PATIENCE_S = 30.0
LOOK_S = 1.0  # how often a result that isn't there is asked for, at most
ENDED = frozenset(("completed", "failed", "cancelled", "superseded"))
NOT_ALLOWED = frozenset(("unauthenticated", "forbidden", "bad_token", "lease_required"))
MISUSE = frozenset(("invalid", "too_large", "unsupported"))
T = TypeVar("T")
Question = Callable[[], Awaitable[T | Refused]]


class AsyncClient:
    """One authority, by its URL (or `TIDEFAST_URL`). Safe for many concurrent calls of one event loop.

    `key` (or `TIDEFAST_KEY`) says who is asking, where the server wants to know; the operator's verbs always need it.
    Every verb raises `Error`: see the tree in `tidefast.sdk.errors`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        patience_s: float = PATIENCE_S,
        backoff: Backoff = Backoff(),  # noqa: B008 - immutable
    ) -> None:
        address = url or os.environ.get(URL_VARIABLE) or URL_DEFAULT
        try:
            self._authority = HttpAuthority(address, key or os.environ.get(KEY_VARIABLE) or None)
        except ValueError as error:
            raise Misuse("the client can't be made", str(error), "name the url that `tidefast serve` prints") from error
        self._patience_s, self._backoff = patience_s, backoff

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._authority.close()

    # --- runs ----------------------------------------------------------------------------------------------

    async def start(
        self, agent: str, input: Any = None, *, run_id: str | None = None, version: str = "1"
    ) -> RunCreated:
        """Create a run; the workers of its agent take it. Durable when it returns.

        Starting a run that exists with the same agent and input changes nothing; with others it raises `Conflict`.
        """
        name = run_id or f"r-{secrets.token_hex(8)}"
        text = _json("input", input)
        return await self._ask(lambda: self._authority.create_run(name, agent, version, text))

    async def run(self, run_id: str) -> RunInfo:
        """One run: its state, its epoch, what of it is held or open, its input and result."""
        return await self._ask(lambda: self._authority.run(run_id))

    async def result(self, run_id: str, *, timeout_s: float | None = None) -> Any:
        """The result of a run, waited for until it ends.

        Raises `RunFailed` if it ended otherwise, `NotYet` if it has not ended after `timeout_s`. A held, paused or
        frozen run has not ended: a person decides about it, and this goes on waiting.
        """
        until = None if timeout_s is None else boot_s() + timeout_s
        look, tries = self._backoff._replace(most_s=min(self._backoff.most_s, LOOK_S)), 0
        while True:
            info = await self.run(run_id)
            if info.state == "completed":
                return msgspec.json.decode(info.result_json)
            if info.state in ENDED:
                raise RunFailed(run_id, info.state, msgspec.json.decode(info.result_json))
            pause_s = look.delay_s(tries)
            if until is not None and boot_s() + pause_s > until:
                raise NotYet(run_id, info.state)
            await asyncio.sleep(pause_s)
            tries += 1

    async def runs(self, *, state: RunState | None = None) -> AsyncIterator[RunInfo]:
        """All runs by their names, asked for page by page."""
        after: str | None = None
        while page := await self._ask(lambda after=after: self._authority.runs(after, PAGE, state)):  # type: ignore[misc]
            for info in page:
                yield info
            after = page[-1].run_id

    async def steps(self, run_id: str) -> AsyncIterator[StepInfo]:
        """All steps of a run by their names, with their stored calls, attempts and receipts."""
        after: str | None = None
        while page := await self._ask(lambda after=after: self._authority.steps(run_id, after, PAGE)):  # type: ignore[misc]
            for step in page:
                yield step
            after = page[-1].step_id

    async def step(self, run_id: str, step_id: str) -> StepInfo:
        """One step of a run."""
        return await self._ask(lambda: self._authority.step(run_id, step_id))

    async def events(self, run_id: str, *, after: int = 0) -> AsyncIterator[EventInfo]:
        """The log of a run as far as it is written, from the event behind number `after` on."""
        while page := await self._ask(lambda after=after: self._authority.events(run_id, after, PAGE)):  # type: ignore[misc]
            for event in page:
                yield event
            after = page[-1].seq

    async def held(self) -> list[StepInfo]:
        """The steps that wait for a person."""
        return list(await self._ask(self._authority.held))

    # --- the operator's verbs: never repeated once they may have arrived -----------------------------------

    async def resolve(
        self,
        run_id: str,
        step_id: str,
        verdict: ResolveVerdict,
        *,
        note: str,
        receipt: Any = None,
        looked_ago_s: float | None = None,
        expect_attempts: int | None = None,
    ) -> Settled:
        """Say what became of a step in doubt or held, after a look at the provider.

        `looked_ago_s`: how long ago the look was; every verdict but *applied* needs it. `expect_attempts`: how many
        attempts the step had then, by default as many as now; refused as `Conflict` (`moved`) if there are others.
        """
        seen = await self.step(run_id, step_id)
        text = _json("receipt", receipt)
        expected = len(seen.attempts) if expect_attempts is None else expect_attempts
        looked_at_ms = None if looked_ago_s is None else seen.now_ms - int(looked_ago_s * 1_000)
        return await self._decide(
            lambda: self._authority.resolve(run_id, step_id, verdict, note, text, looked_at_ms, expected)
        )

    async def preempt(self, run_id: str, *, note: str = "", expect_epoch: int | None = None) -> Done:
        """End the run's lease, so that another worker takes it."""
        return await self._oversee("preempt", run_id, note, expect_epoch)

    async def pause(self, run_id: str, *, note: str = "", expect_epoch: int | None = None) -> Done:
        """Let nothing new of the run begin, until it is resumed. What is in flight settles."""
        return await self._oversee("pause", run_id, note, expect_epoch)

    async def resume(self, run_id: str, *, note: str = "", expect_epoch: int | None = None) -> Done:
        """Let a paused run go on."""
        return await self._oversee("resume", run_id, note, expect_epoch)

    async def freeze(self, run_id: str, *, note: str = "", expect_epoch: int | None = None) -> Done:
        """Stop the run for a person to look at, until it is thawed."""
        return await self._oversee("freeze", run_id, note, expect_epoch)

    async def thaw(self, run_id: str, *, note: str = "", expect_epoch: int | None = None) -> Done:
        """Let a frozen run go on."""
        return await self._oversee("thaw", run_id, note, expect_epoch)

    async def cancel(self, run_id: str, *, note: str = "", expect_epoch: int | None = None) -> Done:
        """End the run: its lease at once, the run once what is open is settled and what can be is undone."""
        return await self._oversee("cancel", run_id, note, expect_epoch)

    async def _oversee(self, verb: RunVerb, run_id: str, note: str, expect_epoch: int | None) -> Done:
        """An operator's verb on a run: of the epoch that is newest now, unless the caller names the one they saw."""
        expected = (await self.run(run_id)).epoch if expect_epoch is None else expect_epoch
        return await self._decide(lambda: self._authority.oversee(verb, run_id, note, expected))

    # --- asking --------------------------------------------------------------------------------------------

    async def _ask(self, question: Question[T]) -> T:
        """The answer to a question that may be repeated."""
        return await self._until_heard(question, lambda silent: False)

    async def _decide(self, question: Question[T]) -> T:
        """The answer to a verb that is sent again only while nothing can have arrived."""
        return await self._until_heard(question, _may_have_arrived)

    async def _until_heard(self, question: Question[T], is_final: Callable[[AuthorityUnavailable], bool]) -> T:
        until, tries = boot_s() + self._patience_s, 0
        while True:
            try:
                answer = await question()
            except AuthorityUnavailable as silent:
                if is_final(silent):
                    raise OutcomeUnknown(str(silent)) from silent
                delay_s = self._backoff.delay_s(tries)
                if boot_s() + delay_s > until:
                    raise Unavailable("the authority doesn't answer", str(silent), "ask again later") from silent
                await asyncio.sleep(delay_s)
                tries += 1
            except RequestRefused as refused:
                raise refusal(refused.refused) from None
            else:
                if isinstance(answer, Refused):
                    raise refusal(answer)
                return answer


def refusal(refused: Refused) -> CallRefused | Misuse:
    """What a refusal is raised as."""
    facts = dict(refused.facts)
    code, detail = str(facts.pop("code", refused.code)), facts.pop("detail", None)
    said = problem(code, refused.reason, facts)
    why = str(detail or said.detail)
    if code in MISUSE:
        return Misuse(f"the call can't be taken ({code}, {refused.reason})", why, said.next)
    kind = NotFound if code == "not_found" else NotAllowed if code in NOT_ALLOWED else Conflict
    return kind(code, refused.reason, why, said.next, facts)


def _may_have_arrived(silent: AuthorityUnavailable) -> bool:
    return not isinstance(silent.__cause__, aiohttp.ClientConnectorError)


def _json(what: str, value: Any) -> str:
    """A value as canonical JSON: also a dataclass, a `msgspec.Struct`, a `datetime`."""
    try:
        text = canonical(msgspec.to_builtins(value))
    except (CanonicalError, TypeError, ValueError, RecursionError) as error:
        raise Misuse(
            f"the {what} isn't JSON", str(error), "give objects, lists, texts, numbers, true, false, None"
        ) from error
    if len(text.encode()) > BODY_BYTES_MAX:
        raise Misuse(
            f"the {what} is too large", f"at most {BODY_BYTES_MAX} bytes fit", "store it elsewhere and name it"
        )
    return text
