"""Send to SQS queues, standard and FIFO."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from txbox.messages.destinations import MAX_SQS_BYTES
from txbox.relay import OutboxMessage
from txbox_aws.clients import SQS_PUBLISHER
from txbox_aws.publishers.answers import PublishResult, result_by_ids
from txbox_aws.publishers.calls import Entry, PublishCall, attributed_entry
from txbox_aws.publishers.publisher import AwsPublisher

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient


class SqsPublisher(AwsPublisher):
    """Sends to SQS queues: destinations that are the URL of a queue.

    A call takes 10 messages and 1 MiB.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SendMessageBatch.html

    It compares the MD5 sums that SQS answers with. A message that SQS has taken differently from how it was sent is
    sent again.
    """

    _use = SQS_PUBLISHER
    _max_bytes = MAX_SQS_BYTES

    def _entry(self, message: OutboxMessage) -> Entry:
        return attributed_entry(message, "MessageBody")

    def _call(self, client: "SQSClient", call: PublishCall) -> PublishResult:
        entries: Any = [{"Id": str(number), **entry.parameters} for number, entry in enumerate(call.entries)]
        answer = client.send_message_batch(QueueUrl=call.destination, Entries=entries)
        return result_by_ids(call, answer, _unlike)


def _unlike(entry: Entry, confirmed: Mapping[str, Any]) -> str | None:
    for name, sum_of in (("MD5OfMessageBody", _body_md5), ("MD5OfMessageAttributes", _attributes_md5)):
        # Some stand-ins for SQS omit these sums.
        if (theirs := confirmed.get(name)) and theirs != (own := sum_of(entry.parameters)):
            return f"{name} is {theirs} and should be {own}"
    return None


def _body_md5(parameters: Mapping[str, Any]) -> str:
    return hashlib.md5(parameters["MessageBody"].encode(), usedforsecurity=False).hexdigest()


def _attributes_md5(parameters: Mapping[str, Any]) -> str:
    # https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-message-metadata.html
    digest = hashlib.md5(usedforsecurity=False)
    for name, attribute in sorted(parameters["MessageAttributes"].items()):
        for position, part in enumerate((name, attribute["DataType"], attribute["StringValue"])):
            encoded = part.encode()
            digest.update(_STRING_VALUE if position == 2 else b"")
            digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.hexdigest()


_STRING_VALUE = b"\x01"
