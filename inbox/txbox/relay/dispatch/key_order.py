"""The order of each key among the messages that are handed out."""

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class KeyOrder(Generic[T]):
    """Hands messages out in rounds: at most one of each key in a round, the rest of a key after its first.

    A broker answers for each message of a call by itself, so of two messages of one key in one call, the second may
    arrive without the first. In rounds it cannot: once a message has failed, no other of its key is handed out.
    """

    def __init__(self, messages: Iterable[tuple[Hashable | None, T]]) -> None:
        self._unordered: list[T] = []
        self._queues: dict[Hashable, list[T]] = {}
        for key, message in messages:
            if key is None:
                self._unordered.append(message)
            else:
                self._queues.setdefault(key, []).append(message)

    def __iter__(self) -> Iterator[list[T]]:
        """Yield the rounds. Between two of them, ``stop`` takes keys out."""
        number = 0
        while messages := self._unordered + [queue[number] for queue in self._queues.values() if number < len(queue)]:
            yield messages
            self._unordered = []
            number += 1

    def stop(self, key: Hashable) -> None:
        """Hand out no more messages of a key."""
        self._queues.pop(key, None)
