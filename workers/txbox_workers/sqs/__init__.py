"""Amazon SQS: a source for workers, the worker itself, the way back for dead letters, and queues to try them with."""

from txbox_workers.sqs.client import sqs_client
from txbox_workers.sqs.limits import MAX_BATCH as MAX_BATCH  # for those who send; not one of the documented names
from txbox_workers.sqs.queues import create_queue, delete_queue, queue_backlog
from txbox_workers.sqs.redrive import redrive_to_queue
from txbox_workers.sqs.source import SqsSource
from txbox_workers.sqs.worker import SqsWorker

__all__ = ["SqsSource", "SqsWorker", "create_queue", "delete_queue", "queue_backlog", "redrive_to_queue", "sqs_client"]
