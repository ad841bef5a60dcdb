"""SQS's own dead-letter queues: import their messages as our dead letters, or let SQS move them back.

A message keeps its MessageId and its attributes when SQS moves it to a dead-letter queue, so a worker's rules find its
original id. When SQS moves it back, it gets a new MessageId: a message without an id of its own is then a new message.

An import deletes a message only after its letter is committed::

    receive ── park ── commit ── killed            it is received again, and found parked: the same letter
    receive ── killed                              it is received again
    receive ── park ── commit ── delete

https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from txbox import (
    BrokerError,
    DeadLetter,
    DeadLetters,
    Failures,
    Identify,
    InFlight,
    InvalidConfiguration,
    Outcome,
    Reason,
    identify,
)
from txbox.dead_letters.failures import describe
from txbox_aws.clients import SQS, sqs_client, translated
from txbox_aws.envelopes import Envelope
from txbox_aws.sqs.queues import MAX_BATCH
from txbox_aws.sqs.source import SqsSource
from txbox_workers.delivery import Delivery, Settlement

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

IMPORT_VISIBILITY_SECONDS = 60
"""How long ten messages are ours: parking one waits for at most a second."""

IMPORT_WAIT_SECONDS = 2
"""How long a long poll waits. A queue that has nothing for this long is empty."""


@dataclass(frozen=True, slots=True)
class ImportedLetters:
    """The results of an import so far.

    Attributes:
        parked: messages that are dead letters now, or were already; deleted from the queue.
        processed: messages that the subscriber had processed; deleted from the queue without keeping a letter.
        in_flight: messages that another transaction is processing; left in the queue.
        copies: further messages whose letter this import has parked already; deleted from the queue, too.
        undeleted: parked, processed or copies whose deletion SQS did not confirm: import them again.
    """

    parked: int = 0
    processed: int = 0
    in_flight: int = 0
    copies: int = 0
    undeleted: int = 0

    @property
    def messages(self) -> int:
        """How many messages of the queue were handled."""
        return self.parked + self.processed + self.in_flight + self.copies


@dataclass(frozen=True, slots=True)
class MessageMove:
    """How far SQS is with moving the messages of a dead-letter queue.

    Attributes:
        task_handle: SQS's name for the move; None unless it is running.
        status: RUNNING, COMPLETED, CANCELLING, CANCELLED or FAILED.
        moved: messages so far, approximately.
        total: messages in all, approximately; None if SQS does not say yet.
        failure: why it failed.
    """

    task_handle: str | None
    status: str
    moved: int = 0
    total: int | None = None
    failure: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the move is over."""
        return self.status in ("COMPLETED", "CANCELLED", "FAILED")


