"""Processes that can be killed and frozen, inside one process.

A *life* stands for a process. Every task that is started under it, and every task that those start, takes its next step
only while the life goes on: killed, it never runs again; frozen, it goes on after the thaw with whatever woke it, as a
process does after SIGCONT. A thread can't be stopped like that: what a tool does on one, it finishes.
"""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

_life: contextvars.ContextVar["Life | None"] = contextvars.ContextVar("tidefast life", default=None)


class Life:
    """One process's life. Built on the running loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_stopped = False
        self.is_over = False  # nothing of it will ever run again; cancelling closes its coroutines
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parked: list[asyncio.Future[None]] = []
        self._context = contextvars.copy_context()
        self._context.run(_life.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """A task of this process, in a context of its own."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def stop(self) -> None:
        """Nothing of it runs from the next step on."""
        self.is_stopped = True
        if not self.stopped.done():
            self.stopped.set_result(None)

    def thaw(self) -> None:
        """It goes on where it stood."""
        self.is_stopped = False
        parked, self._parked = self._parked, []
        for waiter in parked:
            if not waiter.done():
                waiter.set_result(None)

    def end(self) -> None:
        self.stop()
        self.is_over = True

    def park(self) -> "asyncio.Future[None]":
        waiter = asyncio.get_running_loop().create_future()
        self._parked.append(waiter)
        return waiter


class Mortal(Coroutine[Any, Any, Any]):
    """A coroutine that takes a step only while its life goes on."""

    def __init__(self, inner: Coroutine[Any, Any, Any], life: Life) -> None:
        self._inner = inner
        self._life = life
        self._pending: BaseException | None = None  # thrown at it while it was stopped

    def __await__(self) -> Any:
        raise TypeError("only a task drives this")

    def send(self, value: Any) -> Any:
        if self._life.is_stopped:
            return self._park()
        if self._pending is not None:
            error, self._pending = self._pending, None
            return self._inner.throw(error)
        return self._inner.send(value)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        error = typ if isinstance(typ, BaseException) else (val or typ())
        if self._life.is_over:
            self.close()
            raise error
        if self._life.is_stopped:
            self._pending = error
            return self._park()
        return self._inner.throw(error)

    def close(self) -> None:
        try:
            self._inner.close()
        except RuntimeError:  # it awaits while it is being closed; it will never hear an answer
            return

    def _park(self) -> "asyncio.Future[None]":
        waiter = self._life.park()
        waiter._asyncio_future_blocking = True  # what `await` sets, for the task that receives it
        return waiter


def task_factory(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> "asyncio.Task[Any]":
    """Every task of a life is mortal, and so is each task that it starts."""
    context = more.get("context")
    life = _life.get() if context is None else context.get(_life)
    return asyncio.Task(work if life is None else Mortal(work, life), loop=loop, **more)
