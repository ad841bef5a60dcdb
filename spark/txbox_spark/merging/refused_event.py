"""Which message Postgres has refused: of COPY it names a line, and quotes it; of the INSERTs of JDBC, nothing."""

import re
import time
from collections.abc import Sequence
from itertools import islice

import psycopg
from sqlalchemy import Engine

from txbox import TxboxError
from txbox.postgres.transactions import driver_cursor, short_transaction
from txbox_spark.merging.csv_lines import csv_lines
from txbox_spark.merging.fresh_event import copy_fresh, create_fresh
from txbox_spark.reading.columns import MESSAGE_ID, dates_as_text
from txbox_spark.reading.event_rows import PreparedEvents
from txbox_spark.runtime.explanations import describe_postgres_error
from txbox_spark.runtime.lazy_imports import pyarrow, sql

SEARCH_SECONDS = 60.0
"""How long events are searched for the message that Postgres has refused, before the error does without."""

SEARCH_ROWS = 10_000
"""How many of them one COPY tries."""


class EventRefused(TxboxError):
    """Postgres does not take a value of a message as what its column is to be."""


def refused_event(error: psycopg.Error, batches: "Sequence[pyarrow.RecordBatch]", names: Sequence[str]) -> EventRefused:
    """Name the message and the column that an error of COPY is about, without the value.

    ``batches`` are the rows that it was sent, ``names`` those of the columns.
    """
    where = ""
    # The words are in the server's language; the number comes first, and then the column, unless it is the whole line.
    if (found := _PLACE.search(error.diag.context or "")) is not None:
        message_id = _at_line(batches, int(found[1]))
        columns = [name for name in names if re.match(rf", \S+ {re.escape(name)}(?::|$)", found[2])]
        where = "" if message_id is None else f"message {message_id!r}"
        where += f", column {max(columns, key=len)}" if columns else ""
        where = f" of {where.removeprefix(', ')}" if where else ""
    return EventRefused(f"Postgres does not take a value{where}: {describe_postgres_error(error)}")


def search_refused_event(engine: Engine, events: PreparedEvents) -> None:
    """Search for the message that Postgres has refused over JDBC, whose errors name neither message nor column.

    The events are copied from here into a table that the transaction drops, without texts, which are never refused.
    The search ends after ``SEARCH_SECONDS``.

    Raises:
        EventRefused: it is found.
        sqlalchemy.exc.DBAPIError, psycopg.Error, pyspark.errors.PySparkException: the search fails.
    """
    columns = [one for one in events.columns if one.staged_as != MESSAGE_ID and one.postgres_type != "text"]
    sent = [MESSAGE_ID, *(one.staged_as for one in columns)]
    texts = [sql.col(name).cast("string").alias(name) for name in sent]
    rows = (
        dates_as_text(events.staged.where(sql.col(MESSAGE_ID).isNotNull()).select(*sent))
        .select(*texts)
        .toLocalIterator()
    )
    lines = pyarrow.schema([(name, pyarrow.string()) for name in sent])
    until = time.monotonic() + SEARCH_SECONDS
    with short_transaction(engine) as connection:
        connection.exec_driver_sql(create_fresh(columns))
        with driver_cursor(connection) as cursor:
            while time.monotonic() < until and (some := list(islice(rows, SEARCH_ROWS))):
                batch = pyarrow.RecordBatch.from_pylist([row.asDict() for row in some], schema=lines)
                try:
                    with cursor.copy(copy_fresh(columns)) as copy:
                        copy.write(csv_lines(batch))
                except (psycopg.DataError, psycopg.IntegrityError) as error:
                    raise refused_event(error, [batch], [one.name for one in columns]) from error


def _at_line(batches: "Sequence[pyarrow.RecordBatch]", line: int) -> str | None:
    """Return the id of the message that a line belongs to; a text may have line breaks.

    In the first line, Postgres counts CR within texts as line breaks, and later LF.
    """
    first = bytes(csv_lines(batches[0].slice(0, 1))) if batches else b""
    lines = 1 + first.count(b"\r") - first.count(b"\n")
    for batch in batches:
        in_batch = bytes(csv_lines(batch)).count(b"\n")
        if lines + in_batch < line:
            lines += in_batch
            continue
        for number in range(batch.num_rows):
            lines += bytes(csv_lines(batch.slice(number, 1))).count(b"\n")
            if lines >= line:
                return str(batch.column(MESSAGE_ID)[number].as_py())
    return None


_PLACE = re.compile(r"COPY fresh_event\D+(\d+)(.*)", re.DOTALL)
