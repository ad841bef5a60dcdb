"""Events as Prometheus metrics. Needs the extra ``prometheus``.

::

    worker = SqsWorker(..., hooks=[PrometheusHook()])
    prometheus_client.start_http_server(9000)

The metrics are those of ``txbox.instrumentation.metrics``; docs/monitoring.md lists them.
Every metric has the label ``subscriber``, and ``source`` if asked for.
"""

from collections.abc import Callable

from txbox.extras import needs
from txbox.instrumentation.events import Event
from txbox.instrumentation.metrics import METRICS, Kind, Metric, figures

with needs("prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["PrometheusHook"]

Instrument = Counter | Gauge | Histogram


class PrometheusHook:
    """Counts a process's events; one instance serves all its workers, which differ in their labels."""

    def __init__(self, registry: CollectorRegistry | None = None, *, source_label: bool = False) -> None:
        """Register the metrics.

        Args:
            registry: where to register them; None is Prometheus's own default.
            source_label: also label by source, such as a queue's URL.

        Raises:
            ValueError: another instance has registered them there.
        """
        registry = REGISTRY if registry is None else registry
        self._source_label = source_label
        names = ("subscriber", "source") if source_label else ("subscriber",)
        self._instruments = {metric: _instrument(registry, metric, names) for metric in METRICS}
        self._recorders: dict[tuple[Metric, tuple[str, ...]], Callable[[float], None]] = {}

    def __call__(self, event: Event) -> None:
        """Count one event."""
        common = (event.subscriber_id, event.source) if self._source_label else (event.subscriber_id,)
        for metric, figure, label in figures(event):
            labels = (*common, label) if metric.label else common
            record = self._recorders.get((metric, labels))
            if record is None:  # cached, because labels() takes a lock
                record = self._recorders[metric, labels] = _recorder(self._instruments[metric].labels(*labels))
            record(figure)


def _recorder(child: Instrument) -> Callable[[float], None]:
    match child:
        case Counter():
            return child.inc
        case Gauge():
            return child.set
        case Histogram():
            return child.observe


def _instrument(registry: CollectorRegistry, metric: Metric, names: tuple[str, ...]) -> Instrument:
    labels = (*names, metric.label) if metric.label else names
    match metric.kind:
        case Kind.COUNTER:
            return Counter(metric.prometheus, metric.description, labels, registry=registry)
        case Kind.GAUGE:
            return Gauge(metric.prometheus, metric.description, labels, registry=registry)
        case Kind.HISTOGRAM:
            return Histogram(metric.prometheus, metric.description, labels, registry=registry, buckets=metric.buckets)
