"""Keeps the ledger of bulk loads: which run loads what, and which of its chunks are done.

::

    begin ──▶ running ──▶ finished
                │  ▲
          error │  │ begin_attempt (resume, or the next attempt of the same call)
                ▼  │
              failed, or killed

Invariants: a chunk has a row if and only if it is applied, because both happen in one transaction; a run is finished if
and only if every chunk has a row. A heartbeat, by the database's clock, shows that a run is being worked on; staging
tables of runs without one are dropped.
"""

import json
import logging
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from txbox import TxboxError
from txbox.postgres.server import refuse_read_only
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table, short_transaction
from txbox.status import BlockedLoad, find_blocked_loads
from txbox_spark.rejects.remarks import NO_REMARKS, Remarks
from txbox_spark.runtime.periodic import every
from txbox_spark.runtime.retries import retry_outages
from txbox_spark.survey import Survey

HEARTBEAT_SECONDS = 10.0

BLOCKED_SECONDS = 5.0
"""How long a wait for a lock must last before it is logged."""

BLOCKED_AGAIN_SECONDS = 60.0
"""How long until a wait for the same blocker is logged again."""


class RunNotFound(TxboxError):
    """The bulk load to resume does not exist."""


@dataclass(frozen=True, slots=True)
class Run:
    run_id: str  # 12 hexadecimal digits
    subscriber_id: str
    source: str  # what is loaded, in words
    digest: bytes  # SHA-256 of what must be the same in another attempt
    content: bytes | None
    """Digest of the ids, which must be the same in another attempt; None if an older txbox began the run."""
    writer: str  # "copy" or "jdbc"
    bounds: tuple[str, ...]  # between its chunks
    attempt: int = 1  # counted from 1
    staging_table: str | None = None  # set once it is complete
    rows: int = 0  # of the source
    rejected: int | None = None  # of the source's rows; None as long as only the chunks know
    remarks: Remarks = NO_REMARKS
    finished: bool = False  # whether every chunk is merged

    @property
    def chunks(self) -> int:
        return len(self.bounds) + 1


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums over a run's merged chunks; ``already_processed`` includes ``parked``."""

    chunks: int
    read: int
    rejected: int
    already_processed: int
    applied: int
    parked: int
    expired: int


class LedgerStatements(SqlFile, file="ledger.sql"):
    begin_run: str
    read_run: str
    begin_attempt: str
    heartbeat: str
    set_staging_table: str
    record_failure: str
    failure: str
    finish_run: str
    forget_run: str
    run_of_source: str
    forget_abandoned: str
    merged_chunks: str
    totals: str
    remarks: str
    any_processed: str
    any_horizon: str
    some_subscribers: str


