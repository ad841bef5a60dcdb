"""Send to EventBridge buses."""

from typing import TYPE_CHECKING, Any

from txbox.messages.destinations import MAX_EVENTBRIDGE_BYTES
from txbox.messages.eventbridge import entry_bytes, event_entry
from txbox.relay import OutboxMessage
from txbox_aws.clients import EVENTBRIDGE_PUBLISHER
from txbox_aws.publishers.answers import PublishResult, result_in_order
from txbox_aws.publishers.calls import Entry, PublishCall
from txbox_aws.publishers.publisher import AwsPublisher

if TYPE_CHECKING:
    from types_boto3_events import EventBridgeClient


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
