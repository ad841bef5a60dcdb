"""Events of txbox, and small optional exporters for them: each in a file of its own."""

from txbox.instrumentation.events import (
    BrokerLost,
    BrokerRestored,
    Committed,
    Contended,
    DatabaseLost,
    DatabaseRestored,
    Event,
    HeartbeatFailed,
    Hook,
    PublisherOverdue,
    Received,
    Relayed,
    Retried,
    Settled,
    Stopped,
    emit,
)

__all__ = [
    "BrokerLost",
    "BrokerRestored",
    "Committed",
    "Contended",
    "DatabaseLost",
    "DatabaseRestored",
    "Event",
    "HeartbeatFailed",
    "Hook",
    "PublisherOverdue",
    "Received",
    "Relayed",
    "Retried",
    "Settled",
    "Stopped",
    "emit",
]
