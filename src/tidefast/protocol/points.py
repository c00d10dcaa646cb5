"""Names of the moments on a step's way at which a fault injector may stop the world.

Gateway and SDK are given a hook when they are built; they report each point and wait until it lets go. Without a hook a
point costs one comparison.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

Point = Literal[
    "sdk.before_apply",  # the agent decided, nothing has left the worker
    "sdk.after_apply",  # the worker has the receipt
    "sdk.before_checkpoint",
    "sdk.after_checkpoint",
    "gateway.before_intent",
    "gateway.after_intent",  # durable, not sent
    "gateway.after_send",  # the provider has answered, nothing is recorded
    "gateway.after_settle",  # recorded, the caller has no answer yet
]
Facts = Mapping[str, str | int]  # run, step, holder, epoch and whatever the point adds
Hook = Callable[[Point, Facts], Awaitable[None]]
