"""Traces of `tidefast serve`: sent by OTLP over HTTP if one of OpenTelemetry's own variables says where to.

The product itself uses the API only; what sends is the extra `otel`.
"""

import os
from collections.abc import Callable

from tidefast import __version__
from tidefast.services.tools import ConfigError

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def start_tracing() -> Callable[[], None] | None:
    """Begin to send spans; what is returned sends the last ones and ends. None: nobody asked for traces.

    Raises `ConfigError` if they can't be sent.
    """
    named = next((name for name in VARIABLES if os.environ.get(name)), None)
    if named is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{named} asks for traces, and {error.name} isn't installed: pip install 'tidefast[otel]'"
        ) from error
    resource = Resource.create({"service.version": __version__})
    if not os.environ.get("OTEL_SERVICE_NAME"):
        resource = resource.merge(Resource({"service.name": "tidefast"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown
