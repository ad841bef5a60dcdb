"""What becomes of a batch of deliveries in the database: the transactions, and nothing of the broker.

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

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from txbox import (
    DeadLetter,
    DeadLetters,
    Failures,
    Inbox,
    InFlight,
    Message,
    Mismatch,
    Outcome,
    Reason,
)
from txbox.backoff import Backoff
from txbox.failures import NO_OUTCOME, Attempt, describe
from txbox.instrumentation import Committed, Hook, Retried, emit
from txbox.sqlstates import is_retryable, sqlstate
from txbox.transactions import short_transaction
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.lent_transaction import LentTransactions, finish
from txbox_workers.outages import DatabaseUnavailable, bookkeeping, connecting, recording

__all__ = ["BatchHandler", "Handler", "Processor", "SessionFactory"]

Handler = Callable[[Any, Message], object]
"""handler(session, message): applies one message in the session's transaction; raises to have it rolled back."""

BatchHandler = Callable[[Any, Sequence[Message]], object]
"""batch_handler(session, messages): applies all the messages that are first, in one transaction."""


T = TypeVar("T")


class SessionFactory(Protocol):
    """Makes the session that a handler is given: ``Session`` itself, a subclass, or a ``sessionmaker``."""

    def __call__(self, *, bind: Connection, join_transaction_mode: Any) -> Session:
        """Make a session that works in the transaction of this connection."""


