"""Parking: dead letters of one worker's deliveries."""

from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import Engine

from txbox import DeadLetter, DeadLetters, InFlight, Mismatch, Outcome, Reason
from txbox.dead_letters.failures import WAIT_SECONDS, Failed
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.processing.outages import bookkeeping, connecting

__all__ = ["Parking"]


class Parking:
    """Keeps what has failed for the last time, whole."""

    def __init__(
        self,
        engine: Engine,
        subscriber_id: str,
        source_name: str,
        *,
        schema: str | None = None,
        prefix: str = "",
        wait_seconds: float = WAIT_SECONDS,
        beside_inbox: bool = True,
        in_flight_seconds: Callable[[int], float] = float,
    ) -> None:
        """Name the subscriber, what it receives from, and the place of the table.

        Args:
            engine: where to open the short transactions.
            subscriber_id: whose messages.
            source_name: where they come from.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            wait_seconds: how long to wait for another transaction that is processing the same message.
            beside_inbox: an inbox decides whether a message is processed or parked; otherwise it is a ledger.
            in_flight_seconds: until a delivery comes again whose message is being processed, by its receive count.
        """
        self._engine = engine
        self._subscriber_id = subscriber_id
        self._source_name = source_name
        self._wait_seconds = wait_seconds
        self._beside_inbox = beside_inbox
        self._in_flight_seconds = in_flight_seconds
        self._letters = DeadLetters(engine, schema=schema, prefix=prefix)

    def check(self) -> None:
        """See that the table is there.

        Raises:
            SchemaMissing: it is not.
            DatabaseUnavailable: the database does not answer.
        """
        with connecting(), self._engine.connect() as connection:
            self._letters.check(connection)

    def park(
        self,
        delivery: Delivery,
        reason: Reason,
        text: str,
        failed: Failed,
        error: BaseException | None = None,
        lease_attempts: int | None = None,
        wait_seconds: float | None = None,
    ) -> Settlement:
        """Park a message, unless it is processed, or being processed, elsewhere.

        Args:
            delivery: of what.
            reason: why.
            text: what was said of the last attempt.
            failed: the attempts that counted.
            error: the last one's, if this process has seen it.
            lease_attempts: how many the message has had in its ledger, if there is one.
            wait_seconds: for another transaction that is processing the message; None: as long as usual.
        """
        letter = self._letter(delivery, reason, text, failed)
        with bookkeeping(before_handler=False):
            try:
                wait = self._wait_seconds if wait_seconds is None else wait_seconds
                number = self._park(letter, delivery.message.body, lease_attempts, wait)
            except InFlight as in_flight:
                delay = self._in_flight_seconds(delivery.receive_count)
                return Settlement(delivery, Outcome.IN_FLIGHT, in_flight, delay)
        if number is None:
            return Settlement(delivery, Outcome.DUPLICATE)
        return Settlement(delivery, Outcome.DEAD, error, counted=failed.history)

    def _park(self, letter: DeadLetter, body: bytes, lease_attempts: int | None, wait_seconds: float) -> int | None:
        if self._beside_inbox:
            return self._letters.park(letter, body=body, wait_seconds=wait_seconds, lease_attempts=lease_attempts)
        return self._letters.park_leased(letter, lease_attempts or 0)

    def park_mismatch(self, delivery: Delivery, error: Mismatch | None = None) -> Settlement:
        """Park a message whose id has come with another body."""
        error = error or Mismatch(self._subscriber_id, [delivery.message.id])
        settlement = self.park(delivery, Reason.MISMATCH, str(error), NOT_TRIED)
        return replace(settlement, outcome=Outcome.MISMATCH, error=error) if settlement.outcome.acked else settlement

    # --- under a lease ------------------------------------------------------------------------------------------------

    def waits(self, delivery: Delivery, lease_attempts: int) -> bool:
        """Whether a message was parked and not redriven: its ack was lost, or this is another copy of it."""
        with bookkeeping():
            return self._letters.waits(self._subscriber_id, delivery.message.id, delivery.body, lease_attempts)

    def attempts_before(self, delivery: Delivery) -> int:
        """How many attempts under leases a message had when it was parked last."""
        with bookkeeping():
            return self._letters.lease_attempts(self._subscriber_id, delivery.message.id)

    def _letter(self, delivery: Delivery, reason: Reason, text: str, failed: Failed) -> DeadLetter:
        return DeadLetter(
            subscriber_id=self._subscriber_id,
            message_id=delivery.message.id,
            reason=reason,
            error=text,
            attempts=failed.attempts,
            source=self._source_name,
            body=delivery.body,
            headers=dict(delivery.message.headers),
            envelope=dict(delivery.envelope),
            history=failed.history,
        )


NOT_TRIED = Failed(0, ())
"""No attempt was made."""
