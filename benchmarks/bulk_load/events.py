"""The events of the bulk benchmark: files of them, some twice, some that are in the inbox already."""

import uuid
from pathlib import Path
from typing import NamedTuple

import numpy
import psycopg
import pyarrow
from pyarrow import csv, parquet

from benchmarks.shared.database import SCHEMA, SUBSCRIBER, Database, conninfo
from benchmarks.shared.measurements import WrongResult

ACCOUNTS = 100_000
ROW_GROUP = 250_000
DUPLICATE_SHARE, PROCESSED_SHARE = 0.10, 0.20
"""Of the rows, those whose id another row has; of the ids, those that are in the inbox before."""


class BulkEvents(NamedTuple):
    """Files of events, as Parquet and as CSV.

    Attributes:
        folder: where they are.
        rows: of the file.
        distinct: different ids.
        cents: what the events that are not in the inbox before come to.
    """

    folder: Path
    rows: int
    distinct: int
    cents: int

    def file(self, name: str) -> str:
        """Return a file's path: events.parquet, events.csv, half-0.csv, half-1.csv, processed.csv."""
        return str(self.folder / name)

    @classmethod
    def make(cls, folder: Path, rows: int) -> "BulkEvents":
        """Make the files: random ids (UUIDs of version 4, as text) in no order, duplicates far apart."""
        random = numpy.random.default_rng(1)
        distinct = max(1, round(rows * (1 - DUPLICATE_SHARE)))
        digits = random.bytes(16 * distinct).hex()
        ids = numpy.array([_uuid(digits[start : start + 32]) for start in range(0, 32 * distinct, 32)], dtype=object)
        order = numpy.concatenate([numpy.arange(distinct), random.integers(0, distinct, rows - distinct)])
        random.shuffle(order)
        cents = random.integers(1, 10_000, distinct)
        occurred = random.integers(1_600_000_000, 1_700_000_000, distinct)[order] * 1_000_000
        table = pyarrow.table(
            {
                "event_id": pyarrow.array(ids[order]),
                "account_id": pyarrow.array(random.integers(1, ACCOUNTS + 1, distinct)[order]),
                "cents": pyarrow.array(cents[order]),
                "occurred_at": pyarrow.array(occurred, pyarrow.timestamp("us", tz="UTC")),
            }
        )
        known = random.permutation(distinct)[: round(distinct * PROCESSED_SHARE)]
        made = cls(folder, rows, distinct, int(cents.sum() - cents[known].sum()))
        low = pyarrow.compute.less(table["event_id"], "8")
        parquet.write_table(table, made.file("events.parquet"), row_group_size=ROW_GROUP)
        for name, part in (
            ("events.csv", table),
            ("half-0.csv", table.filter(low)),
            ("half-1.csv", table.filter(pyarrow.compute.invert(low))),
            ("processed.csv", pyarrow.table({"id": pyarrow.array(numpy.sort(ids[known]))})),
        ):
            csv.write_csv(part, made.file(name), csv.WriteOptions(include_header=False))
        return made

    def reset(self, database: Database) -> None:
        """Bring the database to how it is before a load: some ids are in the inbox, accounts are empty."""
        database.execute(f"DROP TABLE IF EXISTS {SCHEMA}.staging")
        database.reset(others=("bulk_load", "bulk_load_chunk"), accounts=ACCOUNTS)
        with psycopg.connect(conninfo(database.url)) as connection, connection.cursor() as cursor:
            cursor.execute('CREATE TEMPORARY TABLE processed (id text COLLATE "C") ON COMMIT DROP')
            with cursor.copy("COPY processed FROM STDIN (FORMAT csv)") as copy:
                copy.write(Path(self.file("processed.csv")).read_bytes())
            insert = f"INSERT INTO {SCHEMA}.processed_message (subscriber_id, message_id) SELECT %s, id FROM processed"
            cursor.execute(f"{insert} ORDER BY id".encode(), (SUBSCRIBER,))
        database.execute(f"VACUUM ANALYZE {SCHEMA}.processed_message")
        database.checkpoint()

    def forget(self, database: Database, count: int) -> None:
        """Make some ids of the file new again, spread over it, and take their cents back."""
        table = parquet.read_table(self.file("events.parquet"), columns=["event_id", "cents"])
        step = max(1, self.rows // count)
        some = dict(zip(*(table[name][::step].to_pylist()[:count] for name in ("event_id", "cents")), strict=True))
        with psycopg.connect(conninfo(database.url)) as connection:
            ids = f"DELETE FROM {SCHEMA}.processed_message WHERE subscriber_id = %s AND message_id = ANY(%s)"
            connection.execute(ids.encode(), (SUBSCRIBER, list(some)))
            cents = f"UPDATE {SCHEMA}.account SET balance = balance - %s WHERE account_id = 1"
            connection.execute(cents.encode(), (sum(some.values()),))

    def messages(self, count: int, *, overlapping: bool) -> list[tuple[str, int, int]]:
        """Return id, account and cents for a worker: of events of the file, or new ids that change nothing."""
        table = parquet.read_table(self.file("events.parquet"), columns=["event_id", "account_id", "cents"])
        found = zip(*(table[name][:count].to_pylist() for name in table.column_names), strict=True)
        if overlapping:
            return list({one[0]: one for one in found}.values())
        return [(str(uuid.uuid4()), account, 0) for _, account, _ in found]

    def check(self, database: Database, key: str, others: int = 0) -> None:
        """See that every event that was not processed before has been applied once, by its own cents.

        ``others`` is how many other ids there are.

        Raises:
            WrongResult: it has not.
        """
        found = database.number(f"SELECT sum(balance) FROM {SCHEMA}.account"), database.recorded()
        if found != (expected := (self.cents, self.distinct + others)):
            raise WrongResult(f"{key}: the balances and the ids in the inbox come to {found}, not to {expected}")


def _uuid(digits: str) -> str:
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{digits[16:20]}-{digits[20:]}"
