"""Spans, for whoever has set up OpenTelemetry in this process.

Only its API is used, and only if something has loaded it: where nobody has, there is nobody to be told, and a span
costs a look into a dictionary. Spans carry run, step and epoch; never a token, a key or a body.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_API = "opentelemetry.trace"
_NAME = "tidefast"


@contextmanager
def span(name: str, parent: Mapping[str, str] | None = None, **facts: str | int) -> Iterator[Any]:
    """A span for the block, or None if nobody listens. `parent` are headers that may carry a caller's trace."""
    if _API not in sys.modules:
        yield None
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(parent) if parent else None
    with trace.get_tracer(_NAME).start_as_current_span(name, context, record_exception=False) as found:
        mark(found, **facts)
        yield found


def mark(found: Any, **facts: str | int) -> None:
    """Put facts on a span; empty ones are left out."""
    if found is not None:
        for name, value in facts.items():
            if value:
                found.set_attribute(f"tidefast.{name}", value)
