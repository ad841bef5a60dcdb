"""Writer copy: Spark's tasks copy their chunks into Postgres and merge them, each chunk in one transaction.

The events are partitioned by chunk and sorted by id, so that a task gets whole chunks, in which duplicates of an id are
adjacent. It drops the duplicates, and streams the rest to Postgres, one Arrow batch at a time.

Chunks that seem to be repeats, such as those of a file that is loaded again, are first tried with their ids alone. If
the inbox has every id, the events themselves are never read. If it lacks only a few, their events are picked out of the
source, and the others are neither sorted nor sent::

    likely_repeated ──▶ ids alone ─┬─ none is new ──▶ settled
                                   ├─ few are new ──▶ their events ──▶ merged, with the counts of the whole chunk
                                   └─ many are new ─▶ the whole chunk, as any other

A chunk's records, effects and ledger entry are one transaction. So a task that runs again, or twice at once by
speculation, does no harm: it finds the chunk merged, or waits for the other attempt and then finds it merged.

A task returns a failure as a row. If it raised, Spark would run the task again, and report a Java error.
"""

import logging
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from txbox import TxboxError
from txbox.postgres.transactions import short_transaction
from txbox.status.bulk_loads import run_lock
from txbox.tracing import Tracing
from txbox_spark.loading.context import LoadContext
from txbox_spark.loading.ledger import LoadLedger, Run, Totals
from txbox_spark.loading.writer import RowCounts
from txbox_spark.merging.chunk_merger import ChunkHeld, begin_chunk, claim_chunk, merge_chunk, settle_processed_chunk
from txbox_spark.merging.chunk_ranges import chunk_groups, chunk_range, partition_by_chunk
from txbox_spark.merging.chunk_sessions import open_sessions
from txbox_spark.merging.chunk_stream import ChunkStream
from txbox_spark.merging.event_copier import copy_events
from txbox_spark.merging.fresh_event import FRESH_EVENT, create_fresh
from txbox_spark.merging.merge_plan import ChunkCounts, FailedChunk, MergePlan, MergeSizer, MergeStatements, TriedIds
from txbox_spark.reading.columns import MESSAGE_ID
from txbox_spark.reading.row_order import ANY, ROW_ORDER, is_latest
from txbox_spark.rejects.remarks import Remarks
from txbox_spark.runtime.jobs import is_local
from txbox_spark.runtime.lazy_imports import DataFrame, pyarrow, sql
from txbox_spark.runtime.python_workers import freeze_modules
from txbox_spark.runtime.retries import retry_outages

FEW_NEW_SHARE = 0.02
"""At most this share of a chunk's sampled ids may be new for the chunk to be tried with its ids alone."""

FEW_NEW_IDS = 100_000
"""How many new ids, of all chunks tried, the driver holds; each chunk may have its share of them."""

TASKS_PER_SLOT = 2
"""Tasks for each task that Spark runs at once: few, because each costs a tenth of a second, but more than one, so that
the slots share the work evenly."""


