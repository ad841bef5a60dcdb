"""The road of writer jdbc: executors write to a staging table, and the driver merges it chunk by chunk.

For clusters whose executors have a JVM and nothing else. Spark's JDBC writer knows no upsert, and a task that is run
again writes its rows again; both do no harm in a staging table, from which one event of each id is taken. It is named
after the run and the attempt, so that two attempts never write to the same one, and has a partition for each chunk, so
that a chunk is read without the others.

It is unlogged: what is in it is in the source too. Postgres empties unlogged tables when it recovers from a crash, so
a chunk that was written and is empty is not merged (``StagingLost``); the staging is done once more.
"""

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple
from typing import Any

import psycopg
from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from txbox import InvalidConfiguration, TxboxError
from txbox.postgres.engines import open_engine
from txbox.postgres.sqlstates import UNDEFINED_TABLE, is_outage, sqlstate
from txbox.postgres.transaction_guard import guard
from txbox.postgres.transactions import short_transaction
from txbox_spark.loading.failed_chunk import FailedChunk
from txbox_spark.loading.ledger import Run, span
from txbox_spark.loading.merge import ChunkCounts, MergePlan, begin_chunk, merge_chunk
from txbox_spark.loading.refused_message import search_refused
from txbox_spark.loading.statements import Statements, quote
from txbox_spark.reading.columns import MAX_NAME_BYTES, EventColumn, in_words
from txbox_spark.reading.events import MESSAGE_ID, REJECTED, Events
from txbox_spark.runtime.jdbc import is_about_data, jdbc_options
from txbox_spark.runtime.retries import patient

__all__ = [
    "BATCH_ROWS",
    "MOST_PARTITIONS",
    "StagingLost",
    "drop_staging",
    "holds",
    "merge_staged",
    "stage",
    "sweep_staging",
]

DROP_SECONDS = 10
"""How long to wait for whoever still holds a staging table that is to be dropped."""

CANCEL_SECONDS = 2.0
"""How long the server may take to hear that a statement is to be cancelled."""

CANCEL_AGAIN_SECONDS = 0.1
"""Between two rounds of cancelling: a cancel that meets a chunk between two statements cancels nothing."""

TABLES_AT_ONCE = 64
"""How many tables one transaction creates or drops: each takes a few of the locks that Postgres has room for."""

MOST_PARTITIONS = 1_000
"""Whoever reads a partitioned table plans with each of its partitions."""

BATCH_ROWS = 10_000
"""Rows in one call of Spark's JDBC writer; the driver rewrites them to multi-row inserts."""


class StagingLost(TxboxError):
    """The staging table is not complete any more: Postgres has recovered from a crash, or it was swept."""


