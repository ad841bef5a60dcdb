"""The transactions that record and handle messages: inbox and effects commit together, or not at all."""

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from psycopg import BaseConnection
from sqlalchemy import Connection

from txbox import Expired, Failures, InFlight, MalformedMessage, Message, Mismatch, TransactionEnded
from txbox.dead_letters.order import HeldKeys
from txbox.effects.json_rows import Row
from txbox.inbox.inbox import ParkedIds, Recorded
from txbox.instrumentation import Committed, emit
from txbox.instrumentation.log_context import in_hand
from txbox.leases import Lease
from txbox.leases.handlers import has_lease_parameter, refuse_unfinished
from txbox.postgres.engines import retry_on_new_connections
from txbox.postgres.round_trip import Step, StepFailed, run_steps
from txbox_workers.delivery import Delivery
from txbox_workers.handlers import Handler
from txbox_workers.options import ValidOptions
from txbox_workers.processing.deadlocks import ConflictRetries
from txbox_workers.processing.guarded_transactions import GuardedTransactions, OpenTransaction
from txbox_workers.processing.handler_connections import DriverConnection, HandlerConnection, HandlerSession
from txbox_workers.processing.lock_order import LockOrder
from txbox_workers.processing.outage_errors import DatabaseUnavailable, connecting, recording_errors
from txbox_workers.processing.processor import ProcessorContext
from txbox_workers.processing.transaction_modes import TransactionMode

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NONE_PARKED = ParkedIds(frozenset(), frozenset())


class Parked(Exception):
    """The message is parked as a dead letter: its ack was lost, or this is another copy."""


class NotTogether(Exception):
    """Some messages of a batch cannot be settled with the others. Nothing was done; process them singly."""


class NotThere(InFlight):
    """The message is not where its source has read it: settled by another, taken back, or moved. Nothing was done."""

    def __str__(self) -> str:
        return f"{self.message_ids[0]} is not where {self.subscriber_id} has read it; it is read again"


