"""Watermarks: apply each event of an aggregate once, in the order of its sequence, with one row per aggregate.

The inbox keeps a row for each message. Where the producer numbers the events of an aggregate (the version of the
account that an event made, the offset within the aggregate's stream), the highest number that was applied says the same
of all of them, and one row per aggregate is enough, however many events come. The field knows this as the idempotent
consumer by sequence number or version, or as "highest sequence seen": Kafka's brokers do it for idempotent producers,
and so do event-sourced projections that keep their last position (G. Hohpe and B. Woolf, "Enterprise Integration
Patterns", 2003, Idempotent Receiver; P. Helland, "Life beyond Distributed Transactions", 2007).

It needs more of the producer than the inbox does:

- each event of an aggregate has a number of its own, and a later event a higher one. A clock is no such number;
- the events of an aggregate come in that order, by a FIFO queue whose message group is the aggregate, say. Or each of
  them carries the aggregate's whole state, so that one that comes too late is worth nothing any more: an event that
  changes a balance by five is lost if a later one overtakes it, for it is STALE then and for ever.

Where that does not hold, take the inbox. Both in one transaction work, too::

    advance ── mark < sequence ──▶ APPLIED   the watermark is the sequence now; apply the event, and commit both
       │  └─── sequence ≤ mark ──▶ STALE     applied before, or overtaken; nothing to do, ack
       └ insist: mark + 1 < sequence ──▶ GAP one before it is missing; nothing has changed, roll back and hand back

What happens when transaction B comes to an aggregate that transaction A has advanced::

    A advances ─────────────── A commits       B is judged by A's watermark    (at READ COMMITTED)
         B advances … waits for A ┘            B: 40001, run it again          (at REPEATABLE READ and SERIALIZABLE,
                                                                                if B's snapshot is older than A's end)
    A advances ─────────────── A rolls back    B is judged as if A had never been there
         B advances … waits for A ┘
    A advances ─────────────────────────────…  B: InFlight, after ``wait_seconds``
         B advances … waits ┘

What B's snapshot knows to be stale is STALE at once; it waits for nobody and locks nothing. Everything else holds the
watermark until the transaction ends, GAP included. A serialization failure is never read as STALE: it passes through.

**Gaps.** Without ``insist``, an event may jump over others, which are STALE if they come later. With it, only the next
one is applied: the watermark + 1, or ``first`` where there is no watermark yet. txbox keeps no buffer for the events
behind a gap: it would be a second queue, with every problem of the first. The broker is the buffer. Raise, so that the
transaction is rolled back and the delivery is handed back; it comes again after the worker's backoff, and the missing
one has come meanwhile, if it was only late. How long to wait is the number of attempts and their backoff; then the
event is a dead letter. In a FIFO queue whose group is the aggregate, nothing overtakes: there a GAP means that an event
was lost, was never sent, was parked as a dead letter, or was reordered before it came into the queue, and waiting does
not help.

**When the missing one never comes.** Read the aggregate's state at its source, with the sequence that it is of; write
the state, and call ``advance`` with that sequence and without ``insist``, in one transaction. The watermark jumps over
the gap, events up to there are STALE, and the dead letters behind it can be redriven.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any

from sqlalchemy import ColumnClause, Connection
from sqlalchemy.exc import DBAPIError

from txbox.errors import InFlight, InvalidConfiguration
from txbox.message import valid_subscriber_id
from txbox.postgres.sqlstates import LOCK_NOT_AVAILABLE, sqlstate
from txbox.postgres.statements import text_array
from txbox.postgres.transactions import ConnectionOrSession, in_transaction, missing_schema
from txbox.watermarks.statements import WatermarkStatements, watermark_statements

__all__ = ["WAIT_SECONDS", "Advance", "advance", "advance_from", "advance_many"]

WAIT_SECONDS = 1.0
"""How long to wait for another transaction that has the same watermark."""

MAX_AGGREGATE_TYPE_BYTES = 200
MAX_AGGREGATE_ID_BYTES = 1_000
"""In UTF-8. A B-tree entry of Postgres holds 2,704 bytes, and the subscriber and the type are in it too."""

LOWEST_SEQUENCE, HIGHEST_SEQUENCE = -(2**63) + 1, 2**63 - 1
"""What a bigint holds, but for the lowest: there is always one before the first."""


class Advance(StrEnum):
    """What an event is to the watermark of its aggregate."""

    APPLIED = "applied"
    """It is above, and the watermark is its sequence now: apply the event in the same transaction."""
    STALE = "stale"
    """It is not above: applied before, or overtaken by a later one. Nothing is to be done."""
    GAP = "gap"
    """It is not the next one, and the next one was insisted on. Nothing has changed: hand it back."""

    def __bool__(self) -> bool:
        """Refuse to be taken for yes or no: there are three answers.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"compare with Advance.APPLIED: {self.name} is an answer, and not yes or no")


