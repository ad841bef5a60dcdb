"""The broker of a trial: deliveries come again at once, and visibility ends when the trial says so."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence

from txbox import BrokerError, Outcome
from txbox_testing.stages.life import Killed, Life
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.memory_source import MemorySource

AGAIN_SECONDS = 0.02
"""How long what is handed back stays away, at most: a backoff of minutes is of no use in a test."""


class StageBroker(MemorySource):
    """Delivers from memory; it outlives the workers that are killed."""

    def hand_back(self, settlements: Sequence[Settlement]) -> None:
        """Deliver again, soon."""
        super().hand_back([each._replace(delay_seconds=min(each.delay_seconds, AGAIN_SECONDS)) for each in settlements])

    def end_visibility(self) -> None:
        """Deliver again what was received and is not settled; what its receivers say of it counts no more."""
        with self._condition:
            taken = tuple(self._taken.values())
        self.give_back(taken)

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Deliver again what was received."""
        self.hand_back([Settlement(delivery, Outcome.IN_FLIGHT) for delivery in deliveries])


class Consumer:
    """What the worker of one life sees of the broker; after its death nothing passes. Implements ``Source``."""

    def __init__(self, broker: StageBroker, life: Life) -> None:
        self._broker = broker
        self._life = life
        self.loses_ack = False
        self.settled = threading.Event()  # it has said what became of some delivery

    @property
    def name(self) -> str:
        """The broker's name."""
        return self._broker.name

    @property
    def visibility_seconds(self) -> float | None:
        """None: it ends when the trial says so."""
        return None

    def open(self) -> None:
        """Nothing to check."""

    def receive(self) -> Sequence[Delivery]:
        """Return the next deliveries; none to a worker that is dead or held."""
        if self._takes_nothing():
            time.sleep(AGAIN_SECONDS)
            return ()
        deliveries = self._broker.receive()
        if deliveries and self._takes_nothing():  # since it began to wait for them
            self._broker.give_back(deliveries)
            return ()
        return deliveries if not deliveries or self._passes("received") else ()

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Have the broker forget deliveries; or lose that, once."""
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
        """Have the broker deliver again."""
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
        """Pass a place, and return whether this worker is still alive; its threads end by themselves if not."""
        if self._life.dead:
            return False
        try:
            self._life.reach(place)
        except Killed:
            return False
        return not self._life.dead
