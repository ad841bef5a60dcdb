"""Bodies as AWS's services and CloudEvents wrap them, and what opens them.

The bodies are those that the services really send; only names, numbers and signatures were replaced.
"""

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from support.aws.queues import QUEUE
from txbox import Message
from txbox_aws.envelopes import Envelope, open_envelope
from txbox_workers.delivery import Delivery

BROKER_ID = "059f36b4-87a3-44ab-83d2-661975830a7d"
PURCHASE = '{"account": "a-1", "amount": 10}'

SNS_ID = "da41e39f-ea4d-435a-b922-c6aae3915ebe"
SNS_NOTIFICATION = {
    "Type": "Notification",
    "MessageId": SNS_ID,
    "TopicArn": "arn:aws:sns:eu-central-1:123456789012:purchases",
    "Subject": "Purchase",
    "Message": PURCHASE,
    "Timestamp": "2026-04-02T10:15:30.123Z",
    "SignatureVersion": "1",
    "Signature": "EXAMPLElDMXvB8r9R83tGoNn0ecwd5UjllzsvSvbItzfaMpN2nk5HVSw7XnOn/49IkxDKz8YrlH2qJXj2iZB0Zo2O71c4qQk1f==",
    "SigningCertURL": "https://sns.eu-central-1.amazonaws.com/SimpleNotificationService-0000000000000000000000.pem",
    "UnsubscribeURL": "https://sns.eu-central-1.amazonaws.com/?Action=Unsubscribe&SubscriptionArn=arn:aws:sns:eu-central"
    "-1:123456789012:purchases:2bcfbf39-05c3-41de-beaa-fcfcc21c8f55",
    "MessageAttributes": {
        "Tenant": {"Type": "String", "Value": "t-1"},
        "trace": {"Type": "Binary", "Value": "AAEC"},
    },
}

EVENTBRIDGE_ID = "17793124-05d4-b198-2fde-7ededc63b103"
EVENTBRIDGE_EVENT = {
    "version": "0",
    "id": EVENTBRIDGE_ID,
    "detail-type": "Purchase",
    "source": "com.example.shop",
    "account": "123456789012",
    "time": "2026-04-02T10:15:30Z",
    "region": "eu-central-1",
    "resources": [],
    "detail": {"account": "a-1", "amount": 10},
}

CLOUDEVENT_ID = "/shop/purchases A234-1234-1234"
CLOUDEVENT = {
    "specversion": "1.0",
    "type": "com.example.purchase",
    "source": "/shop/purchases",
    "id": "A234-1234-1234",
    "time": "2026-04-02T10:15:30Z",
    "datacontenttype": "application/json",
    "data": {"account": "a-1", "amount": 10},
}

attribute_names = st.from_regex(r"[A-Za-z0-9_-]{1,30}", fullmatch=True)
attributes_of_sqs = st.dictionaries(
    attribute_names,
    st.one_of(
        st.builds(lambda value: {"DataType": "String", "StringValue": value}, st.text(min_size=1)),
        st.builds(lambda value: {"DataType": "Number.int", "StringValue": str(value)}, st.integers()),
        st.builds(lambda value: {"DataType": "Binary", "BinaryValue": value}, st.binary(min_size=1)),
    ),
    max_size=10,
)


def text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def without(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}


def received(
    body: object, *, attributes: Mapping[str, Any] | None = None, system: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A message as boto3's ``receive_message`` returns it."""
    record = {
        "MessageId": BROKER_ID,
        "ReceiptHandle": "AQEBwJnKyrHigUMZj6rYigCgxlaS3SLy0a",
        "MD5OfBody": "0" * 32,
        "Body": text(body),
        "Attributes": {
            "SenderId": "AIDAIENQZJOLO23YVJ4VO",
            "SentTimestamp": "1775124930123",
            "ApproximateReceiveCount": "1",
            "ApproximateFirstReceiveTimestamp": "1775124931456",
            **(system or {}),
        },
    }
    return record | ({"MessageAttributes": dict(attributes)} if attributes else {})


def opened(body: object, envelope: Envelope = Envelope.AUTO, *, queue: str = QUEUE, **more: Any) -> Delivery:
    return open_envelope(received(body, **more), queue, envelope=envelope)


def readable(body: object, envelope: Envelope = Envelope.AUTO, **more: Any) -> Message:
    delivery = opened(body, envelope, **more)
    assert delivery.problem is None, delivery.problem
    assert delivery.body == text(body).encode(), "a delivery keeps what the broker delivered"
    return delivery.message
