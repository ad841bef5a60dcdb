"""Deliveries through an inbox: the transactions, and what is counted and parked when they fail.

A batch is one transaction when all goes well::

    BEGIN
      INSERT … ON CONFLICT DO NOTHING RETURNING      one statement finds the messages that come for the first time
      handler(session, message)                      for each of those, in the broker's order
    COMMIT

When anything in it fails, all of it is rolled back and its deliveries are processed one by one, each in a transaction
of its own: the good ones commit, and only the bad one is handed back. So a handler may run twice, but only one of its
runs can commit.

A message that takes the whole process down leaves no trace in a transaction that was never committed. So a delivery
whose receive count says that it was lost before (*suspect*) is processed alone, and its attempt is counted, in a
transaction of its own, **before** it is made. The receive count alone does not condemn: innocent messages that were
delivered beside a deadly one have the same count.
"""

from collections.abc import Sequence
from contextlib import suppress

from sqlalchemy import Engine

from txbox import Failures, InFlight, LedgerError, Mismatch, Outcome, Reason
from txbox.backoff import Backoff
from txbox.failures import NO_OUTCOME, Attempt, describe
from txbox.transactions import short_transaction
from txbox_workers import processor
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.handler_transactions import Halt, HandlerTransactions, Stopping
from txbox_workers.outages import DatabaseUnavailable, bookkeeping, connecting
from txbox_workers.parking import Parking
from txbox_workers.processor import Processor

__all__ = ["InboxProcessor"]


