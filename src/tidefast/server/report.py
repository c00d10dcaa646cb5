"""Log lines about requests that failed: where, and for which run, step and epoch. Never a token, a body or a message
of an exception, which may quote either.
"""

import traceback

from starlette.types import Scope

from tidefast.server.verbs import Call

_FRAMES = 6


def report(error: BaseException, call: Call, scope: Scope) -> None:
    """One line about a call that ended in an exception."""
    import structlog  # only now: a start without failures needs none of it

    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    structlog.get_logger("tidefast.server").error(
        "request_failed",
        method=scope["method"],
        route=getattr(scope.get("route"), "path", ""),
        run=call.run,
        step=call.step,
        epoch=call.right.epoch if call.right is not None else 0,
        error=type(error).__name__,
        where=[f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames],
    )
