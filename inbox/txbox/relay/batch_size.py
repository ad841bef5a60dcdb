"""The pace of publishers: how many messages may be handed over in one call, for it to return in time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Pace"]

FIRST_SIZE = 50
"""Messages of a call before anything is known."""

MOST_SIZE = 100_000
"""More than any batch has."""

MOST_GROWTH = 4
"""So many times as many as before, at most; one quick call promises little."""


class Pace:
    """Learns from how long calls take how many messages the next one may have. Used by several threads at once."""

    def __init__(self, seconds: float) -> None:
        """Begin carefully.

        Args:
            seconds: how long a call should take, at most.
        """
        self._seconds = seconds
        self._size = FIRST_SIZE
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """How many messages the next call may have."""
        return self._size

    @contextmanager
    def of(self, count: int) -> Iterator[None]:
        """Around a call of so many messages: learn from how long it takes, whether it fails or not."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            with self._lock:
                fitting = int(count * self._seconds / took) if took > 0 else MOST_SIZE
                # A call of a few says little of one of many: it never makes the next one smaller than it has to be.
                if fitting < self._size or count >= self._size // MOST_GROWTH:
                    self._size = max(1, min(fitting, max(self._size, count * MOST_GROWTH), MOST_SIZE))
