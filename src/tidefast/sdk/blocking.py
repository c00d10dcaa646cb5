"""The client for programs without an event loop: each verb of `AsyncClient`, run on a thread of the client's own.

Nothing is written twice: a verb here is the one there, awaited by somebody else. `Blocking` and `BlockingEach` carry
its types over, so a type checker and an editor see the same parameters and answers.
"""

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from tidefast.sdk.client import PATIENCE_S, AsyncClient
from tidefast.sdk.errors import Misuse

P = ParamSpec("P")
T = TypeVar("T")


class Blocking(Generic[P, T]):
    """A verb of `AsyncClient` as a method that returns when the answer is there."""

    def __init__(self, verb: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]) -> None:
        self._verb = verb
        self.__doc__ = verb.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: "Client", owner: type) -> Callable[P, T]: ...
    def __get__(self, client: "Client | None", owner: type) -> "Self | Callable[P, T]":
        if client is None:
            return self
        verb, thread = self._verb, client._thread

        @functools.wraps(verb)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return thread.wait(verb(client._client, *args, **kwargs))

        return call


class BlockingEach(Generic[P, T]):
    """A verb of `AsyncClient` that yields, as a method that returns an iterator."""

    def __init__(self, verb: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]) -> None:
        self._verb = verb
        self.__doc__ = verb.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: "Client", owner: type) -> Callable[P, Iterator[T]]: ...
    def __get__(self, client: "Client | None", owner: type) -> "Self | Callable[P, Iterator[T]]":
        if client is None:
            return self
        verb, thread = self._verb, client._thread

        @functools.wraps(verb)
        def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
            each = verb(client._client, *args, **kwargs)
            while True:
                try:
                    found = thread.wait(_next(each))
                except StopAsyncIteration:
                    return
                yield found

        return call


async def _next(each: AsyncIterator[T]) -> T:
    return await anext(each)


class Client:
    """One authority, by its URL (or `TIDEFAST_URL`), for any program. Safe for many threads.

        with tf.Client() as client:
            client.start("refund", {"order": "o-1"}, run_id="r-1")
            print(client.result("r-1"))

    `key` says who is asking, where the server wants to know; the operator's verbs always need it. Every verb raises
    `Error`: see the tree in `tidefast.sdk.errors`.
    """

    def __init__(self, url: str | None = None, *, key: str | None = None, patience_s: float = PATIENCE_S) -> None:
        self._client = AsyncClient(url, key=key, patience_s=patience_s)
        self._thread = LoopThread()
        weakref.finalize(self, self._thread.stop, self._client.close)  # of a client that nobody closes

    start = Blocking(AsyncClient.start)
    run = Blocking(AsyncClient.run)
    result = Blocking(AsyncClient.result)
    runs = BlockingEach(AsyncClient.runs)
    steps = BlockingEach(AsyncClient.steps)
    step = Blocking(AsyncClient.step)
    events = BlockingEach(AsyncClient.events)
    held = Blocking(AsyncClient.held)
    resolve = Blocking(AsyncClient.resolve)
    preempt = Blocking(AsyncClient.preempt)
    pause = Blocking(AsyncClient.pause)
    resume = Blocking(AsyncClient.resume)
    freeze = Blocking(AsyncClient.freeze)
    thaw = Blocking(AsyncClient.thaw)
    cancel = Blocking(AsyncClient.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. A call that another thread still waits for is cancelled."""
        self._thread.stop(self._client.close)


class LoopThread:
    """An event loop on a thread of its own, begun with the first call. A daemon: it never keeps a program alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._is_over = False

    def wait(self, verb: Coroutine[Any, Any, T]) -> T:
        """The answer of a verb that runs over there. An interrupt ends it there as well."""
        future = self._begin(verb)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _begin(self, verb: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:
            if os.getpid() != self._process:
                verb.close()
                raise Misuse(
                    "this client belongs to another process", "a fork has no threads", "make one after the fork"
                )
            if self._is_over:
                verb.close()
                raise Misuse("this client is closed", "", "make another one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="tidefast client", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(verb, self._loop)

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel what runs, do one last thing, end the thread."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
            self._is_over = True
        if loop is None or thread is None or os.getpid() != self._process:
            return
        ending = asyncio.run_coroutine_threadsafe(_end(last), loop)
        if threading.current_thread() is thread:  # collected over there: nobody is left to wait for it
            ending.add_done_callback(lambda _: loop.stop())
            return
        ending.result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last()
    await asyncio.get_running_loop().shutdown_asyncgens()
