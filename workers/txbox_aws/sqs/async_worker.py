"""The worker for one SQS queue whose handlers are coroutines."""

from typing import TYPE_CHECKING, Unpack

from txbox import Identify, identify
from txbox_aws.clients import WAIT_SECONDS
from txbox_aws.envelopes import Envelope
from txbox_aws.sqs.queues import MAX_BATCH
from txbox_aws.sqs.source import VISIBILITY_SECONDS, SqsSource
from txbox_aws.sqs.worker import CALLS_AT_ONCE
from txbox_workers.coroutines import DEFAULTS, AsyncWorker, AsyncWorkerOptions
from txbox_workers.options import lists_options

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


class AsyncSqsWorker(AsyncWorker):
    """Processes the messages of one SQS queue, each exactly once in effect, with coroutine handlers.

    ::

        async def on_purchase(session, message):
            await session.execute(update(Account).where(...).values(...))

        worker = AsyncSqsWorker(queue_url, inbox=AsyncInbox("billing"), engine=engine, handler=on_purchase)
        asyncio.run(worker.run())

    The client is still boto3's, in threads of its own.
    """

    @lists_options(AsyncWorkerOptions, **DEFAULTS)
    def __init__(
        self,
        queue_url: str,
        *,
        identify: Identify = identify,
        envelope: Envelope | str = Envelope.AUTO,
        wait_seconds: int = WAIT_SECONDS,
        visibility_seconds: int = VISIBILITY_SECONDS,
        client: "SQSClient | None" = None,
        **options: Unpack[AsyncWorkerOptions],
    ) -> None:
        """Make a worker. It does not connect before ``start`` or ``run``.

        Arguments and errors are those of ``SqsWorker``; the options, of
        ``txbox_workers.coroutines.AsyncWorkerOptions``.
        """
        source = SqsSource(
            queue_url,
            client=client,
            identify=identify,
            envelope=envelope,
            batch_size=MAX_BATCH,
            wait_seconds=wait_seconds,
            visibility_seconds=visibility_seconds,
            connections=CALLS_AT_ONCE,
        )
        super().__init__(source, **options)
