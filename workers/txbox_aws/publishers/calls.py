"""Turn messages into entries, divide those into calls, and read what a service answers. Pure, no I/O.

Only what is confirmed counts as sent. An entry that an answer does not mention is refused. An answer in which boto3
recognises nothing, such as a proxy's page with status 200, is no answer, and no message is to blame.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from txbox import BrokerError
from txbox.messages.attributes import attributes, encoded, wire_bytes
from txbox.messages.destinations import is_fifo, is_token
from txbox.relay import OutboxMessage, Refused
from txbox_aws.publishers.faults import Blame, is_counted, is_final, of_entry

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

    @property
    def numbered(self) -> Any:
        """The entries as SQS and SNS take them: each with an id, which is its place."""
        return [{"Id": str(number), **entry.parameters} for number, entry in enumerate(self.entries)]

    def one_by_one(self) -> Iterator["PublishCall"]:
        return (PublishCall(self.destination, (entry,)) for entry in self.entries)


def calls(entries: Iterable[Entry], max_bytes: int) -> list[PublishCall]:
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
            if open_call and (len(open_call) == MAX_ENTRIES or size + entry.size > max_bytes):
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


Unlike = Callable[[Entry, Mapping[str, Any]], str | None]
"""Returns how a confirmed entry differs from the one that was sent; None if it does not."""


def _in_nothing(_entry: Entry, _confirmed: Mapping[str, Any]) -> None:
    return None


@dataclass(slots=True)
class PublishResult:
    """The results of entries. Those that do not appear in it were sent."""

    refused: list[Refused] = field(default_factory=list)  # through their own fault, or by chance
    unsent: list[OutboxMessage] = field(default_factory=list)  # through no fault of theirs; to be sent again
    error: BrokerError | None = None  # why some are unsent

    def add(self, other: "PublishResult") -> None:
        """Add the results of other entries."""
        self.refused += other.refused
        self.unsent += other.unsent
        if self.error is None or (other.error is not None and self.error.permanent and not other.error.permanent):
            self.error = other.error

    def add_failed(self, entry: Entry, code: str, text: str, *, sender_fault: bool | None) -> None:
        """Add an entry that failed according to the answer."""
        destination = entry.message.destination
        why = f"{destination} refused the message: {code} {text}".strip()
        fault = of_entry(code)
        if fault is Blame.ENTRY:
            final, counted = is_final(code, sender_fault=sender_fault), is_counted(code, sender_fault=sender_fault)
            self.refused.append(Refused(entry.message, why, final=final, counted=counted))
        else:
            self.unsent.append(entry.message)
            self.error = self.error or BrokerError(why, permanent=fault is Blame.DESTINATION)


def refusal(entry: Entry, why: str, *, final: bool = False) -> Refused:
    return Refused(entry.message, f"{entry.message.destination} {why}", final=final)


def result_by_ids(call: PublishCall, answer: Mapping[str, Any], unlike: Unlike = _in_nothing) -> PublishResult:
    """Read the answer of SQS or SNS, in which each entry has the id that it was given: its place in the call.

    ``unlike`` checks a confirmed entry.
    """
    if "Successful" not in answer and "Failed" not in answer:
        return _no_answer(call)
    result = PublishResult()
    successful = _by_id(answer.get("Successful"))
    failed = _by_id(answer.get("Failed"))
    for number, entry in enumerate(call.entries):
        if (failure := failed.get(str(number))) is not None:
            result.add_failed(
                entry,
                str(failure.get("Code", "")),
                str(failure.get("Message", "")),
                sender_fault=bool(failure.get("SenderFault")),
            )
        elif (confirmed := successful.get(str(number))) is None:
            result.refused.append(refusal(entry, _UNMENTIONED))
        elif (difference := unlike(entry, confirmed)) is not None:
            result.refused.append(refusal(entry, f"has taken something else than was sent: {difference}"))
    return result


def result_in_order(call: PublishCall, answer: Mapping[str, Any]) -> PublishResult:
    """Read the answer of EventBridge, which has an entry for each one that was sent, in the same order."""
    if "Entries" not in answer:
        return _no_answer(call)
    result = PublishResult()
    entries: Sequence[Mapping[str, Any]] = answer["Entries"]
    for number, entry in enumerate(call.entries):
        one = entries[number] if number < len(entries) else {}
        if one.get("ErrorCode"):
            result.add_failed(entry, str(one["ErrorCode"]), str(one.get("ErrorMessage", "")), sender_fault=None)
        elif not one.get("EventId"):
            result.refused.append(refusal(entry, _UNMENTIONED))
    return result


def _no_answer(call: PublishCall) -> PublishResult:
    error = BrokerError(f"{call.destination} gave an answer that cannot be read")
    return PublishResult(unsent=call.messages, error=error)


def _by_id(entries: Iterable[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    return {str(one.get("Id")): one for one in entries or ()}


_UNMENTIONED = "has not mentioned the message in its answer; whether it arrived is not known"
