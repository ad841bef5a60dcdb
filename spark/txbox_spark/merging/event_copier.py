"""Sends a chunk's events to ``fresh_event`` by COPY."""

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from sqlalchemy import Connection

from txbox_spark.merging.chunk_merger import ChunkCounts
from txbox_spark.merging.chunk_stream import DistinctEvents
from txbox_spark.merging.csv_lines import csv_lines
from txbox_spark.merging.fresh_event import copy_fresh
from txbox_spark.merging.refused_event import refused_event
from txbox_spark.reading.columns import MESSAGE_ID, EventColumn
from txbox_spark.runtime.lazy_imports import pyarrow

COPY_BYTES = 16 << 20
"""How much one COPY sends, about."""


def copy_events(
    connection: Connection, columns: Sequence[EventColumn], batches: "Iterator[pyarrow.RecordBatch]"
) -> ChunkCounts:
    """Stream a chunk's distinct events into ``fresh_event``; the batches are sorted by message id, rejected rows last.

    Raises:
        EventRefused: Postgres does not take a value.
        psycopg.Error: COPY fails for another reason.
    """
    sent = [MESSAGE_ID, *(one.staged_as for one in columns if one.staged_as != MESSAGE_ID)]
    distinct = DistinctEvents(batches)
    driver_connection: Any = connection.connection.driver_connection
    events, more = distinct.events(), True
    with driver_connection.cursor() as cursor:
        while more:
            # In COPYs of a bounded size, so that an event which Postgres refuses can still be named.
            written: list[pyarrow.RecordBatch] = []
            size = 0
            try:
                with cursor.copy(copy_fresh(columns)) as copy:
                    while size < COPY_BYTES and (more := (batch := next(events, None)) is not None):
                        written.append(batch.select(sent))
                        lines = csv_lines(written[-1])
                        size += len(lines)
                        copy.write(lines)
            except (psycopg.DataError, psycopg.IntegrityError) as error:
                raise refused_event(error, written, [one.name for one in columns]) from error
    return ChunkCounts(distinct.read, distinct.rejected, distinct.kept, tuple(distinct.rejected_sample))
