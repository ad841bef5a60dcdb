"""Events as Prometheus metrics. Needs ``pip install 'txbox[prometheus]'``.

::

    worker = SqsWorker(..., hooks=[PrometheusHook()])
    prometheus_client.start_http_server(9000)

========================================  =========  ======================================================
metric                                    kind       what it counts
========================================  =========  ======================================================
txbox_deliveries_total{outcome}           counter    deliveries whose outcome stands
txbox_ack_failures_total                  counter    acks that the broker did not confirm: they come again
txbox_retries_total{sqlstate}             counter    transactions run again: 40001 or 40P01
txbox_commit_seconds                      histogram  transactions, from begin to commit
txbox_heartbeat_failures_total            counter    deliveries whose visibility could not be prolonged
txbox_broker_up, txbox_database_up        gauge      1 reachable, 0 lost; as last heard
========================================  =========  ======================================================

Every metric has the label ``subscriber``, and ``source`` if asked for.
"""

from txbox.instrumentation.events import Event
from txbox.instrumentation.metrics import COMMIT_SECONDS_BUCKETS, METRICS, Kind, Metric, figures

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ModuleNotFoundError as error:
    raise ImportError("prometheus_client is missing; install it: pip install 'txbox[prometheus]'") from error

__all__ = ["PrometheusHook"]

Instrument = Counter | Gauge | Histogram


class PrometheusHook:
    """Counts a process's events; one instance serves all its workers, told apart by the labels."""

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
        whose = ("subscriber", "source") if source_label else ("subscriber",)
        self._instruments = {metric: _instrument(registry, metric, whose) for metric in METRICS}

    def __call__(self, event: Event) -> None:
        """Count one event."""
        who = (event.subscriber_id, event.source) if self._source_label else (event.subscriber_id,)
        for metric, figure, label in figures(event):
            match self._instruments[metric].labels(*who, *([label] if metric.label else ())):
                case Counter() as counter:
                    counter.inc(figure)
                case Gauge() as gauge:
                    gauge.set(figure)
                case Histogram() as histogram:
                    histogram.observe(figure)


def _instrument(registry: CollectorRegistry, metric: Metric, whose: tuple[str, ...]) -> Instrument:
    labels = (*whose, metric.label) if metric.label else whose
    match metric.kind:
        case Kind.COUNTER:
            return Counter(metric.prometheus, metric.description, labels, registry=registry)
        case Kind.GAUGE:
            return Gauge(metric.prometheus, metric.description, labels, registry=registry)
        case Kind.HISTOGRAM:
            return Histogram(
                metric.prometheus, metric.description, labels, registry=registry, buckets=COMMIT_SECONDS_BUCKETS
            )
