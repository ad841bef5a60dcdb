"""The way back: a dead letter returns to its queue as a message."""

import time
from typing import TYPE_CHECKING

from txbox import BrokerError, DeadLetter, Reason
from txbox.message import HEADER_DEDUPLICATION_ID, HEADER_FIRST_DELIVERY_ID, HEADER_MESSAGE_ID
from txbox_aws.envelopes import restored_attributes
from txbox_aws.sqs.client import given_or_own, translated
from txbox_aws.sqs.limits import MAX_ATTRIBUTES

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["redrive_to_queue"]


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
    with translated(target), given_or_own(client, target) as sqs:
        sqs.send_message(
            QueueUrl=target,
            MessageBody=letter.body.decode(),
            MessageAttributes=attributes,  # type: ignore[arg-type]
            **routing,
        )
