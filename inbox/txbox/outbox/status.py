"""The state of the outbox: what waits for which destination, which relays are at work, what holds the database back.

Reading it must not harm a database in trouble, so everything is bounded: it looks at no more than ``COUNTED_MESSAGES``
messages; each statement is a transaction of its own and may take ``STATEMENT_SECONDS``; and there may be a limit for
all of them together. The rest is estimated from Postgres's statistics, and marked as estimated.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping, Table
from sqlalchemy.exc import DBAPIError

from txbox.messages.destinations import INBOX
from txbox.outbox.lanes import lanes_of
from txbox.outbox.snapshot_holders import SnapshotHolder, find_snapshot_holders, sees_all_sessions
from txbox.postgres.sql import moment, with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import INSUFFICIENT_PRIVILEGE, QUERY_CANCELED, sqlstate
from txbox.postgres.transactions import check_table, short_transaction

__all__ = [
    "COUNTED_MESSAGES",
    "DestinationStatus",
    "OutboxStatus",
    "RelayStatus",
    "is_relayed",
    "read_backlog",
    "read_outbox_status",
    "relays_at_work",
    "with_estimates",
]

COUNTED_MESSAGES = 100_000
"""The most messages that are looked at."""

COUNTED_LANES = 10_000
"""The most lanes that are looked at; a destination has 64."""

STATEMENT_SECONDS = 5.0
"""How long one statement may take. It has to read rows that an old snapshot keeps from being cleaned up."""

ERROR_CHARACTERS = 500
"""How much of a destination's error is kept."""

STALE_SECONDS = 12.0
"""A relay reports every 10 seconds. If it is late it does not count: it does not run, or cannot reach the database. One
that was killed is recognised by its session, which is gone, unless a pooler is in between.
"""

_STALE = {"stale_after": timedelta(seconds=STALE_SECONDS)}


class OutboxStatusStatements(SqlFile, file="status.sql"):
    bound_time: str
    plan_by_index: str
    backlog: str
    backlog_by_lane: str
    backlog_of: str
    estimate_of: str
    row_estimates: str
    relays: str
    relays_at_work: str
    kept: str


@dataclass(frozen=True, slots=True)
class DestinationStatus:
    """What waits to be sent to one destination.

    Attributes:
        destination: where to.
        waiting: messages to send now.
        delayed: messages whose time has not come.
        retrying: messages that were refused, or that wait behind a refused one of their key.
        exact: they were counted; otherwise there are at least so many.
        estimate: how many there are in all by the planner, for ``inbox:SUBSCRIBER``; None if they were counted.
        oldest_seconds: how long ago the oldest message that is not delayed was published; None: there is none.
        most_attempts: how often the message that was refused most often was refused.
        error: why that message was last refused.
        dead_letters: messages that were parked, and wait for a person.
        unreachable: why relays cannot send there, as one of them reports it; None if none does, or nothing waits.
        unreachable_relays: how many of the relays at work report that.
    """

    destination: str
    waiting: int = 0
    delayed: int = 0
    retrying: int = 0
    exact: bool = True
    estimate: int | None = None
    oldest_seconds: float | None = None
    most_attempts: int = 0
    error: str | None = None
    dead_letters: int = 0
    unreachable: str | None = None
    unreachable_relays: int = 0


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """A relay, by its own report.

    Attributes:
        relay_id: a new one for each relay.
        host: where its process runs.
        pid: of its process.
        sent: messages sent since it was made.
        failed: refusals since it was made.
        sent_per_second: between its last two reports; None after its first one.
        started_at: when it first reported.
        seen_seconds_ago: how long ago it last reported.
        outages: destinations that it could not send to when it last tried, and why; at most 20.
        stale: its session is gone, or its last report is late; see ``STALE_SECONDS``.
        version: of txbox.
        state: ``working``; ``paused``: a destination is paused, and messages to it are in hand; or ``drained``: none
            are.
        destinations: the last 100 destinations it sent to, and how many messages.
    """

    relay_id: str
    host: str
    pid: int
    sent: int
    failed: int
    sent_per_second: float | None
    started_at: datetime
    seen_seconds_ago: float
    outages: Mapping[str, str]
    stale: bool
    version: str | None
    state: str | None
    destinations: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """The state of the outbox.

    Attributes:
        messages: in the outbox; None if they could be neither counted in time nor estimated.
        exact: they were counted; otherwise they are estimated.
        removed_rows: rows of sent messages that Postgres has not cleaned up, by its own estimate.
        destinations: one for each that has messages or dead letters, by name.
        in_time: all were read in time; otherwise some may be missing, and their oldest messages.
        relays: those that have not signed off, by host.
        relays_in_time: they were read in time; otherwise none is listed, whether or not there are any.
        sent_per_second: by all relays that are not stale.
        kept_messages: sent messages that are kept; None if they could not be counted in time.
        kept_exact: they were counted; otherwise they are estimated.
        kept_since: when the oldest of them was sent.
        snapshot_holders: what has kept Postgres from cleaning up for long, oldest first.
        sees_all_sessions: this user may see what others run (role pg_read_all_stats).
    """

    messages: int | None = 0
    exact: bool = True
    removed_rows: int = 0
    destinations: tuple[DestinationStatus, ...] = ()
    in_time: bool = True
    relays: tuple[RelayStatus, ...] = ()
    relays_in_time: bool = True
    sent_per_second: float = 0.0
    kept_messages: int | None = 0
    kept_exact: bool = True
    kept_since: datetime | None = None
    snapshot_holders: tuple[SnapshotHolder, ...] = ()
    sees_all_sessions: bool = True


