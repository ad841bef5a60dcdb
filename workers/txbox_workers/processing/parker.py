"""Park deliveries of one worker as dead letters."""

from txbox import DeadLetter, DeadLetters, Expired, Inbox, InFlight, Mismatch, Outcome, Reason
from txbox.dead_letters.failures import Failed
from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.transactions import short_transaction
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.processing.outage_errors import bookkeeping, connecting
from txbox_workers.processing.processor import in_flight


class Parker:
    """Parks what has failed for the last time, complete with body, headers and envelope."""

    def __init__(
        self,
        letters: DeadLetters,
        subscriber_id: str,
        source_name: str,
        inbox: Inbox | None,
        *,
        ordered: bool = False,
    ) -> None:
        """``letters`` use an engine whose transactions are limited.

        ``inbox`` decides whether a message is processed or parked; with None, a ledger does. ``ordered`` says that
        letters keep the order of their keys.
        """
        self._letters = letters
        self._subscriber_id = subscriber_id
        self._source_name = source_name
        self._inbox = inbox
        self._ordered = ordered

    def check(self) -> None:
        """Raise unless the table exists.

        Raises:
            SchemaMissing: it does not.
            DatabaseUnavailable: the database does not answer.
        """
        with connecting(), self._letters.engine.connect() as connection, own_cursors(connection):
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
        """Park a message, unless it is processed or another transaction is processing it.

        Args:
            delivery: the message's delivery.
            reason: why.
            text: the error of the last attempt.
            failed: the attempts that counted.
            error: the last attempt's error, if this process has seen it.
            lease_attempts: how many attempts the message had in its ledger, if there is one.
            wait_seconds: how long to wait for another transaction that is processing the message; None means as long as
                usual.
        """
        letter = self._letter(delivery, reason, text, failed)
        with bookkeeping(before_handler=False):
            try:
                if self._inbox is None:
                    number: int | None = self._letters.park_leased(letter, lease_attempts or 0)
                else:
                    number = self._letters.park(
                        letter,
                        message=delivery.message,
                        wait_seconds=self._inbox.wait_seconds if wait_seconds is None else wait_seconds,
                        lease_attempts=lease_attempts,
                        unknown_age=self._inbox.unknown_age,
                    )
            except InFlight as error_in_flight:
                return in_flight(delivery, error_in_flight)
        if number is None:
            return Settlement(delivery, Outcome.DUPLICATE)
        return Settlement(delivery, Outcome.DEAD, error, counted=failed.history)

    def park_mismatch(self, delivery: Delivery, error: Mismatch | None = None) -> Settlement:
        """Park a message whose id has come with another body."""
        error = error or Mismatch(self._subscriber_id, [delivery.message.id])
        settlement = self.park(delivery, Reason.MISMATCH, str(error), NOT_TRIED)
        return settlement._replace(outcome=Outcome.MISMATCH, error=error) if settlement.outcome.acked else settlement

    def park_expired(self, delivery: Delivery, expired: Expired, lease_attempts: int | None = None) -> Settlement:
        """Park a message that is too old to judge; hand it back if it was redriven just now.

        ``expired`` may name other messages, too. ``lease_attempts`` is as in ``park``.
        """
        message_id = delivery.message.id
        error = Expired(self._subscriber_id, {message_id: expired.sent_at[message_id]}, expired.horizon)
        if self._inbox is not None:
            with bookkeeping(before_handler=False), short_transaction(self._letters.engine) as connection:
                if not self._inbox.still_expired(connection, error):
                    return in_flight(delivery, error)
        settlement = self.park(delivery, Reason.EXPIRED, str(error), NOT_TRIED, lease_attempts=lease_attempts)
        if settlement.outcome is not Outcome.DEAD:
            return settlement
        return settlement._replace(outcome=Outcome.EXPIRED, error=error)

    # --- under a lease ------------------------------------------------------------------------------------------------

    def waits(self, delivery: Delivery, lease_attempts: int) -> bool:
        """Whether a message was parked and not redriven: its ack was lost, or this is another copy."""
        with bookkeeping():
            return self._letters.waits(self._subscriber_id, delivery.message.id, delivery.body, lease_attempts)

    def attempts_before(self, delivery: Delivery) -> int:
        """Return how many attempts under leases a message had when it was last parked."""
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
            order_key=delivery.order_key if self._ordered else None,
        )


NOT_TRIED = Failed(0, ())
