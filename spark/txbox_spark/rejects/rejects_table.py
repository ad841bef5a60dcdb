"""The table that keeps every rejected row of a load; a chunk's rejected rows commit with the chunk.

The caller names the table. It is created if it does not exist; an existing one needs these columns::

    run_id, chunk, message_id, cause, column_name, value, file, event

With writer jdbc, rows that never reach a chunk have the chunk null. They are written once, at the end of their run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from txbox import InvalidConfiguration
from txbox.postgres.sql import quote, unescaped
from txbox.postgres.sqlstates import is_outage
from txbox.postgres.transactions import driver_cursor, short_transaction
from txbox.status.bulk_loads import run_lock
from txbox_spark.rejects.remarks import RejectedRow
from txbox_spark.runtime.lazy_imports import SparkSession
from txbox_spark.runtime.retries import retry_outages

COLUMNS = "run_id, chunk, message_id, cause, column_name, value, file, event"


@dataclass(frozen=True, slots=True)
class RejectsTable:
    """A table of rejected rows; the object is sent to the executors."""

    name: str  # with its schema, quoted for Postgres, and escaped for psycopg's placeholders

    @classmethod
    def named(cls, engine: Engine, name: str) -> "RejectsTable":
        """Return the table of an SQL name, such as ``audit.rejected``; create it if it does not exist.

        Raises:
            InvalidConfiguration: the table cannot be created, or lacks a column.
        """
        try:
            with short_transaction(engine) as connection:
                parts = connection.exec_driver_sql("SELECT parse_ident(%s)", (name,)).scalar_one()
                table = cls(".".join(quote(part) for part in parts))
                table.create(connection)
                connection.exec_driver_sql(f"SELECT {COLUMNS} FROM {table.name} LIMIT 0")  # noqa: S608 - quoted
        except DBAPIError as error:
            if is_outage(error):
                raise
            why = " ".join(str(error.orig).split())
            raise InvalidConfiguration(f"rejected rows cannot be kept in the table {name}: {why}") from error
        return table

    @property
    def rows_of_run(self) -> str:
        """The query for a run's rows, for a psycopg cursor; parameters: run_id."""
        return (
            "SELECT message_id, cause, column_name, value, file, event "  # noqa: S608 - quoted
            f"FROM {self.name} WHERE run_id = %(run_id)s"
        )

    def create(self, connection: Connection) -> None:
        there = connection.exec_driver_sql("SELECT to_regclass(%s)", (unescaped(self.name),)).scalar_one()
        if there is not None:  # even if the table exists, CREATE IF NOT EXISTS needs the right to create
            return
        connection.exec_driver_sql(
            f"CREATE TABLE IF NOT EXISTS {self.name} (run_id text NOT NULL, chunk integer, message_id text, "
            "cause text NOT NULL, column_name text, value text, file text, event text NOT NULL, "
            "rejected_at timestamptz NOT NULL DEFAULT now())"
        )

    def copy(self, cursor: Any, run_id: str, chunk: int | None, rows: Iterable[RejectedRow]) -> None:
        """Add rejected rows, in the transaction of a psycopg cursor."""
        with cursor.copy(f"COPY {unescaped(self.name)} ({COLUMNS}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row((run_id, chunk, row.message_id, row.cause, row.column, row.value, row.file, row.event))

    @retry_outages
    def copy_once(self, engine: Engine, run_id: str, rows: Callable[[], Iterable[RejectedRow]]) -> None:
        """Add the rejected rows of a run that never reached a chunk, unless they were added before."""
        with short_transaction(engine) as connection:
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (run_lock(run_id),))
            there = f"SELECT FROM {self.name} WHERE run_id = %s AND chunk IS NULL LIMIT 1"
            if connection.exec_driver_sql(there, (run_id,)).first() is None:
                with driver_cursor(connection) as cursor:
                    self.copy(cursor, run_id, None, rows())


WRITTEN_ROWS = 50_000
"""How many rows are held at a time."""

_COLUMNS = "message_id string, cause string, column string, value string, file string, event string"


def write_rejects(spark: SparkSession, engine: Engine, table: RejectsTable, run_id: str, folder: str) -> int:
    """Write a run's rows from the table into a folder, as lines of JSON; return how many there are.

    Until the load ends, they are only in the table, so the folder has only what has committed. A run's rows are in its
    subfolder ``run=RUN``; if the end of the run is repeated, they are written again.
    """
    target = f"{folder.rstrip('/')}/run={run_id}"
    written = 0
    with (
        short_transaction(engine) as connection,
        connection.connection.driver_connection.cursor(name="txbox_rejects") as cursor,  # type: ignore[union-attr]
    ):
        cursor.execute(table.rows_of_run, {"run_id": run_id})
        while rows := cursor.fetchmany(WRITTEN_ROWS):
            mode = "append" if written else "overwrite"
            spark.createDataFrame(rows, _COLUMNS).coalesce(1).write.mode(mode).json(target)
            written += len(rows)
    return written
