"""The road of writer copy: each task copies its chunks into Postgres and merges them, a transaction each.

The events are repartitioned by chunk and sorted by id, so that a task meets whole chunks, and in each one the
duplicates of an id side by side. It drops those, and streams the rest to Postgres, a batch of Arrow's at a time.
Nothing is collected, neither here nor on the driver.

Chunks whose ids seem to be known already, as when a file is loaded again, are tried with their ids alone first: where
each one turns out to be in the inbox, the events themselves are never read.

Since a chunk's records, effects and ledger entry are one transaction, a task that is run again, or twice at once by
speculation, is only a redelivery: it finds the chunk done, or waits for the other attempt and then finds it done.

What goes wrong comes back as a row, not as an exception: Spark would run the task again, and tell of it in Java.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from txbox import TxboxError
from txbox.postgres.engines import open_engine
from txbox.postgres.transaction_guard import guard
from txbox.postgres.transactions import short_transaction
from txbox_spark.loading.chunks import ChunkStream, Distinct
from txbox_spark.loading.csv_lines import csv_lines
from txbox_spark.loading.failed_chunk import FailedChunk
from txbox_spark.loading.ledger import Ledger, span
from txbox_spark.loading.merge import ChunkCounts, MergePlan, begin_chunk, merge_chunk, settle_known_chunk
from txbox_spark.loading.refused_message import refused_message
from txbox_spark.loading.statements import FRESH
from txbox_spark.reading.columns import MESSAGE_ID
from txbox_spark.reading.events import CHUNK, chunk_number, partition_keys

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

__all__ = ["COPY_BYTES", "CopyTask", "copy_chunks", "lay_out"]

COPY_BYTES = 16 << 20
"""How much one COPY sends, about."""


def lay_out(
    events: "DataFrame", bounds: tuple[str, ...], left_out: Collection[int], at_once: int | None
) -> "DataFrame":
    """Lay the events out for tasks: whole chunks, each sorted by id.

    Args:
        events: the source, as ``Events`` has it: staged, or judged.
        bounds: between the chunks.
        left_out: chunks to leave out.
        at_once: how many tasks there may be; None: as many as there are chunks.
    """
    from pyspark.sql import functions as sql

    chunks = len(bounds) + 1
    numbered = events.withColumn(CHUNK, chunk_number(bounds))
    if left_out:
        numbered = numbered.where(~sql.col(CHUNK).isin(list(left_out)))
    placed = numbered.repartition(chunks, chunk_number(bounds, partition_keys(chunks)))
    whole = placed.sortWithinPartitions(MESSAGE_ID)
    return whole if at_once is None else whole.coalesce(at_once)


def copy_chunks(frame: "DataFrame", task: "CopyTask") -> list[FailedChunk]:
    """Run the tasks, and return the chunks that could not be merged."""
    failed = frame.mapInArrow(task, "chunk int, error string, passing boolean").collect()
    return [FailedChunk(row["chunk"], row["error"], row["passing"]) for row in failed]


@dataclass(frozen=True)
class CopyTask:
    """What a task does. It travels to the executors, so it holds nothing but values.

    Attributes:
        url: of the database, as SQLAlchemy has it.
        plan: of the run.
        bounds: between the chunks.
        ids_alone: the frame has no more than ids; settle the chunks in which every one is known, and leave the others.
    """

    url: str = field(repr=False)
    plan: MergePlan
    bounds: tuple[str, ...]
    ids_alone: bool = False

    def __call__(self, batches: "Iterator[pyarrow.RecordBatch]") -> "Iterator[pyarrow.RecordBatch]":
        """Merge the chunks of one partition: for ``DataFrame.mapInArrow``."""
        import pyarrow

        stream = ChunkStream(batches)
        while (chunk := stream.next_chunk()) is not None:
            failed = self.merge(chunk, stream.rows())
            if failed is not None:
                columns = {"chunk": [failed.chunk], "error": [failed.error], "passing": [failed.passing]}
                yield pyarrow.RecordBatch.from_pydict(columns, schema=_failed_chunk_schema())

    def merge(self, chunk: int, batches: "Iterator[pyarrow.RecordBatch]") -> FailedChunk | None:
        """Copy and merge one chunk, in a transaction of its own.

        Args:
            chunk: its number.
            batches: its rows, sorted by id.
        """
        engine = guard(open_engine(self.url, poolclass=NullPool))
        ledger = Ledger(engine, self.plan.sql)
        try:
            if (error := ledger.given_up(self.plan.run_id)) is not None:
                return FailedChunk(chunk, error, passing=False)  # another task has met what this one would meet
            with short_transaction(engine) as connection:
                if not begin_chunk(connection, self.plan, chunk):
                    return None
                here = (connection, self.plan, chunk, span(self.bounds, chunk), self._copy(connection, batches))
                if not self.ids_alone:
                    merge_chunk(*here)
                elif not settle_known_chunk(*here):
                    connection.rollback()
        except (SQLAlchemyError, psycopg.Error, TxboxError) as raised:
            failed = FailedChunk.of(chunk, raised)
            if not failed.passing:
                ledger.give_up(self.plan.run_id, failed.error)
            return failed
        return None

    def _copy(self, connection: Connection, batches: "Iterator[pyarrow.RecordBatch]") -> ChunkCounts:
        """Stream a chunk's distinct events into ``fresh_event``."""
        sql, columns = self.plan.sql, () if self.ids_alone else self.plan.columns
        connection.exec_driver_sql(sql.create_fresh(columns))
        sent = [MESSAGE_ID, *(one.staged_as for one in columns if one.staged_as != MESSAGE_ID)]
        distinct = Distinct(batches)
        driver_connection: Any = connection.connection.driver_connection
        events, more = distinct.events(), True
        with driver_connection.cursor() as cursor:
            while more:
                # In statements of a bounded size, so that a message which Postgres refuses can still be named.
                written: list[pyarrow.RecordBatch] = []
                size = 0
                try:
                    with cursor.copy(sql.copy_fresh(columns)) as copy:
                        while size < COPY_BYTES and (more := (batch := next(events, None)) is not None):
                            written.append(batch.select(sent))
                            lines = csv_lines(written[-1])
                            size += len(lines)
                            copy.write(lines)
                except (psycopg.DataError, psycopg.IntegrityError) as error:
                    raise refused_message(error, written, [one.name for one in columns]) from error
        connection.exec_driver_sql(sql.analyze(FRESH))
        return ChunkCounts(distinct.read, distinct.rejected, distinct.kept, tuple(distinct.rejected_sample))


def _failed_chunk_schema() -> "pyarrow.Schema":
    import pyarrow

    return pyarrow.schema({"chunk": pyarrow.int32(), "error": pyarrow.string(), "passing": pyarrow.bool_()})
