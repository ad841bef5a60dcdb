"""Events as Lambda gives them to a function behind an SQS queue, what Lambda does around the function,
and what functions are given to run and answer.

The records are those of AWS's documentation (https://docs.aws.amazon.com/lambda/latest/dg/with-sqs.html); only receipts
are cut there, and bodies and attributes are what a test asks for.
"""

import base64
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session

from support.workers.business import apply
from txbox import Message

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

STANDARD_ARN = "arn:aws:sqs:us-east-2:123456789012:my-queue"
STANDARD_URL = "https://sqs.us-east-2.amazonaws.com/123456789012/my-queue"
FIFO_ARN = "arn:aws:sqs:us-east-2:123456789012:fifo.fifo"

STANDARD_EVENT = {
    "Records": [
        {
            "messageId": "059f36b4-87a3-44ab-83d2-661975830a7d",
            "receiptHandle": "AQEBwJnKyrHigUMZj6rYigCgxlaS3SLy0a...",
            "body": "Test message.",
            "attributes": {
                "ApproximateReceiveCount": "1",
                "SentTimestamp": "1545082649183",
                "SenderId": "AIDAIENQZJOLO23YVJ4VO",
                "ApproximateFirstReceiveTimestamp": "1545082649185",
            },
            "messageAttributes": {
                "myAttribute": {
                    "stringValue": "myValue",
                    "stringListValues": [],
                    "binaryListValues": [],
                    "dataType": "String",
                }
            },
            "md5OfBody": "e4e68fb7bd0e697a0ae8f1bb342846b3",
            "eventSource": "aws:sqs",
            "eventSourceARN": STANDARD_ARN,
            "awsRegion": "us-east-2",
        },
        {
            "messageId": "2e1424d4-f796-459a-8184-9c92662be6da",
            "receiptHandle": "AQEBzWwaftRI0KuVm4tP+/7q1rGgNqicHq...",
            "body": "Test message.",
            "attributes": {
                "ApproximateReceiveCount": "1",
                "SentTimestamp": "1545082650636",
                "SenderId": "AIDAIENQZJOLO23YVJ4VO",
                "ApproximateFirstReceiveTimestamp": "1545082650649",
            },
            "messageAttributes": {},
            "md5OfBody": "e4e68fb7bd0e697a0ae8f1bb342846b3",
            "eventSource": "aws:sqs",
            "eventSourceARN": STANDARD_ARN,
            "awsRegion": "us-east-2",
        },
    ]
}

FIFO_EVENT = {
    "Records": [
        {
            "messageId": "11d6ee51-4cc7-4302-9e22-7cd8afdaadf5",
            "receiptHandle": "AQEBBX8nesZEXmkhsmZeyIE8iQAMig7qw...",
            "body": "Test message.",
            "attributes": {
                "ApproximateReceiveCount": "1",
                "SentTimestamp": "1573251510774",
                "SequenceNumber": "18849496460467696128",
                "MessageGroupId": "1",
                "SenderId": "AIDAIO23YVJENQZJOL4VO",
                "MessageDeduplicationId": "1",
                "ApproximateFirstReceiveTimestamp": "1573251510774",
            },
            "messageAttributes": {},
            "md5OfBody": "e4e68fb7bd0e697a0ae8f1bb342846b3",
            "eventSource": "aws:sqs",
            "eventSourceARN": FIFO_ARN,
            "awsRegion": "us-east-2",
        }
    ]
}


def string(value: str) -> dict[str, Any]:
    """A message attribute of type String, as Lambda spells it."""
    return {"stringValue": value, "stringListValues": [], "binaryListValues": [], "dataType": "String"}


def record(
    message_id: str,
    body: object = None,
    *,
    arn: str = STANDARD_ARN,
    group: str | None = None,
    receives: int = 1,
    sent_at: datetime | None = None,
) -> dict[str, Any]:
    """A record whose message id is in our own header; in a FIFO queue if a group is given. It was sent years ago."""
    fifo = group is not None
    (template,) = FIFO_EVENT["Records"][:1] if fifo else STANDARD_EVENT["Records"][:1]
    attributes = {**template["attributes"], "ApproximateReceiveCount": str(receives)}
    if sent_at is not None:
        attributes["SentTimestamp"] = str(int(sent_at.timestamp() * 1000))
    if fifo:
        attributes |= {"MessageGroupId": group, "MessageDeduplicationId": message_id}
    body = f"body of {message_id}" if body is None else body
    return {
        **template,
        "messageId": item_id(message_id),
        "receiptHandle": f"AQEB{uuid.uuid4().hex}",
        "body": body if isinstance(body, str) else json.dumps(body),
        "attributes": attributes,
        "messageAttributes": {"message-id": string(message_id)},
        "eventSourceARN": FIFO_ARN if fifo and arn == STANDARD_ARN else arn,
    }


