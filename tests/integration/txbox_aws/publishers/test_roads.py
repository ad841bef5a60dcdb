"""From a publisher over the local AWS to what a worker reads."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from support.aws.outgoing import outgoing, sent
from support.aws.roads import Road
from txbox.relay import OutboxMessage
from txbox_aws.publishers import AwsPublisher

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

Publishers = dict[str, AwsPublisher]
MakeRoad = Callable[[str], Road]

TEXT_ROADS = ["sqs", "sqs fifo", "sns", "sns raw", "sns fifo", "sns fifo raw"]
ROADS = [*TEXT_ROADS, "eventbridge"]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

WRAPPER = {"Type": "Notification", "MessageId": "other", "TopicArn": "arn:aws:sns:x:1:x", "Message": "inner"}
EVENTS = [
    b"{}",
    b'{"a":1}',
    b'{"a": 1.10,\n"a": "twice"}',
    '{"Zoë": "<detail>"}'.encode(),
    json.dumps(WRAPPER).encode(),
    b'{"large": "' + b"x" * 200_000 + b'"}',
]
BODIES = [*EVENTS, b"", b"\x00\xff", "\ufffe \x0b".encode(), "Zoë 😀\r\n\t".encode(), b"plain", b'{"a":' * 20_000]


@pytest.mark.parametrize("road", ROADS)
def test_every_body_and_header_arrives_as_it_was_sent_under_its_own_id(
    publishers: Publishers, make_road: MakeRoad, road: str
) -> None:
    there = make_road(road)
    bodies = EVENTS if road == "eventbridge" else BODIES
    headers = {"traceparent": TRACEPARENT, "tenant": "Zoë, <b>&amp;</b>"}
    messages = [
        OutboxMessage(f"m{number}", there.destination, body, key=f"k{number}", headers=headers)
        for number, body in enumerate(bodies)
    ]
    assert list(publishers[there.kind].send(messages)) == []
    arrived = {message.id: message for message in there.arrived()}
    assert {id_: message.body for id_, message in arrived.items()} == {one.id: one.body for one in messages}
    assert all(headers.items() <= message.headers.items() for message in arrived.values())
    if "fifo" in road:
        assert {message.headers["sqs-group-id"] for message in arrived.values()} == {one.key for one in messages}


@pytest.mark.parametrize("road", ["sqs fifo", "sns fifo"])
def test_a_group_keeps_its_order_and_what_is_sent_twice_arrives_once(
    publishers: Publishers, make_road: MakeRoad, road: str
) -> None:
    there = make_road(road)
    for number in range(5):
        wave = [outgoing(there.destination, f"{key}-{number}", key=key)[0] for key in "abcdefghijklmno"]
        for _ in range(2):
            assert list(publishers[there.kind].send(wave)) == []
    arrived = [message.id for message in there.arrived()]
    assert len(arrived) == 75
    for key in "abcdefghijklmno":
        assert [id_ for id_ in arrived if id_.startswith(f"{key}-")] == [f"{key}-{number}" for number in range(5)]


def test_large_bodies_are_cut_into_as_many_calls_as_they_need(publishers: Publishers, make_road: MakeRoad) -> None:
    there = make_road("sqs")
    bodies = [bytes([65 + number]) * 400_000 for number in range(5)]
    messages = [OutboxMessage(f"m{number}", there.destination, body) for number, body in enumerate(bodies)]
    assert list(publishers["sqs"].send(messages)) == []
    assert sorted(message.body for message in there.arrived()) == bodies


@pytest.mark.parametrize("kind", ["sqs", "sns"])
def test_a_destination_that_does_not_exist_is_nobodys_fault_and_others_are_served(
    publishers: Publishers, make_road: MakeRoad, kind: str
) -> None:
    there = make_road(kind)
    nowhere = outgoing(f"{there.destination}-gone", "lost")
    refused, outage = sent(publishers[kind], nowhere + outgoing(there.destination, "m1"))
    assert refused == []
    assert (list(outage.unsent), outage.permanent) == (nowhere, True)
    assert [message.id for message in there.arrived()] == ["m1"]


def test_an_event_that_did_not_come_from_an_outbox_is_read_as_before(
    events: object, make_road: MakeRoad, sqs: "SQSClient"
) -> None:
    there = make_road("eventbridge")
    bus = there.destination
    entry = {"EventBusName": bus, "Source": "s", "DetailType": "d", "Detail": '{"a": 1}', "Resources": ["message-id:x"]}
    event_id = events.put_events(Entries=[entry])["Entries"][0]["EventId"]  # type: ignore[attr-defined]
    (message,) = there.arrived()
    assert (message.id, message.json()) == (event_id, {"a": 1})
    assert message.headers["eventbridge-account"] == "123456789012"
