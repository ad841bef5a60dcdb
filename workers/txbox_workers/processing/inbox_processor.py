"""Process deliveries through an inbox: run the transactions, and count and park what fails.

A batch is one transaction when all goes well::

    BEGIN
      INSERT … ON CONFLICT DO NOTHING RETURNING      one statement finds the messages that come for the first time
      handler(session, message)                      for each of those, in the broker's order
    COMMIT

When anything in it fails, the whole batch is rolled back and its deliveries are processed one by one, each in its own
transaction: the good ones commit, and only the bad one is handed back. A batch of more than ten is first divided into
tenths, each processed as a batch. So a handler may run several times, but only one of its runs can commit.

A message that crashes the whole process leaves no trace in a transaction that was never committed. So a delivery whose
receive count says that it was delivered before (a *suspect*) is processed alone, and its attempt is counted in a
transaction of its own **before** it is made::

    count the attempt ── BEGIN record ── forget what was counted ── handler ── COMMIT
                                                                       ├─ raises: save why it has failed
                                                                       ├─ loses its connection, is called off: take back
                                                                       └─ the process ends: it has no outcome

While the end of an attempt cannot be saved, it looks as if the process had crashed. So the delivery is kept until it is
saved (``Processor.has_unsaved``); otherwise another worker would decide by that::

    A  count ── handler: loses its connection ── keeps the delivery … takes back ── hands it back
    B                                                                                    count ── handler

The receive count alone is not enough. Messages that were delivered together with one that crashes the process have the
same count, and so have those that were handed back. A crash in a first delivery is not recorded and does not count.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from txbox import DeadLetters, Expired, Failures, InFlight, LedgerError, MalformedMessage, Mismatch, Outcome, Reason
from txbox.backoff import Backoff
from txbox.dead_letters.failures import NO_OUTCOME, Attempt, Failed, describe
from txbox.dead_letters.order import KeyHeld
from txbox.postgres.transactions import short_transaction
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.options import ValidOptions
from txbox_workers.processing.deadlocks import Stopping
from txbox_workers.processing.handler_transactions import HandlerTransactions, MalformedInBatch, NotThere, Parked
from txbox_workers.processing.outage_errors import DatabaseUnavailable, bookkeeping, connecting, is_interruption
from txbox_workers.processing.parker import NOT_TRIED, Parker
from txbox_workers.processing.processor import Processor, ProcessorContext, in_flight
from txbox_workers.processing.transaction_limits import limited
from txbox_workers.processing.transaction_modes import TransactionMode


class InboxProcessor(Processor):
    """Processes deliveries of one worker through the inbox and the handler."""

    def __init__(self, options: ValidOptions, context: ProcessorContext) -> None:
        super().__init__(context)
        inbox, subscriber_id = options.inbox, options.subscriber_id
        assert inbox is not None  # noqa: S101 - for the type checker: made for an inbox only, which has an engine
        assert options.engine is not None  # noqa: S101
        self._engine = limited(options.engine, context.limit)
        self._transactions = HandlerTransactions(options, context)
        tables: dict[str, Any] = {"schema": inbox.schema, "prefix": inbox.prefix}
        self._failures = Failures(self._engine, subscriber_id, wait_seconds=inbox.wait_seconds, **tables)
        letters, self._ordered = DeadLetters(self._engine, **tables), options.ordered
        self._parker = Parker(letters, subscriber_id, context.source_name, inbox, ordered=self._ordered)
        self._singly = options.transactions == "message"
        self._max_attempts = options.max_attempts
        self._backoff = options.backoff or Backoff()
        self._lost: OrderedDict[str, int] = OrderedDict()
        self._told_of_keyless = not self._ordered
        most = self._max_attempts
        self._suspect_after = SUSPECT_AFTER if most is None else min(SUSPECT_AFTER, most - 1)

    def check(self) -> None:
        self._transactions.check()
        with connecting(), self._engine.connect() as connection:
            self._failures.check(connection)
        self._parker.check()

    def check_recording(self) -> None:
        self.save_unsaved()
        self._transactions.check_recording()

    def process(self, deliveries: Sequence[Delivery]) -> Iterator[list[Settlement]]:
        if not self._told_of_keyless:
            self._tell_of_keyless(deliveries)
        return super().process(deliveries)

    def _tell_of_keyless(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if delivery.problem is None and delivery.order_key is None:
                self._told_of_keyless = True
                _log.warning(
                    "%s: ordered=True, but %s came without a FIFO group and without a key header: nothing orders it or "
                    "others like it; send them to a FIFO queue, or with a key header. This is said once",
                    self._failures.subscriber_id,
                    delivery.message.id,
                )
                return

    def _suspect(self, delivery: Delivery) -> bool:
        return delivery.receive_count > self._suspect_after

    def _is_single(self, delivery: Delivery) -> bool:
        return delivery.problem is not None or self._suspect(delivery)

    def _portions(self, deliveries: Sequence[Delivery]) -> Sequence[Sequence[Delivery]]:
        if self._transactions.mode is not TransactionMode.HALVES or len(deliveries) < 2:
            return [deliveries]
        half = -(-len(deliveries) // 2)
        return [deliveries[:half], deliveries[half:]]

    def _run_batch(self, deliveries: Sequence[Delivery]) -> list[Settlement] | None:
        """Process a batch in one transaction; return None if it has to be processed singly instead."""
        if self._transactions.mode is TransactionMode.PER_MESSAGE or self._singly:
            return None
        try:
            found = self._transactions.run_batch(deliveries)
        except DatabaseUnavailable:
            raise
        except MalformedInBatch as malformed:
            return self._run_readable(deliveries, malformed.errors)
        except BaseException as error:
            if is_interruption(error):
                raise
            # Any other error comes up again singly, with its own message.
            self._spans.failed_together(error)
            return None
        settlements = []
        for delivery in deliveries:
            if delivery.message.id in found.first:
                settlements.append(Settlement(delivery, Outcome.PROCESSED))
            elif delivery.message.id in found.mismatched:
                settlements.append(self._parker.park_mismatch(delivery))
            elif found.expired is not None and delivery.message.id in found.expired.sent_at:
                settlements.append(self._parker.park_expired(delivery, found.expired))
            elif delivery.message.id in found.parked:
                settlements.append(Settlement(delivery, Outcome.DEAD))
            elif delivery.message.id in found.left:
                settlements.append(Settlement(delivery, Outcome.IN_FLIGHT))
            else:
                settlements.append(Settlement(delivery, Outcome.DUPLICATE))
        return settlements

    def _run_readable(
        self, deliveries: Sequence[Delivery], errors: Mapping[str, MalformedMessage]
    ) -> list[Settlement] | None:
        """Process together what can be read, then what cannot; return None if an order of keys has to be kept."""
        if any(self.group(delivery) for delivery in deliveries):
            return None
        readable = [delivery for delivery in deliveries if delivery.receipt not in errors]
        settlements = self._run_batch(readable) if readable else []
        if settlements is None:
            return None
        return settlements + [self._run_single(delivery) for delivery in deliveries if delivery.receipt in errors]

    def _run_single(self, delivery: Delivery) -> Settlement:
        message = delivery.message
        if delivery.problem is not None:
            return self._failed(delivery, delivery.problem, None)
        attempt: Attempt | None = None
        suspect = self._suspect(delivery)
        try:
            if suspect:
                attempt = self._begin(delivery)
                if attempt is not None and self._is_due(attempt):
                    return self._park_due(delivery, attempt)
            first = self._transactions.run_single(delivery, self._failures if suspect else None)
        except (InFlight, Stopping, LedgerError) as error:
            if isinstance(error, LedgerError) and error.permanent:
                return self._failed(delivery, error, attempt)
            self._take_back(attempt)
            if isinstance(error, NotThere) and delivery.receive_count >= MOVED_DELIVERIES:
                _log.warning(
                    "%s, now in delivery %d: if a trigger, a rule or a policy keeps rows from being deleted, drop it",
                    error,
                    delivery.receive_count,
                )
            is_read_again = isinstance(error, NotThere) and delivery.receive_count == 1
            if isinstance(error, Stopping) or is_read_again:  # at once; after a stop, by another worker
                return Settlement(delivery, Outcome.IN_FLIGHT, error)
            return in_flight(delivery, error)
        except KeyHeld as held:
            return self._wait_behind(delivery, held, attempt)
        except Parked:
            return Settlement(delivery, Outcome.DEAD)
        except Mismatch as error:
            return self._parker.park_mismatch(delivery, error)
        except Expired as error:
            if (error.subscriber_id, message.id) != (self._failures.subscriber_id, error.message_ids[0]):
                return self._failed(delivery, error, attempt)  # from an inbox that the handler itself uses
            settlement = self._parker.park_expired(delivery, error)
            if settlement.outcome is Outcome.IN_FLIGHT:
                self._take_back(attempt)
            return settlement
        except BaseException as error:
            if not isinstance(error, DatabaseUnavailable) and not is_interruption(error):
                return self._failed(delivery, error, attempt)  # including a handler's own SystemExit or CancelledError
            with suppress(Exception):  # if that fails now, it is done once the database is usable again
                self._take_back(attempt)
            if isinstance(error, DatabaseUnavailable) and not error.before_handler:
                self._count_lost(delivery)
            raise
        if not first and suspect:
            # Another copy was processed while attempts of this one were counted.
            with suppress(Exception), short_transaction(self._engine) as connection:
                self._failures.forget(connection, [message.id])
        return Settlement(delivery, Outcome.PROCESSED if first else Outcome.DUPLICATE)

    def group(self, delivery: Delivery) -> str | None:
        """Return the group that keeps a delivery's order. With ``ordered``, a key replaces a missing group."""
        return delivery.failure_group or (delivery.order_key if self._ordered else delivery.group)

    def _wait_behind(self, delivery: Delivery, held: KeyHeld, attempt: Attempt | None) -> Settlement:
        """Park a message behind the letter that holds its key, or hand it back if that letter's copy may come soon.

        Not in a FIFO group: there the delivery would block the copy, which is behind it.
        """
        self._take_back(attempt)
        if held.is_copy and delivery.group is None and delivery.receive_count < EARLY_DELIVERIES:
            return in_flight(delivery, held)
        had = NOT_TRIED if attempt is None else Failed(attempt.number - 1, attempt.before)
        return self._parker.park(delivery, Reason.BEHIND, str(held), had, held)

    def _begin(self, delivery: Delivery) -> Attempt | None:
        refused: InFlight | None = None
        counted: list[Attempt] = []
        with bookkeeping():
            try:
                return self._failures.begin_attempt(
                    delivery.message.id, receive_count=delivery.receive_count, counting=counted.append
                )
            except InFlight as error:
                refused = error
            except Exception:
                if counted:  # the answer to the commit was lost
                    self._take_back_later(counted[0])
                raise
        raise refused

    def _take_back(self, attempt: Attempt | None) -> None:
        """Take back an attempt that was not one; raise ``DatabaseUnavailable`` if that has to be done later."""
        if attempt is not None:
            self._take_back_later(attempt)
            self.save_unsaved()

    def _take_back_later(self, attempt: Attempt) -> None:
        self._save_later(attempt.message_id, lambda: self._failures.take_back(attempt))

    def _count_lost(self, delivery: Delivery) -> None:
        """Warn if the connection is lost with the same message again and again: its handler may be the cause."""
        message_id = delivery.message.id
        lost = self._lost[message_id] = self._lost.pop(message_id, 0) + 1
        if len(self._lost) > LOST_MESSAGES:
            self._lost.popitem(last=False)
        if lost >= LOST_DELIVERIES:
            _log.warning(
                "%s: the connection to the database was lost in the handler of %s in %d deliveries here, now in "
                "delivery %d; none of them counts as an attempt, so if it is this message that ends the connection, it "
                "comes again and again: repair its handler, or take it out of the queue",
                self._failures.subscriber_id,
                message_id,
                lost,
                delivery.receive_count,
            )

    def _is_due(self, attempt: Attempt) -> bool:
        """Whether a suspect has had its last attempt, and is to be parked instead of run."""
        return self._max_attempts is not None and attempt.number > self._max_attempts

    def _park_due(self, delivery: Delivery, attempt: Attempt) -> Settlement:
        crashed = attempt.error_before == NO_OUTCOME
        if crashed and (attempt.seconds_before or 0.0) < JUST_BEGUN_SECONDS:
            # Another worker may be about to begin its transaction.
            raise InFlight(self._failures.subscriber_id, [delivery.message.id])
        reason = Reason.CRASHED if crashed else Reason.FAILED
        had = Failed(attempt.number - 1, attempt.before)
        # A process that still runs it has not crashed. It is not waited for: the message would be parked as soon as
        # that process has failed.
        wait = NO_WAIT_SECONDS if crashed else None
        settlement = self._parker.park(delivery, reason, attempt.error_before or NO_OUTCOME, had, wait_seconds=wait)
        if settlement.outcome is Outcome.IN_FLIGHT:
            self._take_back(attempt)
        return settlement

    def _failed(self, delivery: Delivery, error: BaseException, attempt: Attempt | None) -> Settlement:
        fail = partial(
            self._failures.fail, delivery.message.id, error, attempt=attempt, receive_count=delivery.receive_count
        )
        try:
            with bookkeeping(before_handler=False):
                failed = fail()
        except DatabaseUnavailable:
            if attempt is not None:  # already counted, but not as failed
                self._save_later(delivery.message.id, fail)
            raise
        # What cannot be read will not be readable the next time.
        reason = Reason.MALFORMED if isinstance(error, MalformedMessage) or delivery.problem else Reason.FAILED
        last = self._max_attempts is not None and failed.attempts >= self._max_attempts
        if last or (reason is Reason.MALFORMED and self._max_attempts is not None):
            return self._parker.park(delivery, reason, describe(error), failed, error)
        return Settlement(delivery, Outcome.FAILED, error, self._backoff.seconds(failed.attempts))


SUSPECT_AFTER = 1
"""Deliveries of a message before its attempts are counted in advance."""

EARLY_DELIVERIES = 10
"""Deliveries of a copy that comes before those sent before it, until it is parked again: some minutes."""

LOST_DELIVERIES = 5
"""Deliveries of a message in which the connection was lost, before the log names the message."""

MOVED_DELIVERIES = 5
"""Deliveries of a message that is not where its source has read it, before the log says so."""

LOST_MESSAGES = 1_000
"""How many messages that count is kept for, at most: those lost most recently."""

NO_WAIT_SECONDS = 0.01
"""The shortest possible limit of a wait for a lock, and long enough for what is not locked."""

JUST_BEGUN_SECONDS = 2.0
"""An attempt that was counted in advance less than this ago may not have begun its transaction yet."""

_log = logging.getLogger("txbox.worker")
