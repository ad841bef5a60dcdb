"""A source in memory: for testing a host's handlers and for measuring a worker without a broker."""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from txbox import Message
from txbox.messages.message import valid_message_id
from txbox_workers.delivery import Delivery, Settlement

__all__ = ["MemorySource"]


class MemorySource:
    """Delivers messages from memory, at least once. What is handed back comes again; what is acked does not."""

    def __init__(
        self,
        messages: Iterable[Message] = (),
        *,
        batch_size: int = 10,
        wait_seconds: float = 0.05,
        name: str = "memory",
    ) -> None:
        """Fill the source.

        Args:
            messages: what to deliver, in order.
            batch_size: deliveries per ``receive``, at most.
            wait_seconds: how long ``receive`` waits when there is nothing.
            name: the source's name.
        """
        self._name = name
        self._batch_size = batch_size
        self._wait_seconds = wait_seconds
        self._condition = threading.Condition()
        self._numbers = itertools.count(1)
        self._ready: deque[Delivery] = deque()
        self._delayed: list[tuple[float, int, Delivery]] = []
        self._taken: dict[str, Delivery] = {}
        for message in messages:
            self.send(message)

    @property
    def name(self) -> str:
        """The source's name."""
        return self._name

    @property
    def visibility_seconds(self) -> float | None:
        """Always None: a delivery belongs to the worker until it is settled."""
        return None

    def send(self, message: Message) -> None:
        """Add a message.

        Raises:
            InvalidMessageId: no inbox can keep its id.
        """
        valid_message_id(message.id)
        with self._condition:
            self._ready.append(Delivery(message, receipt=str(next(self._numbers)), body=message.body))
            self._condition.notify_all()

    def wait_until_empty(self, timeout: float) -> bool:
        """Wait until every message is acked.

        Args:
            timeout: how long to wait, in seconds.

        Returns:
            Whether that happened in time.
        """
        with self._condition:
            return self._condition.wait_for(lambda: not (self._ready or self._delayed or self._taken), timeout=timeout)

    def open(self) -> None:
        """Do nothing: there is nothing to check."""

    def receive(self) -> Sequence[Delivery]:
        """Return the next deliveries, in order."""
        with self._condition:
            self._promote()
            if not self._ready:
                until_due = self._delayed[0][0] - time.monotonic() if self._delayed else self._wait_seconds
                self._condition.wait(max(min(self._wait_seconds, until_due), 0.0))
                self._promote()
            deliveries = [self._ready.popleft() for _ in range(min(self._batch_size, len(self._ready)))]
            self._taken.update((delivery.receipt, delivery) for delivery in deliveries)
            return deliveries

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Forget deliveries."""
        with self._condition:
            acked = [d.receipt for d in deliveries if self._taken.pop(d.receipt, None) is not None]
            self._condition.notify_all()
            return acked

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        """Deliver again after each settlement's delay."""
        with self._condition:
            for settlement in settlements:
                delivery = self._taken.pop(settlement.delivery.receipt, None)
                if delivery is not None:
                    number = next(self._numbers)
                    again = replace(delivery, receipt=str(number), receive_count=delivery.receive_count + 1)
                    heapq.heappush(self._delayed, (time.monotonic() + settlement.delay_seconds, number, again))
            self._condition.notify_all()

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:  # noqa: ARG002 - protocol
        """Do nothing: deliveries do not expire."""
        return {}

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _promote(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            self._ready.append(heapq.heappop(self._delayed)[2])
