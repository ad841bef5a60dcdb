"""W3C Trace Context on its way: who published a message, for the trace of whoever receives it.

https://www.w3.org/TR/trace-context/ The headers are ``traceparent`` and ``tracestate``.
"""

import sys
from collections.abc import Mapping

__all__ = ["with_trace_context"]


def with_trace_context(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return headers with those of the current span, if this process uses OpenTelemetry and a span is current.

    Args:
        headers: what travels anyway; a ``traceparent`` in them is left alone.
    """
    # Whoever has a current span has imported it. Importing it here would cost those who do not use it.
    if "opentelemetry.trace" not in sys.modules or "traceparent" in headers:
        return headers
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {**headers, **carrier} if carrier else headers
