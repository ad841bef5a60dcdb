"""Envelopes: every wrapper that AWS and CloudEvents know."""

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given

from support.aws.envelopes import (
    BROKER_ID,
    CLOUDEVENT,
    CLOUDEVENT_ID,
    EVENTBRIDGE_EVENT,
    EVENTBRIDGE_ID,
    PURCHASE,
    SNS_ID,
    SNS_NOTIFICATION,
    attributes_of_sqs,
    opened,
    readable,
    text,
    without,
)
from support.aws.queues import QUEUE, attribute
from txbox import Message
from txbox_aws.envelopes import Envelope, _sendable, open_envelope, restored_attributes

# --- no wrapper ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.RAW, Envelope.JSON])
def test_a_body_without_wrapper_is_the_payload(envelope: Envelope) -> None:
    message = readable(PURCHASE, envelope)
    assert message == Message(BROKER_ID, PURCHASE.encode(), {}, QUEUE)


@pytest.mark.parametrize("wrapper", [SNS_NOTIFICATION, EVENTBRIDGE_EVENT, CLOUDEVENT])
@pytest.mark.parametrize("envelope", [Envelope.RAW, Envelope.JSON])
def test_who_asks_for_the_body_as_it_is_gets_it(wrapper: dict[str, Any], envelope: Envelope) -> None:
    message = readable(wrapper, envelope)
    assert message.body == text(wrapper).encode()
    assert message.id == BROKER_ID


def test_a_delivery_says_what_the_broker_said_of_it() -> None:
    delivery = opened(PURCHASE, queue=f"{QUEUE}.fifo", system={"ApproximateReceiveCount": "7", "MessageGroupId": "a-1"})
    assert (delivery.receive_count, delivery.group) == (7, "a-1")
    assert delivery.receipt == "AQEBwJnKyrHigUMZj6rYigCgxlaS3SLy0a"
    assert delivery.envelope["system"]["SentTimestamp"] == "1775124930123"
    assert (opened(PURCHASE).receive_count, opened(PURCHASE).group) == (1, None)


def test_the_group_of_a_standard_queue_keeps_no_order() -> None:
    assert opened(PURCHASE, system={"MessageGroupId": "tenant-1"}).group is None


def test_a_record_with_nothing_but_the_necessary_is_enough() -> None:
    delivery = open_envelope({"MessageId": "m-1", "ReceiptHandle": "r-1"}, QUEUE)
    assert (delivery.message.id, delivery.message.body, delivery.receive_count) == ("m-1", b"", 1)


# --- SNS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.SNS])
def test_sns_in_sqs(envelope: Envelope) -> None:
    message = readable(SNS_NOTIFICATION, envelope)
    assert (message.id, message.body) == (SNS_ID, PURCHASE.encode())
    assert message.headers == {
        "sns-message-id": SNS_ID,
        "sns-topic-arn": "arn:aws:sns:eu-central-1:123456789012:purchases",
        "sns-subject": "Purchase",
        "sns-timestamp": "2026-04-02T10:15:30.123Z",
        "tenant": "t-1",
        "trace": "AAEC",
    }


def test_sns_without_subject_and_attributes() -> None:
    message = readable(without(SNS_NOTIFICATION, "Subject", "MessageAttributes"))
    assert set(message.headers) == {"sns-message-id", "sns-topic-arn", "sns-timestamp"}


def test_sns_with_raw_delivery_is_a_body_with_attributes_and_the_brokers_id() -> None:
    # https://docs.aws.amazon.com/sns/latest/dg/sns-large-payload-raw-message-delivery.html
    message = readable(PURCHASE, attributes={"Tenant": attribute("t-1")})
    assert (message.id, message.body, message.headers) == (BROKER_ID, PURCHASE.encode(), {"tenant": "t-1"})


def test_a_message_id_attribute_given_to_sns_travels_inside_the_notification() -> None:
    attributes = {"message-id": {"Type": "String", "Value": "purchase-1"}}
    assert readable({**SNS_NOTIFICATION, "MessageAttributes": attributes}).id == "purchase-1"


# --- EventBridge -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.EVENTBRIDGE])
def test_eventbridge_in_sqs(envelope: Envelope) -> None:
    message = readable(EVENTBRIDGE_EVENT, envelope)
    assert message.id == EVENTBRIDGE_ID
    assert message.json() == {"account": "a-1", "amount": 10}
    assert message.headers == {
        "eventbridge-id": EVENTBRIDGE_ID,
        "eventbridge-source": "com.example.shop",
        "eventbridge-detail-type": "Purchase",
        "eventbridge-time": "2026-04-02T10:15:30Z",
        "eventbridge-account": "123456789012",
        "eventbridge-region": "eu-central-1",
    }


