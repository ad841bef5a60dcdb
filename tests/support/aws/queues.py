"""What tests do with SQS queues: send, look, redeliver."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from support.waiting import wait_until

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/purchases"
"""The URL of a queue, as SQS gives it."""


def attribute(value: str) -> dict[str, Any]:
    """A message attribute of type String."""
    return {"DataType": "String", "StringValue": value}


def send(
    sqs: "SQSClient",
    queue: str,
    ids: Iterable[str],
    *,
    group: str | None = None,
    body: str = "body of {id}",
    **attributes: str,
) -> None:
    """Send a message for each id, with the id in our own header; "group-" and the like in FIFO queues."""
    ids = list(ids)
    for start in range(0, len(ids), 10):
        entries = [
            {
                "Id": str(number),
                "MessageBody": body.replace("{id}", id_),
                "MessageAttributes": {
                    "message-id": attribute(id_),
                    **{name: attribute(value) for name, value in attributes.items()},
                },
                **({"MessageGroupId": group, "MessageDeduplicationId": id_} if group else {}),
            }
            for number, id_ in enumerate(ids[start : start + 10])
        ]
        answer = sqs.send_message_batch(QueueUrl=queue, Entries=entries)
        assert not answer.get("Failed")


def sns_notification(message: str, message_id: str, attributes: Mapping[str, str] | None = None) -> str:
    """A body as SNS wraps it."""
    return json.dumps(
        {
            "Type": "Notification",
            "MessageId": message_id,
            "TopicArn": "arn:aws:sns:us-east-1:123456789012:purchases",
            "Message": message,
            "MessageAttributes": {
                name: {"Type": "String", "Value": value} for name, value in (attributes or {}).items()
            },
        }
    )


def held(sqs: "SQSClient", queue: str) -> dict[str, int]:
    """How many messages the queue holds: waiting, in flight, delayed."""
    names = {
        "waiting": "ApproximateNumberOfMessages",
        "in_flight": "ApproximateNumberOfMessagesNotVisible",
        "delayed": "ApproximateNumberOfMessagesDelayed",
    }
    attributes = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=list(names.values()))["Attributes"]
    return {what: int(attributes[name]) for what, name in names.items()}


def wait_until_empty(sqs: "SQSClient", queue: str, timeout: float = 30.0) -> None:
    """Wait until every message is deleted."""
    wait_until(lambda: sum(held(sqs, queue).values()) == 0, f"{queue} is empty", timeout=timeout, every=0.05)