class DeadLetterQueue:
    """One dead-letter queue of SQS."""

    def __init__(self, queue_url: str, *, client: "SQSClient | None" = None) -> None:
        """Name the queue; do not call SQS yet.

        Args:
            queue_url: its URL.
            client: an SQS client of boto3 to use; None makes one, which ``close`` closes.
        """
        self._queue_url = queue_url
        self._client = client or sqs_client(queue_url)
        self._is_own = client is None

    def close(self) -> None:
        """Close the connections, if the client was made here."""
        if self._is_own:
            self._client.close()

    def source_queues(self) -> list[str]:
        """Return the URLs of the queues whose redrive policy names this one.

        Raises:
            BrokerError: the queue cannot be reached.
        """
        with translated(SQS, self._queue_url, _REMEDIES):
            pages = self._client.get_paginator("list_dead_letter_source_queues").paginate(QueueUrl=self._queue_url)
            return sorted(url for page in pages for url in page["queueUrls"])

    def import_letters(
        self,
        letters: DeadLetters,
        failures: Failures,
        *,
        source: str | None = None,
        envelope: Envelope | str = Envelope.AUTO,
        identify: Identify = identify,
        count: int | None = None,
        report: Callable[[ImportedLetters], bool | None] = lambda _: None,
    ) -> ImportedLetters:
        """Import the queue's messages as our dead letters, under their original ids, and delete them from the queue.

        A letter's source is the queue that its message was sent to, so a redrive sends it there. A message that was
        sent before the subscriber's horizon is parked as EXPIRED.

        Args:
            letters: where they are parked.
            failures: those of the subscriber that the letters will belong to; the attempts counted there go into the
                letters.
            source: the URL of the queue that they were sent to. Needed if SQS does not tell and several queues share
                this one.
            envelope: how the subscriber's workers read bodies.
            identify: how they choose ids.
            count: how many, at most; None means until the queue is empty.
            report: called after each ten messages; return true to end here.

        Raises:
            BrokerError: the queue cannot be reached, or refuses.
            InvalidConfiguration: it is not known where a message was sent to; that message is unchanged.
            sqlalchemy.exc.DBAPIError: the database cannot be reached, or refuses.

        Whatever it raises, messages that are not parked are visible in the queue again at once.
        """
        reader = _Reader(self._queue_url, self._client, self.source_queues, source, envelope, identify, count)
        done, numbers = ImportedLetters(), set[int]()
        while count is None or done.messages < count:
            received = list(reader.receive())
            if not received:
                break
            left = len(received) if count is None else count - done.messages
            reader.hand_back([Settlement(delivery, Outcome.IN_FLIGHT) for delivery in received[left:]])
            before, done = done, self._import(reader, letters, failures, received[:left], done, numbers)
            # Messages in flight come again. If the queue has nothing else, only waiting is left.
            if report(done) or done.in_flight - before.in_flight == len(received):
                break
        return done

    def start_move(self, *, to: str | None = None, per_second: int | None = None) -> str:
        """Start SQS's move of the queue's messages back to where they were sent, and return its handle.

        The messages get new MessageIds: one without an id of its own is a new message for every inbox.

        Args:
            to: the URL of another queue; None sends each to its own.
            per_second: messages at most, 1 to 500; None leaves the rate to SQS.

        Raises:
            BrokerError: SQS refuses: it is moving them already, or knows no such queue.
        """
        limits: Any = {} if per_second is None else {"MaxNumberOfMessagesPerSecond": per_second}
        destination: Any = {} if to is None else {"DestinationArn": self._arn_of(to)}
        arn = self._arn_of(self._queue_url)
        with translated(SQS, self._queue_url, _REMEDIES):
            return self._client.start_message_move_task(SourceArn=arn, **destination, **limits)["TaskHandle"]

    def latest_move(self) -> MessageMove | None:
        """Return how far SQS is with the move that was started last; None if there was none.

        Raises:
            BrokerError: the queue cannot be reached.
        """
        arn = self._arn_of(self._queue_url)
        with translated(SQS, self._queue_url, _REMEDIES):
            tasks = self._client.list_message_move_tasks(SourceArn=arn, MaxResults=1).get("Results", [])
        return next((_move_of(task) for task in tasks), None)

    def cancel_move(self, task_handle: str) -> None:
        """Stop a move; messages already moved stay where they are.

        Raises:
            BrokerError: the move is not running.
        """
        with translated(SQS, self._queue_url, _REMEDIES):
            self._client.cancel_message_move_task(TaskHandle=task_handle)

    def _import(
        self,
        reader: "_Reader",
        letters: DeadLetters,
        failures: Failures,
        deliveries: list[Delivery],
        done: ImportedLetters,
        numbers: set[int],
    ) -> ImportedLetters:
        committed: list[Delivery] = []
        try:
            for delivery in deliveries:
                letter = self._letter(reader, failures, delivery)
                try:
                    number = letters.park(letter, message=delivery.message)
                except InFlight:  # it comes back when its visibility ends
                    done = replace(done, in_flight=done.in_flight + 1)
                    continue
                committed.append(delivery)
                if number is None:
                    done = replace(done, processed=done.processed + 1)
                elif number in numbers:
                    done = replace(done, copies=done.copies + 1)
                else:
                    numbers.add(number)
                    done = replace(done, parked=done.parked + 1)
        except Exception:
            left = [Settlement(delivery, Outcome.IN_FLIGHT) for delivery in deliveries if delivery not in committed]
            with suppress(BrokerError):  # the first error is raised; these come back when their visibility ends
                reader.hand_back(left)
            raise
        finally:  # delete what is committed, whatever happened to the others
            deleted = reader.ack(committed) if committed else []
        return replace(done, undeleted=done.undeleted + len(committed) - len(deleted))

    def _letter(self, reader: "_Reader", failures: Failures, delivery: Delivery) -> DeadLetter:
        message = delivery.message
        had = failures.find(message.id)
        receives = max(delivery.receive_count - 1, reader.max_receives(message.source))
        what = [f"SQS moved it to the dead-letter queue {self._queue_url.rpartition('/')[2]} after {receives} receives"]
        if delivery.problem is not None:
            what.append(describe(delivery.problem))
        elif had.history:
            what.append(f"last error: {had.history[-1]['error']}")
        return DeadLetter(
            subscriber_id=failures.subscriber_id,
            message_id=message.id,
            reason=Reason.FAILED if delivery.problem is None else Reason.MALFORMED,
            error="; ".join(what),
            attempts=had.attempts,
            source=message.source,
            body=delivery.body,
            headers=dict(message.headers),
            envelope=dict(delivery.envelope),
            history=had.history,
        )

    def _arn_of(self, queue_url: str) -> str:
        with translated(SQS, queue_url):
            answer = self._client.get_queue_attributes(QueueUrl=queue_url, AttributeNames=["QueueArn"])
        return answer["Attributes"]["QueueArn"]


