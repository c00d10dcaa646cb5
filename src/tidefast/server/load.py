"""How much the server takes on at once, and what it lets go of first.

Four things are bounded: connections; callers that wait (long polls and event streams), for each caller and in all;
bytes of bodies that are being read; and how many requests the event loop takes on in one round. The last one is what
keeps a server useful under more load than it can bear: a watch ticks every few milliseconds, and when the loop's thread
worked for longer than `ROUND_S` between two ticks, the next round may take on fewer requests, until a round is short
again. The rest is refused at once, before anything is read of it. What was taken on is then answered in time, where
otherwise everything would be answered too late. Work is counted in processor time, so that a process which the host did
not let run refuses nobody for that. Renewals and probes of health are never refused so: lost leases make more work.
"""

import asyncio
import math
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.01
ROUND_S = 0.05
ROUND_MIN, ROUND_MAX = 1, 4096  # requests that a round may take on
GROWTH = 1.5
WAITS_PER_CALLER = 256
WAITS_MAX = 4096
BODIES_BYTES_MAX = 64 * 1024 * 1024
CONNECTIONS_MAX = 8192  # fewer where the process may not have so many files
FILES_KEPT = 512  # for the store, providers, and whatever else
RETRY_AFTER_MS = 500
NEVER_SHED = ("/healthz", "/readyz", "/v1/leases/renew", "/lease/renew")  # how their paths end


class Load:
    """What one server has taken on. For the event loop's thread only."""

    def __init__(self) -> None:
        self.connections = 0
        self.connections_max = CONNECTIONS_MAX
        self.shed: Counter[str] = Counter()  # by what was full: loop, waits, bodies, connections
        self._waits: Counter[str] = Counter()
        self._body_bytes = 0
        self._worked_s = 0.0  # the thread's processor time at the last tick
        self._may_take, self._taken, self._taken_before = ROUND_MAX, 0, 0
        self._watch: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return self._waits.total()

    def start(self) -> None:
        """Begin to watch the running event loop, and take as many connections as this process may have files."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = (
            CONNECTIONS_MAX + FILES_KEPT if most == resource.RLIM_INFINITY else min(CONNECTIONS_MAX + FILES_KEPT, most)
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
        self.connections_max = max(1, files - FILES_KEPT)
        self._worked_s = time.thread_time()
        self._tick()

    def _tick(self) -> None:
        worked_s = time.thread_time()
        self._end_round(worked_s - self._worked_s)
        self._worked_s = worked_s
        self._watch = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _end_round(self, worked_s: float) -> None:
        """Judge the round that ends by the time that its requests took, and say how many the next one may take on."""
        took = max(self._taken, self._taken_before, 1)
        self._taken_before, self._taken = self._taken, 0
        if worked_s > ROUND_S:
            self._may_take = max(ROUND_MIN, int(min(took, self._may_take) * ROUND_S / worked_s))
        elif worked_s < ROUND_S / 2:
            self._may_take = min(ROUND_MAX, math.ceil(self._may_take * GROWTH))

    def is_behind(self, path: str) -> bool:
        """Whether a request that arrives now is refused, because its round has taken on as many as it may."""
        if path.endswith(NEVER_SHED):
            return False
        if self._taken < self._may_take:
            self._taken += 1
            return False
        self.shed["loop"] += 1
        return True

    @contextmanager
    def wait(self, caller: str) -> Iterator[bool]:
        """A place to wait in, for as long as the block lasts; false: there is none left."""
        if self._waits[caller] >= WAITS_PER_CALLER or self.waiting >= WAITS_MAX:
            self.shed["waits"] += 1
            yield False
            return
        self._waits[caller] += 1
        try:
            yield True
        finally:
            self._waits[caller] -= 1
            if not self._waits[caller]:
                del self._waits[caller]

    def take_body(self, length: int) -> bool:
        """Room for a piece of a body; false: there is none left. Whoever took it gives it back."""
        if self._body_bytes + length > BODIES_BYTES_MAX:
            self.shed["bodies"] += 1
            return False
        self._body_bytes += length
        return True

    def give_back(self, length: int) -> None:
        self._body_bytes -= length

    def connect(self) -> bool:
        """A place for a connection; false: there is none left. Whoever got one says when it is closed."""
        if self.connections >= self.connections_max:
            self.shed["connections"] += 1
            return False
        self.connections += 1
        return True

    def disconnect(self) -> None:
        self.connections -= 1