def advance(
    connection_or_session: ConnectionOrSession,
    subscriber: str,
    aggregate_type: str,
    aggregate_id: str,
    sequence: int,
    *,
    insist: bool = False,
    first: int = 1,
    wait_seconds: float = WAIT_SECONDS,
    schema: str | None = None,
    prefix: str = "",
) -> Advance:
    """Advance a watermark to an event's sequence, in the caller's transaction; one statement, one round trip.

    The transaction is never begun, committed or rolled back here. If it is rolled back, the watermark is where it was.
    With ``insist``, an event that is found to be ahead takes a second round trip.

    Args:
        connection_or_session: where the event is applied too.
        subscriber: the consumer's name; each subscriber has watermarks of its own. 1 to 200 bytes.
        aggregate_type: what kind of thing the event is about, ``account``. 1 to 200 bytes.
        aggregate_id: which one. 1 to 1,000 bytes.
        sequence: of the event, within its aggregate: a bigint, greater than the lowest of them.
        insist: apply only the very next sequence.
        first: the sequence that is next where there is no watermark yet; for ``insist``.
        wait_seconds: how long to wait for another transaction that has the watermark; from 0.001 to 3600.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.

    Returns:
        APPLIED: apply the event. STALE: there is nothing to do. GAP: one before it is missing; only with ``insist``.

    Raises:
        NotInTransaction: the connection is in autocommit mode.
        InFlight: another transaction has the watermark; roll back, and take the event up again later.
        InvalidConfiguration: an argument cannot be kept, or cannot work; or the next one is insisted on, there is no
            watermark, and the sequence is below ``first``.
        TypeError: the aggregate's id is no text, or the sequence no integer.
        SchemaMissing: the table does not exist.
        sqlalchemy.exc.OperationalError: among others a serialization failure (40001): run the transaction again.
    """
    lock_timeout = _lock_timeout(wait_seconds)
    key = (_subscriber(subscriber), *_aggregate(aggregate_type, aggregate_id))
    _require_sequence(sequence, "sequence")
    _require_sequence(first, "first")
    sql = watermark_statements(schema, prefix)
    connection = in_transaction(connection_or_session)
    execute = _executing(connection, sql, subscriber, [f"{aggregate_type} {aggregate_id}"])
    if not insist:
        applied = execute(sql.advance, (lock_timeout, *key, sequence))[0]
        return Advance.APPLIED if applied else Advance.STALE
    placeholder = None if sequence == first else first - 1
    found = execute(sql.advance_next, (lock_timeout, *key, sequence, placeholder, sequence, sequence - 1))
    applied, placed, known, _ = found
    if applied:
        return Advance.APPLIED
    if placed:
        connection.exec_driver_sql(sql.drop_placeholder, key)
        if sequence < first:
            raise _below_first(aggregate_type, aggregate_id, sequence, first)
        known = first - 1
    elif known is None or known < sequence:
        # The statement has locked a row that may be newer than its snapshot: whether the event is ahead or stale, only
        # another statement can see.
        known = connection.exec_driver_sql(sql.sequence, key).scalar_one()
    return Advance.STALE if sequence <= known else Advance.GAP


