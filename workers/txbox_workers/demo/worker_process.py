"""One worker process of billing or of notification, with a death foretold."""

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session

from txbox import Inbox, Message
from txbox.instrumentation import Committed, Hook, Received
from txbox.outbox import Outbox
from txbox.testing import kill_at
from txbox_workers.demo import billing, notification
from txbox_workers.demo.journal import Journal
from txbox_workers.demo.orders import Orders
from txbox_workers.sqs import MAX_BATCH, SqsWorker, sqs_client

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["COMMITTED", "HANDLING", "RECEIVED", "lose_acks", "run_worker"]

LOST_ACK_SHARE = 0.18
"""Of all acks: confirmed by the broker, and forgotten by it."""

RECEIVED = "received"
HANDLING = "handling"
COMMITTED = "committed"
"""Moments to die: between receive and transaction, between insert and commit, and between commit and ack."""

Handler = Callable[[Session, Message], None]


def run_worker(orders: Orders) -> None:
    """Work until SIGTERM, or die on the way.

    Args:
        orders: what to do; the role is the subscriber.
    """
    queue_url, handler = _service(orders)
    client = sqs_client(queue_url)
    lose_acks(client, random.Random(orders.seed))  # noqa: S311 - choices of the demo, no secrets
    SqsWorker(
        queue_url,
        inbox=Inbox(orders.role),
        engine=orders.engine(),
        handler=_deadly(handler, orders.life) if orders.moment == HANDLING else handler,
        wait_seconds=1,
        visibility_seconds=orders.visibility_seconds,
        client=client,
        hooks=[Journal(orders.journal), *_crash_points(orders)],
    ).run()


def _service(orders: Orders) -> tuple[str, Handler]:
    if orders.role == billing.SUBSCRIBER:
        return orders.purchases_url, billing.Billing(Outbox(), orders.notifications_url)
    return orders.notifications_url, notification.notify


def _crash_points(orders: Orders) -> list[Hook]:
    batches = max(1, orders.life // MAX_BATCH)
    match orders.moment:
        case "received":
            return [kill_at(Received, after=batches)]
        case "committed":
            return [kill_at(Committed, after=batches)]
        case _:
            return []


def _deadly(handle: Handler, after: int) -> Handler:
    """Make a handler that kills the process between the insert into the inbox and the commit."""
    handled = 0

    def handler(session: Session, message: Message) -> None:
        nonlocal handled
        handled += 1
        handle(session, message)
        if handled >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    return handler


def lose_acks(client: "SQSClient", chance: random.Random) -> None:
    """Have some acks confirmed but not carried out.

    SQS's standard queues may do that: a server that holds a copy of the message is unavailable when it is deleted,
    and "you might get that message copy again when you receive messages" (SQS Developer Guide, At-least-once
    delivery).
    """
    lost = threading.local()

    def before(params: dict[str, Any], **_: Any) -> None:
        lost.entries = [entry for entry in params["Entries"][1:] if chance.random() < LOST_ACK_SHARE]
        params["Entries"] = [entry for entry in params["Entries"] if entry not in lost.entries]

    def after(parsed: dict[str, Any], **_: Any) -> None:
        if "Successful" in parsed:
            parsed["Successful"].extend({"Id": entry["Id"]} for entry in lost.entries)

    client.meta.events.register("provide-client-params.sqs.DeleteMessageBatch", before)
    client.meta.events.register("after-call.sqs.DeleteMessageBatch", after)
