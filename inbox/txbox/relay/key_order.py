"""Waves: in which steps the messages of a batch are sent, so that each key keeps its order."""

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Waves"]

T = TypeVar("T")


class Waves(Generic[T]):
    """Hands messages out wave by wave: at most one of each key in a wave, the rest of a key after its first.

    A broker answers for each message of a call by itself, so of two messages of one key in one call, the second may
    arrive without the first. In waves it cannot: once a message has failed, no other of its key is handed out.
    """

    def __init__(self, messages: Iterable[tuple[Hashable | None, T]]) -> None:
        """Take messages in their order, each with its key; None is no key."""
        self._unordered: list[T] = []
        self._queues: dict[Hashable, list[T]] = {}
        for key, message in messages:
            if key is None:
                self._unordered.append(message)
            else:
                self._queues.setdefault(key, []).append(message)

    def __iter__(self) -> Iterator[list[T]]:
        """Yield the waves. Between two of them, ``stop`` takes keys out."""
        number = 0
        while wave := self._unordered + [queue[number] for queue in self._queues.values() if number < len(queue)]:
            yield wave
            self._unordered = []
            number += 1

    def stop(self, key: Hashable) -> None:
        """Hand out no more messages of a key."""
        self._queues.pop(key, None)
