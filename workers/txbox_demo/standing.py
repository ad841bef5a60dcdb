"""How far the chain is, and what still waits in it: read from the database and the queues."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from txbox_aws.sqs import queue_backlog
from txbox_demo import billing, notification
from txbox_demo.place import Place

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["Standing", "read_standing"]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the chain is.

    Attributes:
        placed: orders in the shop.
        billed: messages in billing's inbox.
        notified: messages that are completed in notification's ledger.
        outbox: messages that the relays have not settled.
        purchases_queue: messages between the shop and billing that SQS has not forgotten.
        notifications_queue: the same between billing and notification.
    """

    placed: int = 0
    billed: int = 0
    notified: int = 0
    outbox: int = 0
    purchases_queue: int = 0
    notifications_queue: int = 0

    @property
    def backlog(self) -> int:
        """Everything that waits."""
        return self.outbox + self.purchases_queue + self.notifications_queue

    def is_complete(self, purchases: int) -> bool:
        """Whether everything has gone through the whole chain."""
        return not self.backlog and min(self.placed, self.billed, self.notified) >= purchases

    def __str__(self) -> str:
        return (
            f"{self.placed:,} orders placed, {self.outbox:,} messages left in the outbox, "
            f"{self.purchases_queue:,} in the queue of billing, {self.billed:,} billed, "
            f"{self.notifications_queue:,} in the queue of notification, {self.notified:,} notified"
        )


def read_standing(place: Place, client: "SQSClient") -> Standing:
    """Read how far the chain is.

    What has happened is counted before what waits: if all purchases are billed, then all notifications were published
    before the outbox is looked at, and sent before the queues are. And what waits is counted in the order of the chain,
    each place while the next one already has what left it, so that nothing on its way is in none of the counts.
    """
    with place.engine.connect() as connection:
        placed, billed, notified = connection.execute(_COUNTS).one()
        orders = _count_outbox(connection)
        purchases = _count_queue(place.purchases_url, client)
        outbox = max(orders, _count_outbox(connection))  # billing has published since
        notifications = _count_queue(place.notifications_url, client)
    return Standing(placed, billed, notified, outbox, purchases, notifications)


def _count_outbox(connection: Connection) -> int:
    return int(connection.execute(_OUTBOX).scalar_one())


def _count_queue(url: str, client: "SQSClient") -> int:
    return sum(queue_backlog(url, client=client).values())


_COUNTS = text(
    "SELECT (SELECT count(*) FROM purchase_order), "
    "(SELECT count(*) FROM processed_message WHERE subscriber_id = :billing AND dead_letter_id IS NULL), "
    "(SELECT count(*) FROM message_lease WHERE subscriber_id = :notification AND completed_at IS NOT NULL)"
).bindparams(billing=billing.SUBSCRIBER, notification=notification.SUBSCRIBER)
_OUTBOX = text("SELECT count(*) FROM outbox_message")
