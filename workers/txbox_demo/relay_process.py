"""One process of the relay: sends what shop and billing have published, until it is killed or told to stop."""

import os
import random
import signal
import threading
from collections.abc import Sequence

from txbox.backoff import Backoff
from txbox.relay import OutboxMessage, Publisher, Refused, Relay
from txbox.wire.destinations import SQS
from txbox_aws.publishers import aws_publishers
from txbox_demo.journal import Journal
from txbox_demo.orders import Orders

__all__ = ["CLAIMED", "CONFIRMED", "HANDED", "SENT", "Unlucky", "run_relay"]

LOST_ANSWER_SHARE = 0.12
"""Of all messages that the broker has taken: the answer is lost, and so the relay sends them again."""

HANDED = "handed"
CONFIRMED = "confirmed"
"""What the journal says: before messages are handed to the broker, and after its answer."""

CLAIMED = "claimed"
SENT = "sent"
"""Moments to die: before the broker gets anything, and after it has everything and before the outbox knows."""

BATCH_SIZE = 100
"""Small: what a killed relay has sent and not settled is sent again."""


def run_relay(orders: Orders) -> None:
    """Send until SIGTERM, or die on the way.

    Args:
        orders: what to do.
    """
    engine, journal = orders.engine(), Journal(orders.journal)
    unlucky = Unlucky(aws_publishers()[SQS], journal, moment=orders.moment, life=orders.life, seed=orders.seed)
    Relay(
        engine,
        {SQS: unlucky},
        senders=1,
        batch_size=BATCH_SIZE,
        # Short, because what is refused here has arrived: a demo need not wait for it.
        backoff=Backoff(first_seconds=0.2, longest_seconds=2.0),
    ).run()
    engine.dispose()


class Unlucky:
    """A publisher that keeps a journal of what another one sends, loses answers, and dies when it is told to."""

    def __init__(self, publisher: Publisher, journal: Journal, *, moment: str, life: int, seed: int) -> None:
        """Take a publisher.

        Args:
            publisher: sends.
            journal: gets what was handed to it, and what it has confirmed.
            moment: where to die, or "".
            life: after how many messages.
            seed: of the random choices.
        """
        self._publisher = publisher
        self._journal = journal
        self._moment = moment
        self._life = life
        self._random = random.Random(seed)  # noqa: S311 - choices of the demo, no secrets
        self._lock = threading.Lock()
        self._handed = 0

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        """Send, and lose some of the answers: refused, as far as the relay can tell."""
        with self._lock:
            self._handed += len(messages)
            lost = [message for message in messages if self._random.random() < LOST_ANSWER_SHARE]
            time_to_die = self._handed >= self._life
        if time_to_die and self._moment == CLAIMED:
            os.kill(os.getpid(), signal.SIGKILL)
        self._journal.note(HANDED, [message.id for message in messages])
        refused = list(self._publisher.send(messages))
        if time_to_die and self._moment == SENT:
            os.kill(os.getpid(), signal.SIGKILL)
        known = {refusal.message.id for refusal in refused}
        refused += [Refused(message, "the answer was lost") for message in lost if message.id not in known]
        known.update(message.id for message in lost)
        self._journal.note(CONFIRMED, [message.id for message in messages if message.id not in known])
        return refused