class CopyWriter:
    max_chunks: ClassVar[int] = 4_096  # the bounds of the chunks are part of Spark's plan
    survey_counts_rejected: ClassVar[bool] = False

    def __init__(self, context: LoadContext) -> None:
        self._context = context

    def write(self, run: Run) -> list[FailedChunk]:
        context = self._context
        tasks = _tasks(context)
        task = CopyTask(context.options.database.render_as_string(hide_password=False), context.plan(run), run.bounds)
        if context.are_few(run.rows):
            return self._write_few(run, task)
        sample, context.sample = context.sample, ()  # only for the first attempt
        repeated: tuple[int, ...] = ()
        if sample and context.options.rejected_to is None:  # with ids alone, no rejected rows would be kept
            repeated = likely_repeated(context.engine, task.plan.sql, context.options.subscriber_id, sample, run.bounds)
        # Ids alone lock nothing that others wait for, so a group is as large as a transaction may be; but each task
        # gets some of them.
        most = min(task.plan.most_chunks, math.ceil(len(repeated) / context.parallelism))
        groups = chunk_groups(run.chunks, set(repeated), most)
        with context.stage("merge", run), context.reporter.merge_stage(context.ledger, run):
            if repeated:
                left_out = set(range(run.chunks)).difference(repeated)
                ids = partition_by_chunk(context.events.checked_ids, run.bounds, left_out, tasks, groups)
                few_each = FEW_NEW_IDS // len({groups[chunk] for chunk in repeated})
                ids_alone = replace(task, groups=groups, ids_alone=True, few=few_each)
                tried, failed = _run_tasks(context.tracing, ids, ids_alone)
                if not failed and tried:
                    few = partition_by_chunk(self._only(tried), run.bounds, (), tasks, groups, task.plan.keep)
                    _, failed = _run_tasks(context.tracing, few, replace(task, groups=groups, tried=tried))
                if failed:
                    return failed
            merged = context.merged_chunks(run)
            if len(merged) == run.chunks:
                return []
            rest = partition_by_chunk(context.events.staged, run.bounds, merged, tasks, keep=task.plan.keep)
            return _run_tasks(context.tracing, rest, task)[1]

    def _write_few(self, run: Run, task: "CopyTask") -> list[FailedChunk]:
        """Do a task's work in this process: starting Python on executors takes longer than merging few events."""
        context = self._context
        with context.stage("merge", run), context.reporter.merge_stage(context.ledger, run):
            keep = task.plan.keep
            order = [] if keep == ANY else [(ROW_ORDER, "descending" if is_latest(keep) else "ascending")]
            # Nulls come last, because rejected rows have no id.
            events = context.events.staged.toArrow().sort_by([(MESSAGE_ID, "ascending"), *order])
            return _outcomes(context.tracing, task.tried_chunks(iter(events.to_batches())))[1]

    def _only(self, tried: Mapping[int, TriedIds]) -> DataFrame:
        """Return the events whose ids the inbox lacks, of chunks that were tried with their ids alone."""
        new = pyarrow.table({MESSAGE_ID: [one for chunk in tried.values() for one in chunk.unprocessed]})
        frame = self._context.spark.createDataFrame(new)
        return self._context.events.staged.join(sql.broadcast(frame), MESSAGE_ID, "left_semi")

    def row_counts(self, run: Run, totals: Totals) -> RowCounts:
        """Return the row counts of a run whose chunks are all merged; each chunk has counted its rows."""
        return RowCounts(run.rows, totals.read, totals.rejected)

    def remarks(self, run: Run) -> Remarks:
        """Return the remarks of such a run; each chunk has recorded its own."""
        return self._context.ledger.remarks(run.run_id)

    def clean_up(self, run: Run) -> None:
        """Do nothing: this writer creates no tables."""


def _tasks(context: LoadContext) -> int:
    """Return how many tasks merge: at most ``parallelism`` if it was given, because each has a connection."""
    spark = context.spark.sparkContext
    slots = spark.defaultParallelism
    if context.parallelism < slots:
        return context.parallelism
    # On a cluster, executors may join while tasks wait, so the number of tasks that Spark runs now is no limit.
    asked = None if is_local(spark) else context.options.parallelism
    return slots * TASKS_PER_SLOT if asked is None else min(asked, slots * TASKS_PER_SLOT)


@retry_outages
def likely_repeated(
    engine: Engine, statements: MergeStatements, subscriber_id: str, sample: Sequence[str], bounds: Sequence[str]
) -> tuple[int, ...]:
    """Return the chunks that are tried with their ids alone: the inbox has nearly all of their sampled ids."""
    with short_transaction(engine) as connection:
        ids = {"subscriber_id": subscriber_id, "message_ids": list(sample)}
        processed = set(connection.exec_driver_sql(statements.find_processed, ids).scalars())
    sampled = Counter(bisect_right(bounds, one) for one in sample)
    new = Counter(bisect_right(bounds, one) for one in sample if one not in processed)
    return tuple(sorted(chunk for chunk, ids in sampled.items() if new[chunk] <= FEW_NEW_SHARE * ids))


def _run_tasks(tracing: Tracing, frame: DataFrame, task: "CopyTask") -> tuple[dict[int, TriedIds], list[FailedChunk]]:
    """Run the tasks; return the chunks with few new ids, and those that failed."""
    return _outcomes(tracing, [TriedChunk(*row) for row in frame.mapInArrow(task, TriedChunk.SQL_TYPES).collect()])


