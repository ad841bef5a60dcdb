"""Destinations: where a message can be sent, and what each kind of them accepts. No I/O.

A destination is text:

- an SQS queue's URL, ``https://sqs.eu-central-1.amazonaws.com/123456789012/purchases``; FIFO if it ends in ``.fifo``;
- an SNS topic's ARN, ``arn:aws:sns:eu-central-1:123456789012:purchases``; FIFO likewise;
- an EventBridge bus's ARN, ``arn:aws:events:eu-central-1:123456789012:event-bus/default``;
- ``inbox:SUBSCRIBER`` for the workers of a subscriber in the same database, without a relay or a broker;
- ``topic:NAME`` for every subscriber that has subscribed to the topic, each as ``inbox:SUBSCRIBER``;
- ``scheme:rest`` for a publisher of your own, which the relay has under ``scheme``: ``kafka:purchases``.

A message that a destination cannot take is refused when it is published, while the caller can still do something about
it. Later it could only become a dead letter.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

from txbox.errors import InvalidConfiguration, MessageTooLarge, NotSendable
from txbox.messages.attributes import OWN_ATTRIBUTES, RESERVED_PREFIX, attributes, encoded, is_wire_text, wire_bytes
from txbox.messages.eventbridge import entry_bytes, event_entry, is_event_detail
from txbox.messages.message import valid_subscriber_id

SQS = "sqs"
SNS = "sns"
EVENTBRIDGE = "eventbridge"

INBOX = "inbox:"
"""What the name of a subscriber's destination starts with."""

TOPIC = "topic:"
"""What the name of a topic starts with."""

MAX_SQS_BYTES = 1_048_576
"""For a message with its attributes, and for a call: 1 MiB.
https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SendMessageBatch.html"""

MAX_SNS_BYTES = 262_144
"""For a message with its attributes, and for a call: 256 KiB, unless the topic's MaximumMessageSize is more, which
cannot be seen when a message is published. https://docs.aws.amazon.com/sns/latest/api/API_PublishBatch.html
"""

MAX_EVENTBRIDGE_BYTES = 1_000_000
"""For an entry (source, detail type, detail and resources together), and for a call: less than 1 MB, taken as the
smaller of the two numbers that this may mean.
https://docs.aws.amazon.com/eventbridge/latest/APIReference/API_PutEvents.html
"""

MAX_ATTRIBUTES = 10
"""For one message in SQS, our own included. SNS drops a message with more on its way to a queue with raw delivery.
https://docs.aws.amazon.com/sns/latest/dg/sns-message-attributes.html"""

MAX_DETAIL_TYPE_CHARACTERS = 128
"""https://docs.aws.amazon.com/eventbridge/latest/APIReference/API_PutEventsRequestEntry.html"""

MAX_NAME_CHARACTERS = 256
"""For a header's name."""


@lru_cache(maxsize=1024)
def scheme(destination: str) -> str:
    """Return the kind of a destination, which selects the relay's publisher; raise ``NotSendable`` if it is none."""
    if _QUEUE_URL.fullmatch(destination):
        return SQS
    if _TOPIC_ARN.fullmatch(destination):
        return SNS
    if _BUS_ARN.fullmatch(destination):
        return EVENTBRIDGE
    if destination.startswith(("http:", "https:")):
        raise NotSendable(
            repr(destination),
            "is no queue's URL, https://HOST/ACCOUNT/NAME with an account of 12 digits; for a publisher of your own, "
            "take another scheme, such as hook:https://HOST/PATH",
        )
    own = _OWN.fullmatch(destination)
    if own is None or own["scheme"] == "arn" or "\0" in destination:
        raise NotSendable(
            repr(destination),
            "is not a destination: give a queue's URL, a topic's or an event bus's ARN, or scheme:rest for a "
            "publisher of your own",
        )
    return own["scheme"]


@lru_cache(maxsize=1024)
def region(destination: str) -> str | None:
    """Return the AWS region that a destination names; None if it names none, such as a queue on this machine."""
    if destination.startswith("arn:"):
        return destination.split(":")[3]
    found = _REGION.search(destination.split("/")[2])
    return found[1] if found else None


def is_fifo(destination: str) -> bool:
    """Whether a queue or a topic itself keeps the order of each key."""
    return destination.endswith(".fifo")


def is_token(text: str) -> bool:
    """Whether a text can be a message's group or deduplication id in a FIFO queue or topic."""
    return _TOKEN.fullmatch(text) is not None


