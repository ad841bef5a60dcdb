"""The worker of one measurement."""

import random
from collections.abc import Sequence
from dataclasses import replace

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from sqlalchemy import create_engine

from benchmarks.consumer.clients import handle
from benchmarks.consumer.deliveries import PreparedSource, make_deliveries
from benchmarks.shared.database import SCHEMA, SUBSCRIBER
from benchmarks.shared.work import WARM_UP_SECONDS, Rate, ready, window
from txbox import Inbox
from txbox.instrumentation.opentelemetry_tracing import OpenTelemetryTracing
from txbox.tracing import NO_TRACING
from txbox_workers.delivery import Delivery
from txbox_workers.worker import Worker

NONE, DROPPED, SAMPLED = "no tracing", "none sampled", "10 % sampled"

SHARES = {DROPPED: 0.0, SAMPLED: 0.1}
CREATED_SHARE = 0.1
BATCH = 10
DELIVERIES_PER_SECOND = 40_000
"""More than it reaches; a faster machine ends its measurement when they are used up."""


class NoExporter(SpanExporter):
    """Drops what it is given."""

    def export(self, _spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Drop it."""
        return SpanExportResult.SUCCESS


def consume(_number: int, kind: str, url: str, seconds: float) -> tuple[Rate, int]:
    """Consume in this process; return the rate, and how many different messages were settled."""
    deliveries = make_deliveries(int((seconds + WARM_UP_SECONDS) * DELIVERIES_PER_SECOND), distance=2 * BATCH)
    source = PreparedSource([_created(delivery) for delivery in deliveries], BATCH)
    engine = create_engine(url, pool_size=1, max_overflow=2)
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(SHARES.get(kind, 0.0))))
    provider.add_span_processor(BatchSpanProcessor(NoExporter()))
    tracing = OpenTelemetryTracing(provider) if kind in SHARES else NO_TRACING
    worker = Worker(source, inbox=Inbox(SUBSCRIBER, schema=SCHEMA), engine=engine, handler=handle, tracing=tracing)
    ready()
    worker.start()
    rate = window(lambda: source.acked, seconds, source.used_up)
    if not worker.stop():
        raise RuntimeError("the worker did not drain")
    engine.dispose()
    provider.shutdown()
    return rate, source.distinct_acked()


def _created(delivery: Delivery) -> Delivery:
    """Return a delivery whose message carries the context of its creation, one in ten of them sampled."""
    flags = "01" if random.random() < CREATED_SHARE else "00"
    context = f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-{flags}"
    return replace(delivery, message=replace(delivery.message, headers={"traceparent": context}))