def stage(engine: Engine, url: URL, events: Events, run: Run, statements: Statements, prefix: str, tasks: int) -> str:
    """Write the events to a new staging table.

    Args:
        engine: the database.
        url: the same, for the executors.
        events: the source.
        run: the run, at the attempt that it is in.
        statements: for the ledger's place.
        prefix: what tables' names start with.
        tasks: how many tasks may write at once.

    Returns:
        The table's name.

    Raises:
        InvalidConfiguration: the name would be too long.
        MessageRefused: Postgres does not take a value of a message.
        StagingLost: someone else has dropped the table meanwhile.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as sql

    name = f"{prefix}bulk_load_staging_{run.run_id}_{run.attempt}"
    if len(f"{name}_{run.chunks}".encode()) > MAX_NAME_BYTES:
        raise InvalidConfiguration(f"with the prefix {prefix!r}, a staging table's name is too long; use writer copy")
    with short_transaction(engine) as connection:
        schema = _schema(connection, statements)
        # Behind a pooler nothing may be prepared: ours found out when they were made, the JDBC driver would not.
        prepare = getattr(connection.connection.driver_connection, "prepare_threshold", None) is not None
    creating = statements.create_staging(schema, name, events.columns, run.bounds, _digest(events.columns))
    for first in range(0, len(creating), TABLES_AT_ONCE):
        with short_transaction(engine) as connection:
            for statement in creating[first : first + TABLES_AT_ONCE]:
                connection.exec_driver_sql(statement)
    try:
        (
            in_words(events.staged.where(sql.col(MESSAGE_ID).isNotNull()).drop(REJECTED))
            .write.format("jdbc")
            .options(**jdbc_options(url, prepare=prepare))
            # Strings are sent without a type, so that Postgres reads each as its column's type: uuid, jsonb, int[] …
            .option("stringtype", "unspecified")
            .option("reWriteBatchedInserts", "true")
            # The driver would quote the statement with its values, for Spark to log.
            .option("logServerErrorDetail", "false")
            .option("batchsize", BATCH_ROWS)
            .option("numPartitions", tasks)
            .option("dbtable", f"{schema}.{quote(name)}".replace("%%", "%"))
            .mode("append")
            .save()
        )
    except (PySparkException, Py4JError) as error:
        if is_about_data(error):
            with suppress(SQLAlchemyError, psycopg.Error, PySparkException, Py4JError):
                search_refused(engine, events, statements)
        raise
    if not _staged_as(engine, statements, name)[1]:
        raise StagingLost(f"the staging table {name} was dropped while it was filled")
    return name


def holds(engine: Engine, statements: Statements, run: Run, columns: Sequence[EventColumn]) -> bool:
    """Return whether a staging table that was filled holds these columns; one that is gone holds any.

    Columns are staged by number, so that other ones, or others in their order, would be taken for each other.
    """
    return _staged_as(engine, statements, str(run.staging_table))[0] in (None, _digest(columns))


def _digest(columns: Sequence[EventColumn]) -> str:
    return hashlib.sha256(json.dumps([astuple(one) for one in columns]).encode()).hexdigest()


@patient
def _staged_as(engine: Engine, statements: Statements, table: str) -> tuple[str | None, bool]:
    """Return a staging table's comment, and whether it has partitions, as ours do."""
    with short_transaction(engine) as connection:
        name = f"{_schema(connection, statements)}.{quote(table)}".replace("%%", "%")
        found = connection.exec_driver_sql(statements.staged_as, (name,)).one_or_none()
    return (None, False) if found is None else (found[0], found[1])


def merge_staged(engine: Engine, plan: MergePlan, run: Run, chunks: Iterable[int], at_once: int) -> list[FailedChunk]:
    """Merge chunks of a complete staging table, several at once, each in a transaction of its own.

    An error that would come again stops those that have not begun. So does an interruption of the caller; it cancels
    the chunks that have begun, and of those nothing is committed.

    Args:
        engine: the database.
        plan: of the run.
        run: the run.
        chunks: their numbers.
        at_once: how many.

    Returns:
        The chunks that could not be merged.

    Raises:
        StagingLost: the staging table is not there, or not complete.
    """
    stopping = threading.Event()
    under_way: set[Any] = set()
    # A session for each chunk, as with writer copy: what the caller's statements leave in one, such as a temporary
    # table or a setting, must not meet the next chunk.
    sessions = guard(open_engine(engine.url, poolclass=NullPool))

    def merge(chunk: int) -> FailedChunk | None:
        if stopping.is_set():
            return None
        try:
            _merge_chunk(sessions, plan, run, chunk, under_way)
        except StagingLost:
            stopping.set()
            raise
        except (SQLAlchemyError, psycopg.Error, TxboxError) as error:
            failed = FailedChunk.of(chunk, error)
            if not failed.passing:
                stopping.set()
            return failed
        return None

    with ThreadPoolExecutor(at_once, thread_name_prefix="txbox-merge") as pool:
        try:
            return [failed for failed in pool.map(merge, chunks) if failed is not None]
        except KeyboardInterrupt:
            stopping.set()
            _cancel(under_way)
            raise
        finally:
            stopping.set()


def _cancel(under_way: set[Any]) -> None:
    """Cancel the statements of chunks until none is under way: one may be between two of them."""
    while under_way:
        for driver_connection in tuple(under_way):
            with suppress(psycopg.Error, OSError):
                driver_connection.cancel_safe(timeout=CANCEL_SECONDS)
        time.sleep(CANCEL_AGAIN_SECONDS)


@patient
def drop_staging(engine: Engine, statements: Statements, prefix: str, run_id: str) -> None:
    """Drop the staging tables of a run, those of attempts included that were killed before theirs was complete."""
    pattern = f"^{re.escape(prefix)}bulk_load_staging_{run_id}_[0-9]+$"
    with short_transaction(engine) as connection:
        found = connection.exec_driver_sql(statements.staging_of_run, (statements.bulk_load, pattern)).scalars().all()
    for table in found:
        _drop(engine, statements, table)


