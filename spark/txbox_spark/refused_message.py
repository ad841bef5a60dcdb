"""Which message COPY has refused: Postgres names a line of what it was sent, and quotes it."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psycopg

from txbox import TxboxError
from txbox_spark.columns import MESSAGE_ID
from txbox_spark.csv_lines import csv_lines
from txbox_spark.explanations import said_by_postgres

if TYPE_CHECKING:
    import pyarrow

__all__ = ["MessageRefused", "refused_message"]


class MessageRefused(TxboxError):
    """Postgres does not take a value of a message as what its column is to be."""


def refused_message(
    error: psycopg.Error, batches: "Sequence[pyarrow.RecordBatch]", names: Sequence[str]
) -> MessageRefused:
    """Name the message and the column that an error of COPY is about, and leave the value out.

    Args:
        error: of the COPY.
        batches: the rows that it was sent.
        names: the columns.
    """
    where = ""
    # The words are in the server's language; the number comes first, and then the column, unless it is the whole line.
    if (found := _PLACE.search(error.diag.context or "")) is not None:
        message_id = _at_line(batches, int(found[1]))
        columns = [name for name in names if re.match(rf", \S+ {re.escape(name)}(?::|$)", found[2])]
        where = "" if message_id is None else f"message {message_id!r}"
        where += f", column {max(columns, key=len)}" if columns else ""
        where = f" of {where.removeprefix(', ')}" if where else ""
    return MessageRefused(f"Postgres does not take a value{where}: {said_by_postgres(error)}")


def _at_line(batches: "Sequence[pyarrow.RecordBatch]", line: int) -> str | None:
    """Return the id of the message that a line belongs to; a text may have line breaks.

    Until Postgres has seen the end of a first line, it takes CR for the line breaks within texts, and then LF.
    """
    first = bytes(csv_lines(batches[0].slice(0, 1))) if batches else b""
    seen = 1 + first.count(b"\r") - first.count(b"\n")
    for batch in batches:
        in_batch = bytes(csv_lines(batch)).count(b"\n")
        if seen + in_batch < line:
            seen += in_batch
            continue
        for number in range(batch.num_rows):
            seen += bytes(csv_lines(batch.slice(number, 1))).count(b"\n")
            if seen >= line:
                return str(batch.column(MESSAGE_ID)[number].as_py())
    return None


_PLACE = re.compile(r"COPY fresh_event\D+(\d+)(.*)", re.DOTALL)
