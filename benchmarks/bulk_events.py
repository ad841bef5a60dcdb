"""The events of the bulk benchmark, and the database that they are loaded into: some known, some twice."""

from dataclasses import dataclass
from pathlib import Path

import numpy
import pyarrow
from pyarrow import csv, parquet
from sqlalchemy import Engine

from txbox.schema import tables

__all__ = ["SUBSCRIBER", "BulkEvents", "BulkPlace", "WrongTotals"]

SUBSCRIBER = "billing"
ACCOUNTS = 100_000
ROW_GROUP = 250_000


class WrongTotals(Exception):
    """A road did not come to what the events say; its time means nothing."""


@dataclass(frozen=True)
class BulkEvents:
    """A file of events, as Parquet and as CSV, and what it comes to.

    Attributes:
        folder: where the files are.
        rows: of the file.
        distinct: different ids.
        known: how many of those are in the inbox before.
        cents: what the events that are not come to.
    """

    folder: Path
    rows: int
    distinct: int
    known: int
    cents: int

    @property
    def parquet(self) -> str:
        """The file as Parquet."""
        return str(self.folder / "events.parquet")

    @property
    def csv(self) -> str:
        """The file as CSV."""
        return str(self.folder / "events.csv")

    def half(self, number: int) -> str:
        """A half of the file, by id, as CSV."""
        return str(self.folder / f"half-{number}.csv")

    @property
    def known_ids(self) -> str:
        """The ids that are in the inbox before."""
        return str(self.folder / "known.csv")

    @classmethod
    def make(cls, folder: Path, rows: int, duplicate_share: float, known_share: float, seed: int = 1) -> "BulkEvents":
        """Make the files: random ids (UUIDs of version 4, as text) in no order, duplicates far apart."""
        random = numpy.random.default_rng(seed)
        distinct = max(1, round(rows * (1 - duplicate_share)))
        digits = random.bytes(16 * distinct).hex()
        ids = numpy.array([_uuid(digits[start : start + 32]) for start in range(0, 32 * distinct, 32)], dtype=object)
        order = numpy.concatenate([numpy.arange(distinct), random.integers(0, distinct, rows - distinct)])
        random.shuffle(order)
        cents = random.integers(1, 10_000, distinct)
        columns = {
            "event_id": pyarrow.array(ids[order]),
            "account_id": pyarrow.array(random.integers(0, ACCOUNTS, distinct)[order]),
            "cents": pyarrow.array(cents[order]),
            "occurred_at": pyarrow.array(
                random.integers(1_600_000_000, 1_700_000_000, distinct)[order] * 1_000_000,
                pyarrow.timestamp("us", tz="UTC"),
            ),
        }
        known = random.permutation(distinct)[: round(distinct * known_share)]
        made = cls(folder, rows, distinct, len(known), int(cents.sum() - cents[known].sum()))
        table = pyarrow.table(columns)
        parquet.write_table(table, made.parquet, row_group_size=ROW_GROUP)
        plain = csv.WriteOptions(include_header=False)
        csv.write_csv(table, made.csv, plain)
        low = pyarrow.compute.less(table["event_id"], "8")
        csv.write_csv(table.filter(low), made.half(0), plain)
        csv.write_csv(table.filter(pyarrow.compute.invert(low)), made.half(1), plain)
        csv.write_csv(pyarrow.table({"id": pyarrow.array(numpy.sort(ids[known]))}), made.known_ids, plain)
        return made


class BulkPlace:
    """The database: the inbox with the known ids in it, and accounts."""

    def __init__(self, engine: Engine, events: BulkEvents) -> None:
        self._engine = engine
        self._events = events
        with engine.begin() as connection:
            tables().metadata.drop_all(connection)
            tables().metadata.create_all(connection)
            connection.exec_driver_sql("DROP TABLE IF EXISTS account, known")
            connection.exec_driver_sql(
                "CREATE TABLE account (account_id bigint PRIMARY KEY, purchases bigint NOT NULL, cents bigint NOT NULL)"
            )
            connection.exec_driver_sql('CREATE UNLOGGED TABLE known (id text COLLATE "C")')
            cursor = connection.connection.driver_connection.cursor()
            with cursor.copy("COPY known FROM STDIN (FORMAT csv)") as copy, Path(events.known_ids).open("rb") as file:
                while block := file.read(1 << 20):
                    copy.write(block)

    def reset(self) -> None:
        """Bring it back to how it was."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql("TRUNCATE processed_message, account, bulk_load, bulk_load_chunk")
            connection.exec_driver_sql("DROP TABLE IF EXISTS staging, hand_staging")
            connection.exec_driver_sql(
                "INSERT INTO processed_message (subscriber_id, message_id) SELECT %s, id FROM known ORDER BY id",
                (SUBSCRIBER,),
            )
            connection.exec_driver_sql(f"INSERT INTO account SELECT g, 0, 0 FROM generate_series(0, {ACCOUNTS - 1}) g")
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE processed_message, account")
            connection.exec_driver_sql("CHECKPOINT")

    def check(self, road: str) -> None:
        """See that every event that was not known has been applied once.

        Raises:
            WrongTotals: it has not.
        """
        with self._engine.connect() as connection:
            found = connection.exec_driver_sql(
                "SELECT (SELECT count(*) FROM processed_message), sum(purchases)::bigint, sum(cents)::bigint "
                "FROM account"
            ).one()
        wanted = (self._events.distinct, self._events.distinct - self._events.known, self._events.cents)
        if tuple(found) != wanted:
            raise WrongTotals(f"{road}: ids, events and cents are {tuple(found)}, not {wanted}")


def _uuid(digits: str) -> str:
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{digits[16:20]}-{digits[20:]}"
