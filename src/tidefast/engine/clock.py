"""The authority's clock.

`now().ms` is a base plus the time since boot, which counts suspension and can't be stepped. The base, taken once at
start, is the larger of the wall clock and the store's mark (the latest time that was committed, written once a second),
so a wall clock that was set back can't bring old times again. Clocks decide when a lease lapses and when a provider's
memory may be over; epochs decide writes.
"""

from time import CLOCK_BOOTTIME, clock_gettime_ns, time_ns
from typing import Protocol

from tidefast.protocol.records import Now
from tidefast.stores.base import start_ms


class Clock(Protocol):
    def now(self) -> Now: ...

    def begin_grace(self) -> None:
        """Give every lease one full length from now before it counts as lapsed: the authority itself was silent."""


class SystemClock:
    """The clock of one process over one store."""

    def __init__(self, mark_ms: int) -> None:
        boot_ms = _boot_ms()
        self._base_ms = start_ms(wall_ms(), mark_ms) - boot_ms
        self._mark_ms = mark_ms
        self._grace_from_ms = self._base_ms + boot_ms

    def now(self) -> Now:
        boot_ms = clock_gettime_ns(CLOCK_BOOTTIME) // 1_000_000  # spelled out: every command reads this clock
        return Now(self._base_ms + boot_ms, time_ns() // 1_000_000, self._mark_ms, self._grace_from_ms)

    def begin_grace(self) -> None:
        self._grace_from_ms = self._base_ms + _boot_ms()


class ManualClock:
    """A clock that moves only when told to, for simulation and for users' tests."""

    def __init__(self, start_ms: int = 1_000_000) -> None:
        self.ms = start_ms
        self.wall_ms = start_ms
        self.mark_ms = 0
        self.grace_from_ms = 0

    def now(self) -> Now:
        return Now(self.ms, self.wall_ms, self.mark_ms, self.grace_from_ms)

    def advance(self, ms: int) -> None:
        self.ms += ms
        self.wall_ms += ms

    def begin_grace(self) -> None:
        self.grace_from_ms = self.ms


def _boot_ms() -> int:
    return clock_gettime_ns(CLOCK_BOOTTIME) // 1_000_000


def wall_ms() -> int:
    """The wall clock, which may be set to anything at any time."""
    return time_ns() // 1_000_000
