"""The state of a database: what is processed, what is in flight, what waits to be sent, what is parked."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine

from txbox.dead_letters.letter import DeadLetterStatements
from txbox.dead_letters.order import OrderStatements
from txbox.leases.status import LeaseStatus, read_lease_status
from txbox.operations.pauses import Pause, read_pauses
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.outbox.status import OutboxStatus, read_outbox_status
from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.server import estimate_rows
from txbox.postgres.sql import moment, with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import bounded_wait, check_table
from txbox.status.backlogs import InboxBacklog, inbox_backlogs
from txbox.status.bulk_loads import BlockedLoad, find_blocked_loads
from txbox.status.runway import Runway, read_runway
from txbox.status.workers import WorkerStatus, read_workers

EXACT_UP_TO_ROWS = 1_000_000
"""A larger inbox is estimated unless asked otherwise, because counting reads every row."""


@dataclass(frozen=True, slots=True)
class SubscriberStatus:
    """The state of one subscriber.

    Attributes:
        subscriber_id: the subscriber.
        processed: messages in its inbox; None if they were not counted.
        last_processed_at: when the last one was processed, by the database's clock; None if there is none or they were
            not counted.
        retrying: messages that have failed and wait for another attempt.
        dead_letters: parked messages that wait for a person, by reason, without those processed since.
        oldest_dead_letter_at: since when the oldest of them has waited.
        held_keys: keys whose messages are parked and not run because a dead letter holds them (workers with
            ``ordered=True``), including while redriven messages are on their way.
        oldest_held_at: when the oldest letter that holds a key was parked.
    """

    subscriber_id: str
    processed: int | None = None
    last_processed_at: datetime | None = None
    retrying: int = 0
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    oldest_dead_letter_at: datetime | None = None
    held_keys: int = 0
    oldest_held_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class HandlerConflict:
    """How often handlers' transactions were rolled back because of others, and where they met.

    Attributes:
        subscriber_id: whose handlers.
        sqlstate: 40P01 is a deadlock, 40001 a serialization failure.
        relation: the relation that the server named; empty if it named none.
        conflicts: how many since ``first_at``; those of the last minute may be missing.
        first_at: since when they are counted, by the database's clock.
        last_at: when they were last counted.
    """

    subscriber_id: str
    sqlstate: str
    relation: str
    conflicts: int
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a database.

    Attributes:
        inbox_rows: messages in the inbox, of all subscribers. An estimate includes parked messages.
        exact: whether they were counted; otherwise they are the planner's estimate.
        subscribers: one for each that has left a trace, by name.
        outbox: what waits to be sent, by whom, and what holds the database back.
        leases: what is worked on under leases, and what is done.
        blocked_loads: bulk loads that wait for a lock, and who holds it.
        conflicts: deadlocks and serialization failures of handlers, the latest first.
        workers: those that have not signed off, by subscriber.
        pauses: the subscribers and destinations that are paused.
        runway: what is kept and forgotten; None if nothing was ever to be forgotten.
        backlogs: what waits for workers of this database, by destination.
    """

    inbox_rows: int
    exact: bool
    subscribers: tuple[SubscriberStatus, ...]
    outbox: OutboxStatus = field(default_factory=OutboxStatus)
    leases: LeaseStatus = field(default_factory=LeaseStatus)
    blocked_loads: tuple[BlockedLoad, ...] = ()
    conflicts: tuple[HandlerConflict, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    pauses: tuple[Pause, ...] = ()
    runway: Runway | None = None
    backlogs: tuple[InboxBacklog, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


class StatusStatements(SqlFile, file="status.sql", fragments_of=DeadLetterStatements):
    inbox_counts: str
    failure_counts: str
    conflicts: str


def read_status(engine: Engine, *, schema: str | None = None, prefix: str = "", exact: bool = False) -> Status:
    """Return the state of a database.

    Args:
        engine: the database.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.
        exact: count inbox and leases even if they have more than ``EXACT_UP_TO_ROWS`` rows. The outbox is never counted
            beyond ``txbox.outbox.status.COUNTED_MESSAGES``.

    Raises:
        SchemaMissing: our tables do not exist.
        TableLocked: another session has locked one of them.
    """
    sql = StatusStatements.load(schema, prefix)
    letters = DeadLetterStatements.load(schema, prefix)
    found: dict[str, dict[str, Any]] = {}
    unsent: dict[str, int] = {}
    with engine.connect() as connection, own_cursors(connection):
        check_table(connection, sql.tables.processed_message)
        check_table(connection, sql.tables.message_failure)
        check_table(connection, sql.tables.dead_letter)
        check_table(connection, sql.tables.message_lease)
        rows = estimate_rows(connection, sql.name_of("processed_message"))
        asked, exact = exact, exact or rows <= EXACT_UP_TO_ROWS
        if exact:
            rows = 0
            with bounded_wait(connection, sql.tables.processed_message):  # its generations, too
                counted = connection.exec_driver_sql(sql.inbox_counts).all()
            for subscriber, processed, last in counted:
                rows += processed
                found.setdefault(subscriber, {}).update(processed=processed, last_processed_at=moment(last))
        blocked = find_blocked_loads(connection)
        for subscriber, count in connection.exec_driver_sql(sql.failure_counts):
            found.setdefault(subscriber, {})["retrying"] = count
        check_table(connection, sql.tables.handler_conflict)
        conflicts = read_conflicts(connection, schema=schema, prefix=prefix)
        workers = read_workers(connection, schema=schema, prefix=prefix)
        pauses = read_pauses(connection, schema=schema, prefix=prefix)
        runway = read_runway(connection, schema=schema, prefix=prefix)
        for subscriber, reason, count, oldest in connection.exec_driver_sql(letters.letter_counts):
            if subscriber.startswith(_RELAY):
                destination = subscriber.removeprefix(_RELAY)
                unsent[destination] = unsent.get(destination, 0) + count
                continue
            line = found.setdefault(subscriber, {})
            line.setdefault("dead_letters", {})[reason] = count
            since = line.get("oldest_dead_letter_at")
            line["oldest_dead_letter_at"] = min(filter(None, (moment(oldest), since)), default=None)
        check_table(connection, sql.tables.inbox_horizon)
        for subscriber, keys, oldest in connection.exec_driver_sql(OrderStatements.load(schema, prefix).held_keys):
            found.setdefault(subscriber, {}).update(held_keys=keys, oldest_held_at=moment(oldest))
    unknown = {"processed": 0} if exact else {}
    lines = tuple(SubscriberStatus(name, **{**unknown, **found[name]}) for name in sorted(found))
    # After that connection: here each statement is a transaction, so no snapshot is held for long.
    outbox = read_outbox_status(engine, schema=schema, prefix=prefix, dead_letters=unsent)
    most = math.inf if asked else EXACT_UP_TO_ROWS
    leases = read_lease_status(engine, schema=schema, prefix=prefix, exact_up_to_rows=most)
    backlogs = inbox_backlogs(outbox.destinations, workers)
    return Status(rows, exact, lines, outbox, leases, blocked, conflicts, workers, pauses, runway, backlogs)


def read_conflicts(
    connection: Connection, *, schema: str | None = None, prefix: str = "", subscriber_id: str | None = None
) -> tuple[HandlerConflict, ...]:
    """Return the conflicts of handlers, the latest first; ``subscriber_id``: only of this subscriber."""
    named = {"subscriber_id": subscriber_id, "most": _CONFLICTS}
    rows = connection.exec_driver_sql(StatusStatements.load(schema, prefix).conflicts, named).mappings()
    return tuple(HandlerConflict(**with_moments(row, "first_at", "last_at")) for row in rows)


_CONFLICTS = 20
"""Most conflicts that are read."""

_RELAY = f"{RELAY_SUBSCRIBER}:"
"""Prefix of the relay's dead letters; the destination follows it."""
