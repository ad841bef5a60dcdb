"""Sends a chunk's events to ``fresh_event`` by COPY."""

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from sqlalchemy import Connection

from txbox_spark.merging.chunk_stream import DistinctEvents
from txbox_spark.merging.csv_lines import csv_lines
from txbox_spark.merging.fresh_event import copy_fresh
from txbox_spark.merging.merge_plan import ChunkCounts, MergePlan
from txbox_spark.merging.refusals.values import RELEASE, ROLL_BACK, SAVEPOINT, copy_what_fits
from txbox_spark.reading.columns import MESSAGE_ID, EventColumn
from txbox_spark.rejects.remarks import NO_REMARKS, RejectedRow
from txbox_spark.runtime.lazy_imports import pyarrow

COPY_BYTES = 16 << 20
"""How much one COPY sends, about."""


def copy_events(
    connection: Connection,
    plan: MergePlan,
    chunk: int,
    columns: Sequence[EventColumn],
    batches: "Iterator[pyarrow.RecordBatch]",
) -> ChunkCounts:
    """Stream a chunk's distinct events into ``fresh_event``, without rows that Postgres does not take.

    Args:
        connection: in the chunk's transaction.
        plan, chunk: the run's, and the chunk's number: rejected rows are kept with it.
        columns: of ``fresh_event``; none, if ids alone are sent.
        batches: sorted by message id, rejected rows last.

    Raises:
        psycopg.Error: COPY fails for another reason than a value.
    """
    sent = [MESSAGE_ID, *(one.staged_as for one in columns if one.staged_as != MESSAGE_ID)]
    distinct = DistinctEvents(batches, sent[1:])
    driver_connection: Any = connection.connection.driver_connection
    events, more = distinct.events(), True
    refused, remarks = 0, NO_REMARKS
    with driver_connection.cursor() as cursor:
        while more:
            # In COPYs of a bounded size, for the rows of one that is refused are sent again.
            written: list[pyarrow.RecordBatch] = []
            size = 0
            rejected: list[RejectedRow] = []
            cursor.execute(SAVEPOINT)
            try:
                with cursor.copy(copy_fresh(columns)) as copy:
                    while (
                        size < COPY_BYTES
                        and not distinct.has_many_rejected
                        and (more := (batch := next(events, None)) is not None)
                    ):
                        if batch.num_rows:
                            written.append(batch.select(sent))
                            lines = csv_lines(written[-1])
                            size += len(lines)
                            copy.write(lines)
            except (psycopg.DataError, psycopg.IntegrityError):
                cursor.execute(ROLL_BACK)
                rejected = copy_what_fits(cursor, columns, written)
                refused += len(rejected)
            else:
                cursor.execute(RELEASE)
            remarks += plan.keep_rejected(cursor, chunk, distinct.take_rejected() + rejected)
    remarks += distinct.differing
    return ChunkCounts(distinct.read, distinct.rejected + refused, distinct.kept - refused, refused, remarks)
