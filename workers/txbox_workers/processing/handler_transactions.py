"""The transactions in which messages are recorded and handled: inbox and effects, both or neither."""

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from txbox import Failures, Inbox, Mismatch, TransactionEnded
from txbox.backoff import Backoff
from txbox.inbox.inbox import ParkedIds, Recorded
from txbox.instrumentation import Committed, Contended, Hook, Retried, emit
from txbox.leases.runner import refuse_unfinished
from txbox.postgres.engines import with_sound_connection
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import conflict_place, is_retryable, sqlstate
from txbox.postgres.transaction_guard import left_in_use
from txbox.postgres.transactions import short_transaction
from txbox_workers.delivery import Delivery
from txbox_workers.handlers import BatchHandler, Handler
from txbox_workers.processing.contention import Contention, Report, Way
from txbox_workers.processing.guarded_transaction import LentTransactions, finish
from txbox_workers.processing.outages import DatabaseUnavailable, connecting, recording
from txbox_workers.processing.transaction_limits import TimeLimit, unlimited

__all__ = ["BatchHandler", "Halt", "Handler", "HandlerTransactions", "Parked", "SessionFactory", "Sorted", "Stopping"]

T = TypeVar("T")


class SessionFactory(Protocol):
    """Makes the session that a handler is given: ``Session`` itself, a subclass, or a ``sessionmaker``."""

    def __call__(self, *, bind: Connection, join_transaction_mode: Any) -> Session:
        """Make a session that works in the transaction of this connection."""


class Halt(Protocol):
    """Says when nothing more is to be begun: a ``threading.Event``, or a deadline."""

    def is_set(self) -> bool:
        """Whether that is now."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, so many seconds at most; return whether it is now."""


class Parked(Exception):
    """The message waits as a dead letter; its ack was lost, or it is another copy."""


