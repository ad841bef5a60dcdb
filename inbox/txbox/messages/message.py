"""A message, and how its id is chosen."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from txbox.errors import InvalidConfiguration, InvalidMessageId, MalformedMessage

HEADER_MESSAGE_ID = "message-id"
"""The id that a producer gives a message and keeps for every re-send."""
HEADER_CLOUDEVENTS_ID = "ce-id"
HEADER_CLOUDEVENTS_SOURCE = "ce-source"
HEADER_EVENTBRIDGE_ID = "eventbridge-id"
HEADER_SNS_MESSAGE_ID = "sns-message-id"
HEADER_DEDUPLICATION_ID = "sqs-deduplication-id"
HEADER_GROUP_ID = "sqs-group-id"
HEADER_FIRST_DELIVERY_ID = "first-delivery-id"
"""The broker's id of a message before it was redriven, if there was no better one."""
HEADER_KEY = "key"
"""Messages of one key keep their order; a producer sets it where there are no FIFO groups."""
HEADER_EVENTBRIDGE_KEY = "eventbridge-key"
"""The key under which an outbox published a message that came over EventBridge."""

MAX_MESSAGE_ID_BYTES = 1_000
"""In UTF-8. A B-tree entry of Postgres holds 2,704 bytes, and the subscriber's name is in it too."""

MAX_SUBSCRIBER_BYTES = 200


@dataclass(frozen=True, slots=True)
class Message:
    """An immutable envelope: what a handler gets.

    Attributes:
        id: what makes this the same message when it comes again.
        body: the payload, taken out of its envelopes.
        headers: what travelled beside the payload; names in lower case.
        source: where it was received from, such as a queue's URL.
        sent_at: the latest time at which it can have been made: the earliest time that came with it, in UTC (one
            without a zone is taken to be UTC); None: unknown. It serves only to judge a message's age, for which the
            time in the id counts, too: ``time_of_id``.
    """

    id: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    source: str = ""
    sent_at: datetime | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.sent_at is not None and self.sent_at.tzinfo is None:
            object.__setattr__(self, "sent_at", self.sent_at.replace(tzinfo=UTC))

    @property
    def text(self) -> str:
        """The body as text; raise ``MalformedMessage`` if it is not UTF-8."""
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise MalformedMessage(f"the body of message {self.id} is not UTF-8: {error}") from error

    def json(self) -> Any:
        """Return the body parsed as JSON; raise ``MalformedMessage`` if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"the body of message {self.id} is not JSON: {error}") from error


Identify = Callable[[Message], str]
"""Chooses the id of a message. It gets the message with the broker's own id in ``id``."""


def identify(message: Message) -> str:
    """Return the id of a message, whose ``id`` is the broker's: the first of these that it carries.

    1. our own ``message-id`` header,
    2. CloudEvents ``source`` and ``id`` together (an id is unique only within its source),
    3. EventBridge's event id,
    4. SNS's MessageId,
    5. the group and the deduplication id that the producer gave a FIFO message; where SQS deduplicates per group, an
       id is unique only within its group. An id that SQS derives from the body does not count: two purchases of equal
       content are two purchases.
    6. the broker's own id of the delivery, such as SQS's MessageId. A producer that sends again gets a new one, so this
       does not detect a producer's re-send: have the producer set ``message-id``.
    """
    headers = message.headers
    if own := headers.get(HEADER_MESSAGE_ID):
        return own
    source, event_id = headers.get(HEADER_CLOUDEVENTS_SOURCE), headers.get(HEADER_CLOUDEVENTS_ID)
    if source and event_id:
        # A URI contains no blank, so one blank between the two keeps "a b" + "c" and "a" + "b c" apart.
        return f"{quote(source, safe=_URI_CHARACTERS)} {event_id}"
    if upstream := headers.get(HEADER_EVENTBRIDGE_ID) or headers.get(HEADER_SNS_MESSAGE_ID):
        return upstream
    deduplication_id = headers.get(HEADER_DEDUPLICATION_ID)
    if deduplication_id and deduplication_id != hashlib.sha256(message.body).hexdigest():
        # A group's id contains no blank either.
        return f"{headers.get(HEADER_GROUP_ID, '')} {deduplication_id}".strip()
    return headers.get(HEADER_FIRST_DELIVERY_ID, message.id)


_URI_CHARACTERS = "".join(chr(code) for code in range(0x21, 0x7F))