def advance_many(
    connection_or_session: ConnectionOrSession,
    subscriber: str,
    events: Iterable[tuple[str, str, int]],
    *,
    insist: bool = False,
    first: int = 1,
    wait_seconds: float = WAIT_SECONDS,
    schema: str | None = None,
    prefix: str = "",
) -> list[Advance]:
    """Advance watermarks by many events, in the caller's transaction; the answers are those of ``advance`` one by one.

    One round trip; two with ``insist``. Watermarks are locked in one order, so that batches which overlap wait for each
    other and never deadlock, as calls of ``advance`` one after the other in one transaction may.

    Args:
        connection_or_session: where the events are applied too.
        subscriber: the consumer's name.
        events: aggregate type, aggregate id and sequence of each event, in the order in which they count.
        insist: apply only the very next sequence of each aggregate.
        first: the sequence that is next where there is no watermark yet; for ``insist``.
        wait_seconds: how long to wait for each other transaction that has one of the watermarks; from 0.001 to 3600.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.

    Returns:
        An answer for each event, in the same order.

    Raises:
        NotInTransaction, InFlight, InvalidConfiguration, TypeError, SchemaMissing: as ``advance``; nothing has changed.
    """
    lock_timeout = _lock_timeout(wait_seconds)
    _subscriber(subscriber)
    _require_sequence(first, "first")
    answers: list[Advance] = []
    places: dict[tuple[str, str], list[int]] = {}
    sequences: list[int] = []
    for place, (aggregate_type, aggregate_id, sequence) in enumerate(events):
        places.setdefault(_aggregate(aggregate_type, aggregate_id), []).append(place)
        sequences.append(_require_sequence(sequence, "sequence"))
        answers.append(Advance.STALE)
    sql = watermark_statements(schema, prefix)
    connection = in_transaction(connection_or_session)
    if not places:
        return []
    execute = _executing(connection, sql, subscriber, [f"{kind} {name}" for kind, name in places])
    # Of an aggregate of which every event is stale, nothing comes back.
    found = _before(execute, sql, lock_timeout, subscriber, places, sequences, (first - 1) if insist else None)
    after: dict[tuple[str, str], int | None] = {}
    below: InvalidConfiguration | None = None
    for aggregate, before in found.items():
        mine = places[aggregate]
        decided, mark = decide(before, [sequences[place] for place in mine], insist=insist, first=first)
        for place, answer in zip(mine, decided, strict=True):
            answers[place] = answer
        if insist and (mark is None or mark != before):
            after[aggregate] = mark
        if insist and before is None:
            until_applied = takewhile(lambda place: answers[place] is not Advance.APPLIED, mine)
            for place in until_applied:
                if sequences[place] < first:
                    below = _below_first(*aggregate, sequences[place], first)
    if below is not None:
        # No watermark moves, and no placeholder stays.
        after = {aggregate: None for aggregate in after if found[aggregate] is None}
    if after:
        befores = [found[aggregate] for aggregate in after]
        settled = (*_arrays(after), befores, list(after.values()), subscriber, subscriber)
        connection.exec_driver_sql(sql.settle_many, settled)
    if below is not None:
        raise below
    return answers


