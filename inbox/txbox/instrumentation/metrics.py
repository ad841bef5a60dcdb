"""The metrics in which events are counted: one list for all exporters, which only spell them as their systems do."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from txbox.instrumentation import events
from txbox.instrumentation.events import Event

GENERATIONS = 8
"""Generations of the inbox that have a label each, from 0, the newest. Older ones share one label."""

COMMIT_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

AGE_SECONDS_BUCKETS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0)


class Kind(StrEnum):
    """How the figures of a metric are combined."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True, eq=False, slots=True)
class Metric:
    """One metric; besides its own label it has those that name its worker or relay."""

    prometheus: str  # a counter's name gets the suffix _total
    opentelemetry: str
    kind: Kind
    unit: str  # by the Unified Code for Units of Measure, as OpenTelemetry writes it
    description: str
    label: str | None = None  # its own, if it has one
    buckets: tuple[float, ...] = COMMIT_SECONDS_BUCKETS  # of a histogram


_RECEIVED_AGE = Metric(
    "txbox_received_age_seconds",
    "txbox.received.age",
    Kind.HISTOGRAM,
    "s",
    "How long ago a received batch's oldest message was sent",
    buckets=AGE_SECONDS_BUCKETS,
)
_DELIVERIES = Metric(
    "txbox_deliveries",
    "txbox.deliveries",
    Kind.COUNTER,
    "{delivery}",
    "Deliveries whose outcome stands",
    "outcome",
)
_ACK_FAILURES = Metric(
    "txbox_ack_failures",
    "txbox.ack.failures",
    Kind.COUNTER,
    "{delivery}",
    "Acks that the broker did not confirm",
)
_RETRIES = Metric(
    "txbox_retries",
    "txbox.retries",
    Kind.COUNTER,
    "{transaction}",
    "Transactions that were run again",
    "sqlstate",
)
_COMMIT_SECONDS = Metric(
    "txbox_commit_seconds",
    "txbox.commit.duration",
    Kind.HISTOGRAM,
    "s",
    "Transactions, from begin to commit",
)
_HEARTBEAT_FAILURES = Metric(
    "txbox_heartbeat_failures",
    "txbox.heartbeat.failures",
    Kind.COUNTER,
    "{delivery}",
    "Deliveries that could not be prolonged",
)
_RELAYED = Metric(
    "txbox_relayed_messages",
    "txbox.relayed.messages",
    Kind.COUNTER,
    "{message}",
    "Messages of the outbox, by what became of them: sent, postponed, parked",
    "outcome",
)
_RELAY_LAG_SECONDS = Metric(
    "txbox_relay_lag_seconds",
    "txbox.relay.lag",
    Kind.HISTOGRAM,
    "s",
    "How long a batch's oldest message had waited in the outbox",
)
_PUBLISHER_OVERDUE = Metric(
    "txbox_publisher_overdue",
    "txbox.publisher.overdue",
    Kind.COUNTER,
    "{message}",
    "Messages whose publisher has not returned in time",
)
_MAINTAINED = Metric(
    "txbox_maintained_rows",
    "txbox.maintained.rows",
    Kind.COUNTER,
    "{row}",
    "Rows that a maintainer has removed, by task",
    "task",
)
_BULK_LOADED = Metric(
    "txbox_bulk_load_rows",
    "txbox.bulk_load.rows",
    Kind.COUNTER,
    "{row}",
    "Rows that bulk loads and streams have read, by what became of them: applied, rejected and others",
    "outcome",
)
_MAINTENANCE_AGE = Metric(
    "txbox_maintenance_age_seconds",
    "txbox.maintenance.age",
    Kind.GAUGE,
    "s",
    "How long ago a maintainer has finished a round",
)
_ROTATION_DUE = Metric(
    "txbox_rotation_due_seconds",
    "txbox.rotation.due",
    Kind.GAUGE,
    "s",
    "Until an inbox that rotates needs a new generation; negative: since",
)
_HORIZON_AGE = Metric(
    "txbox_horizon_age_seconds", "txbox.horizon.age", Kind.GAUGE, "s", "How far back a subscriber's horizon lies"
)
_OLDEST_AGE = Metric(
    "txbox_oldest_id_age_seconds", "txbox.oldest_id.age", Kind.GAUGE, "s", "The age of a subscriber's oldest id, about"
)
_INBOX_ROWS = Metric(
    "txbox_inbox_rows", "txbox.inbox.rows", Kind.GAUGE, "{row}", "Rows of the inbox, about, by generation", "generation"
)
_INBOX_BYTES = Metric(
    "txbox_inbox_bytes", "txbox.inbox.size", Kind.GAUGE, "By", "The inbox with its index, by generation", "generation"
)
_AUDITED = Metric(
    "txbox_audited_messages",
    "txbox.audited.messages",
    Kind.GAUGE,
    "{message}",
    "Messages that the last audit has counted, by what became of them: processed, missing, foreign and others",
    "outcome",
)
_AUDIT_BALANCED = Metric(
    "txbox_audit_balanced", "txbox.audit.balanced", Kind.GAUGE, "1", "Whether the last audit has found nothing wrong"
)
_BROKER_UP = Metric("txbox_broker_up", "txbox.broker.up", Kind.GAUGE, "1", "Whether the broker can be reached")
_DATABASE_UP = Metric("txbox_database_up", "txbox.database.up", Kind.GAUGE, "1", "Whether the database can be reached")
_PAUSED = Metric("txbox_paused", "txbox.paused", Kind.GAUGE, "1", "Whether it is paused")

