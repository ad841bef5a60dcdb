"""Staging tables of bulk loads: found by their names, and dropped when their run is finished or abandoned."""

import logging
import re

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from txbox.postgres.server import SERVER
from txbox.postgres.sql import quote, unescaped
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import is_outage
from txbox.postgres.transactions import short_transaction

TABLES_PER_TRANSACTION = 64
"""How many tables one transaction creates or drops: Postgres's lock table is finite."""

DROP_SECONDS = 10
"""How long to wait for a lock on a staging table to be dropped."""


class StagingCatalogueStatements(SqlFile, file="staging_tables.sql"):
    schema_of_tables: str
    of_run: str
    abandoned: str
    partitions: str
    drop_tables: str


class StagingCatalogue:
    """The staging tables beside the tables of one schema, under one prefix. Uses the caller's connection."""

    def __init__(self, schema: str | None, prefix: str) -> None:
        self._sql = StagingCatalogueStatements.load(schema, prefix)
        self._start = f"{prefix}bulk_load_staging_"

    def name(self, run_id: str, attempt: int) -> str:
        return f"{self._start}{run_id}_{attempt}"

    def schema(self, connection: Connection) -> str:
        """Return the schema of our tables, quoted for Postgres and for psycopg's placeholders."""
        return str(connection.exec_driver_sql(self._sql.schema_of_tables).scalar_one()).replace("%", "%%")

    def of_run(self, connection: Connection, run_id: str) -> list[str]:
        pattern = f"^{re.escape(self._start)}{run_id}_[0-9]+$"
        return list(connection.exec_driver_sql(self._sql.of_run, {"pattern": pattern}).scalars())

    def abandoned(self, connection: Connection, abandoned_seconds: float | None) -> list[str]:
        """Return the staging tables of runs that are finished, forgotten or abandoned.

        An abandoned run can still be resumed without its staging table: its events are staged again.

        Args:
            connection: to read with.
            abandoned_seconds: how long an abandoned run has had no heartbeat; None: leave out its tables.
        """
        start = f"^{re.escape(self._start)}"
        values = {
            "pattern": f"{start}[0-9a-f]{{12}}_[0-9]+$",
            "run_pattern": f"{start}([0-9a-f]{{12}})_",
            "abandoned_seconds": abandoned_seconds,
        }
        return list(connection.exec_driver_sql(self._sql.abandoned, values).scalars())

    def drops(self, connection: Connection, table: str) -> list[str]:
        """Return the statements that drop a staging table and its partitions, each for a separate transaction."""
        name = f"{self.schema(connection)}.{quote(table)}"
        found = connection.exec_driver_sql(self._sql.partitions, {"staging_table": unescaped(name)}).scalars()
        names = [*(one.replace("%", "%%") for one in found), name]
        return [
            self._sql.drop_tables.replace("{tables}", ", ".join(names[first : first + TABLES_PER_TRANSACTION]))
            for first in range(0, len(names), TABLES_PER_TRANSACTION)
        ]

    def drop(self, engine: Engine, table: str) -> None:
        """Drop a staging table, or log that it is left to a maintainer and to later loads.

        An executor that hangs or is cut off may hold a lock on it, and it may belong to another role.

        Raises:
            DBAPIError: the database cannot be reached.
        """
        try:
            with short_transaction(engine) as connection:
                drops = self.drops(connection, table)
            for drop in drops:
                with short_transaction(engine) as connection:
                    connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": f"{DROP_SECONDS}s"})
                    connection.exec_driver_sql(drop)
        except DBAPIError as error:
            if is_outage(error):
                raise
            _log.warning(
                "the staging table %s cannot be dropped (%s); `txbox maintain`, or a later load, will try again",
                table,
                error.orig,
            )


_log = logging.getLogger("txbox.maintenance")
