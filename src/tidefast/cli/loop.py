"""The event loop of a process that is ours, and how its interpreter is set for it.

The figures behind each setting stand in `docs/benchmarks.md`. A program that embeds Tidefast has its own loop and keeps
its own settings.
"""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
COLLECT_AFTER = (10_000, 20, 50)  # records are tuples in their thousands, and next to none are in cycles
SWITCH_S = 0.0005  # the store's writer waits this long, not Python's 5 ms, for its turn beside a busy loop


def run_program(main: Coroutine[Any, Any, T]) -> T:
    """Run a process's main coroutine to its end, on uvloop."""
    import uvloop

    gc.freeze()  # modules and their like stay for good: no collection looks at them again
    gc.set_threshold(*COLLECT_AFTER)
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
