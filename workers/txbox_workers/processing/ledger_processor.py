"""Process deliveries through a ledger, for handlers whose effects no transaction covers.

Each delivery is processed under the lease of its message::

    acquire ── in flight: hand back ── completed: a duplicate
       │
    handler(message)                          the lease is renewed meanwhile
       │
    complete ── ack

Beside an inbox, the handler runs in a transaction that records the message, as it would without a ledger: the inbox
decides whether its effects in the database stand, and the lease keeps two workers from running it at the same time.

The ledger counts attempts when they begin. So a message that crashes its process shows in the count, and after its last
attempt it is parked instead of run. An attempt that an outage of the database has ended is taken out of the count
again, and the next lease says so, because the handler may have had its effect. While the end of an attempt cannot be
saved in the ledger, the delivery is kept (``Processor.has_unsaved``). The ledger keeps counting after a message is
parked. So the next lease, of a copy or of the redriven letter, is not the first one, and its owner looks for letters.

A message is processed or parked, never both. Beside an inbox, the inbox decides (see ``txbox.dead_letters``). With a
ledger alone, the owner of the lease parks, and renews the lease first: if it was taken over, nothing is parked::

    A has the lease, its last attempt fails ── renew ── parks ── release
    A … is stopped past its lease                       … renew: LeaseLost, nothing is parked
         B takes it over: it had all of its attempts ── renew ── parks ── release
              C takes it up ── there is a letter ── acks
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from txbox import (
    DeadLetters,
    Expired,
    InFlight,
    LeaseLost,
    LedgerError,
    MalformedMessage,
    Mismatch,
    Outcome,
    Reason,
    SchemaMissing,
)
from txbox.backoff import Backoff
from txbox.dead_letters.failures import NO_OUTCOME, Failed, describe
from txbox.instrumentation import Committed, HeartbeatFailed, emit
from txbox.leases import Lease
from txbox.leases.handlers import has_lease_parameter, refuse_unfinished
from txbox.leases.lease import AttemptEnd
from txbox.leases.runner import LeaseRunner, Release, refuse_expired, release_after
from txbox.messages.message import fingerprint as sha256
from txbox.text import text_of
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.options import ValidOptions
from txbox_workers.processing.deadlocks import Stopping
from txbox_workers.processing.handler_transactions import HandlerTransactions, Parked
from txbox_workers.processing.outage_errors import DatabaseUnavailable, is_cancellation, unavailable
from txbox_workers.processing.parker import Parker
from txbox_workers.processing.processor import Processor, ProcessorContext, in_flight
from txbox_workers.processing.transaction_limits import limited


class LedgerProcessor(Processor):
    """Processes deliveries of one worker under the leases of a ledger."""

    def __init__(self, options: ValidOptions, context: ProcessorContext) -> None:
        super().__init__(context)
        assert options.ledger is not None  # noqa: S101 - for the type checker: made for a ledger only, with a handler
        assert options.handler is not None  # noqa: S101
        self._ledger = options.ledger
        self._subscriber_id = options.subscriber_id
        self._runner = LeaseRunner(
            options.ledger,
            lease_seconds=options.lease_seconds,
            on_renewal_failure=self._renewal_failed,
            on_release_failure=lambda lease, release: self._save_later(
                lease.message_id, lambda: self._release_late(lease, release)
            ),
        )
        self._handler: Callable[..., object] = options.handler
        self._wants_lease = has_lease_parameter(options.handler)
        self._arguments = options.arguments
        letters, inbox = options.dead_letters, options.inbox
        self._transactions = None if inbox is None else HandlerTransactions(options, context)
        if inbox is not None and options.engine is not None:
            letters = DeadLetters(options.engine, schema=inbox.schema, prefix=inbox.prefix)
        self._parker = None
        if letters is not None:
            letters = letters.on(limited(letters.engine, context.limit))
            self._parker = Parker(letters, options.subscriber_id, context.source_name, inbox)
        self._fingerprint = options.fingerprint
        self._max_attempts = options.max_attempts if self._parker is not None else None
        self._backoff = options.backoff or Backoff()

    def check(self) -> None:
        self._ledger.check()
        if self._transactions is not None:
            self._transactions.check()
        if self._parker is not None:
            self._parker.check()

    def check_recording(self) -> None:
        self.save_unsaved()
        self._ledger.check()
        if self._transactions is not None:
            self._transactions.check_recording()

    def _run_single(self, delivery: Delivery) -> Settlement:
        begun = time.monotonic()
        attempt = _Attempt(delivery)
        message = delivery.message
        try:
            done = self._runner.run(
                message.id,
                lambda lease: self._work(attempt, lease),
                fingerprint=sha256(message.body) if self._fingerprint else None,
                until=self._context.ends_at(),
                on_error=lambda lease, error: self._settle_failure(attempt, lease, error),
            )
        except BaseException as error:
            if attempt.settlement is not None:
                if attempt.settlement.outcome.acked:  # it is parked, and the letter has the attempt
                    self._discard_unsaved(message.id)
                elif self.has_unsaved(delivery):
                    raise DatabaseUnavailable(f"it is not saved how an attempt has ended: {describe(error)}") from error
                return attempt.settlement
            if isinstance(error, DatabaseUnavailable) or error is attempt.error:
                raise
            return self._settle_ledger_error(delivery, error, attempt.begun)
        first = done.outcome is Outcome.PROCESSED and bool(done.result)
        if self._transactions is None:
            self._emit_completed(first, time.monotonic() - begun)
        return Settlement(delivery, Outcome.PROCESSED if first else Outcome.DUPLICATE)

    def _emit_completed(self, first: bool, seconds: float) -> None:
        if self._context.wants_details():
            committed = Committed(self._subscriber_id, self._context.source_name, int(first), int(not first), seconds)
            emit(self._context.hooks, committed)

    def _renewal_failed(self, lease: Lease, error: Exception) -> None:
        why = f"its lease: {text_of(error)}"
        failed = HeartbeatFailed(self._subscriber_id, self._context.source_name, lease.message_id, why)
        emit(self._context.hooks, failed)

    def _release_late(self, lease: Lease, release: Release) -> None:
        """Record in the ledger how an attempt has ended, unless another owner has the message or has completed it."""
        try:
            self._ledger.release(lease, release.ended, forget_attempts=release.forget_attempts)
        except LeaseLost:
            pass
        except LedgerError as error:
            if not error.permanent:
                raise
            _log.warning("%r could not be released: %s", lease, error)

    def _work(self, attempt: "_Attempt", lease: Lease) -> bool:
        """Do the work of a message; return whether it was done now and not before.

        Keep what it raises, to tell it from what the ledger raises.
        """
        delivery = attempt.delivery
        attempt.begun = True
        try:
            if self._parker is not None and (lease.attempt > 1 or delivery.receive_count > 1):
                attempt.of_all = lease.attempt
                if self._parker.waits(delivery, lease.attempt):
                    raise Parked
                if lease.attempt > 1:  # a redriven letter starts over
                    lease.attempt -= min(self._parker.attempts_before(delivery), lease.attempt - 1)
            if self._transactions is None:  # otherwise the inbox judges, even what is parked without running
                refuse_expired(self._ledger, lease, delivery.message.sent_at)
            if self._max_attempts is not None and lease.attempt > self._max_attempts:
                raise _Spent
            if delivery.problem is not None:
                raise delivery.problem
            if self._transactions is not None:
                return self._transactions.run_single(delivery, lease=lease)
            arguments = self._arguments.read(delivery.message)
            lease.begin_work()
            refuse_unfinished(self._handler(*arguments, **({"lease": lease} if self._wants_lease else {})))
        except BaseException as error:
            attempt.error = error
            raise
        return True

    def _settle_failure(self, attempt: "_Attempt", lease: Lease, error: BaseException) -> Release:
        """Settle a delivery whose work has raised; return how the attempt has ended."""
        delivery = attempt.delivery
        malformed = isinstance(error, MalformedMessage) or error is delivery.problem
        decision = decide(
            lease, error, malformed=malformed, parks=self._parker is not None, max_attempts=self._max_attempts
        )
        ended = decision.ended
        match decision.outcome:
            case Reason() as reason:
                attempt.settlement = self._park(attempt, lease, error, reason)
                if reason is Reason.EXPIRED and attempt.settlement.outcome is not Outcome.IN_FLIGHT:
                    # Counted once it is parked: a copy's lease is then not the first, and its owner looks for letters.
                    ended = AttemptEnd.FAILED
            case Outcome.FAILED:
                tries = delivery.receive_count if isinstance(error, Expired) and not lease.begun else lease.attempt
                attempt.settlement = Settlement(delivery, Outcome.FAILED, error, self._backoff.seconds(tries))
            case Outcome.IN_FLIGHT if not isinstance(error, Stopping):  # after that, another worker may run it at once
                # The outage may be in the handler's own database: the next message does not wait for it to end.
                outage = ended is AttemptEnd.NOT_COUNTED
                attempt.settlement = in_flight(delivery, unavailable(error) if outage else error)
            case Outcome() as outcome:
                attempt.settlement = Settlement(delivery, outcome, None if isinstance(error, Parked) else error)
        return Release(ended)

    def _park(self, attempt: "_Attempt", lease: Lease, error: BaseException, reason: Reason) -> Settlement:
        assert self._parker is not None  # noqa: S101 - for the type checker: without one, nothing is parked
        delivery = attempt.delivery
        if isinstance(error, Mismatch) and reason is Reason.MISMATCH:
            return self._parker.park_mismatch(delivery, error)
        if isinstance(error, Expired) and reason is Reason.EXPIRED:
            return self._parker.park_expired(delivery, error, attempt.of_all)
        try:
            self._ledger.renew(lease)
        except LeaseLost as lost:
            return Settlement(delivery, Outcome.IN_FLIGHT, lost)
        except (LedgerError, SchemaMissing) as away:
            raise DatabaseUnavailable(str(away)) from away
        if isinstance(error, _Spent):
            had = Failed(lease.attempt - 1, ())
            return self._parker.park(delivery, reason, NO_OUTCOME, had, lease_attempts=attempt.of_all)
        return self._parker.park(delivery, reason, describe(error), Failed(lease.attempt, ()), error, attempt.of_all)

    def _settle_ledger_error(self, delivery: Delivery, error: BaseException, begun: bool) -> Settlement:
        """Settle a delivery whose lease could not be acquired, or was lost."""
        match error:
            case InFlight():
                return in_flight(delivery, error, longest_seconds=error.seconds)
            case LeaseLost():
                return Settlement(delivery, Outcome.IN_FLIGHT, error)
            case Mismatch() if self._parker is not None:
                return self._parker.park_mismatch(delivery, error)
            case Mismatch():
                return Settlement(delivery, Outcome.FAILED, error, self._backoff.seconds(delivery.receive_count))
            case LedgerError() | SchemaMissing():
                raise DatabaseUnavailable(str(error), before_handler=not begun) from error
        raise error


class Decision(NamedTuple):
    """What to do with a delivery whose work has raised."""

    ended: AttemptEnd  # what its lease is released with
    outcome: Outcome | Reason | None = None  # a Reason parks it; None: unknown, and the batch ends


def decide(lease: Lease, error: BaseException, *, malformed: bool, parks: bool, max_attempts: int | None) -> Decision:
    """Decide what to do with a delivery, by what its work has raised under a lease. Pure, no I/O.

    Args:
        lease: it knows how far the work has come.
        error: what was raised.
        malformed: the error says that the message cannot be read.
        parks: dead letters are kept.
        max_attempts: park a message after this many; None means never.
    """
    cut_off = AttemptEnd.NOT_COUNTED if lease.begun else AttemptEnd.NOT_MADE
    ended = release_after(lease, error).ended
    if is_cancellation(error):
        return Decision(cut_off)
    match error:
        case KeyboardInterrupt():
            return Decision(ended)
        case DatabaseUnavailable():
            return Decision(cut_off)
        case Stopping():
            return Decision(cut_off, Outcome.IN_FLIGHT)
        case InFlight() | LedgerError(permanent=False) | LeaseLost():
            return Decision(AttemptEnd.NOT_MADE, Outcome.IN_FLIGHT)
        case Parked():
            return Decision(AttemptEnd.FAILED, Outcome.DEAD)  # the ledger keeps counting: see the module
        case Mismatch() if parks and not lease.begun:
            return Decision(AttemptEnd.NOT_MADE, Reason.MISMATCH)
        case Expired() if not lease.begun:
            return Decision(AttemptEnd.NOT_MADE, Reason.EXPIRED if parks else Outcome.FAILED)
        case _Spent():
            return Decision(AttemptEnd.FAILED, Reason.CRASHED if lease.unknown_attempts else Reason.FAILED)
    if ended is AttemptEnd.NOT_COUNTED:
        return Decision(ended, Outcome.IN_FLIGHT)
    if lease.returned:
        ended = AttemptEnd.UNKNOWN  # the handler had returned, but its transaction could not be committed
    if max_attempts is not None and (malformed or lease.attempt >= max_attempts):
        return Decision(ended, Reason.MALFORMED if malformed else Reason.FAILED)
    return Decision(ended, Outcome.FAILED)


@dataclass(slots=True)
class _Attempt:
    """What is known of one delivery so far."""

    delivery: Delivery
    begun: bool = False  # the ledger has given the lease
    of_all: int = 1  # the attempt's number in the ledger, counting those before a redrive
    error: BaseException | None = None  # what the work has raised
    settlement: Settlement | None = None  # what that means


class _Spent(Exception):
    """The message has had all of its attempts."""


_log = logging.getLogger("txbox.worker")
