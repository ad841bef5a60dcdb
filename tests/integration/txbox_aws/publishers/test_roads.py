"""From a publisher over the local AWS to what a worker reads."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from support.aws.outgoing import outgoing
from support.aws.roads import Road
from txbox import Message
from txbox.relay import OutboxMessage
from txbox_aws.publishers import AwsPublisher
from txbox_testing.conformance.publisher import DestinationUnderTest, PublisherConformance

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

Publishers = dict[str, AwsPublisher]
MakeRoad = Callable[[str], Road]

TEXT_ROADS = ["sqs", "sqs fifo", "sns", "sns raw", "sns fifo", "sns fifo raw"]
ROADS = [*TEXT_ROADS, "eventbridge"]


class Destination:
    """The beginning of a road, for the suite of all publishers."""

    def __init__(self, road: Road, publisher: AwsPublisher) -> None:
        self._road, self._publisher = road, publisher
        self.name, self.takes_events_only = road.destination, road.kind == "eventbridge"
        self.keeps_order = "fifo" in road.name
        self.gone = f"{road.destination.removesuffix('.fifo')}-gone{'.fifo' * self.keeps_order}"

    def publisher(self) -> AwsPublisher:
        return self._publisher

    def unacceptable(self) -> OutboxMessage:
        return OutboxMessage("wrong", self.name, b"x" * 3_000_000, key="wrong")

    def arrived(self, count: int) -> Sequence[Message]:
        return self._road.arrived()


class TestAwsPublishers(PublisherConformance):
    @pytest.fixture(params=ROADS)
    def destination(
        self, request: pytest.FixtureRequest, publishers: Publishers, make_road: MakeRoad
    ) -> DestinationUnderTest:
        road = make_road(request.param)
        return Destination(road, publishers[road.kind])


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
