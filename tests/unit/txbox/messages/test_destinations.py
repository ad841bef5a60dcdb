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


# --- what a destination cannot take ----------------------------------------------------------------------------------


def headers(count: int) -> dict[str, str]:
    return {f"h{number}": "x" for number in range(count)}


@pytest.mark.parametrize("destination", [QUEUE, TOPIC])
@pytest.mark.parametrize("body", [b"{}", b"", b"\0"])
def test_as_many_headers_whatever_the_body(destination: str, body: bytes) -> None:
    require(destination, body, headers=headers(8))
    with pytest.raises(NotSendable, match="takes 8 headers, as 2 of its 10 attributes are ours; the message has 9"):
        require(destination, body, headers=headers(9))


NAMES = ["a b", ".a", "a.", "a..b", "é", "", "AWS.x", "amazon.x", "x" * 257]
KEYS = ["a b", "é", "x" * 129]
NOT_AS_THEY_ARE = [
    ({"txbox-body": "plain"}, "txbox- is for txbox itself"),
    ({"Txbox-x": "1"}, "txbox- is for txbox itself"),
    ({"Tenant": "1", "tenant": "2"}, "two headers 'tenant': they arrive in lower case"),
]
AWS = (QUEUE, TOPIC, BUS)


@pytest.mark.parametrize(
    ("destination", "fields", "why"),
    [
        *((QUEUE, {"headers": {name: "x"}}, "takes no attribute of the name") for name in NAMES),
        *((BUS, {"headers": {name: "x"}}, "takes no header of the name") for name in ("é", "x" * 257)),
        *(
            (TOPIC, {"headers": {"a": value}}, "takes no header 'a' that is empty or holds control characters")
            for value in ("", "\0", "\x1b", "\ufffe")
        ),
        *((where, {"headers": wrong}, why) for where in AWS for wrong, why in NOT_AS_THEY_ARE),
        *((where, {"headers": {"a": "\ud800"}}, "not valid Unicode|control characters") for where in AWS),
        *((f"{where}.fifo", {"key": "\ud800"}, ".") for where in AWS),
        (QUEUE, {"message_id": "a\x01b"}, "takes no message id"),
        *((f"{where}.fifo", {"key": key}, "takes no key") for where in (QUEUE, TOPIC) for key in KEYS),
        *(
            (BUS, {"body": body}, "takes a JSON object")
            for body in (b"", b"[]", b"text", b"\0", b'{"a": 9223372036854775808}')
        ),
        (BUS, {"headers": {"source": "aws.ec2"}}, "aws. is for AWS itself"),
        (BUS, {"headers": {"detail-type": "x" * 129}}, "128 characters"),
    ],
)
def test_what_would_not_arrive_as_it_is_is_refused(destination: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(NotSendable, match=why):
        require(destination, **fields)


def test_others_take_it() -> None:
    require(BUS, headers=headers(50) | {"a b": "", "c": "\0\ufffe"})
    require(BUS, message_id="a\x01b")
    for wrong, _ in NOT_AS_THEY_ARE:
        require("kafka:x", headers=wrong)
    for key in KEYS:
        require(QUEUE, key=key)
        require(TOPIC, key=key)
