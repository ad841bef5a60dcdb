"""Turn the events that Lambda gives a function behind an SQS queue into deliveries. Pure: no I/O.

https://docs.aws.amazon.com/lambda/latest/dg/with-sqs.html shows the events.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from txbox import Identify, InvalidConfiguration, identify
from txbox_aws.envelopes import Envelope, open_envelope
from txbox_workers.delivery import Delivery


@dataclass(frozen=True, slots=True)
class Batch:
    """What one queue has delivered in one event."""

    source: str  # the queue's URL
    deliveries: tuple[Delivery, ...]  # in the queue's order
    item_ids: Mapping[str, str]  # Lambda's name for each of them, by receipt


def batches(event: Any, *, envelope: Envelope = Envelope.AUTO, identify: Identify = identify) -> list[Batch]:
    """Return what an event delivers, by queue; an event from Lambda has only one queue.

    If a delivery of a FIFO queue fails, all behind it wait, whatever their message group: Lambda wants a function to
    stop at the first failure, and to report everything after it (developer guide, "Reporting batch item failures").

    Raises:
        InvalidConfiguration: it is not an event of SQS.
    """
    found: dict[str, list[tuple[str, Delivery]]] = {}
    receipts: set[str] = set()
    for record in _records(event):
        try:
            source = queue_url(record["eventSourceARN"])
            delivery = open_envelope(_received(record), source, envelope=envelope, identify=identify)
            item_id = record["messageId"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _not_of_sqs(f"a record that cannot be read ({type(error).__name__}: {error})") from error
        if source.endswith(".fifo"):
            delivery = replace(delivery, failure_group=source)
        if delivery.receipt in receipts:  # in an event made by hand; SQS gives each delivery its own
            delivery = replace(delivery, receipt=f"{delivery.receipt} {len(receipts)}")
        receipts.add(delivery.receipt)
        found.setdefault(source, []).append((item_id, delivery))
    return [
        Batch(
            source,
            tuple(delivery for _, delivery in several),
            {delivery.receipt: item_id for item_id, delivery in several},
        )
        for source, several in found.items()
    ]


def batch_item_failures(item_ids: list[str]) -> dict[str, list[dict[str, str]]]:
    """Return the answer that makes SQS deliver these items again and delete everything else from the queue.

    The ids are in the queue's order; each is named once, however often it occurs.
    """
    return {"batchItemFailures": [{"itemIdentifier": item_id} for item_id in dict.fromkeys(item_ids)]}


def queue_url(arn: str) -> str:
    """Return the URL of the queue with this ARN: the name that a worker uses, and where a redrive sends to.

    Raises ``ValueError`` if it is not the ARN of a queue.
    """
    try:
        prefix, partition, service, region, account, name = arn.split(":")
    except ValueError:
        raise ValueError(f"{arn!r} is not the ARN of a queue") from None
    if prefix != "arn" or service != "sqs" or not name:
        raise ValueError(f"{arn!r} is not the ARN of a queue")
    suffix = _SUFFIXES.get(partition, "amazonaws.com")
    return f"https://sqs.{region}.{suffix}/{account}/{name}"


def _records(event: Any) -> list[Mapping[str, Any]]:
    records = event.get("Records") if isinstance(event, Mapping) else None
    if not isinstance(records, list):
        keys = f"the keys {', '.join(map(str, event)) or 'of nothing'}" if isinstance(event, Mapping) else repr(event)
        raise _not_of_sqs(f"no Records, but {keys[:_SHOWN_CHARACTERS]}")
    for record in records:
        origin = record.get("eventSource", record.get("EventSource")) if isinstance(record, Mapping) else None
        if origin != "aws:sqs":
            raise _not_of_sqs(f"a record of {origin!r}")
    return records


def _not_of_sqs(what: str) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"sqs_handler was invoked with {what}; it takes the events of an SQS queue's event source mapping "
        '({"Records": [{"eventSource": "aws:sqs", …}, …]}): trigger the function by a queue'
    )


def _received(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as SQS's ReceiveMessage returns it: the same, with other names."""
    return {
        "MessageId": record["messageId"],
        "ReceiptHandle": record["receiptHandle"],
        "Body": record["body"],
        "Attributes": record.get("attributes") or {},
        "MessageAttributes": {
            name: _attribute(attribute) for name, attribute in (record.get("messageAttributes") or {}).items()
        },
    }


def _attribute(attribute: Mapping[str, Any]) -> dict[str, Any]:
    spelled: dict[str, Any] = {"DataType": attribute.get("dataType") or "String"}
    if attribute.get("stringValue") is not None:
        spelled["StringValue"] = attribute["stringValue"]
    if attribute.get("binaryValue") is not None:
        spelled["BinaryValue"] = base64.b64decode(attribute["binaryValue"], validate=True)
    return spelled


_SUFFIXES = {"aws-cn": "amazonaws.com.cn", "aws-iso": "c2s.ic.gov", "aws-iso-b": "sc2s.sgov.gov"}
"""The suffixes of host names, by partition, where they are not ``amazonaws.com``."""

_SHOWN_CHARACTERS = 200