METRICS = tuple(one for one in list(globals().values()) if isinstance(one, Metric))
"""All of them, in this order."""


def figures(event: Event) -> Iterator[tuple[Metric, float, str]]:
    """Yield what an event adds to which metric, and the value of the metric's own label ("" if it has none)."""
    match event:
        case events.Settled():
            yield _DELIVERIES, 1, event.outcome.value
            if event.outcome.acked and not event.acked:
                yield _ACK_FAILURES, 1, ""
        case events.Committed():
            yield _COMMIT_SECONDS, event.seconds, ""
            yield _DATABASE_UP, 1, ""
        case events.Retried():
            yield _RETRIES, 1, event.sqlstate
        case events.HeartbeatFailed():
            yield _HEARTBEAT_FAILURES, 1, ""
        case events.Relayed():
            for outcome in ("sent", "postponed", "parked"):
                if count := getattr(event, outcome):
                    yield _RELAYED, count, outcome
            if event.lag_seconds is not None:
                yield _RELAY_LAG_SECONDS, event.lag_seconds, ""
            yield _DATABASE_UP, 1, ""
        case events.Maintained():
            yield _MAINTAINED, event.removed, event.source
            yield _DATABASE_UP, 1, ""
        case events.BulkLoaded():
            for outcome, count in event.counts.items():
                if count:
                    yield _BULK_LOADED, count, outcome
            yield _DATABASE_UP, 1, ""
        case events.RunwayRead():
            if event.seconds_ago is not None:
                yield _MAINTENANCE_AGE, event.seconds_ago, ""
            if event.rotation_due_seconds is not None:
                yield _ROTATION_DUE, event.rotation_due_seconds, ""
            # Every label each time, so that a generation that is gone shows 0 and not its last value.
            for label in range(GENERATIONS + 1):
                some = event.generations[label : label + 1] if label < GENERATIONS else event.generations[label:]
                yield _INBOX_ROWS, sum(rows for rows, _ in some), str(label)
                yield _INBOX_BYTES, sum(size for _, size in some), str(label)
            yield _DATABASE_UP, 1, ""
        case events.HorizonRead():
            yield _HORIZON_AGE, event.horizon_seconds, ""
            yield _OLDEST_AGE, event.oldest_seconds or 0, ""
        case events.Audited():
            for outcome, count in event.counts.items():
                yield _AUDITED, count, outcome
            yield _AUDIT_BALANCED, float(event.balanced), ""
        case events.Received():
            if event.oldest_seconds is not None:
                yield _RECEIVED_AGE, event.oldest_seconds, ""
            yield _BROKER_UP, 1, ""
        case events.BrokerRestored():
            yield _BROKER_UP, 1, ""
        case events.BrokerLost():
            yield _BROKER_UP, 0, ""
        case events.PublisherOverdue():
            yield _PUBLISHER_OVERDUE, event.messages, ""
            yield _BROKER_UP, 0, ""
        case events.DatabaseRestored():
            yield _DATABASE_UP, 1, ""
        case events.DatabaseLost():
            yield _DATABASE_UP, 0, ""
        case events.Paused():
            yield _PAUSED, 1, ""
        case events.Resumed():
            yield _PAUSED, 0, ""
