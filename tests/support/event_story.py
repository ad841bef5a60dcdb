"""One story of events for every exporter, and what it comes to."""

from txbox import Outcome
from txbox.instrumentation import (
    BrokerLost,
    BrokerRestored,
    Committed,
    Contended,
    DatabaseLost,
    DatabaseRestored,
    Event,
    HeartbeatFailed,
    PublisherOverdue,
    Received,
    Relayed,
    Retried,
    Settled,
    Stopped,
)

WHO = ("billing", "https://sqs/1/orders")


def settled(outcome: Outcome, *, acked: bool) -> Settled:
    return Settled(*WHO, "m-1", "receipt", outcome, acked, 1)


STORY: list[Event] = [
    Received(*WHO, ("m-1", "m-2"), ("r-1", "r-2")),
    Contended(*WHO, {("40P01", "stock"): 2}, "alone"),
    Retried(*WHO, "40001", 1, 2),
    Committed(*WHO, 1, 1, 0.25),
    settled(Outcome.PROCESSED, acked=True),
    settled(Outcome.PROCESSED, acked=False),
    settled(Outcome.DUPLICATE, acked=True),
    settled(Outcome.FAILED, acked=False),
    HeartbeatFailed(*WHO, "m-1", "expired"),
    Relayed(*WHO, 3, 2, 1, 0.25, "refused"),
    Stopped(*WHO, True),
]

LOST = [
    BrokerLost(*WHO, OSError("gone"), 1.0),
    PublisherOverdue(*WHO, messages=1, seconds=60.0),
    DatabaseLost(*WHO, OSError("gone"), 1.0),
]
RESTORED = [BrokerRestored(*WHO), DatabaseRestored(*WHO)]
