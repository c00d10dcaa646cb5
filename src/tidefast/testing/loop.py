"""An event loop whose time is a `ManualClock`: when nothing is left but to wait, it moves the clock to the next timer.

A lease of fifteen seconds lapses, a deadline of thirty passes, and no test sleeps. Real work is waited for in real
time: a tool that runs on a thread, a request that a provider has not parked, a file descriptor that may become ready
within `GRACE_S`. Work that takes longer than `patience_s` counts as hanging, and the clock moves on without it.
"""

import asyncio
import math
import selectors
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tidefast.engine.clock import ManualClock

GRACE_S = 0.003  # what a packet on the loopback interface may take, where descriptors are watched
SLICE_S = 0.25
PATIENCE_S = 10.0
THREADS = 64  # a hung tool keeps its thread until the end of the run
T = TypeVar("T")


class Stuck(RuntimeError):
    """Nothing is left that could happen, and the run has not come to an end."""


class Selector(selectors.DefaultSelector):
    """Waits for what is real, then moves the clock instead of waiting."""

    def __init__(self, clock: ManualClock, patience_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._patience_s = patience_s
        self.is_busy: Callable[[], bool] = lambda: False
        self.own = 1  # descriptors of the loop itself

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        started = time.monotonic()
        while self.is_busy() and time.monotonic() - started < self._patience_s:
            if ready := super().select(SLICE_S):
                return ready
        watches = len(self.get_map()) > self.own
        if ready := super().select(GRACE_S if watches else 0):
            return ready
        if timeout is not None:
            self._clock.advance(max(1, math.ceil(timeout * 1_000 - 1e-6)))
            return []
        if watches and (ready := super().select(self._patience_s)):
            return ready
        raise Stuck("nothing is left that could happen: something awaits what nobody will ever do")


class VirtualLoop(asyncio.SelectorEventLoop):
    """One loop in the time of one clock. `park` marks work that waits on purpose, so that nobody waits for it."""

    def __init__(self, clock: ManualClock, patience_s: float = PATIENCE_S) -> None:
        self._manual = clock
        selector = Selector(clock, patience_s)
        super().__init__(selector)
        selector.is_busy = self._has_real_work
        selector.own = len(selector.get_map())
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tidefast-tool")
        self._count = threading.Lock()
        self._running = 0  # jobs on threads that aren't parked
        self.requests: set[str] = set()  # under way to a provider
        self.parked: set[str] = set()  # of these, the ones that a provider keeps on purpose

    def time(self) -> float:
        return self._manual.ms / 1_000

    def _has_real_work(self) -> bool:
        return self._running > 0 or bool(self.requests - self.parked)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Run on a thread of this loop; the clock stands still until it is done or parked."""
        self._count_running(1)
        job: Future[T] = (executor or self._pool).submit(func, *args)
        wrapped = asyncio.wrap_future(job, loop=self)
        job.add_done_callback(lambda _: self._count_running(-1))  # after the loop has been told
        return wrapped

    def _count_running(self, change: int) -> None:
        with self._count:
            self._running += change

    def park_thread(self, until: threading.Event) -> None:
        """Block this thread until the event; the clock moves on meanwhile."""
        self._count_running(-1)
        try:
            self.call_soon_threadsafe(lambda: None)  # the loop may be waiting for this very thread
            until.wait()
        finally:
            self._count_running(1)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()
