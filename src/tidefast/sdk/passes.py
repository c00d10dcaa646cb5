"""One pass: an agent's function under one lease, and what becomes of the lease afterwards.

| how the agent ends                    | what the pass does                                                          |
|---------------------------------------|-----------------------------------------------------------------------------|
| it returns                            | completes the run with the result, naming what the journal answered         |
| it raises `Fail`                      | fails the run, once open effects are settled and undone                     |
| it raises anything else               | releases the lease (`error`): a grant without progress, tried again later   |
| `PassEnded`: held, drift, shutdown    | lets what is in flight settle, then releases the lease with that reason     |
| `Preempted`                           | nothing: the lease is somebody else's                                       |

A lost lease or a stop cancels the agent's task, again each second if it clings to life. After five times it is left
behind: the lease is given back, the worker's place is free, and the log says so. What the agent raises or returns after
the end of its pass counts for nothing, so swallowing `Preempted` gains it nothing.
"""

import asyncio
import dataclasses
import traceback
from collections.abc import Awaitable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import structlog

from tidefast.protocol.answers import LeaseGrant
from tidefast.protocol.canonical import BODY_BYTES_MAX, CanonicalError, canonical
from tidefast.protocol.points import Hook
from tidefast.protocol.verdicts import Done, Refused
from tidefast.sdk.app import App
from tidefast.sdk.authority import Authority
from tidefast.sdk.errors import Error, Fail, Held, Misuse, PassEnded, Preempted
from tidefast.sdk.lease import Clock, HeldLease, LeaseTable, boot_s
from tidefast.sdk.line import Backoff, Line
from tidefast.sdk.run import Run, within_limit

Raised = TypeVar("Raised", bound=BaseException)
Outcome = Literal["completed", "failed", "cancelled", "preempted", "done", "error", "held", "shutdown", "drift"]
RECANCEL_S = 1.0
RECANCEL_TRIES = 5  # an agent that swallows more cancellations than these is left behind, and its lease is given back
DETAIL_LENGTH_MAX = 400
COMPLETE_BYTES = 1_024  # what a completion has around its result and its lists
ENDING_AGAIN = "the run was ending; its open effects are settled"
_log = structlog.get_logger()