def advance_from(
    connection_or_session: ConnectionOrSession,
    subscriber: str,
    relation: str = "fresh_event",
    *,
    aggregate_type: str | ColumnClause[Any],
    aggregate_id: str,
    sequence: str,
    newest_only: bool = False,
    wait_seconds: float | None = None,
    schema: str | None = None,
    prefix: str = "",
) -> int:
    """Advance watermarks by the events in a table of this transaction, and leave in it those that are above them.

    One statement, however many events. It is meant for the callable that applies a chunk of a bulk load: after it, the
    relation ``fresh_event`` has no stale events any more, and ``UPDATE … FROM fresh_event`` applies the others::

        def apply(connection):
            advance_from(
                connection, "billing", aggregate_type="account", aggregate_id="account_id", sequence="version",
                newest_only=True,
            )
            connection.exec_driver_sql("UPDATE account SET … FROM fresh_event AS event WHERE …")

    Events of one aggregate count in the order of their sequences, wherever they stand in the table; of two with the
    same sequence, one is left. A bulk load merges its chunks in no order, and the events of an aggregate are in many of
    them: one is stale if a later one was in an earlier chunk. So it is for events that carry their aggregate's state.

    Args:
        connection_or_session: whose transaction has the table.
        subscriber: the consumer's name.
        relation: a table without partitions, by its name alone, whose rows may be deleted: a temporary one.
        aggregate_type: the type of all events; or ``sqlalchemy.column("name")``, where a column has it.
        aggregate_id: the column of the aggregate's id; as text, it is what ``advance`` is given.
        sequence: the column of the sequence.
        newest_only: leave only the newest event of each aggregate. UPDATE … FROM takes any one of several.
        wait_seconds: how long to wait for each other transaction that has one of the watermarks; None leaves it to the
            lock_timeout of the transaction, and its 55P03 passes through, which a bulk load tries again.
        schema: the Postgres schema that holds our tables; None leaves it to the search path.
        prefix: what their names start with.

    Returns:
        How many events are left.

    Raises:
        NotInTransaction, InFlight, InvalidConfiguration, SchemaMissing: as ``advance``.
        sqlalchemy.exc.IntegrityError: an event has no sequence, or no aggregate (23502).
        sqlalchemy.exc.DBAPIError: as ``advance``; or there is no such table or column.
    """
    lock_timeout = None if wait_seconds is None else _lock_timeout(wait_seconds)
    _subscriber(subscriber)
    if isinstance(aggregate_type, ColumnClause):
        type_column, kind = aggregate_type.name, []
    else:
        type_column, kind = None, [_text(aggregate_type, "aggregate_type", MAX_AGGREGATE_TYPE_BYTES)]
    names = {"relation": relation, "aggregate_id": aggregate_id, "sequence": sequence}
    for argument, name in names.items():
        if not isinstance(name, str) or not name:
            raise InvalidConfiguration(f"{argument} must be a name, not {name!r}")
    sql = watermark_statements(schema, prefix)
    statement = sql.advance_from(relation, type_column, aggregate_id, sequence, newest_only=newest_only)
    connection = in_transaction(connection_or_session)
    busy = [f"an aggregate of {relation}"] if lock_timeout else None
    execute = _executing(connection, sql, subscriber, busy)
    return int(execute(statement, (lock_timeout, *kind, subscriber, subscriber))[0])


