"""A hook that keeps what it is told."""

import threading

from txbox import Outcome
from txbox.instrumentation import Event, Settled


class Kept:
    """Every event of a worker, in order."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def of(self, *kinds: type[Event]) -> list:
        """The events of these kinds."""
        with self._lock:
            return [event for event in self._events if isinstance(event, kinds)]

    def outcomes(self, message_id: str) -> list[Outcome]:
        """What became of each delivery of a message."""
        return [event.outcome for event in self.of(Settled) if event.message_id == message_id]


class Unloggable(Exception):
    """An error of which no traceback can be made."""

    def __getattr__(self, name: str) -> object:
        raise ValueError(name)
