"""A dictionary of bounded size: it keeps what was set last."""

import threading
from typing import TypeVar

MOST_DESTINATIONS = 10_000
"""How many destinations are remembered, at most. A forgotten one is treated as new."""

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dictionary that drops the entry that was set longest ago. Several threads may write to it at once."""

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
