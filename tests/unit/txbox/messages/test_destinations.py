"""Destinations: which kind, and what each can take."""

from typing import Any

import pytest

from txbox import MessageTooLarge, NotSendable
from txbox.messages.destinations import (
    MAX_EVENTBRIDGE_BYTES,
    MAX_SNS_BYTES,
    MAX_SQS_BYTES,
    is_fifo,
    is_token,
    region,
    require_sendable,
    scheme,
)

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/purchases"
TOPIC = "arn:aws:sns:eu-central-1:123456789012:purchases"
BUS = "arn:aws:events:eu-central-1:123456789012:event-bus/default"


def require(destination: str, body: bytes = b"{}", **fields: Any) -> None:
    require_sendable(destination, body, **{"key": None, "headers": {}, "message_id": "m-1", **fields})


@pytest.mark.parametrize(
    ("destination", "kind"),
    [
        (QUEUE, "sqs"),
        (f"{QUEUE}.fifo", "sqs"),
        ("http://127.0.0.1:4566/000000000000/purchases", "sqs"),
        ("http://localhost:9324/queue/000000000000/purchases", "sqs"),
        (TOPIC, "sns"),
        (f"{TOPIC}.fifo", "sns"),
        ("arn:aws-cn:sns:cn-north-1:123456789012:purchases", "sns"),
        (BUS, "eventbridge"),
        ("arn:aws-us-gov:events:us-gov-west-1:123456789012:event-bus/shop", "eventbridge"),
        ("kafka:purchases", "kafka"),
        ("my+own.scheme-1:anything at all", "my+own.scheme-1"),
        ("hook:https://example.com/hook", "hook"),
    ],
)
def test_kinds(destination: str, kind: str) -> None:
    assert scheme(destination) == kind


@pytest.mark.parametrize(
    "destination",
    ["", "purchases", ":", "kafka:", "Kafka:x", "1:x", "arn:aws:s3:::bucket", "arn:aws:sns:eu:1:x", "a:\0"],
)
def test_what_is_no_destination(destination: str) -> None:
    with pytest.raises(NotSendable, match="is not a destination"):
        scheme(destination)


@pytest.mark.parametrize(
    ("destination", "expected"),
    [
        (QUEUE, "eu-central-1"),
        ("https://sqs.cn-north-1.amazonaws.com.cn/123456789012/purchases", "cn-north-1"),
        ("https://us-gov-west-1.queue.amazonaws.com/123456789012/purchases", "us-gov-west-1"),
        ("https://vpce-1-2.sqs.ap-southeast-2.vpce.amazonaws.com/123456789012/purchases", "ap-southeast-2"),
        ("http://127.0.0.1:4566/000000000000/purchases", None),
        ("http://localhost:4566/000000000000/eu-central-1.", None),
        (TOPIC, "eu-central-1"),
        (BUS, "eu-central-1"),
    ],
)
def test_the_region_that_a_destination_names(destination: str, expected: str | None) -> None:
    assert region(destination) == expected


def test_fifo_is_in_the_name() -> None:
    assert is_fifo(f"{QUEUE}.fifo")
    assert not is_fifo(QUEUE)


@pytest.mark.parametrize(
    ("text", "valid"),
    [("a-1!~", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("a b", False), ("é", False)],
)
def test_what_can_be_a_group(text: str, valid: bool) -> None:
    assert is_token(text) is valid


# --- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("destination", "limit"), [(QUEUE, MAX_SQS_BYTES), (TOPIC, MAX_SNS_BYTES), (BUS, MAX_EVENTBRIDGE_BYTES)]
)
def test_the_largest_message_and_one_byte_more(destination: str, limit: int) -> None:
    def body(size: int) -> bytes:
        return b'{"a":"' + b"x" * (size - 8) + b'"}'

    with pytest.raises(MessageTooLarge) as caught:
        require(destination, body(limit))
    beside = caught.value.size - limit
    assert beside > 0
    require(destination, body(limit - beside))
    with pytest.raises(MessageTooLarge, match=f"at most {limit:,} bytes") as caught:
        require(destination, body(limit - beside + 1))
    assert (caught.value.size, caught.value.limit) == (limit + 1, limit)


