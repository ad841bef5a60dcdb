"""What the library says about its work, for spans: the port, and the one that says nothing."""

from txbox.tracing.spans import (
    NO_SPAN,
    NO_TRACING,
    AttributeValue,
    Operation,
    Span,
    Traced,
    Tracing,
    error_type,
)

__all__ = ["NO_SPAN", "NO_TRACING", "AttributeValue", "Operation", "Span", "Traced", "Tracing", "error_type"]