def decide(
    before: int | None, sequences: Sequence[int], *, insist: bool = False, first: int = 1
) -> tuple[list[Advance], int | None]:
    """Say what events are to a watermark, one after the other, and where it is then; nothing else decides for a set.

    Args:
        before: the watermark; None: there is none.
        sequences: of the events of one aggregate, in the order in which they count.
        insist: apply only the very next sequence.
        first: the next one where there is no watermark.

    Returns:
        An answer for each event, and the watermark after them.
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


def _before(
    execute: "_Execute",
    sql: WatermarkStatements,
    lock_timeout: str,
    subscriber: str,
    places: Mapping[tuple[str, str], Sequence[int]],
    sequences: Sequence[int],
    placeholder: int | None,
) -> dict[tuple[str, str], int | None]:
    """Lock the watermarks that are not above all of their events, and return what they were; None: there was none.

    Without a placeholder, they are advanced to the highest sequence of each at once.
    """
    # Sorted, so that rows are likely to be inserted as they come; the statement orders them itself.
    ordered = sorted(places)
    highest = [max(sequences[place] for place in places[aggregate]) for aggregate in ordered]
    wanted = (*_arrays(ordered), highest, subscriber)
    if placeholder is None:
        found = execute(sql.advance_many, (lock_timeout, subscriber, *wanted))
    else:
        found = execute(sql.hold_many, (lock_timeout, subscriber, placeholder, *wanted))
    kinds, names, marks, _ = found
    return dict(zip(zip(kinds or (), names or (), strict=True), marks or (), strict=True))


def _arrays(aggregates: Iterable[tuple[str, str]]) -> tuple[str | Sequence[str], str | Sequence[str]]:
    """Return the types and the ids of aggregates, to be bound."""
    types, ids = zip(*aggregates, strict=True)
    return text_array(list(types)), text_array(list(ids))


_Execute = Callable[[str, tuple[Any, ...]], Any]


def _executing(
    connection: Connection, sql: WatermarkStatements, subscriber: str, aggregates: Sequence[str] | None
) -> _Execute:
    """Return what runs a statement that may wait, and returns its row.

    Args:
        connection: of the caller's transaction.
        sql: the statements.
        subscriber: for InFlight.
        aggregates: which ones may be in flight; None: the lock_timeout is the caller's own, and so is its error.
    """

    def execute(statement: str, parameters: tuple[Any, ...]) -> Any:
        try:
            return connection.exec_driver_sql(statement, parameters).fetchone()
        except DBAPIError as error:
            if sqlstate(error) == LOCK_NOT_AVAILABLE and aggregates is not None:
                raise InFlight(subscriber, aggregates) from error
            # Or it is the relation of advance_from that is not there, or lacks a column.
            missing = missing_schema(error, sql.aggregate_watermark)
            if missing is not None and sql.name in str(error.orig).splitlines()[0]:
                raise missing from error
            raise

    return execute


def _below_first(aggregate_type: str, aggregate_id: str, sequence: int, first: int) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"sequence {sequence} of {aggregate_type} {aggregate_id} is below the first one, {first}, and nothing was "
        "applied yet: for a producer that begins lower, give first="
    )


def _subscriber(subscriber: str) -> str:
    return valid_subscriber_id(subscriber, "subscriber")


def _aggregate(aggregate_type: str, aggregate_id: str) -> tuple[str, str]:
    kind = _text(aggregate_type, "aggregate_type", MAX_AGGREGATE_TYPE_BYTES)
    if not isinstance(aggregate_id, str):
        raise TypeError(f"aggregate_id must be text, not {type(aggregate_id).__name__}: {aggregate_id!r}")
    return kind, _text(aggregate_id, "aggregate_id", MAX_AGGREGATE_ID_BYTES)


def _text(value: str, argument: str, max_bytes: int) -> str:
    """Return what Postgres can hold as text of 1 to ``max_bytes`` bytes, or refuse it."""
    try:
        if 0 < len(value.encode()) <= max_bytes and "\0" not in value:
            return value
    except (AttributeError, UnicodeEncodeError):
        pass
    raise InvalidConfiguration(f"{argument} must be 1 to {max_bytes:,} bytes of text, not {value!r}")


def _require_sequence(sequence: int, argument: str) -> int:
    if not isinstance(sequence, int) or isinstance(sequence, bool):
        raise TypeError(f"{argument} must be an integer, not {type(sequence).__name__}: {sequence!r}")
    if not LOWEST_SEQUENCE <= sequence <= HIGHEST_SEQUENCE:
        raise InvalidConfiguration(f"{argument} must be from {LOWEST_SEQUENCE} to {HIGHEST_SEQUENCE}, not {sequence}")
    return sequence


def _lock_timeout(wait_seconds: float) -> str:
    if not 0.001 <= wait_seconds <= _MAX_WAIT_SECONDS:
        raise InvalidConfiguration(f"wait_seconds must be from 0.001 to {_MAX_WAIT_SECONDS}, not {wait_seconds!r}")
    return f"{round(wait_seconds * 1000)}ms"


_MAX_WAIT_SECONDS = 3600
