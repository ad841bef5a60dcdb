"""A FIFO queue in memory: of each group the first message alone is handed out, and the others when it is acked."""

import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from support.workers.memory_worker import messages
from txbox import DeadLetter, Outcome
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.memory_source import MemorySource


class FifoSource(MemorySource):
    """As SQS's FIFO queues, but for batches of one group: what follows a message of its group waits for its ack."""

    lost_acks = 0.0
    """How likely it is that an ack is lost, as when a worker dies between its commit and its ack."""

    def ack(self, deliveries: Sequence[Delivery]) -> Collection[str]:
        """Forget deliveries, or lose their acks: what was handed out then comes again, in its order."""
        if random.random() < self.lost_acks:
            self.hand_back([Settlement(delivery, Outcome.IN_FLIGHT) for delivery in deliveries])
            return []
        return super().ack(deliveries)

    def send_in(self, group: str, *ids: str) -> None:
        """Send messages of a group."""
        for message in messages(*ids):
            with self._condition:
                number = next(self._numbers)
                sent = Delivery(message, str(number), group=group, body=message.body, envelope={"sequence": number})
                self._ready.append(sent)
                self._condition.notify_all()

    def send_back(self, letter: DeadLetter) -> None:
        """Send a dead letter's message back, at the end of its group."""
        assert letter.order_key is not None
        self.send_in(letter.order_key, letter.message_id)

    def receive(self) -> Sequence[Delivery]:
        with self._condition:
            self._condition.wait_for(self._due, self._wait_seconds)
            batch = self._due()
            for delivery in batch:
                self._ready.remove(delivery)
                self._taken[delivery.receipt] = delivery
            return batch

    def hand_back(self, settlements: Sequence) -> None:
        """Deliver again at once, in the order of sending, whatever the order in which they are handed back."""
        with self._condition:
            for settlement in settlements:
                delivery = self._taken.pop(settlement.delivery.receipt, None)
                if delivery is not None:
                    receipt = str(next(self._numbers))
                    again = replace(delivery, receipt=receipt, receive_count=delivery.receive_count + 1)
                    self._ready.append(again)
            self._ready = deque(sorted(self._ready, key=lambda each: each.envelope["sequence"]))
            self._condition.notify_all()

    def _due(self) -> list[Delivery]:
        """What may be handed out now; a group's messages may come in one batch, in order, unless one is taken."""
        taken = {delivery.group for delivery in self._taken.values()}
        return [delivery for delivery in self._ready if delivery.group not in taken][: self._batch_size]
