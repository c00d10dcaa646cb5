"""Virtual time, and processes that can be frozen and killed: an event loop for simulations.

When everything waits, the loop's clock jumps to the next timer, so an hour in which little happens costs little. Each
task belongs to the `Process` in whose context it was made. Before each callback the loop looks at that process: a
frozen one's callbacks are put aside until it thaws, a dead one's are dropped, without any `finally` being run, as if
the machine had lost its power. Futures and tasks are hashed by their order of creation, so a set of them is walked in
the same order in every interpreter, and one seed gives one history.
"""

import asyncio
import contextvars
import heapq
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from tidefast.protocol.records import Now
from tidefast.stores.base import start_ms

T = TypeVar("T")
CALLBACKS_MAX = 200_000  # at one moment: more means that something goes round without ever waiting
TIMERS_DEAD_MAX = 200
TICK_S = 1e-6
CLOSINGS_MAX = 4  # a task group waits once more when it is unwound
TASKS_KEPT = 200


class Stopped(Exception):
    """Nothing can happen any more, or too much happens at one moment: a fault of the simulation or of the product."""


class Process:
    """Something that runs on its own: a worker, an authority. What is spawned in it shares its fate."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.state: Literal["running", "frozen", "dead"] = "running"
        self.fuse = 0  # callbacks until `on_fuse` is called; 0: none is lit
        self.on_fuse: Callable[[], None] = lambda: None
        self.parked: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self._context = contextvars.Context()
        self._context.run(_process.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        return self._loop.create_task(work, context=self._context.copy())

    def run(self, function: Callable[[], T]) -> T:
        """Call a function as this process."""
        return self._context.copy().run(function)

    def light(self, callbacks: int, what: Callable[[], None]) -> bool:
        """Let something happen to this process after so many of its callbacks. False if a fuse burns already."""
        if self.fuse or self.state == "dead":
            return False
        self.fuse, self.on_fuse = callbacks, what
        return True

    def freeze(self) -> None:
        if self.state == "running":
            self.state = "frozen"

    def thaw(self) -> None:
        """Go on where it stopped: everything that became due meanwhile is due now."""
        if self.state == "frozen":
            self.state = "running"
            parked, self.parked = self.parked, []
            self._loop.resume(parked)

    def kill(self) -> None:
        """Never run again. The tasks are kept, so that nothing of them is cleaned up while the others live."""
        self.state, self.fuse = "dead", 0
        self.parked.clear()
        self._loop.bury([task for task in self.tasks if not task.done()])
        self.tasks.clear()


_process: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class _Future(asyncio.Future[Any]):
    def __init__(self, loop: "VirtualLoop", number: int) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    def __init__(self, work: Any, loop: "VirtualLoop", number: int, context: Any) -> None:
        self.number = number
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without input or output, whose time is a number."""

    _ready: "deque[Any]"
    _scheduled: list[Any]
    _timer_cancelled_count: int

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = 0
        self.broken: list[str] = []  # exceptions that nobody was there to catch
        self._now = 0.0
        self._numbers = 0
        self._is_over = False
        self._graves: list[asyncio.Task[Any]] = []
        self.set_exception_handler(_note_broken)

    def time(self) -> float:
        return self._now

    def ms(self) -> int:
        """The true time in milliseconds, which no clock in the simulation need agree with."""
        return int(self._now * 1_000 + 1e-6)

    def create_future(self) -> "asyncio.Future[Any]":
        self._numbers += 1
        return _Future(self, self._numbers)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None, **more: Any) -> "asyncio.Task[Any]":
        self._numbers += 1
        task = _Task(coro, self, self._numbers, context)
        owner = _process.get(None) if context is None else context.get(_process)
        if owner is not None:
            if len(owner.tasks) > TASKS_KEPT:
                owner.tasks = [each for each in owner.tasks if not each.done()]
            owner.tasks.append(task)
        return task

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        if not self._is_over:
            self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """A timer is due a microsecond from now at the earliest, so that whoever waits in a circle moves the clock."""
        return super().call_at(max(when, self._now + TICK_S), callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def resume(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def bury(self, tasks: list["asyncio.Task[Any]"]) -> None:
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._graves.extend(tasks)

    def _run_once(self) -> None:
        """One turn: let time pass if nothing is ready, then run what is."""
        ready, scheduled = self._ready, self._scheduled
        if self._timer_cancelled_count > TIMERS_DEAD_MAX and self._timer_cancelled_count * 2 > len(scheduled):
            scheduled = self._scheduled = [timer for timer in scheduled if not timer._cancelled]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)
        if not ready:
            if not scheduled:
                raise Stopped("everything waits, and nothing is due")
            self._now = max(self._now, scheduled[0]._when)
            self.callbacks = 0
        while scheduled and scheduled[0]._when <= self._now:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        self.callbacks += len(ready)
        if self.callbacks > CALLBACKS_MAX:
            raise Stopped(f"more than {CALLBACKS_MAX:,} callbacks at {self._now:.3f} s, and no end")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            owner = handle._context.get(_process)
            if owner is None:
                handle._run()
            else:
                _run_in(owner, handle)

    def end(self) -> None:
        """Nothing is called any more; whatever was pending is let go of silently."""
        self._is_over = True
        for task in sorted({*asyncio.all_tasks(self), *self._graves}, key=hash):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            work = task.get_coro()
            for _ in range(CLOSINGS_MAX):
                if not inspect.iscoroutine(work) or inspect.getcoroutinestate(work) == inspect.CORO_CLOSED:
                    break
                self._close(work)
        self._ready.clear()
        self._scheduled.clear()
        self._graves.clear()
        self.close()

    def _close(self, work: Coroutine[Any, Any, Any]) -> None:
        """Unwind what never came to its end. Left to the garbage collector, such chains have crashed CPython 3.11."""
        try:
            work.close()
        except BaseException as error:  # the simulation is over: what the dead still say is only noted
            self.broken.append(f"while unwinding: {error!r}")


def _run_in(owner: Process, handle: Any) -> None:
    if owner.state == "dead":
        return
    if owner.state == "frozen":
        owner.parked.append(handle)
        return
    handle._run()
    if owner.fuse:
        owner.fuse -= 1
        if not owner.fuse:
            owner.on_fuse()


def _note_broken(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if isinstance(loop, VirtualLoop):
        loop.broken.append(f"{context.get('message', '')}: {context.get('exception')!r}")


class VirtualClock:
    """The authority's clock over virtual time, by the formula of `SystemClock`: one per life of an authority."""

    def __init__(self, loop: VirtualLoop, wall_ms: Callable[[], int], mark_ms: int) -> None:
        self._loop, self._wall_ms, self._mark_ms = loop, wall_ms, mark_ms
        self._base_ms = start_ms(wall_ms(), mark_ms) - loop.ms()
        self._grace_from_ms = self._base_ms + loop.ms()

    def now(self) -> Now:
        return Now(self._base_ms + self._loop.ms(), self._wall_ms(), self._mark_ms, self._grace_from_ms)

    def begin_grace(self) -> None:
        self._grace_from_ms = self._base_ms + self._loop.ms()


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end in virtual time. Raises `Stopped` if it can't get there."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.end()