def read_outbox_status(
    engine: Engine,
    *,
    schema: str | None = None,
    prefix: str = "",
    dead_letters: dict[str, int] | None = None,
    limit_seconds: float = math.inf,
) -> OutboxStatus:
    """Return the state of the outbox; raise ``SchemaMissing`` if its tables do not exist.

    Args:
        engine: the database.
        schema: the Postgres schema that holds the tables; None leaves it to the search path.
        prefix: what the tables' names start with.
        dead_letters: how many dead letters wait, by destination.
        limit_seconds: for all statements together; what is not read by then is left out, and marked so.
    """
    sql = OutboxStatusStatements.load(schema, prefix)
    bounds = _Bounds(engine, sql, time.monotonic() + limit_seconds)
    for table in (sql.tables.outbox_message, sql.tables.outbox_sent, sql.tables.outbox_relay):
        bounds.check(table)
    with short_transaction(engine) as connection:  # only Postgres's own tables, which nobody locks
        live, removed = connection.exec_driver_sql(sql.row_estimates, {"name": sql.name_of("outbox_message")}).one()
        kept_estimate = connection.exec_driver_sql(sql.row_estimates, {"name": sql.name_of("outbox_sent")}).one().live
        sees_all = sees_all_sessions(connection)
        holders = find_snapshot_holders(connection)
    rows = bounds.rows(sql.relays, _STALE)
    relays = tuple(RelayStatus(**with_moments(row, "started_at")) for row in rows or ())
    found, exact, in_time = _destinations(bounds)
    if not exact:
        found = with_estimates(bounds.rows, sql, found)
    counted = sum(one.waiting + one.delayed + one.retrying for one in found)
    kept = bounds.rows(sql.kept, {"limit": COUNTED_MESSAGES + 1})
    kept_exact = kept is not None and kept[0]["messages"] <= COUNTED_MESSAGES
    return OutboxStatus(
        messages=counted if exact else max(live, counted) or None,
        exact=exact,
        removed_rows=removed,
        destinations=_with_outages(_with_letters(found, dead_letters or {}), relays),
        in_time=in_time,
        relays=relays,
        relays_in_time=rows is not None,
        sent_per_second=sum((relay.sent_per_second or 0.0 for relay in relays if not relay.stale), 0.0),
        kept_messages=kept[0]["messages"] if kept and kept_exact else kept_estimate or None,
        kept_exact=kept_exact,
        kept_since=moment(kept[0]["since"]) if kept else None,
        snapshot_holders=holders,
        sees_all_sessions=sees_all,
    )


def relays_at_work(engine: Engine, *, schema: str | None = None, prefix: str = "") -> int | None:
    """Return how many relays are at work, by their reports; None if this user may not see them.

    ``schema`` and ``prefix`` are as for ``read_outbox_status``.
    """
    sql = OutboxStatusStatements.load(schema, prefix)
    try:
        found = _Bounds(engine, sql).rows(sql.relays_at_work, _STALE)
    except DBAPIError as error:
        if sqlstate(error) == INSUFFICIENT_PRIVILEGE:
            return None
        raise
    return None if found is None else int(found[0]["count"])


def is_relayed(destination: str) -> bool:
    """Return whether relays send what is published to a destination, rather than workers of this database."""
    return not destination.startswith(INBOX)


