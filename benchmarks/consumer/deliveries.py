"""Messages made before the clock starts, so that no side pays for making them; and the source that hands them out."""

import random
import threading
from collections.abc import Collection, Mapping, Sequence

from benchmarks.shared.database import ACCOUNTS
from txbox import Message
from txbox_workers.delivery import Delivery, Settlement

REPEAT_EVERY = 20
"""Every twentieth delivery repeats an earlier message: 5 % duplicates."""

REPEAT_SPREAD = 20_000
"""A repeat is at most this much further back than ``distance``."""

IDLE_SECONDS = 0.01


def make_deliveries(count: int, *, distance: int, as_json: bool = False) -> list[Delivery]:
    """Make deliveries with random ids, 5 % of them repeats of a message that came before.

    Args:
        count: how many.
        distance: a repeat comes at least so many deliveries after the first, so that the first has committed.
        as_json: make bodies JSON, in place of the account's number alone.
    """
    generator = random.Random()
    messages: list[Message] = []
    for number in range(count):
        if number % REPEAT_EVERY == REPEAT_EVERY - 1 and number > distance:
            farthest = max(number - distance - REPEAT_SPREAD, 0)
            messages.append(messages[generator.randint(farthest, number - distance)])
        else:
            account = str(generator.randint(1, ACCOUNTS)).encode()
            body = b'{"account": %b, "amount": 3, "currency": "EUR"}' % account if as_json else account
            messages.append(Message(f"{generator.getrandbits(128):032x}", body))
    return [Delivery(message, receipt=str(number)) for number, message in enumerate(messages)]


class PreparedSource:
    """A source that only hands out what was made before, and counts what is acked."""

    name = "benchmark"
    visibility_seconds: float | None = None

    def __init__(self, deliveries: Sequence[Delivery], batch: int) -> None:
        """Take the deliveries; each ``receive`` hands out ``batch`` of them."""
        self._deliveries = deliveries
        self._batch = batch
        self._next = 0
        self._lock = threading.Lock()
        self._acked: list[Sequence[Delivery]] = []
        self.acked = 0
        self.used_up = threading.Event()

    def open(self) -> None:
        """Nothing to check."""

    def receive(self) -> Sequence[Delivery]:
        """Return the next deliveries; none, and ``used_up`` is set, when they have come to an end."""
        with self._lock:
            start = self._next
            self._next = start + self._batch
        deliveries = self._deliveries[start : start + self._batch]
        if not deliveries:
            self.used_up.set()
            threading.Event().wait(IDLE_SECONDS)
        return deliveries

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Count."""
        with self._lock:
            self._acked.append(deliveries)
            self.acked += len(deliveries)
        return [delivery.receipt for delivery in deliveries]

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        """Do not deliver again: what is handed back was not processed."""

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:  # noqa: ARG002 - protocol
        """Nothing to extend."""
        return {}

    def close(self) -> None:
        """Nothing to close."""

    def distinct_acked(self) -> int:
        """How many different messages were acked: what must have been applied, once each."""
        return len({delivery.message.id for deliveries in self._acked for delivery in deliveries})
