"""Ids that a source gives out in order, so that the highest one covers all earlier ones.

Numbers are compared as numbers and texts byte by byte, alike in Postgres, in DynamoDB and in Python. A number is never
compared with a text.
"""

from decimal import Decimal
from typing import TypeAlias

from txbox.errors import InvalidConfiguration
from txbox.messages.message import valid_message_id, valid_text

EventId: TypeAlias = int | str
"""A number, or a text whose bytes grow, such as a UUID of version 7 or a ULID."""

MAX_DIGITS = 38
"""The most digits of a number: as many as DynamoDB keeps exactly."""


def valid_event_id(event_id: EventId) -> EventId:
    """Return the id if every store can keep and compare it.

    Raises:
        InvalidConfiguration: a number of more than ``MAX_DIGITS`` digits.
        InvalidMessageId: a text that is empty, too long or cannot be stored in Postgres.
        TypeError: neither a number nor a text.
    """
    if isinstance(event_id, str):
        return valid_message_id(event_id)
    if not isinstance(event_id, int) or isinstance(event_id, bool):
        raise TypeError(f"an event id is an int or a str, not {type(event_id).__name__}: {event_id!r}")
    if abs(event_id) >= 10**MAX_DIGITS:
        raise InvalidConfiguration(f"event_id must have at most {MAX_DIGITS} digits")
    return event_id


def valid_source(source: str) -> str:
    """Return the source's name; raise ``InvalidConfiguration`` if it is empty, too long or not storable in Postgres."""
    return valid_text(source, "source", _MAX_SOURCE_BYTES)


def check_kind(source: str, event_id: EventId, highest: object) -> None:
    """Raise ``InvalidConfiguration`` unless an id is of the same kind as ``highest``, the source's highest so far."""
    comparable = str if isinstance(event_id, str) else int | float | Decimal
    if not isinstance(highest, comparable) or isinstance(highest, bool):
        raise InvalidConfiguration(
            f"event_id {event_id!r:.100} cannot be compared with {highest!r:.100}, the highest of source {source} so "
            "far: give the ids of one source as numbers or as texts, always the same; or give the new kind a source "
            "of its own"
        )


_MAX_SOURCE_BYTES = 200
