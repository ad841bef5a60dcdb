"""Watermarks: apply each event of an aggregate once, in the order of its sequence, with one row per aggregate.

The idempotent consumer by sequence number (Kafka's brokers do it for idempotent producers; G. Hohpe and B. Woolf,
"Enterprise Integration Patterns", 2003, Idempotent Receiver; P. Helland, "Life beyond Distributed Transactions", 2007).

The producer gives each event of an aggregate a number of its own, a later event a higher one; a clock is no such
number. Either the events of an aggregate arrive in that order, or each one carries the aggregate's whole state: an
event that is overtaken by a later one is STALE for ever. If neither holds, use the inbox. ::

    advance ── mark < sequence ──▶ APPLIED   the watermark is the sequence now; apply the event, and commit both
       │  └─── sequence ≤ mark ──▶ STALE     applied before, or overtaken; nothing to do, ack
       └ insist: mark + 1 < sequence ──▶ GAP one before it is missing; nothing has changed, roll back and hand back

When transaction B reaches an aggregate that transaction A has advanced::

    A advances ─────────────── A commits       B is decided by A's watermark   (at READ COMMITTED)
         B advances … waits for A ┘            B: 40001, run it again          (at REPEATABLE READ and SERIALIZABLE,
                                                                                if B's snapshot is older than A's end)
    A advances ─────────────── A rolls back    B is decided as if A had never been there
         B advances … waits for A ┘
    A advances ─────────────────────────────…  B: InFlight, after ``wait_seconds``
         B advances … waits ┘

What B's snapshot shows to be stale is STALE at once, without waiting or locking. Everything else, including GAP, locks
the watermark until the transaction ends. A serialization failure is never read as STALE: it propagates.

Events behind a gap are not kept: the broker delivers them again. docs/watermarks.md covers a missing event that never
comes.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any

from sqlalchemy import ColumnClause, Connection

from txbox.errors import InFlight, InvalidConfiguration
from txbox.messages.message import valid_subscriber_id, valid_text
from txbox.postgres.driver_cursor import fetch_one, run
from txbox.postgres.sql import array_literal, quote
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import DATABASE_ERRORS, LOCK_NOT_AVAILABLE, sqlstate
from txbox.postgres.transactions import ConnectionOrSession, in_transaction, missing_schema, valid_lock_timeout


class Advance(StrEnum):
    """How an event compares with the watermark of its aggregate."""

    APPLIED = "applied"
    """It is above the watermark, which is now its sequence: apply the event in the same transaction."""
    STALE = "stale"
    """It is not above the watermark: applied before, or overtaken by a later one. Do nothing."""
    GAP = "gap"
    """With ``insist``: it is not the next one. Nothing has changed: hand it back."""

    def __bool__(self) -> bool:
        raise TypeError(f"Advance.{self.name} is not yes or no: compare with Advance.APPLIED")


def decide(
    before: int | None, sequences: Sequence[int], *, insist: bool = False, first: int = 1
) -> tuple[list[Advance], int | None]:
    """Compare events of one aggregate with its watermark (None: there is none), in the order in which they count.

    Return an answer for each event, and the watermark after them. Only here is a set of events decided; ``insist`` and
    ``first`` are as for ``Watermarks.advance``.
    """
    answers: list[Advance] = []
    mark = before
    for sequence in sequences:
        seen = first - 1 if insist and mark is None else mark
        if seen is not None and sequence <= seen:
            answers.append(Advance.STALE)
        elif insist and seen is not None and sequence != seen + 1:
            answers.append(Advance.GAP)
        else:
            answers.append(Advance.APPLIED)
            mark = sequence
    return answers, mark


class WatermarkStatements(SqlFile, file="watermarks.sql"):
    """The statements for the watermarks in one schema, under one prefix."""

    advance: str
    advance_next: str
    drop_placeholder: str
    read_sequence: str
    advance_many: str
    hold_many: str
    settle_many: str
    bound: str
    kept_events: str
    count_kept: str

    def advance_from(self, relation: str, type_column: str | None, id_column: str, sequence_column: str) -> str:
        """Return the statement that advances by the events of a table and deletes the stale ones from it.

        It takes lock_timeout (or null), subscriber_id, newest_only, and aggregate_type unless a column has it; it
        returns how many events are left.

        Args:
            relation: the table, by its name alone; a temporary table of that name is found first.
            type_column: the column of the aggregate's type; None: it is given as a value.
            id_column, sequence_column: the columns of the aggregate's id, and of the event's sequence.
        """
        table = quote(relation)
        kind = "%(aggregate_type)s" if type_column is None else f"event.{quote(type_column)}"
        return f"""
