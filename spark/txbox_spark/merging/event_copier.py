"""Sends a chunk's events to ``fresh_event`` by COPY.

It finds the rows with values that Postgres refuses for their column's type, and copies the others. COPY takes all of
its rows or none, and names the line of the first row that it refuses. So the rows are sent again in small COPYs, each
behind a savepoint: those before that line, that row alone, and then those after it. A row counts as refused only if a
COPY of that row alone fails.
"""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from sqlalchemy import Connection

from txbox_spark.merging.chunk_stream import DistinctEvents
from txbox_spark.merging.fresh_event import copy_fresh, csv_lines
from txbox_spark.merging.merge_plan import ChunkCounts, MergePlan
from txbox_spark.reading.columns import MESSAGE_ID, EventColumn
from txbox_spark.rejects.remarks import NO_REMARKS, VALUE_CHARACTERS, RejectedRow
from txbox_spark.runtime.explanations import describe_postgres_error
from txbox_spark.runtime.lazy_imports import compute, pyarrow

COPY_BYTES = 16 << 20
"""About how many bytes one COPY sends."""


def copy_events(
    connection: Connection,
    plan: MergePlan,
    chunk: int,
    columns: Sequence[EventColumn],
    batches: "Iterator[pyarrow.RecordBatch]",
) -> ChunkCounts:
    """Stream a chunk's distinct events into ``fresh_event``, without rows that Postgres refuses.

    Args:
        connection: in the chunk's transaction.
        plan: the run's plan.
        chunk: the chunk's number, which rejected rows are kept with.
        columns: of ``fresh_event``; empty if only ids are sent.
        batches: sorted by message id, rejected rows last.

    Raises:
        psycopg.Error: COPY fails for a reason other than a value.
    """
    sent = [MESSAGE_ID, *(one.staged_as for one in columns if one.staged_as != MESSAGE_ID)]
    distinct = DistinctEvents(batches, sent[1:])
    driver_connection: Any = connection.connection.driver_connection
    events, more = distinct.events(), True
    refused, remarks = 0, NO_REMARKS
    with driver_connection.cursor() as cursor:
        while more:
            # Each COPY has a bounded size, because all rows of a refused one are sent again.
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


WINDOW_ROWS = 1_000
"""Rows in each COPY that looks for refused rows; at most so many are sent again for each refused row."""

SAVEPOINT = "SAVEPOINT txbox_copy"
RELEASE = "RELEASE SAVEPOINT txbox_copy"
ROLL_BACK = "ROLLBACK TO SAVEPOINT txbox_copy; RELEASE SAVEPOINT txbox_copy"


def copy_what_fits(
    cursor: Any, columns: Sequence[EventColumn], batches: "Sequence[pyarrow.RecordBatch]"
) -> list[RejectedRow]:
    """Copy the rows that Postgres accepts into ``fresh_event``, in their order, and return the others.

    Args:
        cursor: a psycopg cursor in the chunk's transaction.
        columns: of ``fresh_event``.
        batches: the rows, with the columns as they are sent.

    Raises:
        psycopg.Error: COPY fails for a reason other than a value.
    """
    refused = []
    for batch in batches:
        for first in range(0, batch.num_rows, WINDOW_ROWS):
            left = [batch.slice(first, WINDOW_ROWS)]
            while left:
                rows = left.pop()
                if (error := _copied(cursor, columns, rows)) is None:
                    continue
                if rows.num_rows == 1:
                    refused.append(_refused_row(error, columns, rows))
                    continue
                at = _row_of(error, rows)
                # If the error names no line, split the rows in half.
                parts = [(0, rows.num_rows // 2), (rows.num_rows // 2, None)] if at is None else _around(at)
                sliced = [rows.slice(begin) if length is None else rows.slice(begin, length) for begin, length in parts]
                left += [part for part in reversed(sliced) if part.num_rows]
    return refused


def _around(at: int) -> list[tuple[int, int | None]]:
    """Return the start and length of three parts: the rows before ``at``, that row, and the rest."""
    return [(0, at), (at, 1), (at + 1, None)]


def _copied(cursor: Any, columns: Sequence[EventColumn], rows: "pyarrow.RecordBatch") -> psycopg.Error | None:
    """Copy all of the rows or none; return the error if Postgres refuses them."""
    cursor.execute(SAVEPOINT)
    try:
        with cursor.copy(copy_fresh(columns)) as copy:
            copy.write(csv_lines(rows))
    except (psycopg.DataError, psycopg.IntegrityError) as error:
        cursor.execute(ROLL_BACK)
        return error
    cursor.execute(RELEASE)
    return None


def _refused_row(error: psycopg.Error, columns: Sequence[EventColumn], row: "pyarrow.RecordBatch") -> RejectedRow:
    values = {name: None if (one := row.column(name)[0].as_py()) is None else str(one) for name in row.schema.names}
    staged = {one.name: one.staged_as for one in columns}
    found = _PLACE.search(error.diag.context or "")
    named = [] if found is None else [name for name in staged if re.match(rf", \S+ {re.escape(name)}(?::|$)", found[2])]
    column = max(named, key=len, default=None)
    value = None if column is None else values.get(staged[column])
    where = "" if column is None else f"column {column}: "
    return RejectedRow(
        cause=where + describe_postgres_error(error),
        column=column,
        value=None if value is None else value[:VALUE_CHARACTERS],
        message_id=values[MESSAGE_ID],
        event=json.dumps({one.name: values[one.staged_as] for one in columns}, ensure_ascii=False),
    )


def _row_of(error: psycopg.Error, rows: "pyarrow.RecordBatch") -> int | None:
    """Return the row that a COPY error is about; None if it names no line. A text may contain line breaks.

    The error's words are in the server's language, but the line number comes first. Within texts, Postgres counts CR as
    line breaks in the first line, and LF in later ones.
    """
    if (found := _PLACE.search(error.diag.context or "")) is None:
        return None
    ends = compute.cumulative_sum(compute.add(_breaks(rows, "\n"), 1))
    wanted = int(found[1]) - _breaks(rows, "\r")[0].as_py() + _breaks(rows, "\n")[0].as_py()
    row: int = compute.index(compute.greater_equal(ends, wanted), True).as_py()
    return None if row < 0 else row


def _breaks(rows: "pyarrow.RecordBatch", character: str) -> "pyarrow.IntegerArray":
    """Count a line-break character in the texts of each row."""
    texts = [
        one.cast(pyarrow.string())
        for one in rows.columns
        if pyarrow.types.is_string(one.type) or pyarrow.types.is_large_string(one.type)
    ]
    return functools.reduce(compute.add, [compute.count_substring(one, character).fill_null(0) for one in texts])


_PLACE = re.compile(r"COPY fresh_event\D+(\d+)(.*)", re.DOTALL)
