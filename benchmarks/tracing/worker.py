"""The workers of one measurement."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from sqlalchemy import create_engine

from benchmarks.consumer.clients import handle
from benchmarks.consumer.deliveries import PreparedSource, make_deliveries
from benchmarks.shared.database import SCHEMA, SUBSCRIBER
from benchmarks.shared.work import WARM_UP_SECONDS, Rate, ready
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


def consume(_number: int, url: str, seconds: float) -> tuple[dict[str, Rate], int]:
    """Have a worker of each kind take batches in turn, in one thread: what slows the machine down slows all of them.

    Returns their rates, and how many different messages were settled.
    """
    deliveries = make_deliveries(int((seconds + WARM_UP_SECONDS) * DELIVERIES_PER_SECOND), distance=2 * BATCH)
    source = PreparedSource([_created(delivery) for delivery in deliveries], BATCH)
    engine = create_engine(url, pool_size=1, max_overflow=2)
    providers = {kind: _provider(share) for kind, share in SHARES.items()}
    workers = {
        kind: Worker(
            source,
            inbox=Inbox(SUBSCRIBER, schema=SCHEMA),
            engine=engine,
            handler=handle,
            tracing=OpenTelemetryTracing(providers[kind]) if kind in providers else NO_TRACING,
        )
        for kind in (NONE, *SHARES)
    }
    pollers = {kind: worker._make_poller() for kind, worker in workers.items()}  # noqa: SLF001 - polls, without threads
    ready()
    spent: dict[str, list[float]] = {kind: [0.0, 0.0, 0] for kind in workers}
    warm, ends = time.monotonic() + WARM_UP_SECONDS, time.monotonic() + WARM_UP_SECONDS + seconds
    while (now := time.monotonic()) < ends and not source.used_up.is_set():
        for kind, poller in pollers.items():
            began, cpu = time.perf_counter(), time.thread_time()
            poller._poll_once(0)  # type: ignore[attr-defined] # noqa: SLF001
            if now > warm:
                used = spent[kind]
                used[0] += time.perf_counter() - began
                used[1] += time.thread_time() - cpu
                used[2] += BATCH
    engine.dispose()
    for provider in providers.values():
        provider.shutdown()
    rates = {kind: Rate(done / wall, cpu / done * 1e6, int(done), warm) for kind, (wall, cpu, done) in spent.items()}
    return rates, source.distinct_acked()


def _provider(share: float) -> TracerProvider:
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)))
    provider.add_span_processor(BatchSpanProcessor(NoExporter()))
    return provider


def _created(delivery: Delivery) -> Delivery:
    """Return a delivery whose message carries the context of its creation, one in ten of them sampled."""
    flags = "01" if random.random() < CREATED_SHARE else "00"
    context = f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-{flags}"
    return replace(delivery, message=replace(delivery.message, headers={"traceparent": context}))
