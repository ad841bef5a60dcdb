"""Deliveries through a ledger: for handlers whose effects no transaction covers.

Each delivery is processed under the lease of its message::

    acquire ── in flight: hand back ── completed: a duplicate
       │
    handler(message)                          a keeper renews the lease
       │
    complete ── ack

Beside an inbox, the handler runs in a transaction that records the message, as it would without a ledger: the inbox
decides whether its effects in the database stand, and the lease keeps two workers from running it at the same time.

Attempts are counted by the ledger, when they begin. So a message that takes its process down is known by its attempts,
and when it has had them all, it is parked instead of run. One that an outage of the database has ended is taken out of
the count again, and the next owner is told of it, as the handler may have had its effect. While the ledger cannot be
told how an attempt has ended, the delivery is kept (``Processor.owes``). The ledger's count goes on
when a message is parked: so its next lease, of a copy or of the letter that was redriven, is not its first, and has its
owner look for letters.

Processed or parked, never both: beside an inbox, the inbox decides (see ``txbox.dead_letters``). With a ledger alone,
the owner of the lease parks, and renews it before: if it was taken over, nothing is parked::

    A has the lease, its last attempt fails ── renew ── parks ── release
    A … is stopped past its lease                       … renew: LeaseLost, nothing is parked
         B takes it over: it had all of its attempts ── renew ── parks ── release
              C takes it up ── there is a letter ── acks
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from txbox import InFlight, LeaseLost, LedgerError, MalformedMessage, Mismatch, Outcome, Reason, SchemaMissing
from txbox.backoff import Backoff
from txbox.dead_letters.failures import NO_OUTCOME, Failed, describe
from txbox.leases import Lease, Ledger
from txbox.leases.lease import Ended
from txbox.leases.runner import Ending, Leased, known_ending, refuse_unfinished, takes_lease
from txbox.message import fingerprint as sha256
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.handlers import Handler
from txbox_workers.processing import processor
from txbox_workers.processing.handler_transactions import Halt, HandlerTransactions, Parked, Stopping
from txbox_workers.processing.outages import DatabaseUnavailable, unavailable
from txbox_workers.processing.parking import Parking
from txbox_workers.processing.processor import Processor

__all__ = ["LedgerProcessor"]


class LedgerProcessor(Processor):
    """Runs deliveries of one worker under the leases of a ledger."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        handler: Handler,
        transactions: HandlerTransactions | None,
        parking: Parking | None,
        lease_seconds: float,
        fingerprint: bool,
        max_attempts: int | None,
        backoff: Backoff,
        stopping: Halt,
        completed: Callable[[bool, float], None],
        renewal_failed: Callable[[Lease, Exception], None],
        ends_at: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Take what ``Worker`` was given; it has validated all of it.

        Args:
            ledger: where leases live.
            handler: what is run.
            transactions: beside an inbox, the transactions in which it is run; None: it is run by itself.
            parking: for dead letters; None leaves them to the broker.
            lease_seconds: of a lease.
            fingerprint: have another body under the same id refused.
            max_attempts: attempts after which a message is parked.
            backoff: the delay before a failed message is delivered again, by attempt.
            stopping: says when nothing more is to be begun.
            completed: is told of each message that is completed in the ledger, whether that was now, and how many
                seconds it took; not beside an inbox, whose transactions tell of themselves.
            renewal_failed: is told of a lease that could not be renewed.
            ends_at: a reading of ``elapsed`` at which this process ends, and no lease may last longer; None: never.
        """
        super().__init__(stopping)
        self._ledger = ledger
        self._leased = Leased(
            ledger,
            seconds=lease_seconds,
            on_renewal_failure=renewal_failed,
            on_release_failure=lambda lease, ending: self._owe(
                lease.message_id, lambda: self._release_late(lease, ending)
            ),
        )
        self._handler: Callable[..., object] = handler
        self._wants_lease = takes_lease(handler)
        self._transactions = transactions
        self._parking = parking
        self._fingerprint = fingerprint
        self._max_attempts = max_attempts if parking is not None else None
        self._backoff = backoff
        self._completed = completed
        self._ends_at = ends_at

    def check(self) -> None:
        """See that the stores answer and have what is needed."""
        self._ledger.check()
        if self._transactions is not None:
            self._transactions.check()
        if self._parking is not None:
            self._parking.check()

    def check_recording(self) -> None:
        """See that a lease could be acquired, and a message recorded."""
        self.settle_owed()
        self._ledger.check()
        if self._transactions is not None:
            self._transactions.check_recording()

    def _process_one(self, delivery: Delivery) -> Settlement:
        begun = time.monotonic()
        attempt = _Attempt(delivery)
        message = delivery.message
        try:
            done = self._leased.run(
                message.id,
                lambda lease: self._work(attempt, lease),
                fingerprint=sha256(message.body) if self._fingerprint else None,
                until=self._ends_at(),
                ends=lambda lease, error: self._settle_failure(attempt, lease, error),
            )
        except BaseException as error:
            if attempt.settlement is not None:
                if attempt.settlement.outcome.acked:  # it is parked, and its letter says so
                    self._drop_owed(message.id)
                elif self.owes(delivery):
                    raise DatabaseUnavailable(f"the ledger could not be told of: {describe(error)}") from error
                return attempt.settlement
            if isinstance(error, DatabaseUnavailable) or error is attempt.error:
                raise
            return self._ledger_said(delivery, error, attempt.begun)
        first = done.outcome is Outcome.PROCESSED and bool(done.result)
        if self._transactions is None:
            self._completed(first, time.monotonic() - begun)
        return Settlement(delivery, Outcome.PROCESSED if first else Outcome.DUPLICATE)

    def _release_late(self, lease: Lease, ending: Ending) -> None:
        """Tell the ledger how an attempt has ended, unless another owner has the message, or has done it."""
        try:
            self._ledger.release(lease, ending.ended, forget_attempts=ending.forget_attempts)
        except LeaseLost:
            pass
        except LedgerError as error:
            if not error.permanent:
                raise
            _log.warning("%r could not be released: %s", lease, error)

    def _work(self, attempt: "_Attempt", lease: Lease) -> bool:
        """Do the work of a message; return whether it was done now, and not before.

        What it raises is kept, to be told from what the ledger raises.
        """
        delivery = attempt.delivery
        attempt.begun = True
        try:
            if self._parking is not None and (lease.attempt > 1 or delivery.receive_count > 1):
                attempt.of_all = lease.attempt
                if self._parking.waits(delivery, lease.attempt):
                    raise Parked
                if lease.attempt > 1:  # a letter that was redriven begins anew
                    lease.attempt -= min(self._parking.attempts_before(delivery), lease.attempt - 1)
            if self._max_attempts is not None and lease.attempt > self._max_attempts:
                raise _Spent
            if delivery.problem is not None:
                raise delivery.problem
            if self._transactions is not None:
                return self._transactions.run_one(delivery, lease=lease)
            lease.begin_work()
            refuse_unfinished(self._handler(delivery.message, **({"lease": lease} if self._wants_lease else {})))
        except BaseException as error:
            attempt.error = error
            raise
        return True

    def _settle_failure(self, attempt: "_Attempt", lease: Lease, error: BaseException) -> Ending:
        """Say what becomes of a delivery whose work has raised, and how the attempt has ended."""
        delivery = attempt.delivery
        ending = known_ending(lease, error)
        match error:
            case KeyboardInterrupt():
                return ending
            case DatabaseUnavailable():
                return Ending(Ended.NOT_COUNTED if lease.begun else Ended.NOT_MADE)
            case InFlight() | Stopping() | LedgerError(permanent=False) | LeaseLost():
                # Another worker may have it at once, unless somebody elsewhere has it already, or a ledger that the
                # handler uses is away: that is no message's fault.
                delay = processor.IN_FLIGHT_BACKOFF.seconds(delivery.receive_count)
                delay = 0.0 if isinstance(error, Stopping) else delay
                attempt.settlement = Settlement(delivery, Outcome.IN_FLIGHT, error, delay)
                return Ending(Ended.NOT_COUNTED if isinstance(error, Stopping) and lease.begun else Ended.NOT_MADE)
            case Parked():
                attempt.settlement = Settlement(delivery, Outcome.DEAD)
                return Ending(Ended.FAILED)  # it goes on counting: see the module
            case Mismatch() if self._parking is not None and not lease.begun:
                attempt.settlement = self._parking.park_mismatch(delivery, error)
                return Ending(Ended.NOT_MADE)
        if ending.ended is Ended.NOT_COUNTED:
            # A database that the handler itself has connected to: there is nothing to wait for with the next message.
            delay = processor.IN_FLIGHT_BACKOFF.seconds(delivery.receive_count)
            attempt.settlement = Settlement(delivery, Outcome.IN_FLIGHT, unavailable(error), delay)
            return ending
        if lease.returned:
            ending = Ending(Ended.UNKNOWN)  # the handler was done; its transaction was not to be committed
        malformed = isinstance(error, MalformedMessage) or error is delivery.problem
        last = self._max_attempts is not None and (malformed or lease.attempt >= self._max_attempts)
        if self._parking is None or not last:
            attempt.settlement = Settlement(delivery, Outcome.FAILED, error, self._backoff.seconds(lease.attempt))
            return ending
        try:
            self._ledger.renew(lease)
        except LeaseLost as lost:
            attempt.settlement = Settlement(delivery, Outcome.IN_FLIGHT, lost)
            return ending
        except (LedgerError, SchemaMissing) as away:
            raise DatabaseUnavailable(str(away)) from away
        if isinstance(error, _Spent):
            reason = Reason.CRASHED if lease.unknown_attempts else Reason.FAILED
            had = Failed(lease.attempt - 1, ())
            attempt.settlement = self._parking.park(delivery, reason, NO_OUTCOME, had, lease_attempts=attempt.of_all)
            return Ending(Ended.FAILED)
        reason = Reason.MALFORMED if malformed else Reason.FAILED
        had = Failed(lease.attempt, ())
        attempt.settlement = self._parking.park(delivery, reason, describe(error), had, error, attempt.of_all)
        return ending

    def _ledger_said(self, delivery: Delivery, error: BaseException, begun: bool) -> Settlement:
        """Settle a delivery whose lease could not be had, or was lost."""
        match error:
            case InFlight():
                delay = processor.IN_FLIGHT_BACKOFF.seconds(delivery.receive_count)
                return Settlement(delivery, Outcome.IN_FLIGHT, error, min(delay, error.seconds or delay))
            case LeaseLost():
                return Settlement(delivery, Outcome.IN_FLIGHT, error)
            case Mismatch() if self._parking is not None:
                return self._parking.park_mismatch(delivery, error)
            case Mismatch():
                return Settlement(delivery, Outcome.FAILED, error, self._backoff.seconds(delivery.receive_count))
            case LedgerError() | SchemaMissing():
                raise DatabaseUnavailable(str(error), before_handler=not begun) from error
        raise error


@dataclass(slots=True)
class _Attempt:
    """What has become of one delivery so far.

    Attributes:
        delivery: of what.
        begun: the ledger has given the lease.
        of_all: the how-manieth attempt this is in the ledger, those before a redrive included.
        error: what the work has raised.
        settlement: what that means.
    """

    delivery: Delivery
    begun: bool = False
    of_all: int = 1
    error: BaseException | None = None
    settlement: Settlement | None = None


class _Spent(Exception):
    """The message has had all of its attempts."""


_log = logging.getLogger("txbox")
