"""Figures of the database for monitoring, in parts: bounded reads that go on if one of them fails.

Each part has time-limited statements in its own transactions, and waits only briefly for locks. So a slow or locked
table costs only its own figures. A part that could not be read has none, never old ones. All parts together have one
limit, because Prometheus waits only so long. The part that took longest last time comes last, so that it takes no time
from the others.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from txbox.errors import TxboxError
from txbox.instrumentation.events import MAINTAINER
from txbox.instrumentation.metrics import GENERATIONS
from txbox.leases.status import read_leases
from txbox.outbox.status import is_relayed, read_outbox_status
from txbox.postgres.engines import adopt
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table, short_transaction
from txbox.postgres.watchdog import bounded
from txbox.status.backlogs import inbox_backlogs
from txbox.status.runway import read_runway
from txbox.status.status import StatusStatements
from txbox.status.workers import STALE_SECONDS, read_workers
from txbox.text import text_of

LIMIT_SECONDS = 8.0
"""Limit of a read with all its parts; by default Prometheus gives a scrape 10 seconds."""

STATEMENT_SECONDS = 2.0
LOCK_SECONDS = 0.5

OUTBOX_SECONDS = 6.0
"""Limit of all statements of the outbox's status."""

COUNTED_ROWS = 10_000
"""Most rows counted: letters of each subscriber, failures, held keys. Above it, the figure is a lower bound."""

CANCEL_SECONDS = 1.0
"""Timeout of the request to cancel a statement, which takes a connection."""

COUNTED_SUBSCRIBERS = 1_000
COUNTED_LEASES = 1_000_000

RECENT_SECONDS = 60.0
"""How long an age when received is shown; of an earlier batch, it would say nothing about what waits now."""

STALLED_SECONDS = 60.0
"""A bulk load at work shows it every 10 seconds; without that for this long, it has stalled."""


class FiguresStatements(SqlFile, file="figures.sql", fragments_of=StatusStatements):
    bound_time: str
    dead_letters: str
    retrying: str
    outbox_held_keys: str
    bulk_loads: str
    pauses: str
    received_ages: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One gauge's value: the metric's name without ``txbox_``, the values of its labels, and the number."""

    metric: str
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class PartRead:
    """How reading a part went; ``exact`` is False if its figures are lower bounds or left out."""

    succeeded: bool
    exact: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What was read; if the database is away, ``up`` is False and the rest is empty."""

    up: bool
    figures: tuple[Figure, ...]
    parts: dict[str, PartRead]


GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "outbox_messages": ("Messages of the outbox: waiting, delayed, retrying", ("destination", "state")),
    "outbox_rows": ("Messages of the outbox in all, estimated where there are many", ()),
    "outbox_oldest_seconds": ("How long the oldest message has waited to be sent", ("destination",)),
    "outbox_drain_seconds": ("How long its workers take for what waits, at their rate", ("destination",)),
    "outbox_held_keys": ("Keys whose first message was refused", ("destination",)),
    "outbox_unreachable_relays": ("Relays that cannot send there", ("destination",)),
    "relays": ("Relays, by their own reports: working, paused, drained, gone", ("state",)),
    "snapshot_holder_seconds": ("How long the oldest has kept Postgres from cleaning up", ("kind",)),
    "snapshot_holder_transactions": ("Transactions begun since", ("kind",)),
    "dead_letters": ("Dead letters that wait", ("subscriber", "reason")),
    "dead_letters_oldest_seconds": ("How long the oldest dead letter has waited", ("subscriber",)),
    "messages_retrying": ("Messages that wait for another attempt", ("subscriber",)),
    "workers": ("Workers, by their own reports: working, paused, drained, gone", ("subscriber", "state")),
    "workers_received_age_seconds": (
        "How old the oldest message was that workers received in their last batch, if that was within a minute",
        ("subscriber",),
    ),
    "pause_seconds": ("How long it has been paused", ("kind", "name")),
    "leases": ("Leases: in_flight, run_out, failed", ("subscriber", "state")),
    "lease_oldest_seconds": ("How long ago the longest attempt under way began", ("subscriber",)),
    "bulk_loads": ("Bulk loads that are not finished: running, stalled", ("subscriber", "state")),
    "maintenance_task_failed": ("Whether something has prevented the task when it was last due", ("task",)),
    "maintenance_age_seconds": ("How long ago a maintainer has finished a round", ("subscriber",)),
    "rotation_due_seconds": ("Until a rotating inbox needs a new generation", ("subscriber",)),
    "inbox_rows": ("Rows of the inbox, about, by generation", ("subscriber", "generation")),
    "inbox_bytes": ("The inbox with its index, by generation", ("subscriber", "generation")),
    "horizon_age_seconds": ("How far back a subscriber's horizon lies", ("subscriber",)),
}
"""Every gauge, with its description and labels."""


