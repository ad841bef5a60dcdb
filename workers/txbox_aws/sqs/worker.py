"""The worker for one SQS queue."""

from typing import TYPE_CHECKING, Unpack

from txbox import Identify, identify
from txbox_aws.clients import WAIT_SECONDS
from txbox_aws.envelopes import Envelope
from txbox_aws.sqs.queues import MAX_BATCH
from txbox_aws.sqs.source import VISIBILITY_SECONDS, SqsSource
from txbox_workers.options import WorkerOptions, lists_options
from txbox_workers.polling.prefetching_poller import RECEIVERS
from txbox_workers.polling.settler import SETTLERS
from txbox_workers.worker import Worker

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


PREFETCH = 1_000
"""The default with batches larger than a receive."""

CALLS_AT_ONCE = RECEIVERS + SETTLERS + 2
"""Connections with prefetch; two of them are for the heartbeat."""


class SqsWorker(Worker):
    """Processes the messages of one SQS queue, each exactly once in effect.

    ::

        def on_purchase(session, message):
            purchase = message.json()
            session.execute(update(Account).where(...).values(...))

        worker = SqsWorker(queue_url, inbox=Inbox("billing"), engine=engine, handler=on_purchase)
        worker.run()
    """

    @lists_options(WorkerOptions)
    def __init__(
        self,
        queue_url: str,
        *,
        identify: Identify = identify,
        envelope: Envelope | str = Envelope.AUTO,
        wait_seconds: int = WAIT_SECONDS,
        visibility_seconds: int = VISIBILITY_SECONDS,
        client: "SQSClient | None" = None,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """Make a worker. It does not connect before ``start`` or ``run``.

        Args:
            queue_url: the queue's URL; its name ends in .fifo for a FIFO queue.
            identify: chooses a message's id; the default order is that of ``txbox.identify``.
            envelope: how bodies are read: auto, raw, json, sns, eventbridge or cloudevents.
            wait_seconds: how long a long poll waits, 0 to 20.
            visibility_seconds: how long a delivery is ours without a heartbeat. A killed worker delays its messages by
                this much. Slow handlers need no more: the heartbeat extends it.
            client: an SQS client of boto3 to use; None makes one from boto3's own settings.
            options: those of ``txbox_workers.options.WorkerOptions``. With a ``batch_size`` of more than 10,
                ``prefetch`` is 1,000 by default.

        Raises:
            TypeError: there is no such option.
            InvalidConfiguration: an argument cannot work.
        """
        batch_size = options.get("batch_size", MAX_BATCH)
        if batch_size > MAX_BATCH:
            options.setdefault("prefetch", PREFETCH)
        prefetch = options.get("prefetch", 0)
        source = SqsSource(
            queue_url,
            client=client,
            identify=identify,
            envelope=envelope,
            batch_size=MAX_BATCH if prefetch else batch_size,
            wait_seconds=wait_seconds,
            visibility_seconds=visibility_seconds,
            connections=CALLS_AT_ONCE if prefetch else options.get("threads", 1) + 2,
        )
        super().__init__(source, **options)
