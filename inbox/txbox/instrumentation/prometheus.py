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

from txbox.instrumentation.events import (
    BrokerLost,
    BrokerRestored,
    Committed,
    DatabaseLost,
    DatabaseRestored,
    Event,
    HeartbeatFailed,
    Received,
    Retried,
    Settled,
)

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ModuleNotFoundError as error:
    raise ImportError("prometheus_client is missing; install it: pip install 'txbox[prometheus]'") from error

__all__ = ["PrometheusHook"]

COMMIT_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


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
        labels = ("subscriber", "source") if source_label else ("subscriber",)
        self._deliveries = Counter(
            "txbox_deliveries", "Deliveries whose outcome stands", (*labels, "outcome"), registry=registry
        )
        self._ack_failures = Counter(
            "txbox_ack_failures", "Acks that the broker did not confirm", labels, registry=registry
        )
        self._retries = Counter(
            "txbox_retries", "Transactions that were run again", (*labels, "sqlstate"), registry=registry
        )
        self._commit_seconds = Histogram(
            "txbox_commit_seconds",
            "Transactions, from begin to commit",
            labels,
            registry=registry,
            buckets=COMMIT_SECONDS_BUCKETS,
        )
        self._heartbeat_failures = Counter(
            "txbox_heartbeat_failures", "Deliveries that could not be prolonged", labels, registry=registry
        )
        self._broker_up = Gauge("txbox_broker_up", "Whether the broker can be reached", labels, registry=registry)
        self._database_up = Gauge("txbox_database_up", "Whether the database can be reached", labels, registry=registry)

    def __call__(self, event: Event) -> None:
        """Count one event."""
        who = (event.subscriber_id, event.source) if self._source_label else (event.subscriber_id,)
        match event:
            case Settled():
                self._deliveries.labels(*who, event.outcome.value).inc()
                if event.outcome.acked and not event.acked:
                    self._ack_failures.labels(*who).inc()
            case Committed():
                self._commit_seconds.labels(*who).observe(event.seconds)
                self._database_up.labels(*who).set(1)
            case Retried():
                self._retries.labels(*who, event.sqlstate).inc()
            case HeartbeatFailed():
                self._heartbeat_failures.labels(*who).inc()
            case Received() | BrokerRestored():
                self._broker_up.labels(*who).set(1)
            case BrokerLost():
                self._broker_up.labels(*who).set(0)
            case DatabaseRestored():
                self._database_up.labels(*who).set(1)
            case DatabaseLost():
                self._database_up.labels(*who).set(0)
            case _:
                pass
