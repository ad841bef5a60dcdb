"""The producer of the demo, which sends too much: the way producers do after a time-out."""

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from txbox import BrokerError
from txbox.message import HEADER_MESSAGE_ID
from txbox_workers.demo.purchases import Purchase
from txbox_workers.sqs import MAX_BATCH

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

__all__ = ["Publisher", "Sent"]

RESENT_SHARE = 0.15
"""Of all purchases: sent again later, in a new SQS message with a new MessageId."""

TWICE_SHARE = 0.12
"""Of all batches: sent twice, as if the answer to the first had been lost."""


@dataclass(slots=True)
class Sent:
    """How many messages were sent, and why."""

    purchases: int = 0
    resent: int = 0
    in_batches_sent_twice: int = 0

    @property
    def messages(self) -> int:
        """All of them."""
        return self.purchases + self.resent + self.in_batches_sent_twice


class Publisher:
    """Sends each purchase at least once, from a thread of its own."""

    def __init__(
        self,
        client: "SQSClient",
        queue_url: str,
        purchases: Iterable[Purchase],
        *,
        seed: int,
        on_sent: Callable[[int], None],
    ) -> None:
        """Prepare; ``start`` starts sending.

        Args:
            client: an SQS client of boto3.
            queue_url: where to send.
            purchases: what to send.
            seed: of the random choices.
            on_sent: is told how many more purchases were sent for the first time.
        """
        self.sent = Sent()
        self.error: Exception | None = None
        self._client = client
        self._queue_url = queue_url
        self._purchases = iter(purchases)
        self._random = random.Random(seed)  # noqa: S311 - choices of the demo, no secrets
        self._on_sent = on_sent
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-publisher", daemon=True)

    @property
    def done(self) -> bool:
        """Whether everything was sent."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sending, wherever it is."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._send_all()
        except Exception as error:  # noqa: BLE001 - the run looks at it and ends
            self.error = error

    def _send_all(self) -> None:
        to_resend: list[Purchase] = []
        for batch in _batches(self._purchases):
            if self._stopping.is_set():
                return
            self._send(batch)
            self.sent.purchases += len(batch)
            self._on_sent(len(batch))
            if self._random.random() < TWICE_SHARE:
                self._send(batch)
                self.sent.in_batches_sent_twice += len(batch)
            to_resend.extend(purchase for purchase in batch if self._random.random() < RESENT_SHARE)
            # Not at once: a producer retries after its time-out.
            if len(to_resend) >= _RESEND_WHEN:
                to_resend = self._resend(to_resend)
        while to_resend:
            to_resend = self._resend(to_resend)

    def _resend(self, purchases: list[Purchase]) -> list[Purchase]:
        self._random.shuffle(purchases)
        now, later = purchases[:MAX_BATCH], purchases[MAX_BATCH:]
        self._send(now)
        self.sent.resent += len(now)
        return later

    def _send(self, batch: list[Purchase]) -> None:
        entries: list[Any] = [
            {
                "Id": str(number),
                "MessageBody": purchase.as_json(),
                "MessageAttributes": {HEADER_MESSAGE_ID: {"DataType": "String", "StringValue": purchase.event_id}},
            }
            for number, purchase in enumerate(batch)
        ]
        answer = self._client.send_message_batch(QueueUrl=self._queue_url, Entries=entries)
        if failed := answer.get("Failed"):
            raise BrokerError(f"SQS refused {len(failed)} messages: {failed[0]}")


_RESEND_WHEN = 40


def _batches(purchases: Iterator[Purchase]) -> Iterator[list[Purchase]]:
    while batch := list(islice(purchases, MAX_BATCH)):
        yield batch
