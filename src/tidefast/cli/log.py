"""Log lines of the long-lived processes. Light to import: a replica in a small box uses it too."""

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from tidefast.cli import show as out


def configure_log(level: str = "info") -> None:
    """Log lines go to standard error: coloured for people, JSON for everything else. Standard output is for answers."""
    import logging

    import structlog

    is_terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    last: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if is_terminal else structlog.processors.JSONRenderer(ensure_ascii=True)
    )
    # JSON escapes control characters by itself; a terminal has to be kept from them.
    formatted: list[structlog.typing.Processor] = (
        [_safe_values] if is_terminal else [structlog.processors.format_exc_info]
    )
    structlog.configure(
        processors=[*shared, *formatted, last],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # as it is now: a program may put another in place
        cache_logger_on_first_use=False,
    )


def _safe_values(logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    return {name: out.safe(value) if isinstance(value, str) else value for name, value in event.items()}
