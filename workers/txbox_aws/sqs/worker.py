"""The worker for one SQS queue."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from txbox import Identify, Inbox, identify
from txbox.backoff import Backoff
from txbox.instrumentation import Hook
from txbox.leases import LEASE_SECONDS, Ledger
from txbox_aws.clients import WAIT_SECONDS
from txbox_aws.envelopes import Envelope
from txbox_aws.sqs.queues import MAX_BATCH
from txbox_aws.sqs.source import VISIBILITY_SECONDS, SqsSource
from txbox_workers.handlers import BatchHandler, Handler
from txbox_workers.processing.handler_transactions import SessionFactory
from txbox_workers.worker import MAX_ATTEMPTS, Worker

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["SqsWorker"]


class SqsWorker(Worker):
    """Processes the messages of one SQS queue, each exactly once in effect.

    ::

        def on_purchase(session, message):
            purchase = message.json()
            session.execute(update(Account).where(...).values(...))

        worker = SqsWorker(queue_url, inbox=Inbox("billing"), engine=engine, handler=on_purchase)
        worker.run()
    """

    def __init__(
        self,
        queue_url: str,
        *,
        inbox: Inbox | None = None,
        ledger: Ledger | None = None,
        engine: Engine | None = None,
        handler: Handler | None = None,
        batch_handler: BatchHandler | None = None,
        identify: Identify = identify,
        envelope: Envelope | str = Envelope.AUTO,
        transactions: Literal["batch", "message"] = "batch",
        threads: int = 1,
        batch_size: int = MAX_BATCH,
        wait_seconds: int = WAIT_SECONDS,
        visibility_seconds: int = VISIBILITY_SECONDS,
        max_attempts: int | None = MAX_ATTEMPTS,
        backoff: Backoff | None = None,
        session_factory: SessionFactory = Session,
        lease_seconds: float = LEASE_SECONDS,
        fingerprint: bool = False,
        transaction_seconds: float | None = None,
        hooks: Sequence[Hook] = (),
        client: "SQSClient | None" = None,
    ) -> None:
        """Put a worker together; nothing is connected before ``start`` or ``run``.

        Args:
            queue_url: the queue's URL; its name ends in .fifo for a FIFO queue.
            inbox: what the subscriber has processed; its table is in the engine's database.
            ledger: leases, in place of an inbox or beside it, as for ``Worker``.
            engine: the database of the inbox and of the handler's effects, as for ``Worker``.
            handler: as for ``Worker``.
            batch_handler: as for ``Worker``.
            identify: chooses a message's id; the default order is that of ``txbox.identify``.
            envelope: how bodies are read: auto, raw, json, sns, eventbridge or cloudevents.
            transactions: as for ``Worker``.
            threads: polling threads, each with a database connection.
            batch_size: messages taken at a time, 1 to 10.
            wait_seconds: of long polling, 0 to 20.
            visibility_seconds: how long a delivery is ours without a heartbeat; a worker that is killed delays its
                messages by as much. Slow handlers need no more: the heartbeat extends it.
            max_attempts: as for ``Worker``. Where the queue has a redrive policy, its maxReceiveCount should be
                greater, or this None, which leaves dead letters to the queue.
            backoff: as for ``Worker``.
            session_factory: as for ``Worker``.
            lease_seconds: as for ``Worker``.
            fingerprint: as for ``Worker``.
            transaction_seconds: as for ``Worker``.
            hooks: as for ``Worker``.
            client: an SQS client of boto3 to use; None makes one from boto3's own settings.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        source = SqsSource(
            queue_url,
            client=client,
            identify=identify,
            envelope=envelope,
            batch_size=batch_size,
            wait_seconds=wait_seconds,
            visibility_seconds=visibility_seconds,
            connections=threads + 2,
        )
        super().__init__(
            source,
            inbox=inbox,
            ledger=ledger,
            engine=engine,
            handler=handler,
            batch_handler=batch_handler,
            transactions=transactions,
            threads=threads,
            max_attempts=max_attempts,
            backoff=backoff,
            session_factory=session_factory,
            lease_seconds=lease_seconds,
            fingerprint=fingerprint,
            transaction_seconds=transaction_seconds,
            hooks=hooks,
        )
