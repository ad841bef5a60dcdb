"""The outbox: publish a message in the transaction of the business update; a relay sends it after the commit."""

from txbox.outbox.outbox import RELAY_SUBSCRIBER, Outbox, Outgoing

__all__ = ["RELAY_SUBSCRIBER", "Outbox", "Outgoing"]
