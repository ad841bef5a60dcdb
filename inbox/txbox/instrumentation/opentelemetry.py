"""Events as OpenTelemetry metrics. Needs the extra ``otel``, and an SDK that the host has set up.

::

    worker = SqsWorker(..., hooks=[OpenTelemetryHook()])

The metrics are those of ``txbox.instrumentation.metrics``; docs/monitoring.md lists them.
Every metric has the attribute ``subscriber``, and ``source`` if asked for.
"""

from collections.abc import Callable

from txbox.extras import needs
from txbox.instrumentation.events import Event
from txbox.instrumentation.metrics import METRICS, Kind, Metric, figures

with needs("otel"):
    from opentelemetry.metrics import Meter, MeterProvider, get_meter

__all__ = ["OpenTelemetryHook"]

Instrument = Callable[[float, dict[str, str]], None]
"""Takes a figure and its attributes."""


class OpenTelemetryHook:
    """Counts a process's events; one instance serves all its workers, which differ in their attributes."""

    def __init__(self, meter_provider: MeterProvider | None = None, *, source_attribute: bool = False) -> None:
        """Create the instruments.

        Args:
            meter_provider: who makes them; None is the host's global one, even if that is set up later.
            source_attribute: also count by source, such as a queue's URL.
        """
        meter = get_meter("txbox", meter_provider=meter_provider)
        self._source_attribute = source_attribute
        self._instruments = {metric: _instrument(meter, metric) for metric in METRICS}

    def __call__(self, event: Event) -> None:
        """Count one event."""
        attributes = {"subscriber": event.subscriber_id}
        if self._source_attribute:
            attributes["source"] = event.source
        for metric, figure, label in figures(event):
            self._instruments[metric](figure, {**attributes, metric.label: label} if metric.label else attributes)


def _instrument(meter: Meter, metric: Metric) -> Instrument:
    named = (metric.opentelemetry, metric.unit, metric.description)
    match metric.kind:
        case Kind.COUNTER:
            return meter.create_counter(*named).add
        case Kind.GAUGE:
            return meter.create_gauge(*named).set
        case Kind.HISTOGRAM:
            # OpenTelemetry's own default buckets are meant for milliseconds.
            return meter.create_histogram(*named, explicit_bucket_boundaries_advisory=metric.buckets).record