def test_a_binary_body_counts_as_it_travels() -> None:
    require(QUEUE, b"\0" * 780_000)
    with pytest.raises(MessageTooLarge):
        require(QUEUE, b"\0" * 790_000)


def test_headers_count() -> None:
    with pytest.raises(MessageTooLarge):
        require(TOPIC, b"x" * 200_000, headers={"a": "y" * 70_000})
    with pytest.raises(MessageTooLarge):
        require(BUS, b"{}", headers={"a": "y" * 1_000_000})


# --- headers ---------------------------------------------------------------------------------------------------------


def headers(count: int) -> dict[str, str]:
    return {f"h{number}": "x" for number in range(count)}


@pytest.mark.parametrize("destination", [QUEUE, TOPIC])
@pytest.mark.parametrize("body", [b"{}", b"", b"\0"])
def test_as_many_headers_whatever_the_body(destination: str, body: bytes) -> None:
    require(destination, body, headers=headers(8))
    with pytest.raises(NotSendable, match="takes 8 headers, as 2 of its 10 attributes are ours; the message has 9"):
        require(destination, body, headers=headers(9))


def test_eventbridge_takes_any_number_and_any_text() -> None:
    require(BUS, headers=headers(50) | {"a b": "", "c": "\0\ufffe"})


@pytest.mark.parametrize("name", ["a b", ".a", "a.", "a..b", "é", "", "AWS.x", "amazon.x", "x" * 257])
def test_an_attributes_name(name: str) -> None:
    with pytest.raises(NotSendable, match="takes no attribute of the name"):
        require(QUEUE, headers={name: "x"})


@pytest.mark.parametrize("name", ["é", "x" * 257])
def test_a_name_for_eventbridge(name: str) -> None:
    with pytest.raises(NotSendable, match="takes no header of the name"):
        require(BUS, headers={name: "x"})


@pytest.mark.parametrize("value", ["", "\0", "\x1b", "\ufffe"])
def test_an_attributes_value(value: str) -> None:
    with pytest.raises(NotSendable, match="takes no header 'a' that is empty or holds control characters"):
        require(TOPIC, headers={"a": value})


@pytest.mark.parametrize("destination", [QUEUE, TOPIC, BUS])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"txbox-body": "plain"}, "txbox- is for txbox itself"),
        ({"Txbox-x": "1"}, "txbox- is for txbox itself"),
        ({"Tenant": "1", "tenant": "2"}, "two headers 'tenant': they arrive in lower case"),
    ],
)
def test_headers_that_would_not_arrive_as_they_are(destination: str, wrong: dict[str, str], why: str) -> None:
    with pytest.raises(NotSendable, match=why):
        require(destination, headers=wrong)
    require("kafka:x", headers=wrong)


@pytest.mark.parametrize("destination", [QUEUE, TOPIC, BUS])
def test_half_a_surrogate_pair_is_refused(destination: str) -> None:
    with pytest.raises(NotSendable):
        require(destination, headers={"a": "\ud800"})
    with pytest.raises(NotSendable):
        require(f"{destination}.fifo", key="\ud800")


def test_a_message_id_with_control_characters() -> None:
    with pytest.raises(NotSendable, match="takes no message id"):
        require(QUEUE, message_id="a\x01b")
    require(BUS, message_id="a\x01b")


# --- keys and events -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("destination", [QUEUE, TOPIC])
@pytest.mark.parametrize("key", ["a b", "é", "x" * 129])
def test_a_key_that_cannot_be_a_group_is_refused_where_it_would_be_one(destination: str, key: str) -> None:
    require(destination, key=key)
    with pytest.raises(NotSendable, match="takes no key"):
        require(f"{destination}.fifo", key=key)


@pytest.mark.parametrize("body", [b"", b"[]", b"text", b"\0", b'{"a": 9223372036854775808}'])
def test_eventbridge_takes_json_objects(body: bytes) -> None:
    with pytest.raises(NotSendable, match="takes a JSON object"):
        require(BUS, body)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"source": "aws.ec2"}, "aws. is for AWS itself"), ({"detail-type": "x" * 129}, "128 characters")],
)
def test_an_events_source_and_type(wrong: dict[str, str], why: str) -> None:
    with pytest.raises(NotSendable, match=why):
        require(BUS, headers=wrong)
