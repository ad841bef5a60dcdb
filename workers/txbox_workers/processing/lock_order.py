"""The order in which the messages of a batch are handled: that of the rows which they lock.

Two transactions that lock rows in one order wait for each other, and never in a circle::

    batch 1   row 3 ── row 7 ── row 9        batch 2   row 7 ── row 8

Messages of one group, or of one key of an ordered subscriber, stay in the broker's order among themselves, and so do
those that lock the same row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from txbox_workers.delivery import Delivery
from txbox_workers.handlers import MessageArguments


class LockOrder:
    """Sorts deliveries by what the host says that their messages lock."""

    def __init__(
        self,
        locks: Callable[[Any], object],
        arguments: MessageArguments,
        group: Callable[[Delivery], str | None],
    ) -> None:
        """Take the host's function, what handlers are given, and what keeps an order of its own."""
        self._locks = locks
        self._arguments = arguments
        self._group = group

    def sorted(self, deliveries: Sequence[Delivery], values: Mapping[str, Any]) -> Sequence[Delivery]:
        """Return deliveries in the order of their locks; ``values`` has what was read of them, by message id.

        Raises whatever the host's function raises, and ``TypeError`` if its results cannot be compared.
        """
        ranks: dict[object, Any] = {}
        keyed: list[tuple[object, Delivery]] = []
        for delivery in deliveries:
            rank = _rank(self._locks(self._arguments.of_one(delivery.message, values)[0]))
            group = self._group(delivery)
            key: object = delivery.receipt if group is None else (group,)
            ranks[key] = min(ranks.get(key, rank), rank)
            keyed.append((key, delivery))
        if len(deliveries) < 2:
            return deliveries
        return [delivery for _, delivery in sorted(keyed, key=lambda one: ranks[one[0]])]


def _rank(locks: object) -> list[tuple[str, Any]]:
    """Return one or several locks as what can be compared with those of others; types come before values."""
    return sorted(map(_typed, locks)) if isinstance(locks, list | tuple | set | frozenset) else [_typed(locks)]


def _typed(lock: Any) -> tuple[str, Any]:
    return type(lock).__name__, lock