class InboxProcessor(Processor):
    """Runs deliveries of one worker through the inbox and the handler."""

    def __init__(
        self,
        *,
        transactions: HandlerTransactions,
        failures: Failures,
        parking: Parking,
        engine: Engine,
        one_transaction_per_message: bool,
        max_attempts: int | None,
        backoff: Backoff,
        stopping: Halt,
    ) -> None:
        """Take what ``Worker`` was given; it has validated all of it."""
        super().__init__(stopping)
        self._transactions = transactions
        self._failures = failures
        self._parking = parking
        self._engine = engine
        self._singly = one_transaction_per_message
        self._max_attempts = max_attempts
        self._backoff = backoff
        self._suspect_after = SUSPECT_AFTER if max_attempts is None else min(SUSPECT_AFTER, max_attempts - 1)

    def check(self) -> None:
        """See that the database answers and has the tables."""
        self._transactions.check()
        with connecting(), self._engine.connect() as connection:
            self._failures.check(connection)
        self._parking.check()

    def check_recording(self) -> None:
        """See that a message could be recorded."""
        self._transactions.check_recording()

    def _suspect(self, delivery: Delivery) -> bool:
        return delivery.receive_count > self._suspect_after

    def _process_together(self, deliveries: Sequence[Delivery]) -> list[Settlement] | None:
        """Process a batch in one transaction; None if it has to be processed singly instead."""
        if self._singly or any(self._suspect(delivery) or delivery.problem for delivery in deliveries):
            return None
        try:
            found = self._transactions.run_batch(deliveries)
        except (DatabaseUnavailable, KeyboardInterrupt):
            raise
        except BaseException:  # noqa: BLE001 - each one is met again, alone, with its own message
            return None
        self._forget_failures([delivery for delivery in deliveries if delivery.message.id in found.first])
        settlements = []
        for delivery in deliveries:
            if delivery.message.id in found.mismatched:
                settlements.append(self._parking.park_mismatch(delivery))
            elif delivery.message.id in found.first:
                settlements.append(Settlement(delivery, Outcome.PROCESSED))
            elif delivery.message.id in found.left:
                settlements.append(Settlement(delivery, Outcome.IN_FLIGHT))
            else:
                settlements.append(Settlement(delivery, Outcome.DUPLICATE))
        return settlements

    def _process_one(self, delivery: Delivery) -> Settlement:
        message = delivery.message
        attempt: Attempt | None = None
        suspect = self._suspect(delivery)
        if suspect and self._parking.is_parked(delivery, before_handler=True):
            self._forget_failures([delivery])
            return Settlement(delivery, Outcome.DEAD)
        if delivery.problem is not None:
            return self._failed(delivery, delivery.problem, Reason.MALFORMED)
        if suspect:
            with bookkeeping():
                attempt = self._failures.begin_attempt(message.id)
            if attempt is not None and self._is_due(delivery, attempt):
                reason = Reason.CRASHED if attempt.error_before in (None, NO_OUTCOME) else Reason.FAILED
                return self._parking.park(delivery, reason, attempt.error_before or NO_OUTCOME, attempt.number - 1)
        try:
            first = self._transactions.run_one(delivery)
        except (InFlight, Stopping, LedgerError) as error:
            if isinstance(error, LedgerError) and error.permanent:
                return self._failed(delivery, error, Reason.FAILED, counted=attempt is not None)
            if attempt is not None:
                with bookkeeping():
                    self._failures.take_back(attempt)
            # Another worker may have it at once, unless somebody elsewhere has it already, or a ledger that the handler
            # uses is away: that is no message's fault.
            delay = 0.0 if isinstance(error, Stopping) else processor.IN_FLIGHT_BACKOFF.seconds(delivery.receive_count)
            return Settlement(delivery, Outcome.IN_FLIGHT, error, delay)
        except Mismatch as error:
            return self._parking.park_mismatch(delivery, error)
        except DatabaseUnavailable as error:
            if attempt is not None and error.before_handler:
                # Not an attempt: it must not bring the message nearer to its dead letter. If this fails too, one
                # outage has cost one attempt.
                with suppress(Exception):
                    self._failures.take_back(attempt)
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a handler's SystemExit or CancelledError fails its message too
            return self._failed(delivery, error, Reason.FAILED, counted=attempt is not None)
        # Also if it turned out a duplicate: it may have been processed after this attempt was counted in advance.
        self._forget_failures([delivery])
        return Settlement(delivery, Outcome.PROCESSED if first else Outcome.DUPLICATE)

    def _forget_failures(self, deliveries: Sequence[Delivery]) -> None:
        """Forget the failures of messages that are processed now: after the commit, in a short transaction.

        In the handler's transaction it would run with what the handler has left behind there, a role or a search path
        that does not know our tables. Nothing rests on these rows once the inbox has the message, so trouble here is
        none: ``txbox status`` does not count them.
        """
        # Counted for a redelivery or, where few attempts are allowed, in advance for this very delivery.
        counted = [d.message.id for d in deliveries if d.receive_count > 1 or self._suspect(d)]
        if counted:
            with suppress(Exception), short_transaction(self._engine) as connection:
                self._failures.forget(connection, counted)

    def _is_due(self, delivery: Delivery, attempt: Attempt) -> bool:
        """Whether a suspect has had its last attempt, and is to be parked instead of run."""
        if self._max_attempts is None:
            return False
        attempts_before = attempt.number - 1
        if attempts_before >= self._max_attempts:
            return True
        # The first ``_suspect_after`` deliveries were not counted beforehand, so as many attempts may be missing, if
        # they ended with the process as the last one did. A handler's exception is always counted: where it was the
        # last outcome nothing is missing, and a receive count grown by hand-backs (an outage, a group that waits for
        # its first message) must not cost the message its attempts.
        return (
            attempt.error_before == NO_OUTCOME
            and delivery.receive_count > self._max_attempts
            and attempts_before >= self._max_attempts - self._suspect_after
        )

    def _failed(self, delivery: Delivery, error: BaseException, reason: Reason, *, counted: bool = False) -> Settlement:
        if self._parking.is_parked(delivery):
            # Another copy of it has failed for the last time meanwhile; one letter stands for both.
            self._forget_failures([delivery])
            return Settlement(delivery, Outcome.DEAD, error)
        with bookkeeping(before_handler=False):
            attempts = self._failures.fail(delivery.message.id, error, counted=counted)
        if self._max_attempts is not None and attempts >= self._max_attempts:
            return self._parking.park(delivery, reason, describe(error), attempts, error)
        return Settlement(delivery, Outcome.FAILED, error, self._backoff.seconds(attempts))


SUSPECT_AFTER = 2
"""Deliveries of a message before its attempts are counted in advance."""
