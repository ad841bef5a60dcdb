"""Creates, checks and drops the staging tables of writer jdbc.

A staging table is named after the run and the attempt, so that two attempts never write to the same one. It has one
partition per chunk. It is unlogged, so Postgres empties it when it recovers from a crash.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import astuple
from functools import cached_property
from itertools import pairwise
from typing import Any

from sqlalchemy import Engine

from txbox import InvalidConfiguration
from txbox.postgres.sql import quote, unescaped
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.transactions import short_transaction
from txbox.status.staging_tables import TABLES_PER_TRANSACTION, StagingCatalogue
from txbox_spark.loading.ledger import Run
from txbox_spark.merging.fresh_event import quote_text, staged_columns
from txbox_spark.reading.columns import MAX_NAME_BYTES, EventColumn
from txbox_spark.rejects.rejects_table import RejectsTable
from txbox_spark.runtime.retries import retry_outages

MAX_PARTITIONS = 1_000
"""Limited because Postgres plans a query of a partitioned table with each of its partitions."""


class StagingStatements(SqlFile, file="staging_table.sql"):
    describe: str


class StagingTables:
    def __init__(self, engine: Engine, schema: str | None, prefix: str) -> None:
        self._engine = engine
        self._prefix = prefix
        self._sql = StagingStatements.load(schema, prefix)
        self._catalogue = StagingCatalogue(schema, prefix)

    def create(self, run: Run, columns: Sequence[EventColumn]) -> str:
        """Create an empty staging table for a run's current attempt, and return its name.

        Raises:
            InvalidConfiguration: the name would be too long.
        """
        name = self._catalogue.name(run.run_id, run.attempt)
        if len(f"{name}_{run.chunks}".encode()) > MAX_NAME_BYTES:
            raise InvalidConfiguration(
                f"with the prefix {self._prefix!r}, a staging table's name is too long; use writer copy"
            )
        creating = creation(self._schema, name, columns, run.bounds, _digest(columns))
        for first in range(0, len(creating), TABLES_PER_TRANSACTION):
            with short_transaction(self._engine) as connection:
                for statement in creating[first : first + TABLES_PER_TRANSACTION]:
                    connection.exec_driver_sql(statement)
        return name

    @retry_outages
    def create_rejects(self, run_id: str) -> RejectsTable:
        """Create the table that keeps a run's rejected rows until the run ends, unless it exists.

        It is named like one of attempt 0, so that it is dropped with the others. It is not unlogged, because its rows
        commit with chunks that are not merged again.
        """
        table = RejectsTable(self.full_name(self._catalogue.name(run_id, 0)))
        with short_transaction(self._engine) as connection:
            table.create(connection)
        return table

    def full_name(self, table: str) -> str:
        """Return a table's name with its schema, quoted for Postgres, and escaped for psycopg's placeholders."""
        return f"{self._schema}.{quote(table)}"

    def has_columns(self, table: str, columns: Sequence[EventColumn]) -> bool:
        """Return whether a staging table has these columns, in this order; True if the table is gone."""
        found = self._describe(table)
        return found is None or found[0] in (None, _digest(columns))

    def is_partitioned(self, table: str) -> bool:
        """Return whether a staging table exists and has partitions.

        If it is gone, Spark creates one without partitions.
        """
        found = self._describe(table)
        return found is not None and bool(found[1])

    @retry_outages
    def drop(self, run_id: str) -> None:
        """Drop the staging tables of all attempts of a run."""
        with short_transaction(self._engine) as connection:
            found = self._catalogue.of_run(connection, run_id)
        for table in found:
            self._catalogue.drop(self._engine, table)

    def sweep(self, abandoned_seconds: float) -> tuple[str, ...]:
        """Drop the staging tables of runs without a recent heartbeat, and return their names."""
        with short_transaction(self._engine) as connection:
            found = self._catalogue.abandoned(connection, abandoned_seconds)
        for table in found:
            _log.info("dropping the abandoned staging table %s", table)
            self._catalogue.drop(self._engine, table)
        return tuple(found)

    @cached_property
    def _schema(self) -> str:
        """The schema of txbox's tables, quoted for Postgres, and escaped for psycopg's placeholders."""
        with short_transaction(self._engine) as connection:
            return self._catalogue.schema(connection)

    @retry_outages
    def _describe(self, table: str) -> tuple[Any, ...] | None:
        """Return a staging table's comment and whether it has partitions; None if it does not exist."""
        values = {"staging_table": unescaped(self.full_name(table))}
        with short_transaction(self._engine) as connection:
            found = connection.exec_driver_sql(self._sql.describe, values).one_or_none()
        return None if found is None else tuple(found)


def creation(
    schema: str, name: str, columns: Sequence[EventColumn], bounds: Sequence[str], comment: str
) -> tuple[str, ...]:
    """Return the statements that create a staging table with one partition per chunk; DDL takes no parameters.

    ``schema`` is the quoted schema of our tables. ``comment`` identifies the columns later.
    """
    ends = ["MINVALUE", *(quote_text(bound) for bound in bounds), "MAXVALUE"]
    table = f"{schema}.{quote(name)}"
    return (
        f"CREATE TABLE {table} ({staged_columns(columns)}) PARTITION BY RANGE (message_id)",
        f"COMMENT ON TABLE {table} IS {quote_text(comment)}",
        *(
            f"CREATE UNLOGGED TABLE {schema}.{quote(f'{name}_{chunk}')} PARTITION OF {table} "
            f"FOR VALUES FROM ({first}) TO ({beyond}) WITH (autovacuum_enabled = false)"
            for chunk, (first, beyond) in enumerate(pairwise(ends))
        ),
    )


def _digest(columns: Sequence[EventColumn]) -> str:
    return hashlib.sha256(json.dumps([astuple(one) for one in columns]).encode()).hexdigest()


_log = logging.getLogger("txbox.spark")