class LoadLedger:
    """The ledger in one database. Every method is its own short transaction, unless it takes a connection.

    The methods that a load needs are retried while the database cannot be reached. Running one twice does no harm: at
    worst the number of attempts is too high, or a run was begun that is never continued.
    """

    def __init__(self, engine: Engine, schema: str | None = None, prefix: str = "") -> None:
        self._engine = engine
        self._sql = LedgerStatements.load(schema, prefix)

    def check(self) -> None:
        """Raise unless the tables of the inbox and the ledger exist and can be written to.

        Raises:
            SchemaMissing: a table does not exist.
            InvalidConfiguration: row-level security may hide rows of a table, or the server is read-only.
        """
        with self._engine.connect() as connection:
            refuse_read_only(connection, "a bulk load")
            check_table(connection, self._sql.tables.processed_message)
            check_table(connection, self._sql.tables.bulk_load)
            check_table(connection, self._sql.tables.bulk_load_chunk)

    @retry_outages
    def begin(
        self, *, subscriber_id: str, source: str, digest: bytes, writer: str, bounds: Sequence[str], found: Survey
    ) -> Run:
        run_id = secrets.token_hex(6)
        self._execute(
            self._sql.begin_run,
            run_id=run_id,
            subscriber_id=subscriber_id,
            source=source,
            digest=digest,
            content=found.content,
            writer=writer,
            chunks=len(bounds) + 1,
            bounds=json.dumps(bounds),
            rows_read=found.rows,
            rows_rejected=found.rejected,
            rejected_sample=json.dumps(found.remarks.as_json()),
        )
        return self.read(run_id)

    @retry_outages
    def read(self, run_id: str) -> Run:
        """Return a run.

        Raises:
            RunNotFound: there is no run with this id.
        """
        found = self._execute(self._sql.read_run, run_id=run_id)
        if not found:
            raise RunNotFound(f"there is no bulk load {run_id!r} in this database")
        run = Run(*found[0])
        return replace(run, bounds=tuple(run.bounds), remarks=Remarks.from_json(run.remarks))

    @retry_outages
    def begin_attempt(self, run_id: str) -> Run:
        """Record another attempt at a run, and return the run."""
        self._execute(self._sql.begin_attempt, run_id=run_id)
        return self.read(run_id)

    @retry_outages
    def set_staging_table(self, run_id: str, table: str | None) -> Run:
        """Record that a run's staging table is complete, or with None that it is lost, and return the run."""
        self._execute(self._sql.set_staging_table, staging_table=table, run_id=run_id)
        return self.read(run_id)

    @retry_outages
    def record_failure(self, run_id: str, error: str) -> None:
        """Record why an attempt ended, unless the run is finished."""
        self._execute(self._sql.record_failure, error=error, run_id=run_id)

    def failure(self, connection: Connection, run_id: str) -> str | None:
        """Return why the last attempt ended, in the connection's transaction; None if it has not failed."""
        found = connection.exec_driver_sql(self._sql.failure, {"run_id": run_id})
        return found.scalar_one_or_none()

    @retry_outages
    def finish(self, run_id: str, *, rejected: int, remarks: Remarks) -> None:
        """Record that every chunk is merged."""
        kept = json.dumps(remarks.as_json())
        self._execute(self._sql.finish_run, rows_rejected=rejected, rejected_sample=kept, run_id=run_id)

    @retry_outages
    def forget(self, run_id: str) -> None:
        self._execute(self._sql.forget_run, run_id=run_id)

    @retry_outages
    def run_of_source(self, subscriber_id: str, source: str) -> str | None:
        """Return the id of the last run of a subscriber's source; None if there is none."""
        found = self._execute(self._sql.run_of_source, subscriber_id=subscriber_id, source=source)
        return next((run_id for (run_id,) in found), None)

    def forget_abandoned(
        self, subscriber_id: str, own_sources: str, other_sources: str, abandoned_seconds: float, kept: str | None
    ) -> tuple[str, ...]:
        """Delete abandoned runs of a subscriber, with their chunks, and return their ids.

        Args:
            subscriber_id: the subscriber of the runs.
            own_sources: a regular expression for sources that only the caller loads, so that nobody works on them.
            other_sources: a regular expression for sources that another process may be loading.
            abandoned_seconds: how old the heartbeat must be for ``other_sources``.
            kept: a run to keep, because it will be resumed.
        """
        found = self._execute(
            self._sql.forget_abandoned,
            subscriber_id=subscriber_id,
            own_sources=own_sources,
            other_sources=other_sources,
            abandoned_seconds=abandoned_seconds,
            kept=kept,
        )
        return tuple(run_id for (run_id,) in found)

    @retry_outages
    def merged_chunks(self, run_id: str) -> tuple[int, ...]:
        return tuple(chunk for (chunk,) in self._execute(self._sql.merged_chunks, run_id=run_id))

    @retry_outages
    def totals(self, run_id: str) -> Totals:
        return Totals(*self._execute(self._sql.totals, run_id=run_id)[0])

    @retry_outages
    def remarks(self, run_id: str) -> Remarks:
        """Return the remarks of all chunks, added up."""
        found = self._execute(self._sql.remarks, run_id=run_id)
        return sum((Remarks.from_json(one) for (one,) in found), NO_REMARKS)

    def blocked(self, run_id: str) -> tuple[BlockedLoad, ...]:
        """Return the lock waits of a run's chunks, each with its blocker."""
        with short_transaction(self._engine) as connection:
            return find_blocked_loads(connection, run_id)

    def beat(self, run_id: str) -> None:
        self._execute(self._sql.heartbeat, run_id=run_id)

    def _execute(self, statement: str, **values: object) -> Sequence[tuple[Any, ...]]:
        with short_transaction(self._engine) as connection:
            result = connection.exec_driver_sql(statement, values)
            return [tuple(row) for row in result] if result.returns_rows else ()


@contextmanager
def heartbeat(ledger: LoadLedger, run_id: str) -> Iterator[None]:
    """Record a run's heartbeat every ``HEARTBEAT_SECONDS`` until the block ends, and log the locks it waits for."""
    logged: dict[int, float] = {}

    def beat() -> None:
        try:
            ledger.beat(run_id)
            now = time.monotonic()
            for one in ledger.blocked(run_id):
                lately = now - logged.get(one.blocker_pid, -math.inf) < BLOCKED_AGAIN_SECONDS
                if one.usual or lately or (one.seconds is not None and one.seconds < BLOCKED_SECONDS):
                    continue
                logged[one.blocker_pid] = now
                _log.warning("%s", one)
        except DBAPIError as error:
            # One missing heartbeat does not matter. If the database is gone, the load itself fails.
            _log.warning("bulk load %s: no heartbeat: %s", run_id, error.orig)

    with every(HEARTBEAT_SECONDS, beat, name=f"txbox-bulk-load-{run_id}"):
        yield


@retry_outages
def warn_of_new_subscriber(engine: Engine, schema: str | None, prefix: str, subscriber_id: str) -> None:
    """Log a warning if the inbox has no id of a subscriber, but ids of others: every event will be new to it."""
    sql = LedgerStatements.load(schema, prefix)
    with short_transaction(engine) as connection:
        others = _subscribers_instead_of(connection, sql, subscriber_id)
    if others:
        _log.warning("%s has no id in the inbox; there are ids of %s", subscriber_id, ", ".join(others))


def subscribers_instead_of(
    connection: Connection, schema: str | None, prefix: str, subscriber_id: str
) -> Sequence[str]:
    """Return up to five subscribers with ids in the inbox if it does not know this one; otherwise none.

    It knows one that has a horizon, though all its ids may be forgotten.
    """
    sql = LedgerStatements.load(schema, prefix)
    others = _subscribers_instead_of(connection, sql, subscriber_id)
    known = others and connection.exec_driver_sql(sql.any_horizon, {"subscriber_id": subscriber_id}).first() is not None
    return [] if known else others


def _subscribers_instead_of(connection: Connection, sql: LedgerStatements, subscriber_id: str) -> Sequence[str]:
    if connection.exec_driver_sql(sql.any_processed, {"subscriber_id": subscriber_id}).first() is not None:
        return []
    return connection.exec_driver_sql(sql.some_subscribers).scalars().all()


_log = logging.getLogger("txbox.spark")