class FiguresReader:
    def __init__(self, engine: Engine, schema: str | None, prefix: str, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._engine = adopt(engine)
        self._limit_seconds = limit_seconds
        self._seconds: dict[str, float] = {}
        self._schema, self._prefix = schema, prefix
        self._sql = FiguresStatements.load(schema, prefix)

    def can_read(self, limit_seconds: float) -> bool:
        try:
            with self._bounded(time.monotonic() + limit_seconds):
                return True
        except (SQLAlchemyError, TxboxError) as error:
            _log.warning("the database cannot be used: %s", text_of(error))
            return False

    def read(self) -> Figures:
        """Read all parts. Raises nothing if the database is away or a part cannot be read."""
        ends_at = time.monotonic() + self._limit_seconds
        if not self.can_read(self._limit_seconds):
            return Figures(False, (), {})
        figures: list[Figure] = []
        parts = {}
        readers: dict[str, Callable[[list[Figure], float], bool]] = {
            "outbox": self._outbox,
            "outbox_held_keys": self._outbox_held_keys,
            "dead_letters": self._dead_letters,
            "retrying": self._retrying,
            "workers": self._workers,
            "pauses": self._pauses,
            "leases": self._leases,
            "bulk_loads": self._bulk_loads,
            "runway": self._runway,
        }
        for part in sorted(readers, key=lambda part: self._seconds.get(part, 0.0)):
            began, found, exact, succeeded = time.monotonic(), list[Figure](), False, True
            try:
                exact = readers[part](found, ends_at)
            except (SQLAlchemyError, TxboxError, TimeoutError) as error:
                succeeded = False
                if isinstance(error, DBAPIError) and error.connection_invalidated:
                    _log.warning("the database is lost: %s", text_of(error))
                    return Figures(False, (), {})
                late = ", as there was no time left" if time.monotonic() >= ends_at else ""
                _log.warning("%s cannot be read%s: %s", part, late, text_of(error))
            else:
                figures.extend(found)
            seconds = time.monotonic() - began
            if began < ends_at:  # otherwise nothing is known about it
                self._seconds[part] = seconds
            parts[part] = PartRead(succeeded, exact, seconds)
        return Figures(True, tuple(figures), parts)

    @contextmanager
    def _bounded(self, ends_at: float) -> Iterator[Connection]:
        """Open a transaction that waits for nothing beyond ``ends_at``.

        Raises:
            TimeoutError: that time has passed.
        """
        left = ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError("not begun")
        limits = {"statement": min(STATEMENT_SECONDS, left), "lock": min(LOCK_SECONDS, left)}
        # A server that does not answer is probed after half of the time.
        with bounded(left / 2), short_transaction(self._engine) as connection, _cancelled(connection, left):
            in_ms = {name: str(max(round(seconds * 1000), 1)) for name, seconds in limits.items()}
            connection.exec_driver_sql(self._sql.bound_time, in_ms)
            yield connection

    def _outbox(self, found: list[Figure], ends_at: float) -> bool:
        # A lock costs half a second here, but 5 seconds for each statement of the status.
        with self._bounded(ends_at) as connection:
            tables = self._sql.tables
            for table in (tables.outbox_message, tables.outbox_sent, tables.outbox_relay):
                check_table(connection, table)
        left = ends_at - time.monotonic()
        with bounded(left / 2):
            status = read_outbox_status(
                self._engine, schema=self._schema, prefix=self._prefix, limit_seconds=min(left, OUTBOX_SECONDS)
            )
        if not status.relays_in_time:
            raise TimeoutError("the relays' reports were not there")
        for one in status.destinations:
            counts = {"waiting": one.waiting, "delayed": one.delayed, "retrying": one.retrying}
            found.extend(Figure("outbox_messages", (one.destination, state), n) for state, n in counts.items())
            if one.oldest_seconds is not None:
                found.append(Figure("outbox_oldest_seconds", (one.destination,), one.oldest_seconds))
            if is_relayed(one.destination):
                found.append(Figure("outbox_unreachable_relays", (one.destination,), one.unreachable_relays))
        if not all(is_relayed(one.destination) for one in status.destinations):
            with self._bounded(ends_at) as connection:
                workers = read_workers(connection, schema=self._schema, prefix=self._prefix)
            found.extend(
                Figure("outbox_drain_seconds", (one.destination,), one.drain_seconds)
                for one in inbox_backlogs(status.destinations, workers)
                if one.drain_seconds is not None
            )
        if status.messages is not None:
            found.append(Figure("outbox_rows", (), status.messages))
        states = Counter("gone" if relay.stale else relay.state or "working" for relay in status.relays)
        found.extend(Figure("relays", (state,), states[state]) for state in _STATES)
        for kind in {holder.kind for holder in status.snapshot_holders}:
            holders = [holder for holder in status.snapshot_holders if holder.kind == kind]
            longest = max((one.seconds for one in holders if one.seconds is not None), default=None)
            if longest is not None:
                found.append(Figure("snapshot_holder_seconds", (kind,), longest))
            found.append(Figure("snapshot_holder_transactions", (kind,), max(one.transactions for one in holders)))
        return status.exact and status.in_time

    def _outbox_held_keys(self, found: list[Figure], ends_at: float) -> bool:
        with self._bounded(ends_at) as connection:
            rows = connection.exec_driver_sql(self._sql.outbox_held_keys, {"limit": COUNTED_ROWS}).all()
        found.extend(Figure("outbox_held_keys", (row.destination,), row.keys) for row in rows)
        return all(row.exact for row in rows)

    def _dead_letters(self, found: list[Figure], ends_at: float) -> bool:
        limits = {"limit": COUNTED_ROWS, "subscribers": COUNTED_SUBSCRIBERS}
        with self._bounded(ends_at) as connection:
            rows = connection.exec_driver_sql(self._sql.dead_letters, limits).all()
        oldest: dict[str, float] = {}
        for row in rows:
            found.append(Figure("dead_letters", (row.subscriber_id, row.reason), row.letters))
            oldest[row.subscriber_id] = max(row.oldest_seconds, oldest.get(row.subscriber_id, 0.0))
        found.extend(Figure("dead_letters_oldest_seconds", (name,), age) for name, age in oldest.items())
        return all(row.exact for row in rows)

    def _retrying(self, found: list[Figure], ends_at: float) -> bool:
        with self._bounded(ends_at) as connection:
            rows = connection.exec_driver_sql(self._sql.retrying, {"limit": COUNTED_ROWS}).all()
        found.extend(Figure("messages_retrying", (row.subscriber_id,), row.messages) for row in rows)
        return all(row.exact for row in rows)

    def _workers(self, found: list[Figure], ends_at: float) -> bool:
        with self._bounded(ends_at) as connection:
            workers = read_workers(connection, schema=self._schema, prefix=self._prefix)
            spans = {"stale_after": timedelta(seconds=STALE_SECONDS), "recent": timedelta(seconds=RECENT_SECONDS)}
            ages = connection.exec_driver_sql(self._sql.received_ages, spans).all()
        states = Counter((one.subscriber_id, "gone" if one.stale else one.state) for one in workers)
        names = {one.subscriber_id for one in workers}
        found.extend(Figure("workers_received_age_seconds", (row.subscriber_id,), row.seconds) for row in ages)
        found.extend(Figure("workers", (name, state), states[name, state]) for name in names for state in _STATES)
        return True

    def _pauses(self, found: list[Figure], ends_at: float) -> bool:
        with self._bounded(ends_at) as connection:
            rows = connection.exec_driver_sql(self._sql.pauses).all()
        found.extend(Figure("pause_seconds", (row.kind, row.name), row.seconds) for row in rows)
        return True

    def _leases(self, found: list[Figure], ends_at: float) -> bool:
        with self._bounded(ends_at) as connection:
            status = read_leases(connection, schema=self._schema, prefix=self._prefix, exact_up_to_rows=COUNTED_LEASES)
        for one in status.ledgers:
            counts = {"in_flight": one.in_flight, "run_out": one.run_out, "failed": one.failed}
            found.extend(Figure("leases", (one.subscriber_id, state), n) for state, n in counts.items())
            if one.longest_seconds is not None:
                found.append(Figure("lease_oldest_seconds", (one.subscriber_id,), one.longest_seconds))
        return status.exact

    def _bulk_loads(self, found: list[Figure], ends_at: float) -> bool:
        limits = {"stalled_after": timedelta(seconds=STALLED_SECONDS)}
        with self._bounded(ends_at) as connection:
            rows = connection.exec_driver_sql(self._sql.bulk_loads, limits).all()
        for row in rows:
            found.append(Figure("bulk_loads", (row.subscriber_id, "running"), row.running))
            found.append(Figure("bulk_loads", (row.subscriber_id, "stalled"), row.stalled))
        return True

    def _runway(self, found: list[Figure], ends_at: float) -> bool:
        with self._bounded(ends_at) as connection:
            runway = read_runway(connection, schema=self._schema, prefix=self._prefix)
        if runway is None:
            return True
        if runway.seconds_ago is not None:
            found.append(Figure("maintenance_age_seconds", (MAINTAINER,), runway.seconds_ago))
        if runway.rotation_due_seconds is not None:
            found.append(Figure("rotation_due_seconds", (MAINTAINER,), runway.rotation_due_seconds))
        sizes = runway.sizes
        for number in range(min(len(sizes), GENERATIONS + 1)):
            some = sizes[number : number + 1] if number < GENERATIONS else sizes[number:]
            found.append(Figure("inbox_rows", (MAINTAINER, str(number)), sum(rows for rows, _ in some)))
            found.append(Figure("inbox_bytes", (MAINTAINER, str(number)), sum(size for _, size in some)))
        found.extend(Figure("horizon_age_seconds", (one.subscriber_id,), one.age_seconds) for one in runway.horizons)
        found.extend(
            Figure("maintenance_task_failed", (task.task,), float(task.error is not None)) for task in runway.tasks
        )
        return True


@contextmanager
def _cancelled(connection: Connection, seconds: float) -> Iterator[None]:
    """Cancel the running statement after ``seconds``: each has a limit, but a part has several."""
    driver: Any = connection.connection.driver_connection

    def cancel() -> None:
        with suppress(psycopg.Error, OSError):  # the watchdog ends a wait for a server that does not answer
            driver.cancel_safe(timeout=CANCEL_SECONDS)

    timer = threading.Timer(seconds, cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # what comes next on this connection must not be cancelled


_STATES = ("working", "paused", "drained", "gone")

_log = logging.getLogger("txbox.status")