def item_id(message_id: str) -> str:
    """What SQS calls the message that the producer calls so."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, message_id))


def event(*records: Mapping[str, Any]) -> dict[str, Any]:
    """An event of these records."""
    return {"Records": list(records)}


def of(ids: Iterable[str], **options: Any) -> dict[str, Any]:
    """An event of a record for each of these."""
    return event(*(record(message_id, **options) for message_id in ids))


def again(event: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """The event of what comes again after this answer, each received once more."""
    failed = identifiers(answer)
    return {
        "Records": [
            {
                **record,
                "receiptHandle": f"AQEB{uuid.uuid4().hex}",
                "attributes": {
                    **record["attributes"],
                    "ApproximateReceiveCount": str(int(record["attributes"]["ApproximateReceiveCount"]) + 1),
                },
            }
            for record in event["Records"]
            if record["messageId"] in failed
        ]
    }


def identifiers(answer: Mapping[str, Any]) -> list[str]:
    """What is to come again, by an answer; the answer has nothing else in it."""
    assert set(answer) == {"batchItemFailures"}, answer
    assert all(set(failure) == {"itemIdentifier"} for failure in answer["batchItemFailures"]), answer
    return [failure["itemIdentifier"] for failure in answer["batchItemFailures"]]


def failing(ids: Iterable[str]) -> dict[str, Any]:
    """The answer that has these come again."""
    return {"batchItemFailures": [{"itemIdentifier": item_id(message_id)} for message_id in ids]}


NOTHING = failing([])
"""The answer that has nothing come again."""


def failing_for(*ids: str, error: type[BaseException] = ValueError) -> Callable[[Session, Message], None]:
    def handle(session: Session, message: Message) -> None:
        apply(session, message)
        if message.id in ids:
            raise error(f"no {message.id}")

    return handle


class Context:
    """Lambda's context, as far as time is concerned."""

    function_name = "billing"
    aws_request_id = "8476a536-e9f4-11e8-9739-2dfe598c3fcd"

    def __init__(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds

    def get_remaining_time_in_millis(self) -> int:
        return max(int((self._ends_at - time.monotonic()) * 1000), 0)


class EventSourceMapping:
    """What Lambda does between a queue and a function: receives, invokes, and deletes what has not failed."""

    def __init__(self, sqs: "SQSClient", queue: str, *, batch_size: int = 10) -> None:
        self._sqs = sqs
        self._queue = queue
        self._batch_size = batch_size
        names: Any = ["QueueArn"]
        self.arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)["Attributes"]["QueueArn"]

    def poll(self, invoke: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> bool:
        """Receive once, and invoke if there was anything; return whether there was.

        Args:
            invoke: returns the answer, or None if the function has failed.
        """
        received = self._sqs.receive_message(
            QueueUrl=self._queue,
            MaxNumberOfMessages=self._batch_size,
            WaitTimeSeconds=0,
            MessageSystemAttributeNames=["All"],
            MessageAttributeNames=["All"],
        ).get("Messages", [])
        if not received:
            return False
        answer = invoke({"Records": [self._record(message) for message in received]})
        if answer is None:
            return True
        failed = identifiers(answer)
        assert set(failed) <= {message["MessageId"] for message in received}, "Lambda takes that for a failed batch"
        entries = [
            {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
            for number, message in enumerate(received)
            if message["MessageId"] not in failed
        ]
        if entries:
            self._sqs.delete_message_batch(QueueUrl=self._queue, Entries=entries)  # type: ignore[arg-type]
        return True

    def _record(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "messageId": message["MessageId"],
            "receiptHandle": message["ReceiptHandle"],
            "body": message["Body"],
            "attributes": message["Attributes"],
            "messageAttributes": {
                name: _attribute(attribute) for name, attribute in message.get("MessageAttributes", {}).items()
            },
            "md5OfBody": message["MD5OfBody"],
            "eventSource": "aws:sqs",
            "eventSourceARN": self.arn,
            "awsRegion": self.arn.split(":")[3],
        }


def _attribute(attribute: Mapping[str, Any]) -> dict[str, Any]:
    spelled: dict[str, Any] = {"stringListValues": [], "binaryListValues": [], "dataType": attribute["DataType"]}
    if "StringValue" in attribute:
        spelled["stringValue"] = attribute["StringValue"]
    if "BinaryValue" in attribute:
        spelled["binaryValue"] = base64.b64encode(attribute["BinaryValue"]).decode()
    return spelled