def _outcomes(tracing: Tracing, tried: "Iterable[TriedChunk]") -> tuple[dict[int, TriedIds], list[FailedChunk]]:
    """Return the chunks with few new ids, and those that failed.

    It also makes the spans of the chunks, because executors have no tracing.
    """
    tried = list(tried)
    for one in tried:
        span = tracing.internal("txbox.bulk_load chunk", {"txbox.chunk": one.chunk}, began_ns=one.began_ns)
        span.end(None if one.error is None else "failed", ended_ns=one.ended_ns)
    few = {one.chunk: TriedIds.from_json(one.few) for one in tried if one.few is not None}
    return few, [FailedChunk(one.chunk, one.error, one.transient) for one in tried if one.error is not None]


@dataclass(frozen=True, slots=True)
class TriedChunk:
    """What an executor returns about a chunk that it tried to merge."""

    chunk: int
    began_ns: int  # by the executor's clock, in nanoseconds since 1970
    ended_ns: int
    error: str | None  # why it is not merged
    transient: bool  # another attempt may succeed
    few: str | None  # ``TriedIds`` as JSON, if few of its ids are new

    SQL_TYPES: ClassVar = "chunk int, began_ns bigint, ended_ns bigint, error string, transient boolean, few string"

    @classmethod
    def arrow_schema(cls) -> "pyarrow.Schema":
        """Return ``SQL_TYPES`` as an Arrow schema."""
        return pyarrow.schema(
            {
                "chunk": pyarrow.int32(),
                "began_ns": pyarrow.int64(),
                "ended_ns": pyarrow.int64(),
                "error": pyarrow.string(),
                "transient": pyarrow.bool_(),
                "few": pyarrow.string(),
            }
        )


@dataclass(frozen=True)
class CopyTask:
    """What a task does. It is sent to the executors, so it holds only values."""

    url: str = field(repr=False)  # the database's, as SQLAlchemy writes it
    plan: MergePlan
    bounds: tuple[str, ...]  # between the chunks
    groups: tuple[int, ...] | None = None
    """For each chunk, the first chunk of its group; the frame treats a group as one chunk. None means that a
    transaction takes as many consecutive chunks as its time allows."""
    ids_alone: bool = False
    """The frame has only ids: settle the chunks whose ids are all processed, and skip the others."""
    few: int = 0  # a skipped chunk reports its new ids if there are at most this many
    tried: Mapping[int, TriedIds] | None = None
    """The frame has only the new events of these chunks."""

    def __call__(self, batches: "Iterator[pyarrow.RecordBatch]") -> "Iterator[pyarrow.RecordBatch]":
        """Merge the chunks of one partition, as ``DataFrame.mapInArrow`` calls it."""
        freeze_modules()
        schema = TriedChunk.arrow_schema()
        for tried in self.tried_chunks(batches):
            yield pyarrow.RecordBatch.from_pylist([asdict(tried)], schema=schema)

    def tried_chunks(self, batches: "Iterator[pyarrow.RecordBatch]") -> Iterator[TriedChunk]:
        """Merge the chunks of these batches, which are sorted by message id, and yield the result for each."""
        numbers = None if self.groups is None else sorted(set(self.groups))
        bounds = self.bounds if numbers is None else [self.bounds[first - 1] for first in numbers[1:]]
        stream = ChunkStream(batches, bounds, numbers)
        sizer = MergeSizer(self.plan.lock_seconds, self.plan.most_chunks)
        engine = open_sessions(self.url, self.plan.apply)
        try:
            while (chunk := stream.next_chunk()) is not None:
                began_ns = time.time_ns()
                ended = self.merge(engine, chunk, stream, sizer)
                failed = ended if isinstance(ended, FailedChunk) else None
                error, transient = (None, False) if failed is None else (failed.error, failed.transient)
                few = ended.as_json() if isinstance(ended, TriedIds) else None
                yield TriedChunk(chunk, began_ns, time.time_ns(), error, transient, few)
        finally:
            engine.dispose()

    def merge(
        self, engine: Engine, chunk: int, stream: ChunkStream, sizer: MergeSizer
    ) -> FailedChunk | TriedIds | None:
        """Copy and merge a chunk, and as many of the next ones as the sizer says, in one transaction.

        Returns:
            Why they are not merged; or, with ``ids_alone``, what their ids showed if few of them are new.
        """
        ledger = LoadLedger(engine, self.plan.schema, self.plan.prefix)
        try:
            with short_transaction(engine) as connection:
                if (error := ledger.failure(connection, self.plan.run_id)) is not None:
                    return FailedChunk(chunk, error, transient=False)  # another task failed as this one would
                if not begin_chunk(connection, self.plan, chunk):
                    return None
                columns = () if self.ids_alone else self.plan.columns
                connection.exec_driver_sql(create_fresh(columns))
                counts, last = self._copy(connection, chunk, stream.rows()), chunk
                if self.groups is not None:
                    last += self.groups.count(chunk) - 1
                    if not all(claim_chunk(connection, self.plan, other) for other in range(chunk + 1, last + 1)):
                        connection.rollback()  # another attempt has merged some of the group
                        return None
                while self._takes_another(connection, chunk, last, stream, sizer):
                    last += 1
                    stream.next_chunk()
                    counts += self._copy(connection, last, stream.rows())
                connection.exec_driver_sql(f"ANALYZE {FRESH_EVENT} ({MESSAGE_ID})")
                ids = chunk_range(self.bounds, chunk, last)
                if self.ids_alone:
                    told = settle_processed_chunk(connection, self.plan, chunk, ids, counts, self.few + 1)
                    if told.unprocessed:
                        connection.rollback()
                        return told if len(told.unprocessed) <= self.few else None
                    return None
                tried = None if self.tried is None else self.tried[chunk]
                merged = merge_chunk(connection, self.plan, chunk, ids, counts, tried=tried)
            held_seconds = time.monotonic() - merged.locked_at
            sizer.merged(1 + last - chunk, held_seconds, beside_others=merged.beside_others)
        except (SQLAlchemyError, psycopg.Error, TxboxError) as raised:
            failed = FailedChunk.of(chunk, raised)
            if isinstance(raised, ChunkHeld):
                with suppress(SQLAlchemyError):  # the next attempt does not wait for them, and deals with an outage
                    end_frozen_copies(engine, self.plan)
            if not failed.transient:
                ledger.record_failure(self.plan.run_id, failed.error)
            return failed
        return None

    def _takes_another(
        self, connection: Connection, first: int, last: int, stream: ChunkStream, sizer: MergeSizer
    ) -> bool:
        """Claim the chunk after ``last``, too, if it fits; return whether it was claimed."""
        fits = self.groups is None and last - first + 1 < sizer.chunks and stream.chunk_ahead() == last + 1
        return fits and claim_chunk(connection, self.plan, last + 1)

    def _copy(self, connection: Connection, chunk: int, batches: "Iterator[pyarrow.RecordBatch]") -> ChunkCounts:
        return copy_events(connection, self.plan, chunk, () if self.ids_alone else self.plan.columns, batches)


