"""An event loop whose time is a manual clock's: every wait of the product ends when a script says so, and no sooner.

Nothing here ever sleeps, so a coroutine that drives a scenario must keep the loop turning until it is quiet.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidefast.engine.clock import ManualClock

T = TypeVar("T")


class _Impatient(selectors.SelectSelector):
    """Looks and never waits: with a clock that stands still there is nothing to wait for."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(0)


class ManualLoop(asyncio.SelectorEventLoop):
    """A loop on a manual clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(_Impatient())
        self._manual = clock

    def time(self) -> float:
        return self._manual.ms / 1_000

    def has_work(self) -> bool:
        """Whether anything but the caller would run now: a callback that is due, or a timer that is."""
        ready, scheduled = vars(self)["_ready"], vars(self)["_scheduled"]
        return bool(ready) or any(not timer.cancelled() and timer.when() <= self.time() for timer in scheduled)


def run(clock: ManualClock, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a loop of its own."""
    with asyncio.Runner(loop_factory=lambda: ManualLoop(clock)) as runner:
        return runner.run(coroutine)