WITH {self.bound}, txbox_event AS MATERIALIZED (
  SELECT event.ctid AS row_id, ({kind}::text) COLLATE "C" AS aggregate_type,
    (event.{quote(id_column)}::text) COLLATE "C" AS aggregate_id, event.{quote(sequence_column)}::bigint AS sequence
  FROM {table} AS event
), {self.kept_events}, txbox_dropped AS (
  DELETE FROM {table} AS event
  WHERE NOT EXISTS (SELECT FROM txbox_kept WHERE txbox_kept.row_id = event.ctid)
)
{self.count_kept}"""


WAIT_SECONDS = 1.0
"""How long to wait for another transaction that has the same watermark."""

MAX_AGGREGATE_TYPE_BYTES = 200
MAX_AGGREGATE_ID_BYTES = 1_000
"""In UTF-8. A B-tree entry of Postgres holds 2,704 bytes, including the subscriber and the type."""

LOWEST_SEQUENCE, HIGHEST_SEQUENCE = -(2**63) + 1, 2**63 - 1
"""The range of a bigint, except its lowest: there is always a number before the first."""

Aggregate = tuple[str, str]
"""Its type and its id."""


class Watermarks:
    """The highest sequence that one subscriber has applied of each aggregate.

    Methods work in the caller's transaction, and never begin, commit or roll it back. If it is rolled back, the
    watermark is where it was.
    """

    def __init__(
        self, subscriber_id: str, *, schema: str | None = None, prefix: str = "", wait_seconds: float = WAIT_SECONDS
    ) -> None:
        """Store the subscriber and where the table is; nothing is connected.

        Args:
            subscriber_id: the consumer's name; each subscriber has its own watermarks. 1 to 200 bytes.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            wait_seconds: how long to wait for another transaction that holds the same watermark; from 0.001 to 3600.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        self.subscriber_id = valid_subscriber_id(subscriber_id, "Watermarks.subscriber_id")
        self.schema = schema
        self.prefix = prefix
        self.wait_seconds = wait_seconds
        self._lock_timeout = valid_lock_timeout(wait_seconds, "Watermarks.wait_seconds")
        self._statements = WatermarkStatements.load(schema, prefix)

    def __repr__(self) -> str:
        where = f", schema={self.schema!r}" if self.schema else ""
        return f"Watermarks({self.subscriber_id!r}{where})"

    def advance(
        self,
        connection_or_session: ConnectionOrSession,
        aggregate_type: str,
        aggregate_id: str,
        sequence: int,
        *,
        insist: bool = False,
        first: int = 1,
    ) -> Advance:
        """Advance a watermark to an event's sequence, in the caller's transaction; one statement, one round trip.

        With ``insist``, an event that turns out to be ahead costs a second round trip.

        Args:
            connection_or_session: where the event is applied too.
            aggregate_type: what kind of thing the event is about, such as ``account``. 1 to 200 bytes.
            aggregate_id: which one. 1 to 1,000 bytes.
            sequence: of the event, within its aggregate: a bigint, greater than the lowest bigint.
            insist: apply only the very next sequence.
            first: the sequence that is next while there is no watermark yet; for ``insist``.

        Returns:
            APPLIED: apply the event. STALE: there is nothing to do. GAP: an earlier event is missing; only with
            ``insist``.

        Raises:
            NotInTransaction: the connection is in autocommit mode.
            InFlight: another transaction holds the watermark; roll back, and try the event again later.
            InvalidConfiguration: an argument cannot be kept; or ``insist`` is set, there is no watermark, and the
                sequence is below ``first``.
            TypeError: the aggregate's id is not text, or the sequence not an integer.
            SchemaMissing: the table does not exist.
            sqlalchemy.exc.OperationalError: for example a serialization failure (40001): run the transaction again.
        """
        kind, name = _valid_aggregate(aggregate_type, aggregate_id)
        _valid_sequence(sequence, "sequence")
        _valid_sequence(first, "first")
        event: dict[str, Any] = {"aggregate_type": kind, "aggregate_id": name, "sequence": sequence}
        sql = self._statements
        connection = in_transaction(connection_or_session)
        busy = (f"{kind} {name}",)
        if not insist:
            applied, _ = self._execute(connection, sql.advance, event, busy)
            return Advance.APPLIED if applied else Advance.STALE
        event["placeholder"] = None if sequence == first else first - 1
        applied, placed, seen, _ = self._execute(connection, sql.advance_next, event, busy)
        if applied:
            return Advance.APPLIED
        key = {"subscriber_id": self.subscriber_id, **event}
        if placed:
            run(connection, sql.drop_placeholder, key)
            if sequence < first:
                raise _below_first((kind, name), sequence, first)
            seen = first - 1
        elif seen is None or seen < sequence:
            # The statement has locked a row that may be newer than its snapshot. Only another statement can see whether
            # the event is ahead or stale.
            seen = run(connection, sql.read_sequence, key).scalar_one()
        return Advance.STALE if sequence <= seen else Advance.GAP

    def advance_many(
        self,
        connection_or_session: ConnectionOrSession,
        events: Iterable[tuple[str, str, int]],
        *,
        insist: bool = False,
        first: int = 1,
    ) -> list[Advance]:
        """Advance watermarks by many events, in the caller's transaction; answers are those of ``advance`` one by one.

        One round trip; two with ``insist``. Watermarks are locked in a fixed order, so overlapping batches wait for
        each other and never deadlock, as several calls of ``advance`` in one transaction may. ``insist`` and ``first``
        are as for ``advance``.

        Args:
            connection_or_session: where the events are applied too.
            events: aggregate type, aggregate id and sequence of each event, in the order in which they count.

        Returns:
            An answer for each event, in the same order.

        Raises:
            NotInTransaction, InFlight, InvalidConfiguration, TypeError, SchemaMissing: as ``advance``; nothing has
                changed.
        """
        _valid_sequence(first, "first")
        given: dict[Aggregate, dict[int, int]] = {}  # the sequences of each aggregate, by the event's index
        for index, (aggregate_type, aggregate_id, sequence) in enumerate(events):
            aggregate = _valid_aggregate(aggregate_type, aggregate_id)
            given.setdefault(aggregate, {})[index] = _valid_sequence(sequence, "sequence")
        connection = in_transaction(connection_or_session)
        answers = [Advance.STALE] * sum(map(len, given.values()))
        if not given:
            return answers
        sql = self._statements
        # Sorted, so that rows are likely to be inserted in that order; the statement sorts them itself.
        wanted = {aggregate: max(given[aggregate].values()) for aggregate in sorted(given)}
        values = {**_arrays(wanted), "sequences": list(wanted.values()), "placeholder": first - 1}
        busy = [f"{kind} {name}" for kind, name in given]
        types, ids, befores, _ = self._execute(connection, sql.hold_many if insist else sql.advance_many, values, busy)
        moves: dict[Aggregate, tuple[int | None, int | None]] = {}  # the sequence before and after
        below: InvalidConfiguration | None = None
        for kind, name, before in zip(types or (), ids or (), befores or (), strict=True):
            events_here = given[kind, name]
            decided, after = decide(before, list(events_here.values()), insist=insist, first=first)
            for index, answer in zip(events_here, decided, strict=True):
                answers[index] = answer
            if insist and (after is None or after != before):
                moves[kind, name] = before, after
            if insist and before is None:
                for index in takewhile(lambda index: answers[index] is not Advance.APPLIED, events_here):
                    if events_here[index] < first:
                        below = _below_first((kind, name), events_here[index], first)
        if below is not None:
            # No watermark moves, and no placeholder stays.
            moves = {aggregate: (None, None) for aggregate, (before, _) in moves.items() if before is None}
        if moves:
            befores, afters = zip(*moves.values(), strict=True)
            settled = {**_arrays(moves), "befores": list(befores), "afters": list(afters)}
            run(connection, sql.settle_many, {"subscriber_id": self.subscriber_id, **settled})
        if below is not None:
            raise below
        return answers

    def advance_from(
        self,
        connection_or_session: ConnectionOrSession,
        relation: str = "fresh_event",
        *,
        aggregate_type: str | ColumnClause[Any],
        aggregate_id: str,
        sequence: str,
        newest_only: bool = False,
        wait_seconds: float | None = None,
    ) -> int:
        """Advance watermarks by the events in a table of this transaction, and keep only the events above them in it.

        One statement, however many events. It is for the callable that applies a chunk of a bulk load: after it, the
        relation ``fresh_event`` has no stale events, and ``UPDATE … FROM fresh_event`` applies the others.

        Events of one aggregate count in the order of their sequences, wherever they are in the table; of two with the
        same sequence, one is kept. A bulk load merges its chunks in no order, so an event is stale if a later one was
        in an earlier chunk. So use it for events that carry their aggregate's state.

        Args:
            connection_or_session: whose transaction has the table.
            relation: a table without partitions, by its name alone, whose rows may be deleted: a temporary one.
            aggregate_type: the type of all events; or ``sqlalchemy.column("name")``, if a column has it.
            aggregate_id: the column of the aggregate's id; as text, it is what ``advance`` is given.
            sequence: the column of the sequence.
            newest_only: keep only the newest event of each aggregate. UPDATE … FROM takes any one of several.
            wait_seconds: how long to wait for each other transaction that holds one of the watermarks, instead of
                ``Watermarks.wait_seconds``. None leaves it to the transaction's lock_timeout; its 55P03 propagates, and
                a bulk load then tries again.

        Returns:
            How many events are left.

        Raises:
            NotInTransaction, InFlight, InvalidConfiguration, SchemaMissing: as ``advance``.
            sqlalchemy.exc.IntegrityError: an event has no sequence, or no aggregate (23502).
            sqlalchemy.exc.DBAPIError: as ``advance``; or there is no such table or column.
        """
        values: dict[str, Any] = {
            "lock_timeout": None if wait_seconds is None else valid_lock_timeout(wait_seconds, "wait_seconds"),
            "newest_only": bool(newest_only),
        }
        type_column = aggregate_type.name if isinstance(aggregate_type, ColumnClause) else None
        if not isinstance(aggregate_type, ColumnClause):
            values["aggregate_type"] = valid_text(aggregate_type, "aggregate_type", MAX_AGGREGATE_TYPE_BYTES)
        for argument, name in {"relation": relation, "aggregate_id": aggregate_id, "sequence": sequence}.items():
            if not isinstance(name, str) or not name:
                raise InvalidConfiguration(f"{argument} must be a name, not {name!r}")
        statement = self._statements.advance_from(relation, type_column, aggregate_id, sequence)
        connection = in_transaction(connection_or_session)
        busy = None if wait_seconds is None else (f"an aggregate of {relation}",)
        return int(self._execute(connection, statement, values, busy)[0])

    def _execute(
        self, connection: Connection, statement: str, values: Mapping[str, Any], aggregates: Sequence[str] | None
    ) -> Any:
        """Run a statement that may wait, and return its row.

        ``aggregates`` are named in ``InFlight``; None: the lock_timeout is the caller's own, and so is its error.
        """
        common = {"subscriber_id": self.subscriber_id, "lock_timeout": self._lock_timeout}
        try:
            return fetch_one(connection, statement, {**common, **values})
        except DATABASE_ERRORS as error:
            if sqlstate(error) == LOCK_NOT_AVAILABLE and aggregates is not None:
                raise InFlight(self.subscriber_id, aggregates) from error
            # Or the relation of advance_from is missing, or lacks a column.
            missing = missing_schema(error, self._statements.name_of("aggregate_watermark"))
            name = self._statements.tables.aggregate_watermark.name
            if missing is not None and name in str(getattr(error, "orig", error)).splitlines()[0]:
                raise missing from error
            raise


