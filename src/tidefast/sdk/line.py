"""The line to the authority under one lease: what a refusal means for the pass, and when to ask again.

| the authority says                                                      | the line                       |
|-------------------------------------------------------------------------|--------------------------------|
| step_in_flight, step_pending, in_doubt, overloaded, store_unavailable   | waits and asks again           |
| nothing (it can't be reached)                                           | waits and asks again           |
| step_held of an independent tool                                        | gives it to the caller         |
| step_held, run_frozen, run_paused, run_ending                           | ends the pass: `PassEnded`     |
| stale_epoch, lease_lapsed, run_ended, lease_required, bad_token         | ends the pass: `Preempted`     |
| anything else                                                           | gives it to the caller         |

It waits only while the lease can be believed: a worker that hears nothing stops in time by itself. Doubt that stays is
asked about ever more rarely, because asking may send the call again, and a long wait is told in the log.

How `Preempted` reaches the agent: whoever notices the loss calls `end`, and the pass then cancels the tasks that wait
in `guard` and the agent's own. A cancelled wait is translated, so agent code sees `Preempted` from its `run.*` calls
(and a plain `CancelledError` where it awaits something else); from then on each `run.*` call raises it at once.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import structlog

from tidefast.protocol.answers import LeaseGrant, StepAnswer
from tidefast.protocol.verdicts import Refused
from tidefast.sdk.authority import Authority, AuthorityUnavailable
from tidefast.sdk.errors import PassEnded, Preempted, ReleaseReason
from tidefast.sdk.lease import Clock, HeldLease, boot_s

WAIT_MS = 30_000  # how long the authority may hold one question before it says `step_in_flight`
UNDO_SUFFIX = "~undo"
WAITING = frozenset(("step_in_flight", "step_pending", "in_doubt", "no_replica", "overloaded", "store_unavailable"))
SLOW = frozenset(("in_doubt", "no_replica", "step_pending"))  # each time they are said, their wait may grow longer
LOST = frozenset(("stale_epoch", "lease_lapsed", "run_ended", "lease_required", "bad_token"))
TOLD_AFTER_S = 10.0
REASON_LENGTH_MAX = 200
ENDING: dict[str, ReleaseReason] = {
    "step_held": "held",
    "run_frozen": "held",
    "run_paused": "held",
    "run_ending": "done",
}
_log = structlog.get_logger()
T = TypeVar("T")
Question = Callable[[], Awaitable[T | Refused]]


class Backoff(NamedTuple):
    """How long to wait before asking again: doubling from `first_s` to `most_s`, spread by up to a half."""

    first_s: float = 0.1
    most_s: float = 5.0

    def delay_s(self, tries: int) -> float:
        full = min(self.first_s * 2.0 ** min(tries, 20), self.most_s)
        return full * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing

    def slow(self) -> "Backoff":
        """The same for doubt, which goes on doubling. What the authority itself asks for goes as far."""
        return self._replace(most_s=self.most_s * 12)


class Line:
    """One pass's questions to the authority. Built on the running loop; `end` may be called once, the first wins."""

    def __init__(
        self,
        authority: Authority,
        grant: LeaseGrant,
        lease: HeldLease,
        backoff: Backoff = Backoff(),  # noqa: B008 - immutable
        clock: Clock = boot_s,
    ) -> None:
        self.authority, self.lease, self.token = authority, lease, grant.token
        self.ended: Preempted | PassEnded | None = None
        self.has_ended = asyncio.Event()
        self._has_stopped = asyncio.Event()
        self.is_told = False  # whether anything of the agent has heard of the end
        self.is_stopping = False
        self._backoff, self._clock = backoff, clock
        # The authority's time at the grant, paired with ours: only for guessing when `until_ms` is.
        self._granted_ms, self._received_s = grant.expires_at_ms - grant.lease_ms, clock()
        self._tasks: dict[asyncio.Task[object], int] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()

    def end(self, ended: Preempted | PassEnded) -> Preempted | PassEnded:
        """The pass is over for this reason; the first one stands. Returns the one that stands."""
        if self.ended is None:
            self.ended = ended
            self.has_ended.set()
        return self.ended

    def stop(self) -> None:
        """The worker shuts down: nothing new is asked, what is in flight settles."""
        self.is_stopping = True
        self._has_stopped.set()
        self.end(PassEnded(self.lease.run_id, "shutdown", "the worker shuts down"))

    def check(self) -> None:
        """Raise what ended the pass, or `Preempted` if the lease can't be believed any more."""
        if self.ended is not None:
            self.is_told = True
            raise self.ended
        self._check_lease()

    def _check_lease(self) -> None:
        lost = self.lease.lose_by_clock(self._clock())
        if lost is not None:
            self.end(lost)
            raise lost

    def guard(self) -> "Guard":
        """Around everything that agent code awaits here: counted while in flight, its cancellation translated."""
        return Guard(self)

    def entered(self) -> "asyncio.Task[object]":
        """The current task, counted as waiting here. Raises what ended the pass, if it has ended."""
        self.check()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a run is driven from inside a task")
        self._tasks[task] = self._tasks.get(task, 0) + 1
        self._quiet.clear()
        return task

    def left(self, task: "asyncio.Task[object]") -> None:
        """The end of what `entered` began."""
        self._tasks[task] -= 1
        if not self._tasks[task]:
            del self._tasks[task]
        if not self._tasks:
            self._quiet.set()

    def translate(self, error: BaseException | None) -> None:
        """Turn the cancellation of an ended pass into what ended it; any other error goes its way."""
        if self.ended is not None and isinstance(error, asyncio.CancelledError):
            self.is_told = True
            raise self.ended from None

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Around agent code that this pass calls: `translate` what it raises."""
        try:
            yield
        except asyncio.CancelledError as error:
            self.translate(error)
            raise

    def cancel_waiting(self) -> None:
        """Cancel every task that waits inside `guard`."""
        self.is_told = True
        for task in list(self._tasks):
            task.cancel()

    async def drain(self, grace_s: float) -> None:
        """Return when nothing is in flight, or after `grace_s`."""
        try:
            async with asyncio.timeout(grace_s):
                await self._quiet.wait()
        except TimeoutError:
            return

    async def ask(self, question: Question[T], step: str = "", *, is_ending: bool = False) -> T | Refused:
        """The authority's answer, waited for as the table says. Raises `Preempted` and `PassEnded`.

        `step` is what the log tells of a long wait. With `is_ending` the pass has ended and this belongs to giving the
        lease back: only the lease is checked.
        """
        if self.ended is not None and not is_ending:
            self.check()
        wait = _Wait(self._clock())
        while True:
            self._check_lease()
            refused = None
            try:
                answer = await question()
            except AuthorityUnavailable as error:
                code, reason = "unavailable", str(error)[:REASON_LENGTH_MAX]
            else:
                if not isinstance(answer, Refused):
                    return answer
                code, reason, refused = str(answer.code), answer.reason, answer
                self.judge(answer, is_ending)
                if code not in WAITING:
                    return answer
            self._check_wait(code, is_ending)
            waited_s = self._clock() - wait.began_s
            if wait.is_told_at(waited_s):
                told = {"run": self.lease.run_id, "step": step, "code": code, "reason": reason}
                _log.warning("still_waiting", **told, waited_s=round(waited_s))
            slow = code in SLOW
            delay_s = self._delay_s(wait.count(slow), refused, slow=slow)
            await self._pause(delay_s, is_ending or self.ended is not None)

    def judge(self, refused: Refused, is_ending: bool = False) -> None:
        """Raise what this refusal means for the pass, if it ends it."""
        code, run_id = str(refused.code), self.lease.run_id
        if code in LOST:
            why = f"the authority refused its epoch ({code}, {refused.reason})"
            raise self.end(self.lease.lose(Preempted(run_id, self.lease.epoch, why, refused.facts)))
        if code == "step_held" and refused.facts.get("independent") is True and not is_ending:
            return  # held by itself: the agent may go on with its other steps
        if code in ENDING and not (is_ending and code == "run_ending"):
            steps = refused.facts.get("steps")
            named = f", steps {', '.join(map(str, steps))}" if isinstance(steps, list | tuple) else ""
            ended = PassEnded(run_id, ENDING[code], f"{code} ({refused.reason}){named}")
            self.end(ended)
            raise ended

    def _check_wait(self, code: str, is_ending: bool) -> None:
        """A worker that shuts down waits only for what is in flight, and to give its lease back."""
        if self.ended is None or code == "step_in_flight" or (is_ending and not self.is_stopping):
            return
        if not (is_ending and code in ("unavailable", "store_unavailable", "overloaded")):
            self.is_told = True
            raise self.ended

    def _delay_s(self, tries: int, refused: Refused | None, *, slow: bool = False) -> float:
        """The backoff, or what the refusal says about when asking again has a point."""
        slowly = self._backoff.slow()
        full = (slowly if slow else self._backoff).delay_s(tries)
        facts = {} if refused is None else refused.facts
        until, after = facts.get("until_ms"), facts.get("retry_after_ms")
        if isinstance(after, int) and after > 0:
            return max(full, min(after / 1_000, slowly.most_s))
        if isinstance(until, int) and until > 0:  # the latest moment; it may be over sooner
            now_ms = self._granted_ms + (self._clock() - self._received_s) * 1_000
            return max(full, min((until - now_ms) / 1_000, self._backoff.most_s))
        return full

    async def _pause(self, delay_s: float, is_deaf: bool) -> None:
        """Wait; the end of the pass cuts it short. If `is_deaf` only the first word of a shutdown does."""
        heard = self._has_stopped if is_deaf else self.has_ended
        if is_deaf:
            delay_s = min(delay_s, self.lease.lease_s)  # nobody tells a lease that is being given back of its loss
        if heard.is_set():
            await asyncio.sleep(min(delay_s, self._backoff.most_s))
            return
        try:
            async with asyncio.timeout(delay_s):
                await heard.wait()
        except TimeoutError:
            return

    async def ask_settled(self, question: Question[T], *, is_ending: bool = False) -> T | Refused:
        """Like `ask`; first comes what is in the way: unsettled effects by their stored calls, then undos in order."""
        tries, last = 0, ("", "")
        while True:
            answer = await self.ask(question, is_ending=is_ending)
            if not isinstance(answer, Refused) or answer.code != "unsettled_effects" or answer.reason == "not_asked":
                return answer
            found = answer.facts.get("steps")
            steps = [str(step) for step in found] if isinstance(found, list | tuple) else []
            seen = (answer.reason, ",".join(steps))
            tries, last = tries + 1 if seen == last else 0, seen
            if tries:
                self._check_wait("step_pending", is_ending)
                await self._pause(self._delay_s(tries, answer), is_ending)
            if answer.reason == "unsettled":
                await self.settle(steps, is_ending)
                continue
            undo = steps[0] + UNDO_SUFFIX
            undone = await self.ask(self._stored(undo), undo, is_ending=is_ending)
            if isinstance(undone, Refused):
                return undone

    async def settle(self, steps: Sequence[str], is_ending: bool) -> None:
        """Ask for the stored call of each step until its outcome is known; one being undone is settled by its undo."""
        undone = {step.removesuffix(UNDO_SUFFIX) for step in steps if step.endswith(UNDO_SUFFIX)}
        for step in steps:
            if step not in undone:
                answer = await self.ask(self._stored(step), step, is_ending=is_ending)
                if isinstance(answer, Refused):
                    self.judge(answer, is_ending=True)  # what is held alone holds up checkpoints and the end

    def _stored(self, step: str) -> Question[StepAnswer]:
        if step.endswith(UNDO_SUFFIX):
            return lambda: self.authority.compensate(self.token, step.removesuffix(UNDO_SUFFIX), WAIT_MS)
        return lambda: self.authority.apply(self.token, step, "", None, WAIT_MS)


class _Wait:
    """One question's patience: since when, how often it was put, and when the log tells of it next."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self._tell_s = TOLD_AFTER_S
        self._tries = [0, 0]

    def is_told_at(self, waited_s: float) -> bool:
        """Whether a line is due: after ten seconds, then each time the wait has doubled."""
        if waited_s < self._tell_s:
            return False
        while self._tell_s <= waited_s:
            self._tell_s *= 2
        return True

    def count(self, slow: bool) -> int:
        """How often it waited before, for what is slow and for what isn't."""
        self._tries[slow] += 1
        return self._tries[slow] - 1


class Guard:
    """See `Line.guard`. A class, not a generator: it is entered and left once a step."""

    __slots__ = ("_line", "_task")

    def __init__(self, line: Line) -> None:
        self._line = line

    def __enter__(self) -> None:
        self._task = self._line.entered()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._line.left(self._task)
        self._line.translate(error)