def time_of_id(message_id: str) -> datetime | None:
    """Return when an id was made, in UTC, if it is a UUID of version 7 (RFC 9562, section 5.7); otherwise None.

    Upper or lower case, with or without hyphens, and URNs are all read. A time before 2015 is not taken for one.
    """
    # A few comparisons rule out nearly all other ids before the expression runs: every message pays for them.
    if not (isinstance(message_id, str) and len(message_id) in _UUID_LENGTHS and "7" in message_id[_VERSION_PLACES]):
        return None
    found = _UUID_7.fullmatch(message_id)
    return None if found is None else _plausible(int(found[1] + found[3], 16) / 1_000)


def time_from(written: object) -> datetime | None:
    """Return a time that a broker or a producer wrote; None, and no error, if it cannot be read.

    Args:
        written: milliseconds since 1970, as SQS writes them, or a time with its offset as in RFC 3339.
    """
    if isinstance(written, int):
        written = str(written)
    if not isinstance(written, str) or len(written) > _LONGEST_TIME:
        return None
    try:
        if written.isascii() and written.isdigit():
            return _plausible(int(written) / 1_000)
        # RFC 3339 allows any number of digits after the second, and a second 60; Python allows neither.
        moment = datetime.fromisoformat(_LEAP_SECOND.sub(r"\g<1>59", _FINER_DIGITS.sub(r"\1", written.strip().upper())))
        return None if moment.tzinfo is None else _plausible(moment.timestamp())
    except (ValueError, OverflowError):
        return None


def earliest(*times: datetime | None) -> datetime | None:
    return min((time for time in times if time is not None), default=None)


def _plausible(seconds: float) -> datetime | None:
    """Return a time; None if it is too early to be a message's, or too late for a ``datetime``."""
    return _EPOCH + timedelta(seconds=seconds) if _EARLIEST_SECONDS <= seconds < _LATEST_SECONDS else None


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EARLIEST_SECONDS = datetime(2015, 1, 1, tzinfo=UTC).timestamp()
_LATEST_SECONDS = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""This bound has no other meaning: a time in the future is never the earliest, and never behind a horizon."""

_UUID_LENGTHS = frozenset((32, 36, 45))
_VERSION_PLACES = slice(-22, -19, 2)
"""Where the version digit is: 22 characters from the end with hyphens, 20 without."""
_UUID_7 = re.compile(
    "(?:urn:uuid:)?([0-9a-f]{8})(?P<hyphen>-?)([0-9a-f]{4})(?P=hyphen)7[0-9a-f]{3}(?P=hyphen)[89ab][0-9a-f]{3}(?P=hyphen)"
    "[0-9a-f]{12}",
    re.IGNORECASE | re.ASCII,
)
_LONGEST_TIME = 64
_FINER_DIGITS = re.compile(r"(\.\d{6})\d+")
_LEAP_SECOND = re.compile(r"(T\d\d:\d\d:)60")


def valid_message_id(message_id: str) -> str:
    """Return the id if the inbox can keep it.

    Raises:
        InvalidMessageId: it is empty, longer than ``MAX_MESSAGE_ID_BYTES``, or not text for Postgres.
        TypeError: it is not a string.
    """
    if not isinstance(message_id, str):
        raise TypeError(f"a message id is a string, not {type(message_id).__name__}: {message_id!r}")
    if not message_id:
        raise InvalidMessageId(message_id, "is empty")
    if "\0" in message_id:
        raise InvalidMessageId(message_id, "holds a NUL character")
    try:
        size = len(message_id.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessageId(message_id, "is not valid Unicode") from error
    if size > MAX_MESSAGE_ID_BYTES:
        raise InvalidMessageId(message_id, f"has {size} bytes; at most {MAX_MESSAGE_ID_BYTES} are allowed")
    return message_id


def valid_subscriber_id(subscriber_id: str, of: str) -> str:
    """Return a subscriber's name if it is valid; ``of`` names the argument in the error.

    Raise ``InvalidConfiguration`` if it is empty, longer than ``MAX_SUBSCRIBER_BYTES``, or not text for Postgres.
    """
    return valid_text(subscriber_id, of, MAX_SUBSCRIBER_BYTES)


def valid_text(value: str, of: str, max_bytes: int) -> str:
    """Return the value if Postgres can keep it as text of 1 to ``max_bytes`` bytes.

    Raises:
        InvalidConfiguration: it cannot; ``of`` names the argument.
    """
    try:
        if 0 < len(value.encode()) <= max_bytes and "\0" not in value:
            return value
    except (AttributeError, UnicodeEncodeError):
        pass
    raise InvalidConfiguration(f"{of} must be 1 to {max_bytes:,} bytes of text, not {value!r:.100}")


def fingerprint(body: bytes | str) -> bytes:
    """Return the SHA-256 of a body: 32 bytes that tell whether two bodies are the same."""
    return hashlib.sha256(body.encode() if isinstance(body, str) else body).digest()
