"""The broker of a trial: it redelivers at once, and visibility ends when the trial says so."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence

from txbox import BrokerError, Outcome
from txbox_testing.stages.life import Killed, Life
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.memory_source import MemorySource

AGAIN_SECONDS = 0.02
"""The longest time for which a delivery that was handed back stays away: a test has no use for a backoff of minutes."""


class StageBroker(MemorySource):
    """Delivers from memory, and outlives the workers that are killed."""

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        super().hand_back([each._replace(delay_seconds=min(each.delay_seconds, AGAIN_SECONDS)) for each in settlements])

    def end_visibility(self) -> None:
        """Redeliver what was received and is not settled. What its receivers say of it no longer counts."""
        with self._condition:
            taken = tuple(self._taken.values())
        self.give_back(taken)

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        self.hand_back([Settlement(delivery, Outcome.IN_FLIGHT) for delivery in deliveries])


class Consumer:
    """The broker as the worker of one life sees it. After the worker's death nothing passes. Implements ``Source``."""

    def __init__(self, broker: StageBroker, life: Life) -> None:
        self._broker = broker
        self._life = life
        self.loses_ack = False
        self.settled = threading.Event()  # it has settled some delivery

    @property
    def name(self) -> str:
        return self._broker.name

    @property
    def visibility_seconds(self) -> float | None:
        """None: visibility ends when the trial says so."""
        return None

    def open(self) -> None:
        """Nothing to check."""

    def receive(self) -> Sequence[Delivery]:
        """Return the next deliveries; none to a worker that is dead or held."""
        if self._takes_nothing():
            time.sleep(AGAIN_SECONDS)
            return ()
        deliveries = self._broker.receive()
        if deliveries and self._takes_nothing():  # while it waited for them
            self._broker.give_back(deliveries)
            return ()
        return deliveries if not deliveries or self._passes("received") else ()

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Ack deliveries, or lose one ack."""
        if not self._passes("committed"):
            return ()
        if self.loses_ack:
            self.loses_ack = False
            self._broker.end_visibility()
            raise BrokerError("the ack was lost, as this trial wants it")
        acked = self._broker.ack(deliveries)
        self.settled.set()
        return acked if self._passes("acked") else ()

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        if not self._life.dead:
            self._broker.hand_back(settlements)
            self.settled.set()

    def extend_visibility(self, deliveries: Sequence[Delivery], seconds: float) -> Mapping[str, str]:  # noqa: ARG002 - protocol
        """Nothing to extend."""
        return {}

    def close(self) -> None:
        """Nothing to close: the broker is not the worker's."""

    def _takes_nothing(self) -> bool:
        return self._life.dead or self._life.held

    def _passes(self, place: str) -> bool:
        """Pass a place. Return whether this worker is still alive; if not, its threads end by themselves."""
        if self._life.dead:
            return False
        try:
            self._life.reach(place)
        except Killed:
            return False
        return not self._life.dead
