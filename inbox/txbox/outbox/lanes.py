"""Lanes: the parts of the outbox, so that relays can work side by side and keep the order of each key.

A lane belongs to one destination. All messages of one key are in one lane, and one relay at a time works on a lane; as
many relays can work on a destination as it has lanes. Messages without a key are spread over all of its lanes.

The lanes of ``inbox:SUBSCRIBER`` are negative: no relay reads them, but the workers of that subscriber.
"""

import hashlib
import zlib
from functools import lru_cache

from txbox.messages.destinations import INBOX

LANES_PER_DESTINATION = 64
"""A power of two. Never change it: messages of one key would then be in two lanes."""

RELAYED_LANES = range(2**63)
"""The lanes that relays read."""


def lane_of(destination: str, key: str | None, message_id: str) -> int:
    """Return the lane of a message: a number that fits Postgres's bigint.

    ``message_id`` spreads messages that have no key.
    """
    return lanes_of(destination)[spread_of(key, message_id)]


def spread_of(key: str | None, message_id: str) -> int:
    """Return which one of any destination's lanes a message is in, from 0."""
    return zlib.crc32((message_id if key is None else key).encode()) % LANES_PER_DESTINATION


def destination_of(lane: int) -> int:
    """Return a number that all lanes of one destination share, and no other lane has."""
    return lane // LANES_PER_DESTINATION


def number_of(destination: str) -> int:
    """Return a destination's number, as ``destination_of`` returns it for its lanes."""
    return destination_of(lanes_of(destination)[0])


@lru_cache(maxsize=1024)
def lanes_of(destination: str) -> range:
    """Return all lanes of a destination."""
    number = int.from_bytes(hashlib.blake2b(destination.encode(), digest_size=8).digest())
    first = number // (2 * LANES_PER_DESTINATION) * LANES_PER_DESTINATION
    if destination.startswith(INBOX):
        first -= 2**63
    return range(first, first + LANES_PER_DESTINATION)
