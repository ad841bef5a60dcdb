"""One worker process of billing or of notification, with a death foretold."""

import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from txbox import Inbox, Message
from txbox.backoff import Backoff
from txbox.instrumentation import Committed, Event, Received
from txbox.leases import Lease, PostgresLedger
from txbox.outbox.outbox import Outbox
from txbox_aws.sqs import MAX_BATCH, SqsWorker, sqs_client
from txbox_demo import billing, notification
from txbox_demo.journal import Journal
from txbox_demo.orders import Orders

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["COMMITTED", "COMPLETED", "HANDLING", "RECEIVED", "SENDING", "SENT", "lose_acks", "run_worker"]

LOST_ACK_SHARE = 0.18
"""Of all acks: confirmed by the broker, and forgotten by it."""

RECEIVED = "received"
HANDLING = "handling"
SENDING = "sending"
SENT = "sent"
COMMITTED = "committed"
"""Moments to die. Both: between receive and the first word to the database, and between commit and ack. Billing:
between insert and commit. Notification: with the lease and before the mail, and between the mail and its completion."""

COMPLETED = "completed"
"""What the journal says of a message that the ledger has completed: whoever sends its mail again should have known."""

BACKOFF = Backoff(first_seconds=0.5, longest_seconds=2.0)
"""Short, because the server that has refused a mail takes the next one: a demo need not wait for it."""


def run_worker(orders: Orders) -> None:
    """Work until SIGTERM, or die on the way.

    Args:
        orders: what to do; the role is the subscriber.
    """
    engine, journal, death = orders.engine(), Journal(orders.journal), _Death(orders)
    bills = orders.role == billing.SUBSCRIBER
    queue_url = orders.purchases_url if bills else orders.notifications_url
    client = sqs_client(queue_url)
    lose_acks(client, random.Random(orders.seed))  # noqa: S311 - choices of the demo, no secrets
    service = _billing(orders, death) if bills else _notification(orders, engine, journal, death)
    SqsWorker(
        queue_url,
        **service,
        engine=engine,
        backoff=BACKOFF,
        wait_seconds=1,
        visibility_seconds=orders.visibility_seconds,
        client=client,
        hooks=[journal, death.hook],
    ).run()


def _billing(orders: Orders, death: "_Death") -> dict[str, Any]:
    """Return what a worker of billing needs: its effects are in the transaction that records the message."""
    bill = billing.Billing(Outbox(), orders.notifications_url)

    def handler(session: Session, message: Message) -> None:
        bill(session, message)
        death.comes_at(HANDLING)

    return {"inbox": Inbox(orders.role), "handler": handler}


def _notification(orders: Orders, engine: Engine, journal: Journal, death: "_Death") -> dict[str, Any]:
    """Return what a worker of notification needs: no transaction covers a mail, so it works under leases."""
    notify = notification.Notification(orders.smtp_port, journal, orders.process)

    def handler(message: Message, lease: Lease) -> None:
        if lease.unknown_attempts:
            notify(message, lease)  # it has taken one process with it, and takes no second one: the report counts both
            return
        death.comes_at(SENDING)
        notify(message, lease)
        death.comes_at(SENT)

    ledger = _NotedLedger(engine, orders.role, journal)
    return {"ledger": ledger, "handler": handler, "lease_seconds": notification.LEASE_SECONDS}


class _NotedLedger(PostgresLedger):
    """A ledger that keeps a journal of what it has completed, for the reckoning."""

    def __init__(self, engine: Engine, subscriber_id: str, journal: Journal) -> None:
        super().__init__(engine, subscriber_id)
        self._journal = journal

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        super().complete(lease, result)
        self._journal.note(COMPLETED, [lease.message_id])


class _Death:
    """Kills the process when its moment has come for the how-manieth time its orders say."""

    def __init__(self, orders: Orders) -> None:
        self._moment = orders.moment
        # A moment that comes once for each batch, and not for each message, comes less often.
        batched = orders.moment == RECEIVED or (orders.moment == COMMITTED and orders.role == billing.SUBSCRIBER)
        self._left = max(1, orders.life // MAX_BATCH) if batched else orders.life

    def comes_at(self, moment: str) -> None:
        """Die, if this is the moment."""
        if moment == self._moment:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, event: Event) -> None:
        """Die, if this is the moment: of the moments that the worker tells of."""
        match event:
            case Received():
                self.comes_at(RECEIVED)
            case Committed(first=first) if first:
                self.comes_at(COMMITTED)
            case _:
                pass


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
