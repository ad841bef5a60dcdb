"""Ids for messages that are published without one: UUIDs of version 7, which grow with time.

An index on growing ids needs little memory, however large it gets; random ids touch all of it.
"""

import os
import threading
import time
import uuid


def new_message_id() -> str:
    """Return a UUID of version 7, greater than every one that this process made before.

    It consists of 48 bits of milliseconds since 1970, a counter of 42 bits that begins at a random value in each
    millisecond, and 32 random bits (RFC 9562, sections 5.7 and 6.2, method 1). The clock only orders the ids: with a
    wrong clock they are still unique.
    """
    return str(_generator.next())


class _Generator:
    """Keeps the last time and counter, so that ids grow even if the clock stops or goes back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._milliseconds = 0
        self._counter = 0

    def next(self) -> uuid.UUID:
        random = int.from_bytes(os.urandom(9))
        now = time.time_ns() // 1_000_000
        with self._lock:
            if now > self._milliseconds:
                self._milliseconds = now
                self._counter = random >> 32 & _FRESH_COUNTER
            elif self._counter == _COUNTER:
                self._milliseconds += 1
                self._counter = random >> 32 & _FRESH_COUNTER
            else:
                self._counter += 1
            milliseconds, counter = self._milliseconds, self._counter
        high, low = counter >> 30, counter & 0x3FFF_FFFF
        return uuid.UUID(
            int=(milliseconds & 0xFFFF_FFFF_FFFF) << 80
            | 0x7 << 76
            | high << 64
            | 0b10 << 62
            | low << 32
            | random & 0xFFFF_FFFF
        )


_COUNTER = (1 << 42) - 1
_FRESH_COUNTER = (1 << 41) - 1
"""A fresh counter's highest bit is 0, so that it can grow within its millisecond."""

_generator = _Generator()
if hasattr(os, "register_at_fork"):  # otherwise a child would continue its parent's ids, perhaps with the lock held
    os.register_at_fork(after_in_child=_generator.__init__)  # type: ignore[misc]
