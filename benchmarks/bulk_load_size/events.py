"""Files of many events, made one after the other: this process never holds more than two of them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import psycopg
import pyarrow
from pyarrow import csv, parquet

from benchmarks.shared.database import SCHEMA, SUBSCRIBER, Database, conninfo
from benchmarks.shared.measurements import WrongResult

ACCOUNTS = 100_000
DUPLICATE_SHARE, PROCESSED_SHARE = 0.10, 0.20
"""Of a file's rows, those whose id a row of the file before has; of its other ids, those in the inbox before."""

ROW_GROUP_BYTES = 64 << 20
"""Of a Parquet file, about: Spark has a row group's column in memory, and writes groups of 128 MB."""

_HEX = numpy.frombuffer(b"0123456789abcdef", dtype=numpy.uint8)
_DASHES = (8, 13, 18, 23)
_LEAST_BYTES = 60
"""Of a row without a payload: its id, and three numbers of 8 bytes."""


class _File(NamedTuple):
    """What a file adds to those before it."""

    path: Path
    processed: Path  # its ids that are in the inbox before, as CSV
    distinct: int  # ids that no file before it has
    cents: int  # what the events come to that are not in the inbox before


class SizedEvents(NamedTuple):
    """Files of events, of which a load takes the first so many.

    Attributes:
        rows_of_a_file: each has as many.
        files: all of them.
    """

    rows_of_a_file: int
    files: Sequence[_File]

    @classmethod
    def make(cls, folder: Path, sizes: Sequence[int], row_bytes: int) -> "SizedEvents":
        """Make files from which loads of these sizes are taken: random ids (UUIDs of version 4) in no order.

        Rows that are to have more than their id and their numbers have a text beside those.
        """
        rows = math.gcd(*sizes)
        files, before = [], None
        for number in range(max(sizes) // rows):
            random = numpy.random.default_rng([1, number])
            new = _events(random, max(1, round(rows * (1 - DUPLICATE_SHARE))), row_bytes)
            known = round(new.num_rows * PROCESSED_SHARE)
            repeated = (before or new).take(random.integers(0, (before or new).num_rows, rows - new.num_rows))
            file = _File(
                folder / f"events-{number:03}.parquet",
                folder / f"processed-{number:03}.csv",
                new.num_rows,
                pyarrow.compute.sum(new["cents"].slice(known)).as_py(),
            )
            table = pyarrow.concat_tables([new, repeated]).take(random.permutation(rows))
            parquet.write_table(table, file.path, row_group_size=max(1, ROW_GROUP_BYTES // row_bytes))
            options = csv.WriteOptions(include_header=False)
            csv.write_csv(new.select(["event_id"]).slice(0, known), file.processed, options)
            files.append(file)
            before = new
        return cls(rows, files)

    def of(self, rows: int) -> Sequence[_File]:
        """Return the files of so many rows."""
        return self.files[: rows // self.rows_of_a_file]

    def reset(self, database: Database, rows: int) -> None:
        """Bring the database to how it is before a load of so many rows: a fifth of its ids are in the inbox."""
        database.reset(others=("bulk_load", "bulk_load_chunk"), accounts=ACCOUNTS)
        with psycopg.connect(conninfo(database.url)) as connection, connection.cursor() as cursor:
            cursor.execute('CREATE TEMPORARY TABLE processed (id text COLLATE "C") ON COMMIT DROP')
            for file in self.of(rows):
                with cursor.copy("COPY processed FROM STDIN (FORMAT csv)") as copy:
                    copy.write(file.processed.read_bytes())
            insert = f"INSERT INTO {SCHEMA}.processed_message (subscriber_id, message_id) SELECT %s, id FROM processed"
            cursor.execute(f"{insert} ORDER BY id".encode(), (SUBSCRIBER,))
        database.execute(f"VACUUM ANALYZE {SCHEMA}.processed_message")
        database.checkpoint()

    def check(self, database: Database, rows: int, what: str) -> None:
        """See that every event that was not processed before has been applied once, by its own cents.

        Raises:
            WrongResult: it has not.
        """
        files = self.of(rows)
        expected = sum(file.cents for file in files), sum(file.distinct for file in files)
        found = database.number(f"SELECT sum(balance) FROM {SCHEMA}.account"), database.recorded()
        if found != expected:
            raise WrongResult(f"{what}: the balances and the ids in the inbox come to {found}, not to {expected}")


def _events(random: numpy.random.Generator, count: int, row_bytes: int) -> pyarrow.Table:
    occurred = random.integers(1_600_000_000, 1_700_000_000, count) * 1_000_000
    table = pyarrow.table(
        {
            "event_id": _uuids(random, count),
            "account_id": pyarrow.array(random.integers(1, ACCOUNTS + 1, count)),
            "cents": pyarrow.array(random.integers(1, 10_000, count)),
            "occurred_at": pyarrow.array(occurred, pyarrow.timestamp("us", tz="UTC")),
        }
    )
    if row_bytes <= _LEAST_BYTES:
        return table
    return table.append_column("payload", _texts(_digits(random, count, row_bytes - _LEAST_BYTES)))


def _uuids(random: numpy.random.Generator, count: int) -> pyarrow.Array:
    """Make UUIDs of version 4, all at once: 20 million of them one by one take a minute."""
    text = numpy.full((count, 36), ord("-"), dtype=numpy.uint8)
    text[:, [place for place in range(36) if place not in _DASHES]] = _digits(random, count, 32)
    text[:, 14] = ord("4")
    return _texts(text)


def _digits(random: numpy.random.Generator, count: int, width: int) -> Any:
    return _HEX[random.integers(0, 16, (count, width), dtype=numpy.uint8)]


def _texts(characters: Any) -> pyarrow.Array:
    """Return texts, whose characters are the rows of a matrix."""
    count, width = characters.shape
    offsets = numpy.arange(0, width * count + 1, width, dtype=numpy.int64)
    return pyarrow.LargeStringArray.from_buffers(count, pyarrow.py_buffer(offsets), pyarrow.py_buffer(characters))
