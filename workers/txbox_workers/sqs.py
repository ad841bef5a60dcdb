"""Amazon SQS: a source for workers, the worker itself, and the way back for dead letters.

Limits that shape this file: 10 messages a call; a delivery is ours for at most 12 hours, extensions included; the
batch calls answer per entry, and an entry can fail although the call succeeded.
https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-messages.html
"""

import contextlib
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from txbox import BrokerError, DeadLetter, Identify, Inbox, InvalidConfiguration, Reason, identify
from txbox.instrumentation import Hook
from txbox.message import HEADER_DEDUPLICATION_ID, HEADER_FIRST_DELIVERY_ID, HEADER_MESSAGE_ID
from txbox_workers.backoff import Backoff
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.envelopes import Envelope, open_envelope, restored_attributes
from txbox_workers.processor import BatchHandler, Handler, SessionFactory
from txbox_workers.worker import MAX_ATTEMPTS, Worker

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["SqsSource", "SqsWorker", "create_queue", "delete_queue", "queue_backlog", "redrive_to_queue", "sqs_client"]

MAX_BATCH = 10
"""Messages in one call, for SQS's part."""

WAIT_SECONDS = 10
"""Of long polling. Also about the longest that an idle worker takes to stop."""

VISIBILITY_SECONDS = 30
"""How long a delivery is ours before the heartbeat has to extend it."""

MAX_VISIBILITY_SECONDS = 12 * 60 * 60
"""SQS's limit from the first receive of a delivery, extensions included."""

ENTRY_RUNS = 3
"""How often an entry of a batch call is tried that failed by the broker's fault."""

MAX_ATTRIBUTES = 10
"""Message attributes of one message."""


def sqs_client(queue_url: str, *, wait_seconds: float = WAIT_SECONDS, connections: int = 10) -> "SQSClient":
    """Make a client as a worker needs it: patient with long polls, and with retries of its own.

    Region and credentials are boto3's own business; without a configured region, the one in the queue's URL is taken.

    Args:
        queue_url: the queue's URL.
        wait_seconds: the longest long poll.
        connections: how many calls may be under way at once.
    """
    in_url = re.match(r"https://sqs\.([a-z0-9-]+)\.amazonaws\.com", queue_url)
    with _translated():
        session = boto3.session.Session()
        return session.client(
            "sqs",
            region_name=session.region_name or (in_url.group(1) if in_url else None),
            config=Config(
                retries={"mode": "standard", "total_max_attempts": 3},
                connect_timeout=5,
                read_timeout=wait_seconds + 15,
                max_pool_connections=connections,
                tcp_keepalive=True,
            ),
        )