class _Reader(SqsSource):
    """The dead-letter queue as a source whose messages were sent to other queues."""

    def __init__(
        self,
        queue_url: str,
        client: "SQSClient",
        source_queues: Callable[[], list[str]],
        source: str | None,
        envelope: Envelope | str,
        identify: Identify,
        count: int | None,
    ) -> None:
        super().__init__(
            queue_url,
            client=client,
            identify=identify,
            envelope=envelope,
            batch_size=min(MAX_BATCH, count or MAX_BATCH),
            wait_seconds=IMPORT_WAIT_SECONDS,
            visibility_seconds=IMPORT_VISIBILITY_SECONDS,
        )
        self._source_queues = source_queues
        self._given_source = source
        self._sources: dict[str, str] = {}
        self._max_receives: dict[str, int] = {}

    def max_receives(self, source: str) -> int:
        """Return after how many receives SQS moves a queue's messages here; 0 if SQS does not tell."""
        if source not in self._max_receives:
            try:
                with translated(SQS, source):
                    answer = self._client.get_queue_attributes(QueueUrl=source, AttributeNames=["RedrivePolicy"])
                attributes: Mapping[str, str] = answer.get("Attributes", {})  # type: ignore[assignment]
            except BrokerError:  # it is only needed for the letter's text
                attributes = {}
            policy = json.loads(attributes.get("RedrivePolicy", "{}"))
            self._max_receives[source] = int(policy.get("maxReceiveCount", 0))
        return self._max_receives[source]

    def _opened(self, records: Sequence[Mapping[str, Any]]) -> list[Delivery]:
        try:
            return super()._opened(records)
        except Exception:
            entries: Any = [
                {"Id": str(number), "ReceiptHandle": record["ReceiptHandle"], "VisibilityTimeout": 0}
                for number, record in enumerate(records)
            ]
            with suppress(BrokerError), translated(SQS, self._queue_url):
                self._client.change_message_visibility_batch(QueueUrl=self._queue_url, Entries=entries)
            raise

    def _source_of(self, record: Mapping[str, Any]) -> str:
        if self._given_source is not None:
            return self._given_source
        arn = (record.get("Attributes") or {}).get("DeadLetterQueueSourceArn", "")
        if arn not in self._sources:
            self._sources[arn] = self._url_of(arn) if arn else self._only_source()
        return self._sources[arn]

    def _url_of(self, arn: str) -> str:
        _, _, _, _, account, name = arn.split(":", 5)
        with translated(SQS, arn):
            return self._client.get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)["QueueUrl"]

    def _only_source(self) -> str:
        sources = self._source_queues()
        if len(sources) != 1:
            which = " or ".join(sources) or "SQS knows none"
            raise InvalidConfiguration(
                f"which queue were the messages of {self._queue_url} sent to: {which}? Name it with --source"
            )
        return sources[0]


def _move_of(task: Mapping[str, Any]) -> MessageMove:
    return MessageMove(
        task.get("TaskHandle"),
        task.get("Status", "RUNNING"),
        task.get("ApproximateNumberOfMessagesMoved", 0),
        task.get("ApproximateNumberOfMessagesToMove"),
        task.get("FailureReason"),
    )


_REMEDIES = {
    "AccessDenied": "; grant sqs:StartMessageMoveTask, ListMessageMoveTasks, CancelMessageMoveTask, ReceiveMessage, "
    "DeleteMessage, GetQueueAttributes and ListDeadLetterSourceQueues on it, and SendMessage where messages go",
    "UnsupportedOperation": "; is it a dead-letter queue, and is it not being moved already?",
}
