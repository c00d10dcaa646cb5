"""Runs python tools in this process: the embedded way, where the agent's own process is also the gateway.

A tool that raises `RefusedByTool` or `NotSentByTool` has answered definitely; any other exception is doubt, because
nobody knows how far it came. An async tool is cancelled at its deadline. A sync tool runs on a thread, which can't be
stopped: past the deadline others may take its attempt for lost, and what it returns in the end is settled all the same.
"""

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tidefast.engine.clock import Clock
from tidefast.protocol.canonical import JSON, CanonicalError, canonical, digest, text_json
from tidefast.services.tools import Outcome

THREADS_MAX = 64  # sync tools at once; more of them wait for a thread, and say *not sent* if none came in time


class RefusedByTool(Exception):
    """The tool says: definitely not done, and the answer is final. `body`, a JSON value, is stored as the answer."""

    def __init__(self, why: str, body: JSON = None) -> None:
        super().__init__(why)
        self.body: JSON = {"refused": why} if body is None else body


class NotSentByTool(Exception):
    """The tool says: nothing has left this process."""


class LocalRunner:
    """Python tools by name; `takes_key` names those that receive the idempotency key as their parameter `key`."""

    def __init__(self, clock: Clock, functions: Mapping[str, Callable[..., Any]], takes_key: frozenset[str]) -> None:
        self._clock = clock
        self._functions = functions
        self._takes_key = takes_key
        self._threads = ThreadPoolExecutor(THREADS_MAX, "tidefast-tool")
        self._is_async = {name: inspect.iscoroutinefunction(function) for name, function in functions.items()}

    async def __call__(self, tool: str, args: Mapping[str, JSON], key: str, deadline_ms: int) -> Outcome:
        function = self._functions.get(tool)
        if function is None:
            return Outcome("unsent", reason="tool_gone")
        remaining_ms = deadline_ms - self._clock.now().ms
        if remaining_ms <= 0:
            return Outcome("unsent", reason="deadline")
        named = {**args, "key": key} if tool in self._takes_key else args
        try:
            if self._is_async[tool]:
                async with asyncio.timeout(remaining_ms / 1_000):
                    value = await function(**named)
            else:
                value = await self._on_thread(function, named, deadline_ms)
            return Outcome("applied", python_receipt(value))
        except RefusedByTool as refusal:
            return Outcome("refused", python_receipt(refusal.body), "refused")
        except NotSentByTool as error:
            return Outcome("unsent", reason=f"not_sent: {str(error)[:200]}")
        except TimeoutError:
            return Outcome("doubted", reason="deadline")
        except (Exception, SystemExit) as error:  # a library that calls `exit` doesn't end the process of the run
            return Outcome("doubted", reason=type(error).__name__)

    async def _on_thread(self, function: Callable[..., Any], args: Mapping[str, JSON], deadline_ms: int) -> Any:
        """A sync tool's value, however late: a thread can't be stopped, and what it did is a fact to be told."""

        def call() -> Any:
            if self._clock.now().ms >= deadline_ms:
                raise NotSentByTool("no thread was free before the deadline")
            return function(**args)

        in_context = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._threads, in_context, call)


def python_receipt(value: JSON) -> str:
    """The receipt of a python tool: its value as the body. A value that is not JSON counts as applied, body lost."""
    try:
        body, is_truncated = canonical(value), "false"
    except CanonicalError:
        body, is_truncated = text_json(f"a {type(value).__name__}, which is not a JSON value"), "true"
    return (  # in the order of the names, so that this is the canonical text
        f'{{"body":{body},"content_type":"application/json","digest":"{digest(body)}","status":null,'
        f'"truncated":{is_truncated}}}'
    )
