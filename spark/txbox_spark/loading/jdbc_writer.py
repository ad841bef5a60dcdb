"""Writer jdbc: executors write to a staging table, and the driver merges it chunk by chunk.

It is for clusters whose executors have only a JVM. Spark's JDBC writer has no upsert, and a task that runs again writes
its rows again. Neither matters in a staging table, because the merge takes one event of each id from it.

When Postgres recovers from a crash, it empties staging tables; the events are then staged again (``StagingLost``).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from txbox import TxboxError
from txbox.postgres.sql import unescaped
from txbox.postgres.sqlstates import UNDEFINED_TABLE, sqlstate
from txbox.postgres.transactions import short_transaction
from txbox.tracing import error_type
from txbox_spark.loading.context import LoadContext
from txbox_spark.loading.ledger import Run, Totals
from txbox_spark.loading.staging_table import MAX_PARTITIONS
from txbox_spark.loading.writer import RowCounts, StagingLost
from txbox_spark.merging.chunk_merger import begin_chunk, claim_chunk, merge_chunk
from txbox_spark.merging.chunk_ranges import chunk_range
from txbox_spark.merging.chunk_sessions import open_sessions
from txbox_spark.merging.event_copier import copy_what_fits
from txbox_spark.merging.fresh_event import create_fresh, differing_ids, distinct_staged
from txbox_spark.merging.merge_plan import ChunkCounts, FailedChunk, MergePlan, MergeSizer
from txbox_spark.reading.columns import MESSAGE_ID, EventColumn, dates_as_text
from txbox_spark.reading.event_rows import REJECTED
from txbox_spark.reading.row_order import ROW_ORDER
from txbox_spark.rejects.remarks import RejectedRow, Remarks
from txbox_spark.runtime.jdbc import is_about_data, jdbc_options
from txbox_spark.runtime.lazy_imports import pyarrow, spark_errors, sql
from txbox_spark.survey import rejected_causes

BATCH_ROWS = 10_000
"""Rows in one batch of Spark's JDBC writer; the JDBC driver rewrites them to multi-row inserts."""

STAGING_IDLE_SECONDS = 3600.0
"""How long a staging task may send nothing in its one transaction. Without a limit, a frozen host would keep its locks
for ever, and a snapshot that holds VACUUM back. The limit is long because a source may be slow to give a batch."""

CANCEL_SECONDS = 2.0
"""How long a request to cancel a statement may take."""

CANCEL_AGAIN_SECONDS = 0.1
"""Pause between two rounds of cancelling; cancelling a chunk that is between two statements has no effect."""


class JdbcWriter:
    max_chunks: ClassVar[int] = MAX_PARTITIONS
    survey_counts_rejected: ClassVar[bool] = True

    def __init__(self, context: LoadContext) -> None:
        self._context = context

    def write(self, run: Run) -> list[FailedChunk]:
        """Merge every chunk that is not merged yet; return those that failed.

        Raises:
            StagingLost: the staging table is missing or incomplete.
        """
        context, table = self._context, run.staging_table
        columns = context.events.staged_columns
        texts = _as_texts(columns)
        as_texts = table is not None and context.staging.has_columns(table, texts)
        if table is not None and not (as_texts or context.staging.has_columns(table, columns)):
            _log.info("bulk load %s: other columns were staged; staging the events again", run.run_id)
            run = context.ledger.set_staging_table(run.run_id, None)
        if run.staging_table is None:
            with context.stage("staging", run):
                table = _stage(context, run, columns)
                if as_texts := table is None:
                    _log.warning(
                        "bulk load %s: Postgres does not take a value; staging the events as text, to find them all",
                        run.run_id,
                    )
                    run = context.ledger.begin_attempt(run.run_id)
                    table = _stage(context, run, texts)
            run = context.ledger.set_staging_table(run.run_id, table)
        chunks = sorted(set(range(run.chunks)) - set(context.merged_chunks(run)))
        with context.stage("merge", run), context.reporter.merge_stage(context.ledger, run):
            return _merge_chunks(context, run, chunks, as_texts=as_texts)

    def row_counts(self, run: Run, totals: Totals) -> RowCounts:
        """Return the row counts of a run whose chunks are all merged."""
        # A task that ran again has staged its rows again. They count as read twice, but are applied once.
        loadable = run.rows - (run.rejected or 0)
        distinct = totals.already_processed + totals.applied + totals.expired + totals.rejected
        found = max(distinct, min(loadable, totals.read))
        return RowCounts(loadable, found, (run.rejected or 0) + totals.rejected)

    def remarks(self, run: Run) -> Remarks:
        """Return the remarks of such a run; rejected rows that never reached a chunk are read again."""
        context = self._context
        remarks = context.ledger.remarks(run.run_id)
        if not run.rejected:
            return remarks
        rejected = context.events.identified.where(sql.col(REJECTED).isNotNull()).select(REJECTED)
        with context.stage("rejected rows", run):
            if (table := context.rejects_table(run)) is not None:
                table.copy_once(
                    context.engine,
                    run.run_id,
                    lambda: (RejectedRow.from_json(text) for (text,) in rejected.toLocalIterator()),
                )
            causes = rejected_causes(context.events)
        return Remarks(causes, run.remarks.sample) + remarks

    def clean_up(self, run: Run) -> None:
        self._context.staging.drop(run.run_id)


