"""Publishers of each service: to SQS queues and SNS topics, standard and FIFO, and to EventBridge buses."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from txbox.messages.destinations import MAX_EVENTBRIDGE_BYTES, MAX_SNS_BYTES, MAX_SQS_BYTES
from txbox.messages.eventbridge import entry_bytes, event_entry
from txbox.relay import OutboxMessage
from txbox_aws.clients import EVENTBRIDGE_PUBLISHER, SNS_PUBLISHER, SQS_PUBLISHER
from txbox_aws.publishers.calls import (
    Entry,
    PublishCall,
    PublishResult,
    attributed_entry,
    result_by_ids,
    result_in_order,
)
from txbox_aws.publishers.publisher import AwsPublisher

if TYPE_CHECKING:
    from types_boto3_events import EventBridgeClient
    from types_boto3_sns import SNSClient
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
        answer = client.send_message_batch(QueueUrl=call.destination, Entries=call.numbered)
        return result_by_ids(call, answer, _unlike)


class SnsPublisher(AwsPublisher):
    """Sends to SNS topics: destinations that are the ARN of a topic.

    A call takes 10 messages and 256 KiB; more only for topics whose MaximumMessageSize says so.
    https://docs.aws.amazon.com/sns/latest/api/API_PublishBatch.html

    Headers are message attributes, so subscriptions can filter by them. A queue subscribed with raw delivery receives
    them as its own attributes; without raw delivery they arrive in SNS's envelope. The worker reads both.
    """

    _use = SNS_PUBLISHER
    _max_bytes = MAX_SNS_BYTES

    def _entry(self, message: OutboxMessage) -> Entry:
        return attributed_entry(message, "Message")

    def _call(self, client: "SNSClient", call: PublishCall) -> PublishResult:
        answer = client.publish_batch(TopicArn=call.destination, PublishBatchRequestEntries=call.numbered)
        return result_by_ids(call, answer)


class EventBridgePublisher(AwsPublisher):
    """Sends to EventBridge buses: destinations that are the ARN of an event bus.

    A call takes 10 entries and less than 1 MB.
    https://docs.aws.amazon.com/eventbridge/latest/APIReference/API_PutEvents.html

    The body, a JSON object, is the event's detail. The source is the message's header ``source``, or ``txbox``; the
    detail type is the header ``detail-type``, or ``message``. Id, key and headers are among the event's resources,
    where rules can match on them: see ``txbox.messages.eventbridge``. EventBridge keeps no order.
    """

    _use = EVENTBRIDGE_PUBLISHER
    _max_bytes = MAX_EVENTBRIDGE_BYTES

    def _entry(self, message: OutboxMessage) -> Entry:
        entry = event_entry(message.id, message.body, key=message.key, headers=message.headers)
        parameters = {
            "EventBusName": message.destination,
            "Source": entry.source,
            "DetailType": entry.detail_type,
            "Detail": entry.detail,
            "Resources": list(entry.resources),
        }
        return Entry(message, parameters, entry_bytes(entry))

    def _call(self, client: "EventBridgeClient", call: PublishCall) -> PublishResult:
        entries: Any = [entry.parameters for entry in call.entries]
        return result_in_order(call, client.put_events(Entries=entries))


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
