"""One upstream's door: so many calls at a time, so many waiting, and a rest after failures.

A place in the queue belongs to a caller that still may use it: one whose lease has ended, or whose patience is over,
gives it up. What can't be taken now is said at once with the time after which asking again has a point; nobody waits
without a bound.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable

from tidefast.engine.clock import Clock
from tidefast.protocol.canonical import JSON
from tidefast.protocol.verdicts import Refused
from tidefast.services.models import Settings

LOOK_S = 0.5  # how often a waiting caller's lease is looked at
RETRY_MIN_MS = 100
RETRY_MAX_MS = 60_000
GUESS_MS = 1_000.0  # how long an answer takes, until one has


class Upstream:
    """Concurrency, queue and circuit breaker of one upstream. Lives on one event loop."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self.running = 0
        self._clock = clock
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._failures = 0  # in a row
        self._rests_until_ms = 0
        self._reason = ""
        self._is_trying = False  # after a rest one call goes first
        self._answer_ms = GUESS_MS

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def enter(self, until_ms: int, may_wait: Callable[[], bool]) -> Refused | None:
        """Take a place, or say why there is none. Who got one calls `leave`.

        Waits until `until_ms` at most, and only while `may_wait` says so; it is asked again before a place is given.
        """
        resting = self._resting()
        if resting is not None:
            return resting
        if self.running < self.settings.table.concurrency and not self._waiting:
            self._take()
            return None
        if len(self._waiting) >= self.settings.table.queue:
            return self._overloaded("queue_full")
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await self._wait(place, until_ms, may_wait)
        except BaseException:
            self._give_up(place)
            raise

    async def _wait(self, place: asyncio.Future[bool], until_ms: int, may_wait: Callable[[], bool]) -> Refused | None:
        while True:
            left_s = (until_ms - self._clock.now().ms) / 1_000
            if not place.done():
                await asyncio.wait((place,), timeout=max(min(left_s, LOOK_S), 0))
            is_wanted = may_wait()
            if place.done() and is_wanted:
                return self._resting_with_place()
            if not is_wanted or self._clock.now().ms >= until_ms:
                self._give_up(place)
                return self._overloaded("queue_wait")

    def _resting_with_place(self) -> Refused | None:
        """The upstream may have begun to rest while this call waited; its place goes on to nobody."""
        resting = self._resting()
        if resting is not None:
            self.leave()
        return resting

    def _give_up(self, place: asyncio.Future[bool]) -> None:
        if place.done():
            self.leave()
        else:
            place.cancel()
            self._waiting.remove(place)

    def _take(self) -> None:
        self.running += 1
        if self._failures >= self.settings.table.failures:
            self._is_trying = True

    def leave(self) -> None:
        """Give the place back; the first that waits gets it."""
        self.running -= 1
        while self._waiting and self.running < self.settings.table.concurrency:
            place = self._waiting.popleft()
            if not place.done():
                self._take()
                place.set_result(True)

    def worked(self, took_ms: int) -> None:
        """An answer came, or a refusal that speaks for a healthy upstream."""
        self._failures = 0
        self._is_trying = False
        self._answer_ms += (max(took_ms, 1) - self._answer_ms) / 8

    def failed(self) -> None:
        """No answer came: after so many in a row the upstream is left alone for a while."""
        self._failures += 1
        self._is_trying = False
        if self._failures >= self.settings.table.failures:
            self._rest(self.settings.pause_ms, "circuit_open")

    def is_busy(self, retry_after_ms: int) -> None:
        """The upstream turned a call away and said for how long."""
        self._is_trying = False
        self._rest(max(RETRY_MIN_MS, min(retry_after_ms, RETRY_MAX_MS)), "upstream_busy")

    def _rest(self, length_ms: int, reason: str) -> None:
        self._rests_until_ms = max(self._rests_until_ms, self._clock.now().ms + length_ms)
        self._reason = reason

    def _resting(self) -> Refused | None:
        left_ms = self._rests_until_ms - self._clock.now().ms
        if left_ms > 0:
            return self._overloaded(self._reason, left_ms)
        if self._is_trying and self._failures >= self.settings.table.failures:
            return self._overloaded("circuit_open", self.settings.pause_ms)
        return None

    def _overloaded(self, reason: str, retry_after_ms: int = 0) -> Refused:
        if not retry_after_ms:
            rounds = (self.running + len(self._waiting)) / self.settings.table.concurrency
            retry_after_ms = math.ceil(min(max(self._answer_ms * rounds / 2, RETRY_MIN_MS), RETRY_MAX_MS))
        facts: dict[str, JSON] = {
            "upstream": self.settings.name,
            "running": self.running,
            "queued": len(self._waiting),
            "retry_after_ms": retry_after_ms,
        }
        return Refused("overloaded", reason, facts)