class Pass:
    """Drives one grant to its end. Built on the running loop; `asked_s` is when the grant was asked for."""

    def __init__(
        self,
        authority: Authority,
        app: App,
        grant: LeaseGrant,
        asked_s: float,
        leases: LeaseTable,
        *,
        hook: Hook | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008 - immutable
        clock: Clock = boot_s,
        grace_s: float = 30.0,
    ) -> None:
        self.lease = HeldLease(grant, asked_s)
        self.line = Line(authority, grant, self.lease, backoff, clock)
        self._app, self._grant, self._leases, self._hook, self._grace_s = app, grant, leases, hook, grace_s
        self._authority, self._token = authority, grant.token
        self._log = _log.bind(run=grant.run_id, epoch=grant.epoch, agent=grant.agent)

    def stop(self) -> None:
        """Shut down: ask for nothing new, let what is in flight settle, release the lease."""
        self.line.stop()

    async def drive(self) -> Outcome:
        """Run the agent under the lease and give the lease back. Raises nothing that the agent raised."""
        loop = asyncio.get_running_loop()
        self.lease.on_lost = lambda lost: _tell(loop, self.line, lost)
        self._leases.add(self.lease)
        self._log.info("pass_started", ending=self._grant.is_ending, journal=len(self._grant.journal))
        try:
            outcome = await self._outcome()
        except Preempted as lost:
            self._log.warning("preempted", why=lost.why)
            return "preempted"
        finally:
            self._leases.remove(self.lease)
        self._log.info("pass_ended", outcome=outcome)
        return outcome

    async def _outcome(self) -> Outcome:
        try:
            if self._grant.is_ending:
                return await self._settle_ending()
            return await self._run_agent()
        except PassEnded as ended:
            return await self._release(ended)
        except Error as error:
            self._log.error("pass_misused", error=_short(error))
            return await self._release(PassEnded(self._grant.run_id, "error", _short(error)))

    async def _run_agent(self) -> Outcome:
        spec = self._app.agents.get(self._grant.agent)
        if spec is None:
            raise Misuse(
                f"this app has no agent {self._grant.agent}", f"it has {', '.join(self._app.agents) or 'none'}"
            )
        if self._grant.agent_version not in spec.versions:
            told = f"the run belongs to version {self._grant.agent_version}, this program drives {spec.versions}"
            raise Misuse(f"this is another version of agent {spec.name}", told, "let a worker of that version have it")
        run = Run(self._grant, self.line, spec.on_drift, self._hook, self._app.tools)
        task = asyncio.ensure_future(_contained(spec.start(run, self._grant.input_json)))
        try:
            await self._supervise(task)
        finally:
            task.cancel()
        if self.line.ended is not None and not task.done():
            await self.line.drain(0 if isinstance(self.line.ended, Preempted) else self._grace_s)
            raise self.line.ended  # the agent's task is left to itself: nothing that it still does counts
        raised = _raised(task)
        if self.line.ended is not None and not self._may_still_end(raised):
            await self.line.drain(0 if isinstance(self.line.ended, Preempted) else self._grace_s)
            raise self.line.ended
        self.line.end(PassEnded(self._grant.run_id, "done", "the agent has returned"))
        await self.line.drain(self._grace_s)
        if raised is None:
            return await self._complete(task.result(), run, spec.dropped)
        failed = found_in(raised, Fail)
        if failed is not None:
            return await self._fail(failed.why)
        held = found_in(raised, Held)
        if held is not None:
            return await self._release(PassEnded(self._grant.run_id, "held", str(held)))
        self._log.error("agent_raised", error=_short(raised), trace="".join(traceback.format_exception(raised)))
        return await self._release(PassEnded(self._grant.run_id, "error", _short(raised)))

    def _may_still_end(self, raised: BaseException | None) -> bool:
        """Whether the agent ended before it heard of the shutdown: then its word counts, and no pass is wasted."""
        return (
            self.line.is_stopping and not self.line.is_told and (raised is None or found_in(raised, Fail) is not None)
        )

    async def _supervise(self, task: "asyncio.Future[Any]") -> None:
        """Wait for the agent; once the pass has ended, make its task end as well."""
        ended = asyncio.ensure_future(self.line.has_ended.wait())
        try:
            await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not task.done() and not isinstance(self.line.ended, Preempted):
            await self.line.drain(self._grace_s)
        for _ in range(RECANCEL_TRIES):
            if task.done():
                break
            self.line.cancel_waiting()
            task.cancel()
            await asyncio.wait((task,), timeout=RECANCEL_S)
        else:
            self._log.error("agent_clings", why="it swallows its cancellation; every call of its run is refused to it")
        if isinstance(self.line.ended, Preempted):
            self.line.cancel_waiting()

    async def _complete(self, result: Any, run: Run, dropped: tuple[str, ...]) -> Outcome:
        """Complete the run, naming what the journal answered. What one call can't carry is named only if it is missed.

        If even that is too much, a checkpoint with the state as it is says that all of it was asked for.
        """
        result_json = _result_json(self._grant.agent, result)
        self.lease.is_ending = True
        asked, named = run.answered, dropped
        room = BODY_BYTES_MAX - COMPLETE_BYTES - len(result_json.encode())
        fits = _length(asked, named) <= room
        answer = await self._ask_complete(result_json, asked if fits else (), named if fits else ())
        missed = _not_asked(answer)
        known = {*asked, *named}
        if missed and not fits and known.issuperset(missed):
            needed = set(missed)
            asked, named = [step for step in asked if step in needed], tuple(step for step in named if step in needed)
            if _length(asked, named) > room:
                await self._save_last(run)
                asked, named = [], ()
            answer = await self._ask_complete(result_json, asked, named)
            missed = _not_asked(answer)
        if not isinstance(answer, Refused):
            return "completed"
        if missed:
            steps = [step for step in missed if step not in known] or missed
            why = "earlier passes settled them since the newest checkpoint, and this pass didn't ask for them"
            hint = f"ask for them, or drop them: @app.agent(dropped=[{', '.join(map(repr, steps))}])"
            raise Misuse(f"the run can't complete without its steps {', '.join(steps)}", why, hint)
        raise Error("the run's completion was refused", f"{answer.code} ({answer.reason})")

    async def _ask_complete(self, result_json: str, asked: Sequence[str], dropped: Sequence[str]) -> Done | Refused:
        authority, token = self._authority, self._token
        return await self.line.ask_settled(
            lambda: authority.complete(token, result_json, asked, dropped), is_ending=True
        )

    async def _save_last(self, run: Run) -> None:
        authority, token, (number, state_json) = self._authority, self._token, run.same_state()
        answer = await self.line.ask_settled(lambda: authority.checkpoint(token, number, state_json), is_ending=True)
        if isinstance(answer, Refused):
            raise Error("the run's completion was refused", f"its last checkpoint: {answer.code} ({answer.reason})")

    async def _settle_ending(self) -> Outcome:
        """No agent code: what is open is settled by its stored calls, what can be is undone, then the run ends."""
        await self.line.settle(self._grant.unsettled, is_ending=True)
        return await self._fail(ENDING_AGAIN)

    async def _fail(self, why: str) -> Outcome:
        self.lease.is_ending = True
        text = _clean(why)
        authority, token = self._authority, self._token

        def ask() -> Awaitable[Done | Refused]:
            return authority.fail(token, text)

        while True:
            answer = await self.line.ask_settled(ask, is_ending=True)
            if isinstance(answer, Refused):
                raise Error("the run's failing was refused", f"{answer.code} ({answer.reason})")
            if answer.state == "failed":
                return "failed"
            if answer.state == "cancelled":
                return "cancelled"
            text = ENDING_AGAIN  # the reason stands in the log; asked in other words, the refusal names what is open

    async def _release(self, ended: PassEnded) -> Outcome:
        self.line.end(ended)
        await self.line.drain(self._grace_s)
        self.lease.is_ending = True
        detail = _clean(ended.why)[:DETAIL_LENGTH_MAX]
        authority, token = self._authority, self._token
        answer = await self.line.ask(lambda: authority.release(token, ended.reason, detail), is_ending=True)
        if isinstance(answer, Refused):
            self._log.error("release_refused", code=answer.code, reason=answer.reason)
        self._log.info("lease_released", reason=ended.reason, detail=detail)
        return ended.reason