class Processor:
    """Runs deliveries of one worker through the inbox and the handler."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        engine: Engine,
        handler: Handler | None,
        batch_handler: BatchHandler | None,
        session_factory: SessionFactory,
        one_transaction_per_message: bool,
        max_attempts: int | None,
        backoff: Backoff,
        source_name: str,
        hooks: Sequence[Hook],
        wants_details: Callable[[], bool],
        stopping: threading.Event,
    ) -> None:
        """Take what ``Worker`` was given; it has validated all of it."""
        self._engine = engine
        self._transactions = LentTransactions(engine)
        self._inbox = inbox
        self._handler = handler
        self._batch_handler = batch_handler
        self._session_factory = session_factory
        self._singly = one_transaction_per_message
        self._max_attempts = max_attempts
        self._backoff = backoff
        self._source_name = source_name
        self._hooks = hooks
        self._wants_details = wants_details
        self._stopping = stopping
        self._suspect_after = SUSPECT_AFTER if max_attempts is None else min(SUSPECT_AFTER, max_attempts - 1)
        place = {"schema": inbox.schema, "prefix": inbox.prefix}
        self._failures = Failures(engine, inbox.subscriber_id, **place)  # type: ignore[arg-type]
        self._dead_letters = DeadLetters(engine, **place)  # type: ignore[arg-type]

    def check(self) -> None:
        """See that the database answers and has the tables.

        Raises:
            DatabaseUnavailable: it does not answer.
            SchemaMissing, NotInTransaction: it cannot be used like this.
        """
        with connecting(), self._engine.connect() as connection:
            self._inbox.check(connection)
            self._failures.check(connection)
            self._dead_letters.check(connection)

    def check_recording(self) -> None:
        """See that a message could be recorded, by recording one and rolling back.

        Reading is not enough after trouble: a server that is read-only, full or short of a permission can be read, and
        a worker that took that for recovery would take deliveries and hand them back, over and over.

        Raises:
            DatabaseUnavailable, SchemaMissing: it could not.
        """
        with connecting(), self._engine.connect() as connection, recording():
            self._inbox.record(connection, f"check {uuid.uuid4()}", b"")
            connection.rollback()

    def process(self, deliveries: Sequence[Delivery]) -> Iterator[list[Settlement]]:
        """Process deliveries, and yield what is to be told to the broker as soon as it stands.

        Once the worker is stopping, no transaction is begun any more, and the rest is handed back untouched.

        Args:
            deliveries: in the broker's order.

        Raises:
            DatabaseUnavailable: whatever was not yielded before has no known outcome.
        """
        blocked: set[str] = set()
        settled_before: dict[str, Settlement] = {}
        for several in _without_repeats(deliveries):
            repeats = [self._settled_like(d, settled_before.get(d.message.id)) for d in several]
            if known := [settlement for settlement in repeats if settlement is not None]:
                blocked.update(s.delivery.group for s in known if s.delivery.group and not s.outcome.acked)
                yield known
            unique = [d for d, settlement in zip(several, repeats, strict=True) if settlement is None]
            if not unique:
                continue
            # After a failure in some group, one by one: what comes next in that group is not to be run.
            together = not (blocked or self._needs_care(unique) or self._stopping.is_set())
            settled = self._process_batch(unique) if together else None
            rounds = self._process_singly(unique, blocked) if settled is None else [settled]
            for settlements in rounds:
                settled_before.update((settlement.delivery.message.id, settlement) for settlement in settlements)
                yield settlements

    def _settled_like(self, delivery: Delivery, before: Settlement | None) -> Settlement | None:
        """Settle a repeat of a message that was met in the same batch; None if it has to be processed.

        Not run again at once: ten copies of a message whose handler fails would use up its attempts in a moment.
        """
        if before is None:
            return None
        if before.outcome in (Outcome.FAILED, Outcome.IN_FLIGHT):
            return Settlement(delivery, Outcome.IN_FLIGHT, before.error, before.delay_seconds)
        if delivery.message.body != before.delivery.message.body or delivery.body != before.delivery.body:
            return None
        outcome = Outcome.DUPLICATE if before.outcome is Outcome.PROCESSED else before.outcome
        return Settlement(delivery, outcome, before.error)

    def _needs_care(self, deliveries: Sequence[Delivery]) -> bool:
        return self._singly or len(deliveries) == 1 or any(self._suspect(d) or d.problem for d in deliveries)

    def _suspect(self, delivery: Delivery) -> bool:
        return delivery.receive_count > self._suspect_after

    # --- a batch in one transaction ----------------------------------------------------------------------------------

    def _process_batch(self, deliveries: Sequence[Delivery]) -> list[Settlement] | None:
        """Process a batch in one transaction; None if it has to be processed singly instead."""
        try:
            recorded, mismatched = self._with_retries(deliveries, lambda: self._batch_transaction(deliveries))
        except (DatabaseUnavailable, KeyboardInterrupt):
            raise
        except BaseException:  # noqa: BLE001 - each one is met again, alone, with its own message
            return None
        settlements = []
        for delivery in deliveries:
            if delivery.message.id in mismatched:
                settlements.append(self._mismatch(delivery))
            elif delivery.message.id in recorded:
                settlements.append(Settlement(delivery, Outcome.PROCESSED))
            else:
                settlements.append(Settlement(delivery, Outcome.DUPLICATE))
        return settlements

    def _batch_transaction(self, deliveries: Sequence[Delivery]) -> tuple[frozenset[str], frozenset[str]]:
        begun = time.monotonic()
        with self._transactions.lend() as connection:
            with recording():
                recorded = self._inbox.sort_out(connection, {d.message.id: d.message.body for d in deliveries})
            first = [delivery for delivery in deliveries if delivery.message.id in recorded.first]
            if first:
                self._handle(connection, first)
        self._emit_committed(len(first), len(deliveries) - len(first) - len(recorded.mismatched), begun)
        self._forget_failures(first)
        return recorded.first, recorded.mismatched

    # --- one by one --------------------------------------------------------------------------------------------------

    def _process_singly(self, deliveries: Sequence[Delivery], blocked: set[str]) -> Iterator[list[Settlement]]:
        for delivery in deliveries:
            if self._stopping.is_set() or delivery.group in blocked:
                settlement = Settlement(delivery, Outcome.IN_FLIGHT)
            else:
                settlement = self._process_one(delivery)
            if delivery.group is not None and not settlement.outcome.acked:
                # What follows in the same group must not overtake it.
                blocked.add(delivery.group)
            yield [settlement]

    def _process_one(self, delivery: Delivery) -> Settlement:
        message = delivery.message
        attempt: Attempt | None = None
        suspect = self._suspect(delivery)
        if suspect and self._is_parked(delivery):
            self._forget_failures([delivery])
            return Settlement(delivery, Outcome.DEAD)
        if delivery.problem is not None:
            return self._failed(delivery, delivery.problem, Reason.MALFORMED)
        if suspect:
            with bookkeeping():
                attempt = self._failures.begin_attempt(message.id)
            if attempt is not None and self._is_due(delivery, attempt):
                reason = Reason.CRASHED if attempt.error_before in (None, NO_OUTCOME) else Reason.FAILED
                return self._park(delivery, reason, attempt.error_before or NO_OUTCOME, attempt.number - 1)
        try:
            first = self._with_retries([delivery], lambda: self._single_transaction(delivery))
        except (InFlight, _Stopping) as error:
            if attempt is not None:
                with bookkeeping():
                    self._failures.take_back(attempt)
            # Another worker may have it at once, unless a transaction elsewhere has it already.
            delay = IN_FLIGHT_BACKOFF.seconds(delivery.receive_count) if isinstance(error, InFlight) else 0.0
            return Settlement(delivery, Outcome.IN_FLIGHT, error, delay)
        except Mismatch as error:
            return self._mismatch(delivery, error)
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
        return Settlement(delivery, Outcome.PROCESSED if first else Outcome.DUPLICATE)

    def _single_transaction(self, delivery: Delivery) -> bool:
        begun = time.monotonic()
        message = delivery.message
        with self._transactions.lend() as connection:
            with recording():
                first = self._inbox.record(connection, message.id, message.body)
            if first:
                self._handle(connection, [delivery])
        self._emit_committed(int(first), int(not first), begun)
        # Also if it turned out a duplicate: it may have been processed after this attempt was counted in advance.
        self._forget_failures([delivery])
        return first

    # --- inside a transaction ----------------------------------------------------------------------------------------

    def _handle(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        """Run the handler for messages that are first, in the transaction that has recorded them."""
        # rollback_only: session.commit() in a handler flushes and ends nothing; session.rollback() does end the
        # transaction, which is then found inactive.
        session = self._session_factory(bind=connection, join_transaction_mode="rollback_only")
        try:
            if self._batch_handler is not None:
                self._batch_handler(session, [delivery.message for delivery in deliveries])
                finish(session, connection)
            elif self._handler is not None:
                for delivery in deliveries:
                    self._handler(session, delivery.message)
                    finish(session, connection)
        finally:
            session.close()

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

    def _with_retries(self, deliveries: Sequence[Delivery], run: Callable[[], T]) -> T:
        for attempt in range(1, TRANSACTION_RUNS):
            try:
                return run()
            except Exception as error:
                if not is_retryable(error):
                    raise
                code = sqlstate(error) or ""
                emit(self._hooks, Retried(self._inbox.subscriber_id, self._source_name, code, attempt, len(deliveries)))
                if self._stopping.wait(RETRY_BACKOFF.seconds(attempt)):
                    raise _Stopping("not run again, because the worker stops") from error
        return run()

    # --- what did not go well ----------------------------------------------------------------------------------------

    def _is_parked(self, delivery: Delivery) -> bool:
        """Whether a message was parked, and its worker killed before the ack: it has had its attempts."""
        with bookkeeping():
            return self._dead_letters.is_parked(self._inbox.subscriber_id, delivery.message.id, delivery.body)

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
        if self._is_parked(delivery):
            # Another copy of it has failed for the last time meanwhile; one letter stands for both.
            self._forget_failures([delivery])
            return Settlement(delivery, Outcome.DEAD, error)
        with bookkeeping():
            attempts = self._failures.fail(delivery.message.id, error, counted=counted)
        if self._max_attempts is not None and attempts >= self._max_attempts:
            return self._park(delivery, reason, describe(error), attempts, error)
        return Settlement(delivery, Outcome.FAILED, error, self._backoff.seconds(attempts))

    def _mismatch(self, delivery: Delivery, error: Mismatch | None = None) -> Settlement:
        error = error or Mismatch(self._inbox.subscriber_id, [delivery.message.id])
        self._park(delivery, Reason.MISMATCH, str(error), delivery.receive_count)
        return Settlement(delivery, Outcome.MISMATCH, error)

    def _park(
        self, delivery: Delivery, reason: Reason, text: str, attempts: int, error: BaseException | None = None
    ) -> Settlement:
        letter = DeadLetter(
            subscriber_id=self._inbox.subscriber_id,
            message_id=delivery.message.id,
            reason=reason,
            error=text,
            attempts=attempts,
            source=self._source_name,
            body=delivery.body,
            headers=dict(delivery.message.headers),
            envelope=dict(delivery.envelope),
        )
        with bookkeeping():
            self._dead_letters.park(letter)
        return Settlement(delivery, Outcome.DEAD, error)

    def _emit_committed(self, first: int, duplicates: int, begun: float) -> None:
        if not self._wants_details():
            return
        seconds = time.monotonic() - begun
        emit(self._hooks, Committed(self._inbox.subscriber_id, self._source_name, first, duplicates, seconds))


class _Stopping(Exception):
    """The worker stops while a transaction that the database has rolled back waits to be run again."""


SUSPECT_AFTER = 2
"""Deliveries of a message before its attempts are counted in advance."""

TRANSACTION_RUNS = 6
"""How often a transaction is run before a deadlock or serialization failure counts as a failure of its messages."""

RETRY_BACKOFF = Backoff(first_seconds=0.02, longest_seconds=1.0)
"""Between the runs of a transaction that the database rolled back."""

IN_FLIGHT_BACKOFF = Backoff(first_seconds=2.0, longest_seconds=60.0)
"""Until a delivery comes again whose message another transaction was processing."""


def _without_repeats(deliveries: Sequence[Delivery]) -> Iterator[list[Delivery]]:
    """Split deliveries so that no message comes twice in one list; later ones find the first one's outcome.

    What follows a repeat in its group waits with it, so that the order within the group stays.
    """
    rest = list(deliveries)
    while rest:
        unique: dict[str, Delivery] = {}
        waiting: list[Delivery] = []
        groups: set[str] = set()
        for delivery in rest:
            if delivery.message.id in unique or delivery.group in groups:
                waiting.append(delivery)
                if delivery.group is not None:
                    groups.add(delivery.group)
            else:
                unique[delivery.message.id] = delivery
        yield list(unique.values())
        rest = waiting
