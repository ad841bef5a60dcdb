"""moto's SNS and EventBridge, mended: nothing is kept, and nothing is torn apart."""

import json
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID

from txbox_local.aws.moto_server import patch_sns_eventbridge
from txbox_local.aws.moto_sqs import patch_sqs


def received(queue: Any) -> list[Any]:
    return [json.loads(message.body) for message in queue._messages]


def test_a_topic_forgets_what_it_has_delivered() -> None:
    patch_sqs()
    patch_sns_eventbridge("sns")
    patch_sns_eventbridge("sns")
    from moto.sns.models import sns_backends
    from moto.sqs.models import sqs_backends

    sns, sqs = (backends[DEFAULT_ACCOUNT_ID]["us-east-1"] for backends in (sns_backends, sqs_backends))
    queue = sqs.create_queue("behind-a-topic", {})
    topic = sns.create_topic("purchases")
    sns.subscribe(topic.arn, queue.queue_arn, "sqs")
    for number in range(3):
        sns.publish(f"message {number}", topic.arn)
    assert [body["Message"] for body in received(queue)] == ["message 0", "message 1", "message 2"]
    assert len(topic.sent_notifications) == 0


def test_an_event_arrives_whole_whatever_its_texts_say() -> None:
    patch_sqs()
    patch_sns_eventbridge("events")
    from moto.events.models import events_backends
    from moto.sqs.models import sqs_backends

    events, sqs = (backends[DEFAULT_ACCOUNT_ID]["us-east-1"] for backends in (events_backends, sqs_backends))
    queue = sqs.create_queue("behind-a-bus", {})
    events.put_rule("all", event_pattern='{"source": ["<detail>"]}')
    target = {"Id": "1", "Arn": queue.queue_arn}
    templated = {
        "Id": "2",
        "Arn": queue.queue_arn,
        "InputTransformer": {"InputPathsMap": {"type": "$.detail-type"}, "InputTemplate": '{"type": "<type>"}'},
    }
    events.put_targets("all", None, [target, templated])
    detail = {"a": "<source>", "b": [1.5, None]}
    entry = {"Source": "<detail>", "DetailType": "d", "Detail": json.dumps(detail), "Resources": ["<id>", '"']}
    events.put_events([entry])
    whole, transformed = received(queue)
    assert whole["detail"] == detail
    assert (whole["source"], whole["resources"]) == ("<detail>", ["<id>", '"'])
    assert whole["account"] == DEFAULT_ACCOUNT_ID
    assert "ingestion-time" not in whole
    assert transformed == {"type": "d"}