def _as_texts(columns: Sequence[EventColumn]) -> tuple[EventColumn, ...]:
    kept = (MESSAGE_ID, ROW_ORDER)
    return tuple(one if one.staged_as in kept else replace(one, postgres_type="text") for one in columns)


def _stage(context: LoadContext, run: Run, columns: Sequence[EventColumn]) -> str | None:
    """Write the events to a new staging table, and return its name; None if Postgres refuses a value.

    Raises:
        InvalidConfiguration: the name would be too long.
        StagingLost: another process has dropped the table.
    """
    engine, events, staging = context.engine, context.events, context.staging
    name = staging.create(run, columns)
    frame = dates_as_text(events.staged.where(sql.col(MESSAGE_ID).isNotNull()).drop(REJECTED))
    texts = [one.staged_as for one in columns if one.postgres_type == "text"]
    frame = frame.withColumns({name: sql.col(name).cast("string") for name in texts if name in frame.columns})
    with short_transaction(engine) as connection:
        # Statements must not be prepared behind a pooler. Our connections detect one, the JDBC driver does not.
        prepare = getattr(connection.connection.driver_connection, "prepare_threshold", None) is not None
    idle_seconds = STAGING_IDLE_SECONDS if prepare else None
    try:
        (
            frame.write.format("jdbc")
            .options(**jdbc_options(context.options.database, prepare=prepare, idle_seconds=idle_seconds))
            # Send strings without a type, so that Postgres parses each as its column's type: uuid, jsonb, int[] …
            .option("stringtype", "unspecified")
            .option("reWriteBatchedInserts", "true")
            # Otherwise the driver would quote the statement with its values, and Spark would log them.
            .option("logServerErrorDetail", "false")
            .option("batchsize", BATCH_ROWS)
            .option("numPartitions", context.parallelism)
            .option("dbtable", unescaped(staging.full_name(name)))
            .mode("append")
            .save()
        )
    except spark_errors() as error:
        if not is_about_data(error):
            raise
        return None
    if not staging.is_partitioned(name):
        raise StagingLost(f"the staging table {name} was dropped while it was filled")
    return name


def _merge_chunks(context: LoadContext, run: Run, chunks: Iterable[int], *, as_texts: bool) -> list[FailedChunk]:
    """Merge chunks of a complete staging table, several at once; return those that failed.

    After a lasting error, or if the caller is interrupted, no other chunk begins. An interruption also cancels the
    chunks that have begun; nothing of them is committed.

    Raises:
        StagingLost: the staging table is missing or incomplete.
    """
    stopping, parent = threading.Event(), context.span
    left, taking = deque(chunks), threading.Lock()
    plan = context.plan(run)
    sizer = MergeSizer(plan.lock_seconds, plan.most_chunks)
    active: set[Any] = set()
    sessions = open_sessions(context.engine.url, plan.apply, context.parallelism)

    def take(after: int | None) -> int | None:
        """Take the next chunk that is left, with ``after`` only if it is the one after that; None if there is none."""
        with taking:
            there = bool(left) and after in (None, left[0] - 1) and not stopping.is_set()
            return left.popleft() if there else None

    def merge_all(_: int) -> list[FailedChunk]:
        failed = []
        while (chunk := take(None)) is not None:
            if (one := merge(chunk)) is not None:
                failed.append(one)
        return failed

    def merge(chunk: int) -> FailedChunk | None:
        with parent.current():  # another thread does not inherit the span
            span = context.tracing.internal("txbox.bulk_load chunk", {"txbox.chunk": chunk})
        try:
            with span.current():
                _merge_chunk(sessions, context, run, chunk, active, sizer, take, as_texts=as_texts)
        except StagingLost as error:
            span.end(error_type(error))
            stopping.set()
            raise
        except (SQLAlchemyError, psycopg.Error, TxboxError) as error:
            span.end(error_type(error))
            failed = FailedChunk.of(chunk, error)
            if not failed.transient:
                stopping.set()
            return failed
        finally:
            span.end()
        return None

    with ThreadPoolExecutor(context.parallelism, thread_name_prefix="txbox-merge") as pool:
        try:
            return [failed for each in pool.map(merge_all, range(context.parallelism)) for failed in each]
        except KeyboardInterrupt:
            stopping.set()
            _cancel(active)
            raise
        finally:
            stopping.set()
            pool.shutdown()
            sessions.dispose()