def require_sendable(
    destination: str, body: bytes, *, key: str | None, headers: Mapping[str, str], message_id: str
) -> None:
    """Raise ``NotSendable`` if a destination cannot take a message, ``MessageTooLarge`` if it is too large."""
    kind = scheme(destination)
    if kind in (SQS, SNS, EVENTBRIDGE):
        _require_headers(destination, headers)
    try:
        match kind:
            case "sqs":
                _require_attributes(destination, body, key, headers, message_id, MAX_SQS_BYTES)
            case "sns":
                _require_attributes(destination, body, key, headers, message_id, MAX_SNS_BYTES)
            case "eventbridge":
                _require_event(destination, body, key, headers, message_id)
            case "inbox" | "topic":
                _require_name(destination)
    except UnicodeEncodeError as error:
        raise NotSendable(destination, f"takes no header or key that is not valid Unicode: {error}") from error


def _require_name(destination: str) -> None:
    try:
        valid_subscriber_id(destination.partition(":")[2], "a name behind inbox: or topic:")
    except InvalidConfiguration as error:
        raise NotSendable(destination, f"names nothing: {error}") from error


def _require_headers(destination: str, headers: Mapping[str, str]) -> None:
    seen = set()
    for name in headers:
        lower = name.lower()
        if lower.startswith(RESERVED_PREFIX):
            raise NotSendable(destination, f"cannot be sent a header {name!r}: {RESERVED_PREFIX} is for txbox itself")
        if lower in seen:
            raise NotSendable(destination, f"cannot be sent two headers {lower!r}: they arrive in lower case")
        seen.add(lower)


def _require_attributes(
    destination: str, body: bytes, key: str | None, headers: Mapping[str, str], message_id: str, limit: int
) -> None:
    most = MAX_ATTRIBUTES - OWN_ATTRIBUTES
    if len(headers) > most:
        raise NotSendable(
            destination,
            f"takes {most} headers, as {OWN_ATTRIBUTES} of its {MAX_ATTRIBUTES} attributes are ours; "
            f"the message has {len(headers)}",
        )
    for name, value in headers.items():
        if not _ATTRIBUTE_NAME.fullmatch(name) or ".." in name or name.lower().startswith(("aws.", "amazon.")):
            raise NotSendable(destination, f"takes no attribute of the name {name!r}: letters, digits, _, - and .")
        if not is_wire_text(value):
            raise NotSendable(destination, f"takes no header {name!r} that is empty or holds control characters")
    if not is_wire_text(message_id):
        raise NotSendable(destination, f"takes no message id {message_id[:80]!r} that holds control characters")
    text, encoding = encoded(body)
    size = wire_bytes(text, attributes(message_id, headers, encoding))
    if size > limit:
        raise MessageTooLarge(destination, size, limit)
    if key is not None and is_fifo(destination) and not is_token(key):
        raise NotSendable(
            destination, f"takes no key {key[:80]!r}: at most 128 letters, digits and ASCII punctuation, no blank"
        )


def _require_event(destination: str, body: bytes, key: str | None, headers: Mapping[str, str], message_id: str) -> None:
    if not is_event_detail(body):
        raise NotSendable(
            destination, "takes a JSON object with integers of at most 64 bits as body: it becomes the event's detail"
        )
    for name in headers:
        if len(name) > MAX_NAME_CHARACTERS or not name.isascii():
            raise NotSendable(
                destination, f"takes no header of the name {name[:80]!r}: at most {MAX_NAME_CHARACTERS} of ASCII"
            )
    entry = event_entry(message_id, body, key=key, headers=headers)
    if entry.source.startswith("aws."):
        raise NotSendable(destination, f"takes no header source {entry.source[:80]!r}: aws. is for AWS itself")
    if len(entry.detail_type) > MAX_DETAIL_TYPE_CHARACTERS:
        raise NotSendable(
            destination, f"takes no header detail-type of more than {MAX_DETAIL_TYPE_CHARACTERS} characters"
        )
    size = entry_bytes(entry)
    if size > MAX_EVENTBRIDGE_BYTES:
        raise MessageTooLarge(destination, size, MAX_EVENTBRIDGE_BYTES)


# A queue's URL ends in the account's number and the queue's name, on AWS and on its stand-ins alike.
_QUEUE_URL = re.compile(r"https?://[^/?#\s]+(?:/[^/?#\s]+)*?/[0-9]{12}/[A-Za-z0-9_-]{1,80}(?:\.fifo)?")
_TOPIC_ARN = re.compile(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]{1,256}(?:\.fifo)?")
_BUS_ARN = re.compile(r"arn:aws[a-z-]*:events:[a-z0-9-]+:[0-9]{12}:event-bus/\S{1,256}")
_OWN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*):\S(?:.*\S)?", re.DOTALL)

_REGION = re.compile(r"(?:^|\.)([a-z]{2}(?:-[a-z]+)+-[0-9]+)\.")
_ATTRIBUTE_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,256}(?<!\.)")
_TOKEN = re.compile(r"[!-~]{1,128}")
