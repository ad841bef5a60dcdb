"""Envelopes: every wrapper that AWS and CloudEvents know, whole and broken.

The bodies are those that the services really send; only names, numbers and signatures were replaced.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txbox import InvalidMessageId, MalformedMessage, Message
from txbox_workers.delivery import Delivery
from txbox_workers.envelopes import Envelope, _sendable, open_envelope, restored_attributes

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/purchases"
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

UNREADABLE = ["", " ", "purchase 1", "{", "[]", "[1]", "null", "12", '"text"', "{}", '{"a":' * 100_000, "9" * 10_000]


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


def string(value: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": value}


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
        "tenant": "t-1",
        "trace": "AAEC",
    }


def test_sns_without_subject_and_attributes() -> None:
    message = readable(without(SNS_NOTIFICATION, "Subject", "MessageAttributes"))
    assert set(message.headers) == {"sns-message-id", "sns-topic-arn"}


def test_sns_with_raw_delivery_is_a_body_with_attributes_and_the_brokers_id() -> None:
    # https://docs.aws.amazon.com/sns/latest/dg/sns-large-payload-raw-message-delivery.html
    message = readable(PURCHASE, attributes={"Tenant": string("t-1")})
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
    attributes = {f"{prefix}{name}": string(value) for name, value in context.items()}
    message = readable(PURCHASE, envelope, attributes=attributes)
    assert (message.id, message.body) == (CLOUDEVENT_ID, PURCHASE.encode())
    assert message.headers == {f"ce-{name}": value for name, value in context.items()}


def test_a_binary_cloudevents_body_is_not_opened() -> None:
    attributes = {"ce_id": string("outer"), "ce_source": string("/shop")}
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


def test_a_payload_is_not_opened_twice() -> None:
    inner = {**SNS_NOTIFICATION, "MessageId": "inner"}
    message = readable({**SNS_NOTIFICATION, "Message": text(inner)})
    assert (message.id, message.body) == (SNS_ID, text(inner).encode())


def test_sns_that_was_promised_is_opened_once_too() -> None:
    inner = {**SNS_NOTIFICATION, "MessageId": "inner"}
    message = readable({**SNS_NOTIFICATION, "Message": text(inner)}, Envelope.SNS)
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


def test_the_group_of_a_standard_queue_keeps_no_order() -> None:
    assert opened(PURCHASE, system={"MessageGroupId": "tenant-1"}).group is None


TOO_DEEP = "is nested too deeply to be read"


def test_a_wrapper_around_a_very_long_number_is_still_seen() -> None:
    event = json.dumps({**CLOUDEVENT, "data": "HERE"}).replace('"HERE"', "9" * 5_000)
    assert (readable(event).id, readable(event).body) == (CLOUDEVENT_ID, b"9" * 5_000)


def test_what_is_nested_too_deeply_to_be_looked_at_is_not_passed_on_under_another_id() -> None:
    event = json.dumps({**CLOUDEVENT, "data": "HERE"}).replace('"HERE"', "[" * 200_000 + "]" * 200_000)
    problem = opened(event).problem
    assert isinstance(problem, MalformedMessage)
    assert str(problem) == f"message {BROKER_ID} {TOO_DEEP}"


def test_the_deduplication_id_that_a_redrive_has_kept_counts() -> None:
    system = {"MessageDeduplicationId": "redrive-7-1", "MessageGroupId": "a-1"}
    attributes = {"sqs-deduplication-id": string("purchase-1"), "first-delivery-id": string("m-0")}
    assert readable(PURCHASE, system=system, attributes=attributes).id == "a-1 purchase-1"
    assert readable(PURCHASE, attributes={"first-delivery-id": string("m-0")}).id == "m-0"


@pytest.mark.parametrize("body", UNREADABLE, ids=lambda body: body[:10])
@pytest.mark.parametrize(
    ("envelope", "what"),
    [
        (Envelope.SNS, "is not an SNS notification"),
        (Envelope.EVENTBRIDGE, "is not an EventBridge event"),
        (Envelope.CLOUDEVENTS, "is not a CloudEvent"),
    ],
)
def test_a_wrapper_that_was_promised_has_to_be_there(envelope: Envelope, what: str, body: str) -> None:
    system = {"ApproximateReceiveCount": "3", "MessageGroupId": "a-1"}
    delivery = opened(body, envelope, queue=f"{QUEUE}.fifo", system=system)
    assert isinstance(delivery.problem, MalformedMessage)
    assert str(delivery.problem) in (f"message {BROKER_ID} {what}", f"message {BROKER_ID} {TOO_DEEP}")
    # It goes the way of a failed message, so all that is known of it is kept.
    assert (delivery.message.id, delivery.message.body, delivery.body) == (BROKER_ID, body.encode(), body.encode())
    assert (delivery.receive_count, delivery.group) == (3, "a-1")


@pytest.mark.parametrize("envelope", [Envelope.EVENTBRIDGE, Envelope.CLOUDEVENTS])
def test_sns_around_something_else_than_was_promised(envelope: Envelope) -> None:
    assert isinstance(opened(SNS_NOTIFICATION, envelope).problem, MalformedMessage)


@pytest.mark.parametrize("body", ["", "{", "purchase 1", "[" * 200_000, "9" * 10_000], ids=lambda body: body[:10])
def test_json_that_was_promised_has_to_be_json(body: str) -> None:
    problem = opened(body, Envelope.JSON).problem
    assert isinstance(problem, MalformedMessage)
    assert f"message {BROKER_ID} is not JSON" in str(problem)


@pytest.mark.parametrize("data", ["not base64!", 7, None, ["AAEC"]])
@pytest.mark.parametrize("envelope", [Envelope.AUTO, Envelope.CLOUDEVENTS])
def test_a_cloudevent_with_broken_base64_is_malformed(data: object, envelope: Envelope) -> None:
    problem = opened({**without(CLOUDEVENT, "data"), "data_base64": data}, envelope).problem
    assert isinstance(problem, MalformedMessage)
    assert "data_base64 of CloudEvent A234-1234-1234 is not base64" in str(problem)


@pytest.mark.parametrize("body", [{**SNS_NOTIFICATION, "Message": "\ud800"}, {**CLOUDEVENT, "source": "\ud800"}])
def test_half_a_surrogate_pair_where_text_is_needed_is_malformed(body: dict[str, Any]) -> None:
    delivery = opened(body)
    assert isinstance(delivery.problem, MalformedMessage)
    assert isinstance(delivery.problem.__cause__, UnicodeEncodeError)


# --- choosing the id -------------------------------------------------------------------------------------------------


def test_identify_is_given_the_message_without_its_wrappers() -> None:
    seen: list[Message] = []

    def by_account(message: Message) -> str:
        seen.append(message)
        return str(message.json()["account"])

    delivery = open_envelope(received(SNS_NOTIFICATION), QUEUE, identify=by_account)
    assert delivery.message.id == "a-1"
    assert (seen[0].id, seen[0].body, seen[0].source) == (BROKER_ID, PURCHASE.encode(), QUEUE)


def test_an_identify_that_raises_makes_its_message_malformed() -> None:
    delivery = open_envelope(received(PURCHASE), QUEUE, identify=lambda message: str(message.json()["no such key"]))
    assert isinstance(delivery.problem, MalformedMessage)
    assert str(delivery.problem) == "the message's id could not be told: KeyError: 'no such key'"
    assert isinstance(delivery.problem.__cause__, KeyError)
    assert delivery.message.id == BROKER_ID


@pytest.mark.parametrize("not_text", [None, 7, b"id"])
def test_an_identify_that_returns_no_text_makes_its_message_malformed(not_text: Any) -> None:
    delivery = open_envelope(received(PURCHASE), QUEUE, identify=lambda message: not_text)
    assert isinstance(delivery.problem, MalformedMessage)
    assert "TypeError: a message id is a string" in str(delivery.problem)


@pytest.mark.parametrize("useless", ["", "a\0b", "x" * 1_001, "\ud800"], ids=["empty", "NUL", "long", "surrogate"])
def test_an_id_that_the_inbox_cannot_keep_is_a_problem_of_the_message(useless: str) -> None:
    delivery = open_envelope(received(PURCHASE), QUEUE, identify=lambda message: useless)
    assert isinstance(delivery.problem, InvalidMessageId)
    assert delivery.message.id == BROKER_ID


def test_a_message_id_that_is_too_long_is_not_cut() -> None:
    delivery = opened(PURCHASE, attributes={"message-id": string("x" * 1_001)})
    assert isinstance(delivery.problem, InvalidMessageId)


def test_a_fifo_deduplication_id_is_an_id_within_its_group() -> None:
    message = readable(PURCHASE, system={"MessageDeduplicationId": "purchase-1", "MessageGroupId": "a-1"})
    assert message.id == "a-1 purchase-1"


# --- attributes ------------------------------------------------------------------------------------------------------

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


@given(attributes_of_sqs)
def test_attributes_survive_being_parked_as_json(attributes: dict[str, dict[str, Any]]) -> None:
    assert restored_attributes(json.loads(json.dumps(_sendable(attributes)))) == attributes


def test_attributes_become_headers_in_lower_case() -> None:
    attributes = {
        "Tenant-Id": string("T-1"),
        "Count": {"DataType": "Number", "StringValue": "7"},
        "Blob": {"DataType": "Binary", "BinaryValue": b"\x00\x01\x02"},
    }
    message = readable(PURCHASE, attributes=attributes)
    assert message.headers == {"tenant-id": "T-1", "count": "7", "blob": "AAEC"}


# --- whatever comes --------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
damaged_wrappers = st.builds(
    lambda wrapper, name, value: json.dumps({**wrapper, name: value}),
    st.sampled_from([SNS_NOTIFICATION, EVENTBRIDGE_EVENT, CLOUDEVENT]),
    st.sampled_from(sorted({*SNS_NOTIFICATION, *EVENTBRIDGE_EVENT, *CLOUDEVENT, "data_base64"})),
    json_values,
)
any_text = st.text(st.characters())


@given(
    body=any_text | json_values.map(json.dumps) | damaged_wrappers,
    envelope=st.sampled_from(Envelope),
    attributes=st.just({}) | attributes_of_sqs,
)
@example(body="\ud800", envelope=Envelope.AUTO, attributes={})
@example(body='{"a":' * 100_000, envelope=Envelope.AUTO, attributes={})
@example(body=f'{{"detail": {"9" * 10_000}}}', envelope=Envelope.AUTO, attributes={})
def test_no_body_at_all_makes_open_envelope_raise(
    body: str, envelope: Envelope, attributes: dict[str, dict[str, Any]]
) -> None:
    delivery = open_envelope(received("") | {"Body": body, "MessageAttributes": attributes}, QUEUE, envelope=envelope)
    assert delivery.body == body.encode("utf-8", "surrogatepass")
    if delivery.problem is not None:
        assert (delivery.message.id, delivery.message.body) == (BROKER_ID, delivery.body)
    elif envelope in (Envelope.RAW, Envelope.JSON):
        assert delivery.message.body == delivery.body
