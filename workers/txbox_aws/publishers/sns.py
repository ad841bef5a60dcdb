"""Send to SNS topics, standard and FIFO."""

from typing import TYPE_CHECKING, Any

from txbox.messages.destinations import MAX_SNS_BYTES
from txbox.relay import OutboxMessage
from txbox_aws.clients import SNS_PUBLISHER
from txbox_aws.publishers.answers import PublishResult, result_by_ids
from txbox_aws.publishers.calls import Entry, PublishCall, attributed_entry
from txbox_aws.publishers.publisher import AwsPublisher

if TYPE_CHECKING:
    from types_boto3_sns import SNSClient


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
        entries: Any = [{"Id": str(number), **entry.parameters} for number, entry in enumerate(call.entries)]
        answer = client.publish_batch(TopicArn=call.destination, PublishBatchRequestEntries=entries)
        return result_by_ids(call, answer)
