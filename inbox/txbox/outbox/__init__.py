"""The outbox: publish a message in the transaction of the business update; a relay sends it after the commit."""

from txbox.outbox.outbox import RELAY_SUBSCRIBER, Outbox, Outgoing
from txbox.outbox.subscriptions import Subscription, Subscriptions

__all__ = ["RELAY_SUBSCRIBER", "Outbox", "Outgoing", "Subscription", "Subscriptions"]
