"""How many messages a call of a publisher has: as many as it answers for in time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_CALL_SIZE = 50
"""Messages of a destination's first call."""

MAX_CALL_SIZE = 100_000
"""More than any batch has."""

MAX_GROWTH = 4
"""So many times as many as before, at most: one quick call is too small a sample."""


class CallSize:
    """How many messages the next call of a publisher may have, computed from how long calls take. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """Begin small; a call should take ``seconds`` at most."""
        self._seconds = seconds
        self._value = FIRST_CALL_SIZE
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """How many messages the next call may have."""
        return self._value

    @contextmanager
    def measured(self, count: int) -> Iterator[None]:
        """Around a call of so many messages: learn from how long it takes, whether it fails or not."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            with self._lock:
                fitting = int(count * self._seconds / took) if took > 0 else MAX_CALL_SIZE
                # A quick call with few messages must not make the next one smaller.
                if fitting < self._value or count >= self._value // MAX_GROWTH:
                    self._value = max(1, min(fitting, max(self._value, count * MAX_GROWTH), MAX_CALL_SIZE))
