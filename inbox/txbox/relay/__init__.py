"""Send the outbox's messages to their brokers.

::

    relay = Relay(engine, aws_publishers())
    relay.run()         # until SIGTERM; or start() and stop(), within a service
"""

from txbox.relay.publisher import (
    AsyncFunctionPublisher,
    AsyncPublisher,
    FunctionPublisher,
    OutboxMessage,
    PartlySent,
    Publisher,
    Refused,
)
from txbox.relay.relay import Relay

__all__ = [
    "AsyncFunctionPublisher",
    "AsyncPublisher",
    "FunctionPublisher",
    "OutboxMessage",
    "PartlySent",
    "Publisher",
    "Refused",
    "Relay",
]