def read_backlog(
    engine: Engine, destination: str, *, schema: str | None = None, prefix: str = ""
) -> Mapping[str, int] | None:
    """Return about how many messages of a destination are ``waiting``, and ``delayed``: failed ones, too.

    More than ``COUNTED_MESSAGES`` are estimated, from the share of each among those that were looked at. None: they
    could not be read in time. The arguments and errors are those of ``read_outbox_status``.
    """
    sql = OutboxStatusStatements.load(schema, prefix)
    bounds = _Bounds(engine, sql)
    bounds.check(sql.tables.outbox_message)
    found = bounds.rows(sql.backlog_of, {**_lanes(destination), "limit": COUNTED_MESSAGES + 1})
    if found is None:
        return None
    counted = int(found[0]["waiting"] + found[0]["delayed"])
    about = _estimate(bounds.rows, sql, destination) if counted > COUNTED_MESSAGES else counted
    return {state: count * max(about or 0, counted) // max(counted, 1) for state, count in found[0].items()}


def with_estimates(
    read: Callable[[str, Mapping[str, Any]], Sequence[RowMapping] | None],
    sql: OutboxStatusStatements,
    found: Sequence[DestinationStatus],
) -> list[DestinationStatus]:
    """Return destinations that were not counted with the estimates of those that no relay sends to.

    ``read`` returns the rows of a statement with its parameters; None if that took too long.
    """
    return [
        one if is_relayed(one.destination) else replace(one, estimate=_estimate(read, sql, one.destination))
        for one in found
    ]


def _estimate(
    read: Callable[[str, Mapping[str, Any]], Sequence[RowMapping] | None], sql: OutboxStatusStatements, destination: str
) -> int | None:
    """Return how many messages a destination has, by the planner's estimate; None if that was not read in time."""
    rows = read(sql.estimate_of, _lanes(destination))
    return int(rows[0]["QUERY PLAN"][0]["Plan"]["Plan Rows"]) if rows else None


def _lanes(destination: str) -> dict[str, int]:
    lanes = lanes_of(destination)
    return {"low": lanes[0], "high": lanes[-1]}


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Runs each statement in a transaction of its own, within limited time."""

    engine: Engine
    sql: OutboxStatusStatements
    ends_at: float = math.inf
    """By ``time.monotonic``; no statement begins later."""

    def check(self, table: Table) -> None:
        """Raise unless a table exists; one that is locked for too long is taken to exist."""
        try:
            with self._transaction() as connection:
                if connection is not None:
                    check_table(connection, table)
        except DBAPIError as error:
            if sqlstate(error) != QUERY_CANCELED:
                raise

    def rows(
        self, statement: str, parameters: Mapping[str, Any], setting: str | None = None
    ) -> Sequence[RowMapping] | None:
        """Return the rows of a statement; None if it did not finish in time."""
        try:
            with self._transaction() as connection:
                if connection is None:
                    return None
                if setting is not None:
                    connection.exec_driver_sql(setting)
                return connection.exec_driver_sql(statement, dict(parameters)).mappings().all()
        except DBAPIError as error:
            if sqlstate(error) == QUERY_CANCELED:
                return None
            raise

    @contextmanager
    def _transaction(self) -> Iterator[Connection | None]:
        milliseconds = int(min(STATEMENT_SECONDS, self.ends_at - time.monotonic()) * 1000)
        if milliseconds <= 0:
            yield None
            return
        with short_transaction(self.engine) as connection:
            connection.exec_driver_sql(self.sql.bound_time, {"milliseconds": str(milliseconds)})
            yield connection


def _destinations(bounds: _Bounds) -> tuple[list[DestinationStatus], bool, bool]:
    """Return what waits, whether that is everything, and whether every destination was read in time."""
    sql = bounds.sql
    first = bounds.rows(sql.backlog, {"limit": COUNTED_MESSAGES + 1})
    if first is not None and sum(map(_messages, first)) <= COUNTED_MESSAGES:
        return [_destination(row, exact=True) for row in first], True, True
    limits = {"lanes": COUNTED_LANES, "limit": COUNTED_MESSAGES}
    each = bounds.rows(sql.backlog_by_lane, limits, sql.plan_by_index)
    # If not all messages, some of them, wherever they are.
    rows = each if each is not None else first or ()
    return [_destination(row, exact=False) for row in rows], False, each is not None


def _destination(row: RowMapping, *, exact: bool) -> DestinationStatus:
    return DestinationStatus(**{**row, "error": row["error"] and row["error"][:ERROR_CHARACTERS]}, exact=exact)


def _messages(row: RowMapping) -> int:
    return int(row["waiting"] + row["delayed"] + row["retrying"])


def _with_letters(found: Sequence[DestinationStatus], letters: dict[str, int]) -> tuple[DestinationStatus, ...]:
    by_name = {one.destination: one for one in found}
    for destination, count in letters.items():
        by_name[destination] = replace(by_name.get(destination, DestinationStatus(destination)), dead_letters=count)
    return tuple(by_name[destination] for destination in sorted(by_name))


def _with_outages(
    destinations: tuple[DestinationStatus, ...], relays: Sequence[RelayStatus]
) -> tuple[DestinationStatus, ...]:
    """Add to each destination with waiting messages why relays cannot send there."""

    def with_outage(one: DestinationStatus) -> DestinationStatus:
        outages = [relay.outages[one.destination] for relay in relays if one.destination in relay.outages]
        return replace(one, unreachable=outages[0], unreachable_relays=len(outages)) if outages and _waits(one) else one

    relays = [relay for relay in relays if not relay.stale]
    return tuple(with_outage(one) for one in destinations)


def _waits(one: DestinationStatus) -> bool:
    return one.waiting + one.retrying > 0
