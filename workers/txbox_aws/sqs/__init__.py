"""Amazon SQS: a source for workers, the worker itself, dead-letter queues, and queues to try them with."""

from typing import TYPE_CHECKING

from txbox.lazy_names import lazy_names
from txbox_aws.clients import sqs_client
from txbox_aws.sqs.dead_letter_queue import DeadLetterQueue, ImportedLetters, MessageMove
from txbox_aws.sqs.queues import MAX_BATCH as MAX_BATCH
from txbox_aws.sqs.queues import create_queue, delete_queue, queue_backlog, redrive_to_queue
from txbox_aws.sqs.source import SqsSource
from txbox_aws.sqs.worker import SqsWorker

if TYPE_CHECKING:
    from txbox_aws.sqs.async_worker import AsyncSqsWorker
else:  # it loads greenlet, which a service without coroutines does not need
    __getattr__, __dir__ = lazy_names(__name__, {"AsyncSqsWorker": "txbox_aws.sqs.async_worker"})

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
