"""One story of events for every exporter, and what it comes to."""

from txbox import Outcome
from txbox import instrumentation as events

WHO = ("billing", "https://sqs/1/orders")


def settled(outcome: Outcome, *, acked: bool) -> events.Settled:
    return events.Settled(*WHO, "m-1", "receipt", outcome, acked, 1)


STORY: list[events.Event] = [
    events.Received(*WHO, ("m-1", "m-2"), ("r-1", "r-2"), 90.0),
    events.Contended(*WHO, {("40P01", "stock"): 2}, "per_message"),
    events.Retried(*WHO, "40001", 1, 2),
    events.Committed(*WHO, 1, 1, 0.25),
    settled(Outcome.PROCESSED, acked=True),
    settled(Outcome.PROCESSED, acked=False),
    settled(Outcome.DUPLICATE, acked=True),
    settled(Outcome.FAILED, acked=False),
    events.HeartbeatFailed(*WHO, "m-1", "expired"),
    events.Relayed(*WHO, 3, 2, 1, 0.25, "refused"),
    events.Maintained("txbox:maintenance", "inbox", 5, 0.5),
    events.RunwayRead("txbox:maintenance", "processed_message", 7.0, None, [(2, 20), *[(1, 10)] * 9]),
    events.HorizonRead("billing", "processed_message", 60.0, 30.0),
    events.Paused(*WHO, "anna", "repairs"),
    events.Drained(*WHO),
    events.BulkLoaded(WHO[0], "bulk load", {"applied": 7, "rejected": 2, "parked": 0}, 0.5),
    events.Audited(*WHO, {"sent": 3, "missing": 1}, False, 0.5),
    events.Stopped(*WHO, True),
]

LOST = [
    events.BrokerLost(*WHO, OSError("gone"), 1.0),
    events.PublisherOverdue(*WHO, messages=1, seconds=60.0),
    events.DatabaseLost(*WHO, OSError("gone"), 1.0),
]
RESTORED = [events.BrokerRestored(*WHO), events.DatabaseRestored(*WHO), events.Resumed(*WHO)]
