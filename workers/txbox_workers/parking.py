"""Parking: dead letters of one worker's deliveries."""

from sqlalchemy import Engine

from txbox import DeadLetter, DeadLetters, Mismatch, Outcome, Reason
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.outages import bookkeeping, connecting

__all__ = ["Parking"]


class Parking:
    """Keeps what has failed for the last time, whole."""

    def __init__(
        self, engine: Engine, subscriber_id: str, source_name: str, *, schema: str | None = None, prefix: str = ""
    ) -> None:
        """Name the subscriber, what it receives from, and the place of the table.

        Args:
            engine: where to open the short transactions.
            subscriber_id: whose messages.
            source_name: where they come from.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
        """
        self._engine = engine
        self._subscriber_id = subscriber_id
        self._source_name = source_name
        self._letters = DeadLetters(engine, schema=schema, prefix=prefix)

    def check(self) -> None:
        """See that the table is there.

        Raises:
            SchemaMissing: it is not.
            DatabaseUnavailable: the database does not answer.
        """
        with connecting(), self._engine.connect() as connection:
            self._letters.check(connection)

    def is_parked(self, delivery: Delivery, *, before_handler: bool = False) -> bool:
        """Whether a message was parked, and its worker killed before the ack: it has had its attempts."""
        with bookkeeping(before_handler=before_handler):
            return self._letters.is_parked(self._subscriber_id, delivery.message.id, delivery.body)

    def park(
        self, delivery: Delivery, reason: Reason, text: str, attempts: int, error: BaseException | None = None
    ) -> Settlement:
        """Park a message.

        Args:
            delivery: of what.
            reason: why.
            text: what was said of the last attempt.
            attempts: how many there were.
            error: the last one's, if this process has seen it.
        """
        letter = DeadLetter(
            subscriber_id=self._subscriber_id,
            message_id=delivery.message.id,
            reason=reason,
            error=text,
            attempts=attempts,
            source=self._source_name,
            body=delivery.body,
            headers=dict(delivery.message.headers),
            envelope=dict(delivery.envelope),
        )
        with bookkeeping(before_handler=False):
            self._letters.park(letter)
        return Settlement(delivery, Outcome.DEAD, error)

    def park_mismatch(self, delivery: Delivery, error: Mismatch | None = None) -> Settlement:
        """Park a message whose id has come with another body."""
        error = error or Mismatch(self._subscriber_id, [delivery.message.id])
        self.park(delivery, Reason.MISMATCH, str(error), delivery.receive_count)
        return Settlement(delivery, Outcome.MISMATCH, error)
