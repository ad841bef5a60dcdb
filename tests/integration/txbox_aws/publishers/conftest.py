"""Queues, topics and buses of the local AWS, and publishers that send to them."""

import json
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import boto3
import pytest

from support.aws.roads import Road
from txbox_aws.publishers import AwsPublisher, aws_publishers
from txbox_local import LocalAws

if TYPE_CHECKING:
    from types_boto3_events import EventBridgeClient
    from types_boto3_sns import SNSClient
    from types_boto3_sqs import SQSClient


@pytest.fixture(scope="module")
def publishers(aws: LocalAws) -> Iterator[dict[str, AwsPublisher]]:
    """Publishers to the local AWS."""
    publishers = aws_publishers()
    yield publishers
    for publisher in publishers.values():
        publisher.close()


@pytest.fixture(scope="module")
def sns(aws: LocalAws) -> Iterator["SNSClient"]:
    """A client of the local SNS."""
    client = boto3.client("sns")
    yield client
    client.close()


@pytest.fixture(scope="module")
def events(aws: LocalAws) -> Iterator["EventBridgeClient"]:
    """A client of the local EventBridge."""
    client = boto3.client("events")
    yield client
    client.close()


@pytest.fixture
def make_road(
    sqs: "SQSClient", sns: "SNSClient", events: "EventBridgeClient", make_queue: Callable[..., str]
) -> Callable[[str], Road]:
    """Make a destination and a queue behind it: make_road("sns raw")."""

    def make(name: str) -> Road:
        kind, *how = name.split()
        queue = make_queue(fifo="fifo" in how)
        if kind == "sqs":
            return Road(name, kind, queue, queue, sqs)
        arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        unique = f"test-{uuid.uuid4().hex[:12]}"
        if kind == "sns":
            fifo = {"FifoTopic": "true"} if "fifo" in how else {}
            topic = sns.create_topic(Name=unique + (".fifo" if fifo else ""), Attributes=fifo)["TopicArn"]
            raw = {"RawMessageDelivery": "true"} if "raw" in how else {}
            sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn, Attributes=raw)
            return Road(name, kind, topic, queue, sqs)
        bus = events.create_event_bus(Name=unique)["EventBusArn"]
        pattern = json.dumps({"resources": [{"prefix": "message-id:"}]})
        events.put_rule(Name=unique, EventBusName=unique, EventPattern=pattern)
        events.put_targets(Rule=unique, EventBusName=unique, Targets=[{"Id": "queue", "Arn": arn}])
        return Road(name, kind, bus, queue, sqs)

    return make
