"""The tables that format txbox reads, and its reader: each task reads one range, in batches of a bounded size."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from sqlalchemy import Engine
from sqlalchemy.pool import NullPool

from txbox import InvalidConfiguration
from txbox.postgres.engines import open_engine
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import check_table, short_transaction
from txbox_spark.runtime.jdbc import parts_of, sampled_percent
from txbox_spark.runtime.lazy_imports import StructType, pyarrow
from txbox_spark.source.source_options import ReadOptions, explained


class SourceStatements(SqlFile, file="source_reader.sql"):
    prepare_read: str
    size: str
    cut_inbox: str
    read_inbox: str
    cut_outbox_sent: str
    read_outbox_sent: str
    cut_letters: str
    read_letters: str
    read_loads: str


@dataclass(frozen=True, slots=True)
class SourceTable:
    name: str  # in Postgres, without the prefix
    columns: str  # as Spark DDL
    rows: int  # how many a task holds at a time: fewer if they have bodies
    has_subscriber: bool = True
    in_parts: bool = True  # whether several tasks may read it

    @property
    def names(self) -> list[str]:
        return [column.split()[0] for column in self.columns.split(", ")]

    def arrow_schema(self) -> "pyarrow.Schema":
        kinds = {
            "string": pyarrow.string(),
            "bigint": pyarrow.int64(),
            "int": pyarrow.int32(),
            "binary": pyarrow.binary(),
            "timestamp": pyarrow.timestamp("us", "UTC"),
        }
        return pyarrow.schema([(name, kinds[kind]) for name, kind in map(str.split, self.columns.split(", "))])


SOURCE_TABLES = {
    "inbox": SourceTable(
        "processed_message",
        "subscriber_id string, message_id string, processed_at timestamp, fingerprint binary, dead_letter_id bigint",
        10_000,
    ),
    "outbox_sent": SourceTable(
        "outbox_sent",
        "message_id string, position bigint, destination string, key string, headers string, body binary, "
        "published_at timestamp, sent_at timestamp",
        500,
        has_subscriber=False,
    ),
    "letters": SourceTable(
        "dead_letter",
        "dead_letter_id bigint, subscriber_id string, message_id string, reason string, error string, attempts int, "
        "source string, headers string, body binary, parked_at timestamp, redriven_at timestamp, redriven_by string, "
        "discarded_at timestamp, discarded_by string, note string",
        500,
    ),
    "loads": SourceTable(
        "bulk_load",
        "run_id string, subscriber_id string, source string, writer string, attempts int, chunks int, merged bigint, "
        "read bigint, rejected bigint, duplicate_in_source bigint, already_processed bigint, parked bigint, "
        "expired bigint, applied bigint, error string, started_at timestamp, heartbeat_at timestamp, "
        "finished_at timestamp",
        1_000,
        in_parts=False,
    ),
}
"""By the value of ``option("table", …)``."""

Key = tuple[str, ...]


@dataclass(frozen=True)
class KeyRange(InputPartition):
    """The rows that one task reads: from the key ``first`` up to, but without, ``beyond``; None means no bound."""

    first: Key | None
    beyond: Key | None


class TableReader(DataSourceReader):
    """Reads a table. Every task has its own transaction, so rows that arrive meanwhile may be included or not."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._table: SourceTable = SOURCE_TABLES[options.table]
        if schema.names != self._table.names:
            raise InvalidConfiguration(f"table {options.table} has columns of its own: leave schema(…) out")
        if options.subscriber_id is not None and not self._table.has_subscriber:
            raise InvalidConfiguration(f"table {options.table} has no subscribers: leave option('subscriber', …) out")
        self._options = options
        self._url = options.database.render_as_string(hide_password=False)

    def partitions(self) -> list[InputPartition]:
        """Return ranges that cut the table evenly, by a sample."""
        with explained(f"table {self._options.table} cannot be read"), short_transaction(self._engine()) as connection:
            check_table(connection, getattr(self._sql.tables, self._table.name))
            if not self._table.in_parts:
                return [KeyRange(None, None)]
            size = connection.exec_driver_sql(self._sql.size, {"name": self._sql.name_of(self._table.name)})
            bytes_ = max(int(size.scalar_one()), 1)
            parts = self._options.partitions or parts_of(bytes_)
            if parts == 1:
                return [KeyRange(None, None)]
            values = {
                "subscriber_id": self._options.subscriber_id,
                "percent": sampled_percent(bytes_),
                "parts": parts,
            }
            statement = getattr(self._sql, f"cut_{self._options.table}")
            bounds = [tuple(key) for key in connection.exec_driver_sql(statement, values).scalars()]
        return [KeyRange(first, beyond) for first, beyond in zip([None, *bounds], [*bounds, None], strict=True)]

    def read(self, partition: InputPartition) -> "Iterator[pyarrow.RecordBatch]":
        assert isinstance(partition, KeyRange)  # noqa: S101 - Spark passes one that we made
        arrow = self._table.arrow_schema()
        values: dict[str, Any] = {"subscriber_id": self._options.subscriber_id}
        for name, key in (("first", partition.first), ("beyond", partition.beyond)):
            values[name] = None if key is None else list(key)
        with explained(f"table {self._options.table} cannot be read"), short_transaction(self._engine()) as connection:
            connection.exec_driver_sql(self._sql.prepare_read)
            driver: Any = connection.connection.driver_connection
            with driver.cursor("txbox_read") as cursor:
                cursor.execute(getattr(self._sql, f"read_{self._options.table}"), values)
                while rows := cursor.fetchmany(self._table.rows):
                    columns = zip(*rows, strict=True)
                    arrays = [pyarrow.array(one, kind) for one, kind in zip(columns, arrow.types, strict=True)]
                    yield pyarrow.RecordBatch.from_arrays(arrays, schema=arrow)

    @property
    def _sql(self) -> SourceStatements:
        return SourceStatements.load(self._options.schema, self._options.prefix)

    def _engine(self) -> Engine:
        return open_engine(self._url, poolclass=NullPool)
