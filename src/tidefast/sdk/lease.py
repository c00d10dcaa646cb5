"""Leases as their worker sees them: how long it may believe in each one.

A lease is believed from *before* the request that granted or renewed it was sent, on a clock that counts suspension:
the authority can't have granted it any earlier, so the belief never outlasts the lease. A worker that can't reach the
authority therefore stops spending by itself, in time; the authority's fence is the real guard.
"""

import threading
import time
from collections.abc import Callable

from tidefast.protocol.answers import LeaseGrant
from tidefast.sdk.errors import Preempted

Clock = Callable[[], float]
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_s() -> float:
    """Seconds since boot, time asleep included where the system counts it. Never goes back."""
    return time.clock_gettime(_BOOT_CLOCK)


UNHEARD_MIN_S = 10.0  # longer than a pass takes to leave an agent behind that clings to life


class HeldLease:
    """One lease in this process. Renewed and lost by the heartbeat's thread, read by the run's.

    `lose` calls `on_lost` at most once, on the thread that noticed. While `is_ending` the verb that ends the lease is
    under way, and it will hear the authority's word itself.
    """

    __slots__ = (
        "_lock",
        "beat_s",
        "epoch",
        "from_s",
        "holder",
        "is_ending",
        "lease_s",
        "lost",
        "lost_seen_s",
        "on_lost",
        "run_id",
        "token",
    )

    def __init__(self, grant: LeaseGrant, asked_s: float) -> None:
        self.run_id = grant.run_id
        self.epoch = grant.epoch
        self.holder = grant.holder
        self.token = grant.token
        self.lease_s = grant.lease_ms / 1_000
        self.from_s = asked_s
        self.beat_s = asked_s + self.lease_s / 3
        self.lost: Preempted | None = None
        self.lost_seen_s: float | None = None  # when the heartbeat first saw it lost and its pass not over
        self.is_ending = False
        self.on_lost: Callable[[Preempted], None] | None = None
        self._lock = threading.Lock()

    @property
    def until_s(self) -> float:
        """When this worker stops believing in the lease."""
        return self.from_s + self.lease_s

    def renewed(self, asked_s: float) -> None:
        """The authority renewed it, in answer to a request sent after `asked_s`."""
        self.from_s = max(self.from_s, asked_s)
        self.beat_s = asked_s + self.lease_s / 3

    def put_off(self, now_s: float) -> None:
        """The authority couldn't be asked; try again soon."""
        self.beat_s = now_s + self.lease_s / 15

    def lose(self, lost: Preempted) -> Preempted:
        """Make the loss a fact of this process; the first reason stands."""
        with self._lock:
            if self.lost is not None:
                return self.lost
            self.lost = lost
        if self.on_lost is not None and not self.is_ending:
            self.on_lost(lost)
        return lost

    def lose_by_clock(self, now_s: float) -> Preempted | None:
        """The loss if the lease's time is over by this machine's clock, None while it can be believed."""
        if self.lost is not None:
            return self.lost
        if now_s < self.until_s:
            return None
        why = f"it was last renewed {now_s - self.from_s:.1f} s ago and lasts {self.lease_s:.1f} s"
        return self.lose(Preempted(self.run_id, self.epoch, why, {"ended_by": "own_clock"}))


class LeaseTable:
    """Every lease that this process holds. Any thread may read it; `on_change` is called after each change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[tuple[str, int], HeldLease] = {}
        self.on_change: Callable[[], None] = lambda: None

    def add(self, lease: HeldLease) -> None:
        with self._lock:
            self._leases[lease.run_id, lease.epoch] = lease
        self.on_change()

    def remove(self, lease: HeldLease) -> None:
        with self._lock:
            self._leases.pop((lease.run_id, lease.epoch), None)

    def unheard(self, now_s: float) -> list[HeldLease]:
        """The leases that were lost a lease's time (10 s at least) ago, and whose passes have not ended since.

        Each heartbeat asks. A pass ends within moments of the loss wherever its loop runs at all.
        """
        with self._lock:
            lost = [lease for lease in self._leases.values() if lease.lost is not None]
        for lease in lost:
            lease.lost_seen_s = now_s if lease.lost_seen_s is None else lease.lost_seen_s
        return [
            lease
            for lease in lost
            if now_s - (now_s if lease.lost_seen_s is None else lease.lost_seen_s) > max(lease.lease_s, UNHEARD_MIN_S)
        ]

    def believed(self) -> list[HeldLease]:
        """The leases that aren't lost."""
        with self._lock:
            return [lease for lease in self._leases.values() if lease.lost is None]