def _drop(engine: Engine, statements: Statements, table: str) -> None:
    """Drop a staging table, or leave it to a later sweep: no load fails because of what another one has left.

    An executor that hangs, or that is cut off, may hold a lock on it for as long as Postgres believes that it lives.
    And it may be another role's.
    """
    try:
        with short_transaction(engine) as connection:
            name = f"{_schema(connection, statements)}.{quote(table)}"
            partitions = connection.exec_driver_sql(statements.partitions, (name.replace("%%", "%"),)).scalars().all()
        names = [*(one.replace("%", "%%") for one in partitions), name]
        for first in range(0, len(names), TABLES_AT_ONCE):
            with short_transaction(engine) as connection:
                connection.exec_driver_sql(statements.bound_wait, (f"{DROP_SECONDS}s",))
                connection.exec_driver_sql(statements.drop_tables(names[first : first + TABLES_AT_ONCE]))
    except DBAPIError as error:
        if is_outage(error):
            raise
        _log.warning("the staging table %s cannot be dropped (%s); a later load will try again", table, error.orig)


def sweep_staging(engine: Engine, statements: Statements, prefix: str, abandoned_seconds: float) -> tuple[str, ...]:
    """Drop the staging tables of runs that nobody has worked on for a while, and return their names.

    Such a run can still be resumed: its events are staged anew.
    """
    start = f"^{re.escape(prefix)}bulk_load_staging_"
    values = (statements.bulk_load, f"{start}[0-9a-f]{{12}}_[0-9]+$", f"{start}([0-9a-f]{{12}})_", abandoned_seconds)
    with short_transaction(engine) as connection:
        found = connection.exec_driver_sql(statements.abandoned_staging, values).scalars().all()
    for table in found:
        _log.info("dropping the abandoned staging table %s", table)
        _drop(engine, statements, table)
    return tuple(found)


def _merge_chunk(engine: Engine, plan: MergePlan, run: Run, chunk: int, under_way: set[Any]) -> None:
    """Merge one chunk of the staging table, in a transaction of its own; its connection is under way meanwhile.

    Raises:
        StagingLost: the staging table is not there, or not complete.
        sqlalchemy.exc.DBAPIError, TxboxError: the chunk cannot be merged; nothing of it is committed.
    """
    sql = plan.sql
    with short_transaction(engine) as connection, _noted(connection, under_way):
        if not begin_chunk(connection, plan, chunk):
            return
        schema = _schema(connection, sql)
        staged = f"{schema}.{quote(f'{run.staging_table}_{chunk}')}"
        try:
            read, distinct = connection.exec_driver_sql(sql.distinct_ids(staged)).one()
        except DBAPIError as error:
            if sqlstate(error) == UNDEFINED_TABLE:
                raise StagingLost(f"the staging table {run.staging_table} is gone") from error
            raise
        # After a crash all of it is empty, never a part. A chunk alone may be: all its ids may be of rejected rows.
        if not read and run.rows > (run.rejected or 0) and not _has_rows(connection, schema, run.staging_table):
            raise StagingLost(f"the staging table {run.staging_table} has been emptied; did Postgres crash?")
        connection.exec_driver_sql(sql.analyze(staged))
        merge_chunk(connection, plan, chunk, span(run.bounds, chunk), ChunkCounts(read, 0, distinct), staged=staged)


@contextmanager
def _noted(connection: Connection, under_way: set[Any]) -> Iterator[None]:
    driver_connection = connection.connection.driver_connection
    under_way.add(driver_connection)
    try:
        yield
    finally:
        under_way.discard(driver_connection)


def _has_rows(connection: Connection, schema: str, table: str | None) -> bool:
    return connection.exec_driver_sql(Statements.any_row(f"{schema}.{quote(str(table))}")).rowcount > 0


def _schema(connection: Connection, statements: Statements) -> str:
    """Return the schema that our tables are in, quoted as Postgres and psycopg's placeholders need it."""
    schema = str(connection.exec_driver_sql(statements.schema_of_tables, (statements.bulk_load,)).scalar_one())
    return schema.replace("%", "%%")


_log = logging.getLogger("txbox")