def _tell(loop: asyncio.AbstractEventLoop, line: Line, lost: Preempted) -> None:
    """End the line on its own loop, from whatever thread noticed the loss."""
    try:
        loop.call_soon_threadsafe(line.end, lost)
    except RuntimeError:  # the loop is closed: nothing runs that could be told
        return


async def _contained(agent: Awaitable[Any]) -> Any:
    """The agent, kept from ending the worker and its other runs: to leave the process is an error of this pass."""
    try:
        return await agent
    except (SystemExit, KeyboardInterrupt) as left:
        raise Misuse("the agent tried to end the process", f"{type(left).__name__}: {left}") from left


def _raised(task: "asyncio.Future[Any]") -> BaseException | None:
    return asyncio.CancelledError("the agent cancelled itself") if task.cancelled() else task.exception()


def found_in(raised: BaseException, kind: type[Raised]) -> Raised | None:
    """What an agent raised of this kind, also from inside a task group."""
    if isinstance(raised, kind):
        return raised
    if isinstance(raised, BaseExceptionGroup):
        return next((found for inner in raised.exceptions if (found := found_in(inner, kind)) is not None), None)
    return None


def _result_json(agent: str, result: Any) -> str:
    try:
        is_record = isinstance(result, msgspec.Struct) or (
            dataclasses.is_dataclass(result) and not isinstance(result, type)
        )
        return within_limit(canonical(msgspec.to_builtins(result) if is_record else result))
    except (CanonicalError, TypeError) as error:
        raise Misuse(f"agent {agent} returned what can't be stored", f"not JSON: {error}") from error


def _length(*lists: Sequence[str]) -> int:
    """How much the ids take in a call: they are ASCII, with quotes and a comma each."""
    return sum(len(step) + 3 for steps in lists for step in steps)


def _not_asked(answer: Done | Refused) -> list[str]:
    """The steps that a completion must name and didn't."""
    if not isinstance(answer, Refused) or (answer.code, answer.reason) != ("unsettled_effects", "not_asked"):
        return []
    steps = answer.facts.get("steps")
    return [str(step) for step in steps] if isinstance(steps, list | tuple) else []


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:DETAIL_LENGTH_MAX]


def _clean(text: str) -> str:
    """The text without lone surrogates, which no JSON can carry."""
    return text.encode("utf-8", "replace").decode()