@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.SNS, Envelope.EVENTBRIDGE])
def test_eventbridge_in_sns_in_sqs(envelope: Envelope) -> None:
    message = readable({**SNS_NOTIFICATION, "Message": text(EVENTBRIDGE_EVENT)}, envelope)
    assert message.id == EVENTBRIDGE_ID, "the innermost id is the producer's"
    assert message.json() == {"account": "a-1", "amount": 10}
    assert message.headers["sns-message-id"] == SNS_ID


@pytest.mark.parametrize(
    "detail",
    [{}, [], None, "text", 12_345_678_901_234_567_890, 10**4_000, {"Zoë": "😀", "half": "\ud83d"}],
    ids=["object", "list", "null", "text", "big", "huge", "half a surrogate pair"],
)
def test_whatever_the_detail_is_it_arrives(detail: object) -> None:
    message = readable({**EVENTBRIDGE_EVENT, "detail": detail})
    assert message.json() == detail


# --- CloudEvents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.CLOUDEVENTS])
def test_a_structured_cloudevent(envelope: Envelope) -> None:
    message = readable(CLOUDEVENT, envelope)
    assert message.id == CLOUDEVENT_ID
    assert message.json() == {"account": "a-1", "amount": 10}
    assert message.headers["ce-type"] == "com.example.purchase"
    assert message.headers["ce-time"] == "2026-04-02T10:15:30Z"
    assert "ce-data" not in message.headers


@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.SNS, Envelope.CLOUDEVENTS])
def test_a_structured_cloudevent_in_sns_in_sqs(envelope: Envelope) -> None:
    message = readable({**SNS_NOTIFICATION, "Message": text(CLOUDEVENT)}, envelope)
    assert message.id == CLOUDEVENT_ID
    assert message.json() == {"account": "a-1", "amount": 10}


# https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md#31-handling-of-data
@pytest.mark.parametrize(
    ("data", "body"),
    [
        ({"data": {"a": 1}}, b'{"a": 1}'),
        ({"data": None}, b"null"),
        ({"data": "text"}, b'"text"'),
        ({"data": "text", "datacontenttype": None}, b'"text"'),
        ({"data": "text", "datacontenttype": "application/json"}, b'"text"'),
        ({"data": "text", "datacontenttype": "application/vnd.api+json"}, b'"text"'),
        ({"data": "<a/>", "datacontenttype": "application/xml"}, b"<a/>"),
        ({"data": "Zoë", "datacontenttype": "text/plain"}, "Zoë".encode()),
        ({"data_base64": base64.b64encode(b"\x00\xff").decode()}, b"\x00\xff"),
        ({}, b""),
    ],
    ids=str,
)
def test_data_of_every_kind(data: dict[str, Any], body: bytes) -> None:
    message = readable({**without(CLOUDEVENT, "data", "datacontenttype"), **data})
    assert message.body == body


def test_context_attributes_are_spelled_as_in_binary_mode() -> None:
    # https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/spec.md#type-system
    extensions = {"traced": True, "partition": 7, "nothing": None, "nested": {"not": "allowed"}}
    headers = readable({**CLOUDEVENT, **extensions}).headers
    assert (headers["ce-traced"], headers["ce-partition"]) == ("true", "7")
    assert "ce-nothing" not in headers
    assert "ce-nested" not in headers


@pytest.mark.parametrize("prefix", ["ce-", "ce_", "CE_", "cloudEvents:", "cloudEvents_"])
@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.CLOUDEVENTS])
def test_a_binary_cloudevent_is_told_by_its_attributes(prefix: str, envelope: Envelope) -> None:
    context = {
        "specversion": "1.0",
        "type": "com.example.purchase",
        "source": "/shop/purchases",
        "id": "A234-1234-1234",
    }
    attributes = {f"{prefix}{name}": attribute(value) for name, value in context.items()}
    message = readable(PURCHASE, envelope, attributes=attributes)
    assert (message.id, message.body) == (CLOUDEVENT_ID, PURCHASE.encode())
    assert message.headers == {f"ce-{name}": value for name, value in context.items()}


def test_a_binary_cloudevents_body_is_not_opened() -> None:
    attributes = {"ce_id": attribute("outer"), "ce_source": attribute("/shop")}
    message = readable(CLOUDEVENT, attributes=attributes)
    assert (message.id, message.body) == ("/shop outer", text(CLOUDEVENT).encode())


