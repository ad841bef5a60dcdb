"""Amazon SQS: a source for workers, the worker itself, dead-letter queues, and queues to try them with."""

from typing import TYPE_CHECKING, Any

from txbox_aws.clients import sqs_client
from txbox_aws.sqs.dead_letter_queue import DeadLetterQueue, ImportedLetters, MessageMove
from txbox_aws.sqs.queues import MAX_BATCH as MAX_BATCH
from txbox_aws.sqs.queues import create_queue, delete_queue, queue_backlog, redrive_to_queue
from txbox_aws.sqs.source import SqsSource
from txbox_aws.sqs.worker import SqsWorker

if TYPE_CHECKING:
    from txbox_aws.sqs.async_worker import AsyncSqsWorker

__all__ = [
    "AsyncSqsWorker",
    "DeadLetterQueue",
    "ImportedLetters",
    "MessageMove",
    "SqsSource",
    "SqsWorker",
    "create_queue",
    "delete_queue",
    "queue_backlog",
    "redrive_to_queue",
    "sqs_client",
]


if not TYPE_CHECKING:  # type checkers would accept any name in this module

    def __getattr__(name: str) -> Any:
        if name == "AsyncSqsWorker":  # it loads greenlet, which a service without coroutines does not need
            from txbox_aws.sqs.async_worker import AsyncSqsWorker

            return AsyncSqsWorker
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
