"""Turn messages into entries, and divide those into calls. Pure, no I/O."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from txbox.messages.attributes import attributes, encoded, wire_bytes
from txbox.messages.destinations import is_fifo, is_token
from txbox.relay import OutboxMessage

MAX_ENTRIES = 10
"""The limit of one call, the same for SQS's SendMessageBatch, SNS's PublishBatch and EventBridge's PutEvents.

https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SendMessageBatch.html
https://docs.aws.amazon.com/sns/latest/api/API_PublishBatch.html
https://docs.aws.amazon.com/eventbridge/latest/APIReference/API_PutEvents.html
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A message as one entry of a call."""

    message: OutboxMessage
    parameters: Mapping[str, Any]  # the entry as boto3 takes it
    size: int  # in bytes, as the service counts them


@dataclass(frozen=True, slots=True)
class PublishCall:
    """One call to one destination."""

    destination: str  # the same for all entries
    entries: tuple[Entry, ...]  # at least one

    @property
    def messages(self) -> list[OutboxMessage]:
        return [entry.message for entry in self.entries]

    def one_by_one(self) -> Iterator["PublishCall"]:
        return (PublishCall(self.destination, (entry,)) for entry in self.entries)


def calls(entries: Iterable[Entry], max_bytes: int, max_entries: int = MAX_ENTRIES) -> list[PublishCall]:
    """Divide entries into calls, each for one destination, keeping the order within each destination.

    The destinations take turns, so that one that does not answer is noticed before it has taken all threads. An entry
    of more than ``max_bytes`` has a call of its own: the service must refuse it.
    """
    by_destination: dict[str, list[Entry]] = {}
    for entry in entries:
        by_destination.setdefault(entry.message.destination, []).append(entry)
    cut: list[list[PublishCall]] = []
    for destination, all_entries in by_destination.items():
        cut.append(own := [])
        open_call: list[Entry] = []
        size = 0
        for entry in all_entries:
            if open_call and (len(open_call) == max_entries or size + entry.size > max_bytes):
                own.append(PublishCall(destination, tuple(open_call)))
                open_call, size = [], 0
            open_call.append(entry)
            size += entry.size
        own.append(PublishCall(destination, tuple(open_call)))
    return [call for turn in zip_longest(*cut) for call in turn if call is not None]


def attributed_entry(message: OutboxMessage, body_parameter: str) -> Entry:
    """Return a message as an entry whose headers travel as attributes.

    In a FIFO queue or topic, the group is the key. A message without a key is its own group, so that it waits for no
    other. It is deduplicated by its own id, so that what the relay sends twice within five minutes arrives once.

    A standard queue gets no group. A group would keep no order there. SQS's fair queues would take each key for a
    tenant, which an order's or an account's number is not. And some stand-ins for SQS refuse it.

    ``body_parameter`` is the service's name for the body.
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
