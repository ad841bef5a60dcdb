"""A memory of a bounded size: what was set last is kept."""

import threading
from typing import TypeVar

MOST_DESTINATIONS = 10_000
"""Destinations that are remembered, at most. One that was forgotten is like a new one."""

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dictionary that forgets what was set longest ago. Several threads may write to it at once."""

    def __init__(self, most: int = MOST_DESTINATIONS) -> None:
        super().__init__()
        self._most = most
        self._lock = threading.Lock()

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            self.pop(key, None)
            super().__setitem__(key, value)
            if len(self) > self._most:
                del self[next(iter(self))]
