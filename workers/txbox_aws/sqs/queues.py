"""SQS queues and their limits: create a queue, delete it, read its backlog, send a dead letter back to its own queue.

https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-messages.html
"""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from txbox import BrokerError, DeadLetter, Reason
from txbox.dead_letters.order import order_key
from txbox.messages.attributes import attributes as travelling
from txbox.messages.attributes import encoded
from txbox.messages.destinations import INBOX, is_fifo, is_token
from txbox.messages.message import HEADER_DEDUPLICATION_ID, HEADER_FIRST_DELIVERY_ID, HEADER_KEY, HEADER_MESSAGE_ID
from txbox_aws.clients import SQS, sqs_client, translated
from txbox_aws.envelopes import restored_attributes

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

MAX_ATTRIBUTES = 10
"""Attributes per message."""

MAX_BATCH = 10
"""Messages per call."""

MAX_VISIBILITY_SECONDS = 12 * 60 * 60
"""How long a delivery can be ours after its receive, including extensions."""

MAX_WAIT_SECONDS = 20
"""The longest long poll."""


def create_queue(name: str, *, client: "SQSClient | None" = None) -> str:
    """Create a queue and return its URL; it is FIFO if its name says so. A queue that exists is left as it is.

    Raises:
        BrokerError: SQS cannot be reached, or refuses.
    """
    attributes = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
    with translated(SQS, name), _given_or_own(client) as sqs:
        return sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]  # type: ignore[arg-type]


def delete_queue(queue_url: str, *, client: "SQSClient") -> None:
    """Delete a queue and everything in it.

    Raises:
        BrokerError: SQS cannot be reached, or refuses.
    """
    with translated(SQS, queue_url):
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
    with translated(SQS, queue_url), _given_or_own(client, queue_url) as sqs:
        answer = sqs.get_queue_attributes(QueueUrl=queue_url, AttributeNames=list(names.values()))  # type: ignore[arg-type]
    return {what: int(answer["Attributes"][name]) for what, name in names.items()}  # type: ignore[index]


def redrive_to_queue(letter: DeadLetter, *, client: "SQSClient | None" = None, queue_url: str | None = None) -> None:
    """Send a dead letter back to the queue it came from, with its original message id.

    A letter that keeps the order of its key keeps it in the other kind of queue, too: in a FIFO queue the key becomes
    its group, in a standard queue its group becomes its header ``key``.

    Args:
        letter: what to send; ``DeadLetters.redrive`` calls this.
        client: an SQS client of boto3 to use; None makes one.
        queue_url: a queue other than the letter's own.

    Raises:
        BrokerError: the queue cannot be reached, or refuses the message; or the letter's id or key cannot travel with
            it.
    """
    target = queue_url or letter.source
    attributes, text = restored_attributes(letter.envelope.get("attributes", {})), None
    if letter.source.startswith(INBOX):  # it was never in a queue: it travels as a relay sends it
        text, encoding = encoded(letter.body)
        headers = travelling(letter.message_id, letter.headers, encoding)
        attributes = {name: {"DataType": "String", "StringValue": value} for name, value in headers.items()}
    # A malformed message's id is the broker's: it must not override the id that the message turns out to carry once it
    # can be read.
    system = letter.envelope.get("system", {})
    ids = {HEADER_MESSAGE_ID: letter.message_id}
    if letter.reason is Reason.MALFORMED:
        ids = {HEADER_FIRST_DELIVERY_ID: letter.message_id}
        if deduplication_id := system.get("MessageDeduplicationId"):
            ids[HEADER_DEDUPLICATION_ID] = deduplication_id
    group = system.get("MessageGroupId") or letter.envelope.get("key")
    if is_fifo(target):
        group = letter.order_key or group or f"redrive-{letter.dead_letter_id}"
    elif is_fifo(letter.source) or letter.source.startswith(INBOX):
        group = None
    if letter.order_key is not None:
        _keep_order(letter, target, ids)
    present = {name.lower() for name in attributes}
    attributes |= {name: {"DataType": "String", "StringValue": id_} for name, id_ in ids.items() if name not in present}
    if len(attributes) > MAX_ATTRIBUTES:
        raise BrokerError(
            f"message {letter.message_id} has {len(present)} attributes already; {' and '.join(ids)} cannot travel "
            "with it",
            permanent=True,
        )
    routing = {} if group is None else {"MessageGroupId": group}
    if is_fifo(target):
        # A new one: SQS drops what it has seen in the last five minutes. We go by the message id.
        routing["MessageDeduplicationId"] = f"redrive-{letter.dead_letter_id}-{time.time_ns()}"
    with translated(SQS, target), _given_or_own(client, target) as sqs:
        sqs.send_message(
            QueueUrl=target,
            MessageBody=letter.body.decode() if text is None else text,
            MessageAttributes=attributes,  # type: ignore[arg-type]
            **routing,
        )


def _keep_order(letter: DeadLetter, target: str, headers: dict[str, str]) -> None:
    """Keep the key of a letter's copy, as its group or in an added header, or raise ``BrokerError``."""
    key = letter.order_key or ""
    if is_fifo(target):
        if not is_token(key):
            raise BrokerError(
                f"its key {key!r:.200} cannot be a group, so {target} would not keep its order", permanent=True
            )
    elif (own := order_key(None, letter.headers)) is None:
        headers[HEADER_KEY] = key
    elif own != key:
        raise BrokerError(
            f"it keeps the order of its group {key!r}, and in {target}, a standard queue, it would keep that of its "
            f"header key, {own!r:.200}; send it to a FIFO queue",
            permanent=True,
        )


@contextlib.contextmanager
def _given_or_own(client: "SQSClient | None", queue_url: str = "") -> Iterator["SQSClient"]:
    """Yield the caller's client, or make one for the queue and close it afterwards."""
    if client is not None:
        yield client
        return
    with contextlib.closing(sqs_client(queue_url)) as own:
        yield own