def _arrays(aggregates: Iterable[Aggregate]) -> dict[str, Any]:
    types, ids = zip(*aggregates, strict=True)
    return {"aggregate_types": array_literal(list(types)), "aggregate_ids": array_literal(list(ids))}


def _below_first(aggregate: Aggregate, sequence: int, first: int) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"sequence {sequence} of {' '.join(aggregate)} is below the first one, {first}, and nothing was applied yet: "
        "for a producer that begins lower, give first="
    )


def _valid_aggregate(aggregate_type: str, aggregate_id: str) -> Aggregate:
    kind = valid_text(aggregate_type, "aggregate_type", MAX_AGGREGATE_TYPE_BYTES)
    if not isinstance(aggregate_id, str):
        raise TypeError(f"aggregate_id must be text, not {type(aggregate_id).__name__}: {aggregate_id!r}")
    return kind, valid_text(aggregate_id, "aggregate_id", MAX_AGGREGATE_ID_BYTES)


def _valid_sequence(sequence: int, argument: str) -> int:
    if not isinstance(sequence, int) or isinstance(sequence, bool):
        raise TypeError(f"{argument} must be an integer, not {type(sequence).__name__}: {sequence!r}")
    if not LOWEST_SEQUENCE <= sequence <= HIGHEST_SEQUENCE:
        raise InvalidConfiguration(f"{argument} must be from {LOWEST_SEQUENCE} to {HIGHEST_SEQUENCE}, not {sequence}")
    return sequence
