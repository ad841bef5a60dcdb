"""Events as OpenTelemetry metrics. Needs ``pip install 'txbox[otel]'``, and an SDK that the host has set up.

::

    worker = SqsWorker(..., hooks=[OpenTelemetryHook()])

========================================  =========  ==============  ==============================================
metric                                    kind       unit            what it counts
========================================  =========  ==============  ==============================================
txbox.deliveries {outcome}                counter    {delivery}      deliveries whose outcome stands
txbox.ack.failures                        counter    {delivery}      acks that the broker did not confirm
txbox.retries {sqlstate}                  counter    {transaction}   transactions run again: 40001 or 40P01
txbox.commit.duration                     histogram  s               transactions, from begin to commit
txbox.heartbeat.failures                  counter    {delivery}      deliveries that could not be prolonged
txbox.broker.up, txbox.database.up        gauge      1               1 reachable, 0 lost; as last heard
========================================  =========  ==============  ==============================================

Every metric has the attribute ``subscriber``, and ``source`` if asked for.
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
    from opentelemetry.metrics import MeterProvider, get_meter
except ModuleNotFoundError as error:
    raise ImportError("opentelemetry-api is missing; install it: pip install 'txbox[otel]'") from error

__all__ = ["OpenTelemetryHook"]

COMMIT_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""OpenTelemetry's own defaults are made for milliseconds."""


class OpenTelemetryHook:
    """Counts a process's events; one instance serves all its workers, told apart by the attributes."""

    def __init__(self, meter_provider: MeterProvider | None = None, *, source_attribute: bool = False) -> None:
        """Create the instruments.

        Args:
            meter_provider: who makes them; None is the host's global one, also if that is set up later.
            source_attribute: also tell events apart by source, such as a queue's URL.
        """
        meter = get_meter("txbox", meter_provider=meter_provider)
        self._source_attribute = source_attribute
        self._deliveries = meter.create_counter("txbox.deliveries", "{delivery}", "Deliveries whose outcome stands")
        self._ack_failures = meter.create_counter(
            "txbox.ack.failures", "{delivery}", "Acks that the broker did not confirm"
        )
        self._retries = meter.create_counter("txbox.retries", "{transaction}", "Transactions that were run again")
        self._commit_duration = meter.create_histogram(
            "txbox.commit.duration",
            "s",
            "Transactions, from begin to commit",
            explicit_bucket_boundaries_advisory=COMMIT_SECONDS_BUCKETS,
        )
        self._heartbeat_failures = meter.create_counter(
            "txbox.heartbeat.failures", "{delivery}", "Deliveries that could not be prolonged"
        )
        self._broker_up = meter.create_gauge("txbox.broker.up", "1", "Whether the broker can be reached")
        self._database_up = meter.create_gauge("txbox.database.up", "1", "Whether the database can be reached")

    def __call__(self, event: Event) -> None:
        """Count one event."""
        who = {"subscriber": event.subscriber_id}
        if self._source_attribute:
            who["source"] = event.source
        match event:
            case Settled():
                self._deliveries.add(1, {**who, "outcome": event.outcome.value})
                if event.outcome.acked and not event.acked:
                    self._ack_failures.add(1, who)
            case Committed():
                self._commit_duration.record(event.seconds, who)
                self._database_up.set(1, who)
            case Retried():
                self._retries.add(1, {**who, "sqlstate": event.sqlstate})
            case HeartbeatFailed():
                self._heartbeat_failures.add(1, who)
            case Received() | BrokerRestored():
                self._broker_up.set(1, who)
            case BrokerLost():
                self._broker_up.set(0, who)
            case DatabaseRestored():
                self._database_up.set(1, who)
            case DatabaseLost():
                self._database_up.set(0, who)
            case _:
                pass
