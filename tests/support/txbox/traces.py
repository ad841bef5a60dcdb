"""Spans, as a test reads them."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from txbox.instrumentation.opentelemetry_tracing import OpenTelemetryTracing


class Traces:
    """A provider of its own, and what was exported from it."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = OpenTelemetryTracing(self.provider)
        self.tracer = self.provider.get_tracer("host")

    def of(self, operation: str) -> list[ReadableSpan]:
        """The spans of one operation, in the order of their ends."""
        return [span for span in self.all() if attributes(span).get("messaging.operation.type") == operation]

    def named(self, name: str) -> list[ReadableSpan]:
        """The spans of one name."""
        return [span for span in self.all() if span.name == name]

    def all(self) -> list[ReadableSpan]:
        """Every span that has ended."""
        return list(self._exporter.get_finished_spans())


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    """The attributes of a span."""
    return dict(span.attributes or {})


def linked(span: ReadableSpan) -> set[int]:
    """The ids of the spans that a span is linked to."""
    return {link.context.span_id for link in span.links}


def span_id(span: ReadableSpan) -> int:
    """The id of a span."""
    assert span.context is not None
    return span.context.span_id


def parent(span: ReadableSpan) -> int | None:
    """The id of a span's parent."""
    return None if span.parent is None else span.parent.span_id