FROZEN_SECONDS = 30.0
"""How long a COPY must receive nothing to count as frozen; ``stalled_seconds`` if that is shorter."""


def end_frozen_copies(engine: Engine, plan: MergePlan) -> int:
    """End the sessions of a run that are frozen within a COPY, and return how many.

    No timeout of Postgres stops a server process that reads a COPY: neither the one for idle transactions nor the one
    for statements. And a frozen client has not closed its socket. So a task that freezes within its COPY keeps its
    chunk, and whoever runs the chunk again waits for it::

        task, frozen       claims chunk 17 ── COPY ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ended
        task, run again        claims chunk 17: waits ── stalled_seconds ── ChunkHeld ── looks ─┴── another attempt

    A COPY is frozen if it began before the wait, waits for its client, and receives nothing for another
    ``FROZEN_SECONDS``. Ending one that is merely slow only costs time: nothing of it is committed.
    """
    before = _copies(engine, plan)
    if not before:
        return 0
    time.sleep(min(FROZEN_SECONDS, plan.stalled_seconds))
    # The process id may belong to another session by then; it is then in a COPY of the same run, and has received less.
    frozen = sorted(pid for pid, received in _copies(engine, plan).items() if before.get(pid) == received)
    with short_transaction(engine) as connection:
        for pid in frozen:
            connection.exec_driver_sql(plan.sql.end_session, {"pid": pid})
    if frozen:
        _log.warning("bulk load %s: ended COPYs whose client is frozen, by server processes %s", plan.run_id, frozen)
    return len(frozen)


def _copies(engine: Engine, plan: MergePlan) -> dict[int, int]:
    """Return the run's server processes that wait for more of a COPY, and how many bytes each has received."""
    values = {"run_lock": run_lock(plan.run_id), "stalled": plan.stalled}
    with short_transaction(engine) as connection:
        return {row.pid: row.received for row in connection.exec_driver_sql(plan.sql.waiting_copies, values)}


_log = logging.getLogger("txbox.spark")
