"""What is sent to AWS, and how many calls at once."""

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import boto3
import pytest

from support.aws.outgoing import BUS, DESTINATIONS, FIFO_QUEUE, FIFO_TOPIC, OTHERS, QUEUE, TOPIC, numbered, outgoing
from support.aws.scripted_aws import Answer, ScriptedAws, Sent, confirm
from support.waiting import wait_until
from txbox import InvalidConfiguration
from txbox_aws.publishers import AwsPublisher, SqsPublisher, aws_publishers


def string(value: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": value}


def only_entry(broker: ScriptedAws) -> dict[str, Any]:
    (call,) = broker.calls
    (entry,) = call.entries
    return entry.parameters


Publishers = dict[str, AwsPublisher]

# --- SQS and SNS -----------------------------------------------------------------------------------------------------


def test_a_message_for_a_standard_queue(publishers: Publishers, broker: ScriptedAws) -> None:
    publishers["sqs"].send(outgoing(QUEUE, "m-1", body=b'{"a": 1}', key="k", headers={"traceparent": "00-1"}))
    assert only_entry(broker) == {
        "Id": "0",
        "MessageBody": '{"a": 1}',
        "MessageAttributes": {
            "traceparent": string("00-1"),
            "message-id": string("m-1"),
            "txbox-body": string("plain"),
        },
    }


@pytest.mark.parametrize("destination", [FIFO_QUEUE, FIFO_TOPIC])
@pytest.mark.parametrize(
    ("id_", "key", "group", "deduplication"),
    [
        ("m-1", "account-1", "account-1", "m-1"),
        ("m-1", None, "m-1", "m-1"),
        ("a b", None, hashlib.sha256(b"a b").hexdigest(), hashlib.sha256(b"a b").hexdigest()),
        ("x" * 128, "k", "k", "x" * 128),
        ("x" * 129, "k", "k", hashlib.sha256(b"x" * 129).hexdigest()),
        ("Zoë", "k", "k", hashlib.sha256("Zoë".encode()).hexdigest()),
    ],
)
def test_a_fifo_destinations_group_is_the_key_and_its_deduplication_id_the_messages(
    publishers: Publishers,
    broker: ScriptedAws,
    destination: str,
    id_: str,
    key: str | None,
    group: str,
    deduplication: str,
) -> None:
    publishers["sqs" if destination == FIFO_QUEUE else "sns"].send(outgoing(destination, id_, key=key))
    entry = only_entry(broker)
    assert (entry["MessageGroupId"], entry["MessageDeduplicationId"]) == (group, deduplication)


@pytest.mark.parametrize("kind", ["sqs", "sns"])
def test_a_standard_destination_is_given_no_group(publisher: AwsPublisher, broker: ScriptedAws, kind: str) -> None:
    publisher.send(outgoing(DESTINATIONS[kind], "m-1", key="k"))
    assert not {"MessageGroupId", "MessageDeduplicationId"} & only_entry(broker).keys()


def test_a_message_for_a_topic(publishers: Publishers, broker: ScriptedAws) -> None:
    publishers["sns"].send(outgoing(TOPIC, "m-1", body=b"\x00", headers={"tenant": "t-1"}))
    assert broker.calls[0].destination == TOPIC
    assert only_entry(broker)["Message"] == "AA=="
    assert only_entry(broker)["attributes"] == {"tenant": "t-1", "message-id": "m-1", "txbox-body": "base64"}


# --- EventBridge -----------------------------------------------------------------------------------------------------


def test_a_message_for_a_bus(publishers: Publishers, broker: ScriptedAws) -> None:
    publishers["eventbridge"].send(outgoing(BUS, "m-1", body=b'{"a": 1}', key="k", headers={"tenant": "t-1"}))
    assert only_entry(broker) == {
        "EventBusName": BUS,
        "Source": "txbox",
        "DetailType": "message",
        "Detail": '{"a": 1}',
        "Resources": ["message-id:m-1", "key:k", "header:tenant=t-1", "body:spaced"],
    }


def test_headers_name_an_events_source_and_type(publishers: Publishers, broker: ScriptedAws) -> None:
    publishers["eventbridge"].send(outgoing(BUS, "m-1", headers={"source": "shop", "Detail-Type": "Purchase"}))
    entry = only_entry(broker)
    assert (entry["Source"], entry["DetailType"]) == ("shop", "Purchase")
    assert "header:source=shop" in entry["Resources"]


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "limit"), [("sqs", 1_048_576), ("sns", 262_144), ("eventbridge", 1_000_000)])
def test_a_call_has_no_more_bytes_than_the_service_takes(
    publisher: AwsPublisher, broker: ScriptedAws, kind: str, limit: int
) -> None:
    third = b'{"a":"' + b"x" * (limit // 3 - 150) + b'"}'
    publisher.send(numbered(DESTINATIONS[kind], 4, body=third))
    assert sorted(len(call.entries) for call in broker.calls) == [1, 3]


def test_destinations_do_not_share_a_call(publisher: AwsPublisher, broker: ScriptedAws, kind: str) -> None:
    assert list(publisher.send(numbered(DESTINATIONS[kind], 2) + outgoing(OTHERS[kind], "o"))) == []
    assert {call.destination: call.ids for call in broker.calls} == {
        DESTINATIONS[kind]: ["m0", "m1"],
        OTHERS[kind]: ["o"],
    }


def test_each_thread_that_sends_makes_a_call_and_they_share_the_others(
    make_publisher: Callable[..., AwsPublisher], broker: ScriptedAws
) -> None:
    enough = threading.Event()

    def answer(call: Sent) -> Answer:
        enough.wait(20)
        return confirm(call)

    publisher = make_publisher("sqs", calls_at_once=3)
    publisher.send(numbered(QUEUE, 1))
    broker.answer = answer
    threads = [threading.Thread(target=publisher.send, args=(numbered(QUEUE, 40),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(broker.calls) == 1 + 4, "four calls are under way")
    enough.set()
    for thread in threads:
        thread.join()
    assert (len(broker.calls), broker.most_at_once) == (1 + 8, 4)


def test_calls_that_hang_keep_no_other_destination_waiting(
    make_publisher: Callable[..., AwsPublisher], broker: ScriptedAws
) -> None:
    freed = threading.Event()
    hanging = [QUEUE.replace("purchases", f"hangs-{number}") for number in range(4)]

    def answer(call: Sent) -> Answer:
        if call.destination in hanging:
            freed.wait(20)
        return confirm(call)

    publisher = make_publisher("sqs", calls_at_once=3)
    for destination in [QUEUE, *hanging]:
        publisher.send(numbered(destination, 1))
    broker.answer = answer
    threads = [threading.Thread(target=publisher.send, args=(numbered(queue, 40),)) for queue in hanging]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(broker.calls) == 5 + 4 + 2, "each of them hangs, and so do all threads that are shared")
    assert publisher.send(numbered(QUEUE, 40)) == []
    freed.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("destination", "region"),
    [
        (QUEUE, "eu-central-1"),
        ("https://sqs.cn-north-1.amazonaws.com.cn/123456789012/purchases", "cn-north-1"),
        ("http://127.0.0.1:9324/000000000000/purchases", "us-west-2"),
    ],
)
def test_the_region_is_the_destinations_or_else_boto3s_own(
    broker: ScriptedAws, monkeypatch: pytest.MonkeyPatch, destination: str, region: str
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    with SqsPublisher() as publisher:
        publisher.send(outgoing(destination, "m-1"))
        (client,) = publisher._clients._made.values()
        assert client.meta.region_name == region
    assert broker.calls[0].destination == destination


def test_a_clients_pool_has_a_connection_for_each_call() -> None:
    with SqsPublisher(calls_at_once=17, connect_timeout_seconds=1, read_timeout_seconds=2) as publisher:
        config = publisher._clients.of("eu-central-1").meta.config
    assert (config.max_pool_connections, config.connect_timeout, config.read_timeout) == (17, 1, 2)
    assert config.retries["total_max_attempts"] == 2


def test_a_client_that_is_given_is_used_and_not_closed(broker: ScriptedAws) -> None:
    client = boto3.client("sqs", region_name="eu-central-1")
    with SqsPublisher(client=client) as publisher:
        publisher.send(numbered(QUEUE, 1))
    client.send_message_batch(
        QueueUrl=QUEUE,
        Entries=[{"Id": "0", "MessageBody": "b", "MessageAttributes": {"message-id": string("m-2")}}],  # type: ignore[typeddict-item]
    )
    client.close()
    assert [call.ids for call in broker.calls] == [["m0"], ["m-2"]]


def test_a_closed_publisher_can_be_used_again(broker: ScriptedAws) -> None:
    publisher = SqsPublisher()
    before = set(threading.enumerate())
    for _ in range(2):
        publisher.send(numbered(QUEUE, 1))
        publisher.close()
        assert not [one for one in threading.enumerate() if one not in before and one.name.startswith("txbox-")]
    assert len(broker.calls) == 2


def test_nothing_is_connected_before_something_is_sent(broker: ScriptedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    publishers = aws_publishers()
    assert set(publishers) == {"sqs", "sns", "eventbridge"}
    assert list(publishers["sqs"].send([])) == []
    assert broker.calls == []


@pytest.mark.parametrize("name", ["calls_at_once", "connect_timeout_seconds", "read_timeout_seconds"])
def test_an_argument_that_cannot_work_is_named(name: str) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"SqsPublisher\.{name} must be more than 0, not 0"):
        SqsPublisher(**{name: 0})