class MalformedInBatch(Exception):
    """Some messages of a batch cannot be read: ``errors`` says why, by receipt. Nothing was done."""

    def __init__(self, errors: Mapping[str, MalformedMessage]) -> None:
        self.errors = errors
        super().__init__(f"{len(errors)} messages cannot be read")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcomes of a batch that was committed."""

    first: frozenset[str]  # ids that were processed now
    mismatched: frozenset[str]  # ids processed before, or parked, with another body
    parked: frozenset[str]  # ids that wait as dead letters
    left: frozenset[str]  # ids not begun because time ran out; not recorded
    expired: Expired | None = None  # names the ids too old to judge, which are not recorded


class HandlerTransactions:
    """Records deliveries and runs the handler, in one transaction for one or for many."""

    def __init__(self, options: ValidOptions, context: ProcessorContext) -> None:
        inbox, engine, handler = options.inbox, options.engine, options.handler
        assert inbox is not None  # noqa: S101 - for the type checker: made for an inbox only, which has an engine
        assert engine is not None  # noqa: S101
        self._engine = engine
        self._transactions = GuardedTransactions(engine, context.limit)
        self._inbox = inbox
        self._handler: Callable[..., object] | None = (
            handler if handler is None or options.ledger is None else _under_lease(handler)
        )
        self._batch_handler = options.batch_handler
        self._arguments = options.arguments
        self._effect = options.effect
        reads = options.effect or options.arguments.message_type
        self._reader: Callable[[Message], Any] | None = None if reads is None else reads.read
        # Whether to send the query for parked duplicates with COMMIT. Normally it goes before the handler, which may
        # leave behind a role or a search path that does not know our tables. An effect that does not publish is itself
        # sent with COMMIT, after that query.
        self._asks_with_commit = options.effect is not None and not options.effect.publishes
        self._session_factory = options.session_factory
        self._driver_kind = options.driver_kind
        self._context = context
        self._order = (
            HeldKeys(inbox.subscriber_id, schema=inbox.schema, prefix=inbox.prefix) if options.ordered else None
        )
        self._lock_order = None if options.locks is None else LockOrder(options.locks, options.arguments, self._group)
        self._conflicts = ConflictRetries(
            inbox, engine, context, batches=options.transactions == "batch" and options.ledger is None
        )
        tables = f"{inbox.schema or ''}.{inbox.prefix} {inbox.subscriber_id}"
        self._turn = int.from_bytes(hashlib.sha256(tables.encode()).digest()[:8], signed=True)

    @property
    def mode(self) -> TransactionMode:
        """How transactions run now, given recent conflicts."""
        return self._conflicts.mode

    def check(self) -> None:
        """Raise unless the inbox can be used.

        Raises:
            DatabaseUnavailable: the database does not answer.
            SchemaMissing, NotInTransaction, InvalidConfiguration: it cannot be used like this.
        """
        with connecting(), self._engine.connect() as connection:
            self._inbox.check(connection)
            if self._effect is not None:
                self._effect.check(connection)
            if self._order is not None:
                self._order.check(connection)
            if self._effect is None:
                self._connect(connection).close()

    def check_recording(self) -> None:
        """Raise unless a message can be recorded: record one and roll back.

        After an outage, reading is not enough. A server that is read-only, full or lacks a permission can still be
        read, and a worker that relied on that would take deliveries and hand them back, over and over. If only the
        session of a pooled connection is broken, that connection is discarded and others are tried, until a new one has
        failed.

        Raises:
            DatabaseUnavailable, SchemaMissing: it cannot.
        """

        def record(connection: Connection) -> None:
            self._inbox.record(connection, f"check {uuid.uuid4()}", b"")
            connection.rollback()

        with connecting(), recording_errors():
            retry_on_new_connections(self._engine, record)

    def run_batch(self, deliveries: Sequence[Delivery]) -> BatchResult:
        """Process deliveries in one transaction.

        Raises:
            KeyHeld, Expired, NotTogether: one of them may have to wait behind a dead letter, or be parked; process them
                singly.
            MalformedInBatch: some cannot be read for the effect or the handler; process the others.
            Stopping, DatabaseUnavailable, and whatever a handler raises. Nothing is committed.
        """
        return self._conflicts.run(self._record_and_handle, deliveries)

    def run_single(self, delivery: Delivery, failures: Failures | None = None, **extra: Any) -> bool:
        """Process a delivery in its own transaction; return False if its message was processed before.

        ``failures`` removes the message's failures in this transaction. ``extra`` has further arguments for the
        handler.

        Raises:
            InFlight, NotThere, Mismatch, Expired, Parked, KeyHeld, Stopping, DatabaseUnavailable, and whatever the
                handler raises. Nothing is committed.
        """
        result = self._conflicts.run(self._record_and_handle, [delivery], extra, failures, single=True)
        return bool(result.first)

    def _record_and_handle(
        self,
        deliveries: Sequence[Delivery],
        extra: Mapping[str, Any] = _NOTHING,
        failures: Failures | None = None,
        *,
        single: bool = False,
    ) -> BatchResult:
        """Process deliveries in one transaction. For a single one, raise unless it is processed, now or before."""
        begun = time.monotonic()
        values = self._read(deliveries) if self._reader is not None and not single else _NOTHING
        recording = self._inbox.recording(
            {d.message.id: d.message.body for d in deliveries},
            sent_at={d.message.id: d.message.sent_at for d in deliveries},
        )
        left: frozenset[str] = frozenset()
        duplicates: Mapping[str, bytes] = _NOTHING
        parked = _NONE_PARKED
        settles = self._context.settles
        asks_now = single or not self._asks_with_commit or settles is not None
        settling = () if settles is None else settles.settling(deliveries)
        with ExitStack() as spans, self._open(recording.step, settling) as opened:
            connection = opened.connection
            with recording_errors():
                recorded = self._inbox.recorded(connection, recording, opened.answer, ends=single)
                first = deliveries
                if len(recorded.first) < len(deliveries):
                    first = [delivery for delivery in deliveries if delivery.message.id in recorded.first]
                    duplicates = _duplicates(deliveries, recorded)
                    if duplicates and asks_now:
                        parked = self._inbox.find_parked(connection, duplicates)
                if self._order is not None and single:
                    _enter(self._order, connection, first)
                elif self._order is not None:
                    _refuse_held(self._order, connection, deliveries, recorded)
                if first and failures is not None:
                    # Before the handler, which may leave behind a role or a search path that does not know our tables.
                    failures.forget(connection, [delivery.message.id for delivery in first])
            if settling and opened.answer.behind[-1].command_tuples < len(deliveries):
                raise NotThere(self._inbox.subscriber_id, [deliveries[0].message.id]) if single else NotTogether
            if single and not first:
                self._raise_refusal(recorded, parked)
            elif settling and (recorded.mismatched or recorded.expired or parked.mismatched):
                raise NotTogether  # those are settled once they are parked, so not in this transaction
            elif single and self._reader is not None:
                values = self._read(first)
            if first and self._effect is not None:
                spans.enter_context(self._context.spans.handled_together(first))  # until it has committed
                self._apply_effect(opened, first, values)
            elif first:
                left = frozenset(self._handle(opened, first, values, extra))
            if left:
                assert not settling  # noqa: S101 - only a Lambda function ends within a batch
                self._inbox.unrecord(connection, left)
            if duplicates and not asks_now:
                opened.asked = self._inbox.finding_parked(duplicates)
        if opened.asked is not None:
            parked = self._inbox.parked(duplicates, opened.rows)
        if settles is not None:
            settles.settled(deliveries)
        mismatched = recorded.mismatched | parked.mismatched
        processed_before = len(duplicates) - len(parked.mismatched) - len(parked.same)
        self._emit_committed(len(first) - len(left), processed_before, begun)
        return BatchResult(recorded.first - left, mismatched, parked.same, left, recorded.error)

    def _raise_refusal(self, recorded: Recorded, parked: ParkedIds) -> None:
        """Raise why a single message must not run, unless it was processed before."""
        if recorded.error is not None:
            raise recorded.error
        if mismatched := recorded.mismatched | parked.mismatched:
            raise Mismatch(self._inbox.subscriber_id, mismatched)
        if parked.same:
            raise Parked

    def _read(self, deliveries: Sequence[Delivery]) -> dict[str, Any]:
        """Return what the reader makes of the messages, by id, for the effect or the handler.

        A transaction that runs again reads again, so its handlers get objects that no earlier run has changed.

        Raises ``MalformedInBatch`` if some cannot be read; for a single message, ``MalformedMessage``.
        """
        assert self._reader is not None  # noqa: S101 - for the type checker: called only with a reader
        values: dict[str, Any] = {}
        malformed: dict[str, MalformedMessage] = {}
        for delivery in deliveries:
            try:
                values[delivery.message.id] = self._reader(delivery.message)
            except MalformedMessage as error:
                malformed[delivery.receipt] = error
        if malformed and len(deliveries) == 1:
            raise malformed.popitem()[1]
        if malformed:
            raise MalformedInBatch(malformed)
        return values

    def _apply_effect(self, opened: OpenTransaction, deliveries: Sequence[Delivery], rows: Mapping[str, Row]) -> None:
        """Send the effect's steps with COMMIT; or now, if the rows that they return are to be published."""
        assert self._effect is not None  # noqa: S101 - for the type checker
        ids = sorted(delivery.message.id for delivery in deliveries)
        steps = self._effect.steps(ids, [rows[message_id] for message_id in ids])
        if self._effect.publishes:
            self._effect.publish(opened.connection, run_steps(opened.connection, steps)[-1])
        else:
            opened.last = steps

    def _handle(
        self,
        opened: OpenTransaction,
        deliveries: Sequence[Delivery],
        values: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> list[str]:
        """Run the handler for messages that are first, in the transaction that has recorded them.

        ``values`` has what was read of them. Return the ids of those that were not begun.
        """
        if self._lock_order is not None:
            deliveries = self._lock_order.sorted(deliveries, values)
        connection = opened.connection
        works_with = self._connect(connection)
        cut_short = self._context.cut_short
        pooled = connection.connection
        driver = pooled.dbapi_connection
        try:
            if self._batch_handler is not None:
                named = in_hand(self._inbox.subscriber_id, [delivery.message.id for delivery in deliveries])
                with named, self._context.spans.handled_together(deliveries):
                    arguments = self._arguments.of_many([delivery.message for delivery in deliveries], values)
                    refuse_unfinished(self._batch_handler(works_with.given, *arguments))
                    works_with.finish()
            elif self._handler is not None:
                for number, delivery in enumerate(deliveries):
                    if number and cut_short is not None and cut_short.is_set():
                        return [rest.message.id for rest in deliveries[number:]]
                    named = in_hand(self._inbox.subscriber_id, (delivery.message.id,))
                    with named, self._context.spans.handled(delivery):
                        arguments = self._arguments.of_one(delivery.message, values)
                        refuse_unfinished(self._handler(works_with.given, *arguments, **extra))
                        works_with.finish()
        finally:
            given_back = pooled.dbapi_connection is None and not getattr(driver, "closed", True)
            opened.closed_by_handler = connection.closed or given_back or works_with.was_closed()
            works_with.close()
        return []

    def _group(self, delivery: Delivery) -> str | None:
        return delivery.failure_group or (delivery.group if self._order is None else delivery.order_key)

    def _connect(self, connection: Connection) -> HandlerConnection:
        if self._driver_kind is None:
            return HandlerSession(connection, self._session_factory)
        return DriverConnection(connection, as_cursor=not issubclass(self._driver_kind, BaseConnection))

    @contextmanager
    def _open(self, then: Step, after: Sequence[Step]) -> Iterator[OpenTransaction]:
        turn = self._turn if self.mode is TransactionMode.SERIAL else None
        opened: OpenTransaction | None = None
        try:
            with self._transactions.open(
                turn,
                then=then,
                after=after,
                guarded=self._effect is None,
                lends_connection=self._driver_kind is None,
            ) as opened:
                yield opened
        except StepFailed as failure:
            assert self._effect is not None  # noqa: S101 - for the type checker: only an effect has steps
            number = failure.number - (opened is not None and opened.asked is not None)
            if number < 0:
                with recording_errors():
                    raise failure.error from None
            raise self._effect.failed(number, failure.error) from failure.error
        except DatabaseUnavailable as error:
            if opened is not None and opened.closed_by_handler:  # that is the handler's fault; a lost connection is not
                raise TransactionEnded from error
            raise

    def _emit_committed(self, first: int, duplicates: int, begun: float) -> None:
        if self._context.wants_details():
            seconds = time.monotonic() - begun
            committed = Committed(self._inbox.subscriber_id, self._context.source_name, first, duplicates, seconds)
            emit(self._context.hooks, committed)


def _under_lease(handler: Handler) -> Callable[..., object]:
    """Make the lease record the handler's progress: its transaction may run again, or not be committed."""
    wants_lease = has_lease_parameter(handler)
    call: Callable[..., object] = handler

    def run(session: Any, /, *arguments: Any, lease: Lease) -> object:
        lease.begin_work()
        result = call(session, *arguments, **({"lease": lease} if wants_lease else {}))
        lease.returned = True
        return result

    return run


def _duplicates(deliveries: Sequence[Delivery], recorded: Recorded) -> dict[str, bytes]:
    """Return the bodies, by id, of what was processed before or is parked."""
    sorted_out = recorded.first | recorded.mismatched | recorded.expired
    return {d.message.id: d.message.body for d in deliveries if d.message.id not in sorted_out}


def _enter(order: HeldKeys, connection: Connection, first: Sequence[Delivery]) -> None:
    """Raise ``KeyHeld`` if a dead letter holds the key of a single message that was recorded now."""
    for delivery in first:
        if (key := delivery.order_key) is not None:
            order.enter(connection, key, delivery.message.id, delivery.message.headers)


def _refuse_held(order: HeldKeys, connection: Connection, deliveries: Sequence[Delivery], recorded: Recorded) -> None:
    """Raise ``KeyHeld`` if a dead letter holds the key of a message that was recorded now, or is about to.

    The batch is not sorted out here: the outcome of one message decides about those after it, so they are processed
    singly.
    """
    if recorded.error is not None and any(d.order_key for d in deliveries if d.message.id in recorded.expired):
        raise recorded.error  # its letter is parked after the commit and holds what follows in this batch
    keys = {key for d in deliveries if d.message.id in recorded.first and (key := d.order_key) is not None}
    if keys:
        order.require_free(connection, keys)
