"""SQS as a broker that commands and the dashboard find by its scheme; see ``txbox_workers.brokers``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack

from txbox import DeadLetter
from txbox_aws.clients import sqs_client
from txbox_aws.publishers import AwsPublisher, aws_publishers
from txbox_aws.sqs.queues import queue_backlog, redrive_to_queue
from txbox_aws.sqs.source import VISIBILITY_SECONDS
from txbox_aws.sqs.worker import SqsWorker
from txbox_workers.brokers import DatabasePlace
from txbox_workers.options import WorkerOptions

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


class SqsBroker:
    """The queues of SQS, by URL."""

    def queue(self, name: str, place: DatabasePlace) -> "SqsQueue":  # noqa: ARG002 - SQS needs no database
        return SqsQueue(name)

    def publishers(self) -> Mapping[str, AwsPublisher]:
        """Return the publishers of SQS, SNS and EventBridge."""
        return aws_publishers()

    def worker(self, queue: str, *, visibility_seconds: int | None, **options: Unpack[WorkerOptions]) -> SqsWorker:
        return SqsWorker(queue, visibility_seconds=visibility_seconds or VISIBILITY_SECONDS, **options)


class SqsQueue:
    """One queue. It makes a client of its own at the first call."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._made: SQSClient | None = None

    def backlog(self) -> Mapping[str, int]:
        """Return SQS's own approximate figures."""
        return queue_backlog(self._url, client=self._client())

    def send_back(self, letter: DeadLetter) -> None:
        """Send a dead letter to this queue, like ``redrive_to_queue``."""
        redrive_to_queue(letter, client=self._client(), queue_url=self._url)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    def _client(self) -> "SQSClient":
        if self._made is None:
            self._made = sqs_client(self._url, wait_seconds=0)
        return self._made