# --- what is almost a wrapper ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "almost",
    [
        {**SNS_NOTIFICATION, "Type": "SubscriptionConfirmation"},
        without(SNS_NOTIFICATION, "TopicArn"),
        {**SNS_NOTIFICATION, "Message": {"not": "text"}},
        *(without(EVENTBRIDGE_EVENT, name) for name in ("id", "source", "detail-type", "time", "account", "detail")),
        {**EVENTBRIDGE_EVENT, "id": 7},
        *(without(CLOUDEVENT, name) for name in ("specversion", "type", "source", "id")),
        {**CLOUDEVENT, "id": 7},
        [SNS_NOTIFICATION],
    ],
    ids=lambda almost: text(almost)[:60],
)
def test_what_only_resembles_a_wrapper_is_the_payload(almost: object) -> None:
    message = readable(almost)
    assert (message.id, message.body, message.headers) == (BROKER_ID, text(almost).encode(), {})


@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.SNS])
def test_a_payload_is_not_opened_twice(envelope: Envelope) -> None:
    inner = {**SNS_NOTIFICATION, "MessageId": "inner"}
    message = readable({**SNS_NOTIFICATION, "Message": text(inner)}, envelope)
    assert (message.id, message.body) == (SNS_ID, text(inner).encode())


@pytest.mark.parametrize("written", ["1234567890.123456789012", "1e999", "10.10", '{"a": 1, "a" : 2}', '"\\u00e9"'])
def test_a_payload_leaves_its_wrapper_as_it_was_written(written: str) -> None:
    event = json.dumps(EVENTBRIDGE_EVENT | {"detail": "HERE"}).replace('"HERE"', written)
    assert readable(event).body == written.encode()
    event = json.dumps({**CLOUDEVENT, "data": "HERE"}).replace('"HERE"', f" {written}\n")
    assert readable(event).body == written.encode()


def test_of_two_members_of_one_name_the_last_counts() -> None:
    event = json.dumps(EVENTBRIDGE_EVENT | {"detail": "HERE"}).replace('"HERE"', '1, "detail" : 2')
    assert readable(event).body == b"2"


def test_a_wrapper_around_a_very_long_number_is_still_seen() -> None:
    event = json.dumps({**CLOUDEVENT, "data": "HERE"}).replace('"HERE"', "9" * 5_000)
    assert (readable(event).id, readable(event).body) == (CLOUDEVENT_ID, b"9" * 5_000)


# --- attributes ------------------------------------------------------------------------------------------------------


@given(attributes_of_sqs)
def test_attributes_survive_being_parked_as_json(attributes: dict[str, dict[str, Any]]) -> None:
    assert restored_attributes(json.loads(json.dumps(_sendable(attributes)))) == attributes


def test_attributes_become_headers_in_lower_case() -> None:
    attributes = {
        "Tenant-Id": attribute("T-1"),
        "Count": {"DataType": "Number", "StringValue": "7"},
        "Blob": {"DataType": "Binary", "BinaryValue": b"\x00\x01\x02"},
    }
    message = readable(PURCHASE, attributes=attributes)
    assert message.headers == {"tenant-id": "T-1", "count": "7", "blob": "AAEC"}


# --- when it was sent ------------------------------------------------------------------------------------------------


SENT = datetime(2026, 4, 2, 10, 15, 30, 123_000, tzinfo=UTC)
LATER = str(round(SENT.timestamp() * 1_000) + 60_000)


@pytest.mark.parametrize(
    ("body", "sent_at"),
    [
        (PURCHASE, SENT + timedelta(seconds=60)),  # SQS's own
        (SNS_NOTIFICATION, SENT),
        (EVENTBRIDGE_EVENT, SENT.replace(microsecond=0)),
        (CLOUDEVENT, SENT.replace(microsecond=0)),
        ({**SNS_NOTIFICATION, "Message": json.dumps(CLOUDEVENT)}, SENT.replace(microsecond=0)),
        ({**CLOUDEVENT, "time": "soon"}, SENT + timedelta(seconds=60)),
        ({**SNS_NOTIFICATION, "Timestamp": 7}, SENT + timedelta(seconds=60)),
    ],
)
def test_a_message_was_sent_at_the_earliest_time_that_is_known_of_it(body: object, sent_at: datetime) -> None:
    assert readable(body, system={"SentTimestamp": LATER}).sent_at == sent_at


def test_a_message_without_any_time_is_of_unknown_age() -> None:
    assert readable(PURCHASE, system={"SentTimestamp": "never"}).sent_at is None
