"""What SQS and SNS have in common: messages with attributes, and FIFO's two ids. Pure, no I/O."""

import hashlib
from typing import Any

from txbox.relay import OutboxMessage
from txbox.wire.attributes import attributes, encoded, wire_bytes
from txbox.wire.destinations import is_fifo, is_token
from txbox_aws.publishers.calls import Entry

__all__ = ["attributed_entry"]


def attributed_entry(message: OutboxMessage, body_parameter: str) -> Entry:
    """Return a message as an entry whose headers travel as attributes.

    In a FIFO queue or topic, the group is the key. A message without one is a group of its own, so that it waits for no
    other. It is deduplicated by its own id, so that what the relay sends twice within five minutes arrives once.

    A standard queue is given no group. There it would keep no order; it would make SQS's fair queues take each key for
    a tenant, which an order's or an account's number is not; and there are stand-ins for SQS that refuse it.

    Args:
        message: the message.
        body_parameter: what the service calls the body.
    """
    text, encoding = encoded(message.body)
    travelling = attributes(message.id, message.headers, encoding)
    parameters: dict[str, Any] = {
        body_parameter: text,
        "MessageAttributes": {name: {"DataType": "String", "StringValue": value} for name, value in travelling.items()},
    }
    if is_fifo(message.destination):
        own = message.id if is_token(message.id) else hashlib.sha256(message.id.encode()).hexdigest()
        parameters["MessageGroupId"] = own if message.key is None else message.key
        parameters["MessageDeduplicationId"] = own
    return Entry(message, parameters, wire_bytes(text, travelling))