class SqsSource:
    """One SQS queue, standard or FIFO, as a source for a worker."""

    def __init__(
        self,
        queue_url: str,
        *,
        client: "SQSClient | None" = None,
        identify: Identify = identify,
        envelope: Envelope | str = Envelope.AUTO,
        batch_size: int = MAX_BATCH,
        wait_seconds: int = WAIT_SECONDS,
        visibility_seconds: int = VISIBILITY_SECONDS,
        connections: int = 10,
    ) -> None:
        """Name the queue; nothing is called yet. The arguments are those of ``SqsWorker``."""
        if not re.match(r"https?://[^/]+/.+", queue_url or ""):
            raise InvalidConfiguration(f"SqsWorker.queue_url must be the URL of a queue, not {queue_url!r}")
        if not 1 <= batch_size <= MAX_BATCH:
            raise InvalidConfiguration(f"SqsWorker.batch_size must be from 1 to {MAX_BATCH}, not {batch_size!r}")
        if not 0 <= wait_seconds <= _MAX_WAIT_SECONDS:
            raise InvalidConfiguration(
                f"SqsWorker.wait_seconds must be from 0 to {_MAX_WAIT_SECONDS}, not {wait_seconds!r}"
            )
        if not 1 <= visibility_seconds <= MAX_VISIBILITY_SECONDS:
            raise InvalidConfiguration(
                f"SqsWorker.visibility_seconds must be from 1 to {MAX_VISIBILITY_SECONDS}, not {visibility_seconds!r}"
            )
        try:
            self._envelope = Envelope(envelope)
        except ValueError as error:
            raise InvalidConfiguration(
                f"SqsWorker.envelope must be one of {', '.join(Envelope)}, not {envelope!r}"
            ) from error
        self._queue_url = queue_url
        self._identify = identify
        self._batch_size = batch_size
        self._wait_seconds = wait_seconds
        self._visibility_seconds = visibility_seconds
        self._connections = connections
        self._given_client = client
        self._made_client: SQSClient | None = None
        self._received_at: dict[str, float] = {}

    @property
    def name(self) -> str:
        """The queue's URL."""
        return self._queue_url

    @property
    def visibility_seconds(self) -> float | None:
        """How long a delivery is ours."""
        return self._visibility_seconds

    @property
    def _client(self) -> "SQSClient":
        if self._given_client is not None:
            return self._given_client
        if self._made_client is None:
            self._made_client = sqs_client(
                self._queue_url, wait_seconds=self._wait_seconds, connections=self._connections
            )
        return self._made_client

    def open(self) -> None:
        """See that the queue exists and answers."""
        with _translated(self._queue_url):
            self._client.get_queue_attributes(QueueUrl=self._queue_url, AttributeNames=["QueueArn"])

    def receive(self) -> Sequence[Delivery]:
        """Return up to ``batch_size`` deliveries, in SQS's order."""
        with _translated(self._queue_url):
            answer = self._client.receive_message(
                QueueUrl=self._queue_url,
                MaxNumberOfMessages=self._batch_size,
                WaitTimeSeconds=self._wait_seconds,
                VisibilityTimeout=self._visibility_seconds,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["All"],
            )
        received_at = time.monotonic()
        deliveries = [
            open_envelope(record, self._queue_url, envelope=self._envelope, identify=self._identify)
            for record in answer.get("Messages", ())
        ]
        for delivery in deliveries:
            self._received_at[delivery.receipt] = received_at
        return deliveries

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Delete messages, in batches; an entry that failed by the broker's fault is tried again."""
        try:
            refused = self._in_batches(
                deliveries,
                lambda entries: self._client.delete_message_batch(QueueUrl=self._queue_url, Entries=entries),  # type: ignore[arg-type]
                lambda delivery: {"ReceiptHandle": delivery.receipt},
            )
        finally:
            self._forget(deliveries)
        return [delivery.receipt for delivery in deliveries if delivery.receipt not in refused]

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        """Make messages visible again, each after its delay."""
        delays = {settlement.delivery.receipt: settlement.delay_seconds for settlement in settlements}
        deliveries = [settlement.delivery for settlement in settlements]
        try:
            self._change_visibility(deliveries, delays)
        finally:
            self._forget(deliveries)

    def extend(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:
        """Extend the visibility of deliveries, as far as SQS's 12 hours allow."""
        now = time.monotonic()
        refused: dict[str, str] = {}
        extendable, delays = [], {}
        for delivery in deliveries:
            left = MAX_VISIBILITY_SECONDS - (now - self._received_at.get(delivery.receipt, now))
            if left < 1:
                refused[delivery.receipt] = "SQS's limit of 12 hours is reached"
            else:
                extendable.append(delivery)
                # Rounded down: a second too much is refused as a whole.
                delays[delivery.receipt] = math.floor(min(seconds, left))
        return {**refused, **self._change_visibility(extendable, delays)}

    def close(self) -> None:
        """Close the connections, if they are ours."""
        if self._made_client is not None:
            self._made_client.close()
            self._made_client = None

    def _change_visibility(self, deliveries: Sequence[Delivery], delays: Mapping[str, float]) -> dict[str, str]:
        def entry(delivery: Delivery) -> dict[str, Any]:
            seconds = min(max(math.ceil(delays[delivery.receipt]), 0), MAX_VISIBILITY_SECONDS)
            return {"ReceiptHandle": delivery.receipt, "VisibilityTimeout": seconds}

        return self._in_batches(
            deliveries,
            lambda entries: self._client.change_message_visibility_batch(QueueUrl=self._queue_url, Entries=entries),  # type: ignore[arg-type]
            entry,
        )

    def _in_batches(
        self,
        deliveries: Sequence[Delivery],
        call: Callable[[list[dict[str, Any]]], Any],
        entry: Callable[[Delivery], dict[str, Any]],
    ) -> dict[str, str]:
        """Call for ten deliveries at a time, and reconcile the answer entry by entry.

        An entry that is in neither list of the answer counts as failed: only what SQS confirms is taken as done.

        Returns:
            For each receipt that was refused in the end: why.
        """
        refused: dict[str, str] = {}
        confirmed: set[str] = set()
        for start in range(0, len(deliveries), MAX_BATCH):
            pending = dict(enumerate(deliveries[start : start + MAX_BATCH]))
            for run in range(1, ENTRY_RUNS + 1):
                try:
                    with _translated(self._queue_url):
                        answer = call([{"Id": str(number), **entry(delivery)} for number, delivery in pending.items()])
                except BrokerError as error:
                    if not confirmed:
                        raise
                    # Part of it stands: to say that nothing does would be wrong.
                    unknown = {delivery.receipt: str(error) for delivery in deliveries}
                    return {receipt: why for receipt, why in unknown.items() if receipt not in confirmed}
                for done in answer.get("Successful", ()):
                    if delivery := pending.pop(int(done["Id"]), None):
                        confirmed.add(delivery.receipt)
                        refused.pop(delivery.receipt, None)
                final = {int(failed["Id"]) for failed in answer.get("Failed", ()) if failed.get("SenderFault")}
                reasons = {int(failed["Id"]): failed for failed in answer.get("Failed", ())}
                for number, delivery in pending.items():
                    reason = reasons.get(number, {})
                    refused[delivery.receipt] = f"{reason.get('Code', 'NoAnswer')}: {reason.get('Message', '')}".strip()
                pending = {number: delivery for number, delivery in pending.items() if number not in final}
                if not pending or run == ENTRY_RUNS:
                    break
                time.sleep(_ENTRY_BACKOFF.seconds(run))
        return refused

    def _forget(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._received_at.pop(delivery.receipt, None)


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
        inbox: Inbox,
        engine: Engine,
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
        hooks: Sequence[Hook] = (),
        client: "SQSClient | None" = None,
    ) -> None:
        """Put a worker together; nothing is connected before ``start`` or ``run``.

        Args:
            queue_url: the queue's URL; its name ends in .fifo for a FIFO queue.
            inbox: what the subscriber has processed; its table is in the engine's database.
            engine: the database of the inbox and of the handler's effects.
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
            engine=engine,
            handler=handler,
            batch_handler=batch_handler,
            transactions=transactions,
            threads=threads,
            max_attempts=max_attempts,
            backoff=backoff,
            session_factory=session_factory,
            hooks=hooks,
        )


def redrive_to_queue(letter: DeadLetter, *, client: "SQSClient | None" = None, queue_url: str | None = None) -> None:
    """Send a dead letter back to the queue it came from, under the message id that it had.

    Args:
        letter: what to send; ``DeadLetters.redrive`` calls this.
        client: an SQS client of boto3 to use; None makes one.
        queue_url: another queue than the letter's own.

    Raises:
        BrokerError: the queue cannot be reached, or refuses the message.
    """
    target = queue_url or letter.source
    attributes = restored_attributes(letter.envelope.get("attributes", {}))
    # A malformed message's id is the broker's, for want of a better one: it must not win over the one that the
    # message turns out to carry once it can be read.
    system = letter.envelope.get("system", {})
    ids = {HEADER_MESSAGE_ID: letter.message_id}
    if letter.reason is Reason.MALFORMED:
        ids = {HEADER_FIRST_DELIVERY_ID: letter.message_id}
        if deduplication_id := system.get("MessageDeduplicationId"):
            ids[HEADER_DEDUPLICATION_ID] = deduplication_id
    known = {name.lower() for name in attributes}
    attributes |= {name: {"DataType": "String", "StringValue": id_} for name, id_ in ids.items() if name not in known}
    if len(attributes) > MAX_ATTRIBUTES:
        raise BrokerError(
            f"message {letter.message_id} has {len(known)} attributes already; its id cannot travel with it",
            permanent=True,
        )
    routing = {}
    if group := system.get("MessageGroupId"):
        routing["MessageGroupId"] = group
    if target.endswith(".fifo"):
        routing.setdefault("MessageGroupId", f"redrive-{letter.dead_letter_id}")
        # A new one: SQS drops what it has seen in the last five minutes. The message id is what counts for us.
        routing["MessageDeduplicationId"] = f"redrive-{letter.dead_letter_id}-{time.time_ns()}"
    with _translated(target), contextlib.ExitStack() as cleanup:
        if client is None:
            client = sqs_client(target)
            cleanup.callback(client.close)
        client.send_message(
            QueueUrl=target,
            MessageBody=letter.body.decode(),
            MessageAttributes=attributes,  # type: ignore[arg-type]
            **routing,
        )


def create_queue(name: str, *, client: "SQSClient | None" = None) -> str:
    """Create a queue, FIFO if its name says so, and return its URL; one that exists is returned as it is.

    Raises:
        BrokerError: SQS cannot be reached, or refuses.
    """
    with _translated(name), contextlib.ExitStack() as cleanup:
        if client is None:
            client = sqs_client("")
            cleanup.callback(client.close)
        attributes = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
        return client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]  # type: ignore[arg-type]


def delete_queue(queue_url: str, *, client: "SQSClient") -> None:
    """Delete a queue and what is in it.

    Raises:
        BrokerError: SQS cannot be reached, or refuses.
    """
    with _translated(queue_url):
        client.delete_queue(QueueUrl=queue_url)


def queue_backlog(queue_url: str, *, client: "SQSClient | None" = None) -> dict[str, int]:
    """Return how many messages a queue holds, by SQS's own approximate figures.

    Raises:
        BrokerError: the queue cannot be reached.
    """
    names = {
        "waiting": "ApproximateNumberOfMessages",
        "delivered": "ApproximateNumberOfMessagesNotVisible",
        "delayed": "ApproximateNumberOfMessagesDelayed",
    }
    with _translated(queue_url), contextlib.ExitStack() as cleanup:
        if client is None:
            client = sqs_client(queue_url)
            cleanup.callback(client.close)
        answer = client.get_queue_attributes(QueueUrl=queue_url, AttributeNames=list(names.values()))  # type: ignore[arg-type]
    return {what: int(answer["Attributes"][name]) for what, name in names.items()}  # type: ignore[index]


@contextlib.contextmanager
def _translated(queue_url: str = "") -> Iterator[None]:
    """Turn boto3's errors into ours, with the remedy."""
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        remedy = next((text for name, text in _REMEDIES.items() if name in code), "")
        raise BrokerError(
            f"SQS refused {error.operation_name} on {queue_url}: {code}{remedy}", permanent=bool(remedy)
        ) from error
    except BotoCoreError as error:
        remedy = _CLIENT_REMEDIES.get(type(error).__name__, "")
        raise BrokerError(f"SQS cannot be reached: {error}{remedy}", permanent=bool(remedy)) from error


_REMEDIES = {
    "NonExistentQueue": "; create the queue, or correct its URL, region or account",
    "QueueDoesNotExist": "; create the queue, or correct its URL, region or account",
    "AccessDenied": "; grant sqs:ReceiveMessage, DeleteMessage, ChangeMessageVisibility and GetQueueAttributes",
    "InvalidClientTokenId": "; the access key is not known: check AWS_ACCESS_KEY_ID",
    "InvalidAddress": "; the URL is not that of a queue",
    "SignatureDoesNotMatch": "; the secret key does not fit: check AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "; the credentials have expired",
}

_CLIENT_REMEDIES = {
    "NoRegionError": "; set AWS_DEFAULT_REGION",
    "NoCredentialsError": "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or any other of boto3's ways",
}

_ENTRY_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=1.0)
_MAX_WAIT_SECONDS = 20