def _cancel(active: set[Any]) -> None:
    """Cancel again and again until no chunk is active: a chunk may be between two statements."""
    while active:
        for driver_connection in tuple(active):
            with suppress(psycopg.Error, OSError):
                driver_connection.cancel_safe(timeout=CANCEL_SECONDS)
        time.sleep(CANCEL_AGAIN_SECONDS)


def _merge_chunk(
    engine: Engine,
    context: LoadContext,
    run: Run,
    chunk: int,
    active: set[Any],
    sizer: MergeSizer,
    take: Callable[[int], int | None],
    *,
    as_texts: bool,
) -> None:
    """Merge a chunk of the staging table, and as many of the next ones as the sizer says, in one transaction."""
    plan, staging = context.plan(run), context.staging
    with short_transaction(engine) as connection, _active(connection, active):
        if not begin_chunk(connection, plan, chunk):
            return
        last = chunk
        while last - chunk + 1 < sizer.chunks and take(last) is not None and claim_chunk(connection, plan, last + 1):
            last += 1
        tables = [staging.full_name(f"{run.staging_table}_{each}") for each in range(chunk, last + 1)]
        staged = f"({' UNION ALL '.join(f'TABLE {table}' for table in tables)})"
        try:
            counted = f"SELECT count(*), count(DISTINCT message_id) FROM {staged} AS staged"  # noqa: S608 - quoted
            read, distinct = connection.exec_driver_sql(counted).one()
        except DBAPIError as error:
            if sqlstate(error) == UNDEFINED_TABLE:
                raise StagingLost(f"the staging table {run.staging_table} is gone") from error
            raise
        # After a crash the whole table is empty, never a part of it. One chunk may be empty anyway, if all its ids
        # are those of rejected rows.
        whole = f"SELECT FROM {staging.full_name(str(run.staging_table))} LIMIT 1"
        if not read and run.rows > (run.rejected or 0) and not connection.exec_driver_sql(whole).rowcount:
            raise StagingLost(f"the staging table {run.staging_table} has been emptied; did Postgres crash?")
        for table in tables:
            connection.exec_driver_sql(f"ANALYZE {table} ({MESSAGE_ID})")
        ids = chunk_range(run.bounds, chunk, last)
        counts = ChunkCounts(read, 0, distinct)
        if read > distinct:
            differing, sample = connection.exec_driver_sql(differing_ids(plan.columns, staged)).one()
            counts = replace(counts, remarks=Remarks(differing=differing, differing_sample=tuple(sample or ())))
        if as_texts:
            counts = _copy_texts(connection, plan, chunk, staged, counts)
        merged = merge_chunk(connection, plan, chunk, ids, counts, staged=None if as_texts else staged)
    held_seconds = time.monotonic() - merged.locked_at
    sizer.merged(1 + last - chunk, held_seconds, beside_others=merged.beside_others)


def _copy_texts(connection: Connection, plan: MergePlan, chunk: int, staged: str, counts: ChunkCounts) -> ChunkCounts:
    """Copy a chunk's staged texts into ``fresh_event`` with their columns' types, leaving out rows that do not fit."""
    connection.exec_driver_sql(create_fresh(plan.columns))
    names = [MESSAGE_ID, *(one.staged_as for one in plan.columns if one.staged_as != MESSAGE_ID)]
    query = distinct_staged(names, staged, plan.keep)
    driver_connection: Any = connection.connection.driver_connection
    schema = pyarrow.schema([(name, pyarrow.string()) for name in names])
    with driver_connection.cursor(name="txbox_texts") as reader, driver_connection.cursor() as cursor:
        reader.execute(query)
        while rows := reader.fetchmany(BATCH_ROWS):
            batch = pyarrow.RecordBatch.from_arrays(
                [pyarrow.array(one, pyarrow.string()) for one in zip(*rows, strict=True)], schema=schema
            )
            rejected = copy_what_fits(cursor, plan.columns, [batch])
            counts = counts.without(len(rejected), plan.keep_rejected(cursor, chunk, rejected))
    return counts


@contextmanager
def _active(connection: Connection, active: set[Any]) -> Iterator[None]:
    driver_connection = connection.connection.driver_connection
    active.add(driver_connection)
    try:
        yield
    finally:
        active.discard(driver_connection)


_log = logging.getLogger("txbox.spark")