class Stopping(Exception):
    """Nothing more is to be begun while a transaction that the database has rolled back waits to be run again."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """What became of a batch that was committed.

    Attributes:
        first: ids that were processed now.
        mismatched: ids processed before, or parked, with another body.
        parked: ids that wait as dead letters.
        left: ids that were not begun, as time ran out, and are not recorded.
    """

    first: frozenset[str]
    mismatched: frozenset[str]
    parked: frozenset[str]
    left: frozenset[str]


class ConflictStatements(SqlFile, file="conflicts.sql"):
    """The statements of ``conflicts.sql``."""

    count_conflicts: str


class HandlerTransactions:
    """Records deliveries and runs the handler, in one transaction for one or for many."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        engine: Engine,
        handler: Handler | None,
        batch_handler: BatchHandler | None,
        session_factory: SessionFactory,
        source_name: str,
        hooks: Sequence[Hook],
        wants_details: Callable[[], bool],
        stopping: Halt,
        cut_short: Halt | None = None,
        limit: TimeLimit = unlimited,
        contention: Contention | None = None,
    ) -> None:
        """Take what ``Worker`` was given; it has validated all of it.

        Args:
            cut_short: within a batch, begin no more handlers once this is set: what was not begun is taken out of the
                inbox again, and the rest commits.
            limit: says how long a transaction may take.
            contention: learns of conflicts, and says how transactions are to be run.
        """
        self._engine = engine
        self._transactions = LentTransactions(engine, limit)
        self._inbox = inbox
        self._handler: Callable[..., object] | None = handler
        self._batch_handler = batch_handler
        self._session_factory = session_factory
        self._source_name = source_name
        self._hooks = hooks
        self._wants_details = wants_details
        self._stopping = stopping
        self._cut_short = cut_short or threading.Event()
        self._closed = threading.local()
        self.contention = contention or Contention()
        place = f"{inbox.schema or ''}.{inbox.prefix} {inbox.subscriber_id}"
        self._turn = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], signed=True)

    def check(self) -> None:
        """See that the inbox can be used.

        Raises:
            DatabaseUnavailable: the database does not answer.
            SchemaMissing, NotInTransaction: it cannot be used like this.
        """
        with connecting(), self._engine.connect() as connection:
            self._inbox.check(connection)

    def check_recording(self) -> None:
        """See that a message could be recorded, by recording one and rolling back.

        Reading is not enough after trouble: a server that is read-only, full or short of a permission can be read, and
        a worker that took that for recovery would take deliveries and hand them back, over and over. A connection that
        fails may be to blame alone: it is discarded, and another one asked, until a new one has failed.

        Raises:
            DatabaseUnavailable, SchemaMissing: it could not.
        """

        def record(connection: Connection) -> None:
            self._inbox.record(connection, f"check {uuid.uuid4()}", b"")
            connection.rollback()

        with connecting(), recording():
            with_sound_connection(self._engine, record)

    def run_batch(self, deliveries: Sequence[Delivery]) -> Sorted:
        """Process deliveries in one transaction.

        Raises:
            Stopping, DatabaseUnavailable; and whatever a handler raises. Nothing is committed.
        """
        return self._with_retries(deliveries, lambda: self._unless_closed(lambda: self._batch(deliveries)))

    def run_one(self, delivery: Delivery, failures: Failures | None = None, **extra: Any) -> bool:
        """Process a delivery in a transaction of its own.

        Args:
            delivery: what.
            failures: forget those of the message in this transaction.
            extra: what the handler is to be given besides.

        Returns:
            True: it was processed now. False: it was before.

        Raises:
            InFlight, Mismatch, Parked, Stopping, DatabaseUnavailable; and whatever the handler raises. Nothing is
                committed.
        """
        return self._with_retries([delivery], lambda: self._unless_closed(lambda: self._one(delivery, failures, extra)))

    def _unless_closed(self, run: Callable[[], T]) -> T:
        """Tell a handler that has closed its connection from a connection that was lost: that is no handler's fault."""
        self._closed.by_handler = False
        try:
            return run()
        except DatabaseUnavailable as error:
            if self._closed.by_handler:
                raise TransactionEnded from error
            raise

    def _batch(self, deliveries: Sequence[Delivery]) -> Sorted:
        begun = time.monotonic()
        with self._lend() as connection:
            with recording():
                recorded = self._inbox.sort_out(connection, {d.message.id: d.message.body for d in deliveries})
                parked = self._find_parked(connection, deliveries, recorded)
            first = [delivery for delivery in deliveries if delivery.message.id in recorded.first]
            left = frozenset(self._handle(connection, first, {}) if first else ())
            if left:
                self._inbox.unrecord(connection, left)
        mismatched = recorded.mismatched | parked.mismatched
        duplicates = len(deliveries) - len(first) - len(mismatched) - len(parked.same)
        self._emit_committed(len(first) - len(left), duplicates, begun)
        return Sorted(recorded.first - left, mismatched, parked.same, left)

    def _find_parked(self, connection: Connection, deliveries: Sequence[Delivery], recorded: Recorded) -> ParkedIds:
        """Tell which of the duplicates are parked; while all are first, nothing is asked."""
        known = recorded.first | recorded.mismatched
        duplicates = {d.message.id: d.message.body for d in deliveries if d.message.id not in known}
        return self._inbox.find_parked(connection, duplicates) if duplicates else _NONE_PARKED

    def _one(self, delivery: Delivery, failures: Failures | None, extra: Mapping[str, Any]) -> bool:
        begun = time.monotonic()
        message = delivery.message
        with self._lend() as connection:
            with recording():
                first = self._inbox.record(connection, message.id, message.body)
                parked = _NONE_PARKED if first else self._inbox.find_parked(connection, {message.id: message.body})
                if first and failures is not None:
                    # Before the handler, which may leave a role or a search path behind that does not know our tables.
                    failures.forget(connection, [message.id])
            if parked.same:
                raise Parked
            if parked.mismatched:
                raise Mismatch(self._inbox.subscriber_id, parked.mismatched)
            if first:
                self._handle(connection, [delivery], extra)
        self._emit_committed(int(first), int(not first), begun)
        return first

    def _handle(self, connection: Connection, deliveries: Sequence[Delivery], extra: Mapping[str, Any]) -> list[str]:
        """Run the handler for messages that are first, in the transaction that has recorded them.

        Returns:
            The ids of those that were not begun.
        """
        # rollback_only: session.commit() in a handler flushes and ends nothing; session.rollback() does end the
        # transaction, which is then found inactive.
        session = self._session_factory(bind=connection, join_transaction_mode="rollback_only")
        pooled = connection.connection
        driver = pooled.dbapi_connection
        try:
            if self._batch_handler is not None:
                refuse_unfinished(self._batch_handler(session, [delivery.message for delivery in deliveries]))
                finish(session, connection)
            elif self._handler is not None:
                for number, delivery in enumerate(deliveries):
                    if number and self._cut_short.is_set():
                        return [rest.message.id for rest in deliveries[number:]]
                    refuse_unfinished(self._handler(session, delivery.message, **extra))
                    finish(session, connection)
        finally:
            given_back = pooled.dbapi_connection is None and not getattr(driver, "closed", True)
            self._closed.by_handler = connection.closed or given_back or _was_closed(driver)
            if not left_in_use(connection):  # or else it would wait for ever
                session.close()
        return []

    def _with_retries(self, deliveries: Sequence[Delivery], run: Callable[[], T]) -> T:
        for attempt in range(1, TRANSACTION_RUNS):
            way, begun = self.contention.way, time.monotonic()
            try:
                done = run()
            except Exception as error:
                if not is_retryable(error):
                    raise
                code = sqlstate(error) or ""
                self._tell(self.contention.conflicted(way, code, conflict_place(error), time.monotonic() - begun))
                emit(self._hooks, Retried(self._inbox.subscriber_id, self._source_name, code, attempt, len(deliveries)))
                if len(deliveries) > 1 and self.contention.way is Way.ALONE:
                    raise  # not together again
                if self._stopping.wait(RETRY_BACKOFF.seconds(attempt)):
                    raise Stopping("not run again, because nothing more is to be begun") from error
            else:
                self._tell(self.contention.committed(len(deliveries), time.monotonic() - begun))
                return done
        return run()

    def _lend(self) -> AbstractContextManager[Connection]:
        return self._transactions.lend(self._turn if self.contention.way is Way.IN_TURN else None)

    def _tell(self, report: Report | None) -> None:
        """Tell of conflicts: here, and by the database, whoever asks for the status."""
        if report is None:
            return
        subscriber = self._inbox.subscriber_id
        emit(self._hooks, Contended(subscriber, self._source_name, report.conflicts, report.way.name.lower()))
        sql = ConflictStatements.load(self._inbox.schema, self._inbox.prefix)
        # Nothing rests on these figures; the handler's message goes on without them.
        with suppress(Exception), short_transaction(self._engine) as connection:
            for (code, place), count in sorted(report.conflicts.items()):
                counted = {"subscriber_id": subscriber, "sqlstate": code, "place": place, "conflicts": count}
                connection.exec_driver_sql(sql.count_conflicts, counted)

    def _emit_committed(self, first: int, duplicates: int, begun: float) -> None:
        if not self._wants_details():
            return
        seconds = time.monotonic() - begun
        emit(self._hooks, Committed(self._inbox.subscriber_id, self._source_name, first, duplicates, seconds))


def _was_closed(driver: Any) -> bool:
    """Whether a connection was closed from this side, and not lost; see psycopg's ``Connection.broken``."""
    return bool(getattr(driver, "closed", False)) and not getattr(driver, "broken", True)


_NONE_PARKED = ParkedIds(frozenset(), frozenset())

TRANSACTION_RUNS = 6
"""How often a transaction is run before a deadlock or serialization failure counts as a failure of its messages."""

RETRY_BACKOFF = Backoff(first_seconds=0.02, longest_seconds=1.0)
"""Between the runs of a transaction that the database rolled back."""
