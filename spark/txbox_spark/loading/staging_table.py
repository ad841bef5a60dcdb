"""Staging tables of writer jdbc: created, checked, dropped.

A staging table is named after the run and the attempt, so that two attempts never write to the same one, and has a
partition for each chunk, so that a chunk is read without the others.

It is unlogged: what is in it is in the source too. Postgres empties unlogged tables when it recovers from a crash.
"""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import astuple

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from txbox import InvalidConfiguration
from txbox.postgres.sqlstates import is_outage
from txbox.postgres.transactions import short_transaction
from txbox_spark.loading.ledger import Run
from txbox_spark.merging.statements import LoadStatements, quote
from txbox_spark.reading.columns import MAX_NAME_BYTES, EventColumn
from txbox_spark.runtime.retries import retry_outages

__all__ = [
    "MAX_PARTITIONS",
    "create_staging",
    "drop_staging",
    "has_columns",
    "is_partitioned",
    "schema_of_tables",
    "sweep_staging",
]

MAX_PARTITIONS = 1_000
"""A query of a partitioned table is planned with each of its partitions."""

DROP_SECONDS = 10
"""How long to wait for a transaction that still locks a staging table that is to be dropped."""

TABLES_PER_TRANSACTION = 64
"""How many tables one transaction creates or drops: each takes a few of the locks that Postgres has room for."""


def create_staging(
    engine: Engine, statements: LoadStatements, prefix: str, run: Run, columns: Sequence[EventColumn]
) -> str:
    """Create an empty staging table, and return its name.

    Raises:
        InvalidConfiguration: the name would be too long.
    """
    name = f"{prefix}bulk_load_staging_{run.run_id}_{run.attempt}"
    if len(f"{name}_{run.chunks}".encode()) > MAX_NAME_BYTES:
        raise InvalidConfiguration(f"with the prefix {prefix!r}, a staging table's name is too long; use writer copy")
    with short_transaction(engine) as connection:
        schema = schema_of_tables(connection, statements)
    creating = statements.create_staging(schema, name, columns, run.bounds, _digest(columns))
    for first in range(0, len(creating), TABLES_PER_TRANSACTION):
        with short_transaction(engine) as connection:
            for statement in creating[first : first + TABLES_PER_TRANSACTION]:
                connection.exec_driver_sql(statement)
    return name


def has_columns(engine: Engine, statements: LoadStatements, table: str, columns: Sequence[EventColumn]) -> bool:
    """Return whether a staging table that was filled has these columns; one that is gone has any.

    Columns are staged by number, so that other ones, or others in their order, would be taken for each other.
    """
    return _describe(engine, statements, table)[0] in (None, _digest(columns))


def is_partitioned(engine: Engine, statements: LoadStatements, table: str) -> bool:
    """Return whether a staging table is there with its partitions; Spark creates one without them."""
    return _describe(engine, statements, table)[1]


def _digest(columns: Sequence[EventColumn]) -> str:
    return hashlib.sha256(json.dumps([astuple(one) for one in columns]).encode()).hexdigest()


@retry_outages
def _describe(engine: Engine, statements: LoadStatements, table: str) -> tuple[str | None, bool]:
    """Return a staging table's comment, and whether it has partitions."""
    with short_transaction(engine) as connection:
        name = f"{schema_of_tables(connection, statements)}.{quote(table)}".replace("%%", "%")
        found = connection.exec_driver_sql(statements.staged_as, (name,)).one_or_none()
    return (None, False) if found is None else (found[0], found[1])


@retry_outages
def drop_staging(engine: Engine, statements: LoadStatements, prefix: str, run_id: str) -> None:
    """Drop the staging tables of a run, those of attempts included that were killed before theirs was complete."""
    pattern = f"^{re.escape(prefix)}bulk_load_staging_{run_id}_[0-9]+$"
    with short_transaction(engine) as connection:
        found = connection.exec_driver_sql(statements.staging_of_run, (statements.bulk_load, pattern)).scalars().all()
    for table in found:
        _drop(engine, statements, table)


def _drop(engine: Engine, statements: LoadStatements, table: str) -> None:
    """Drop a staging table, or leave it to a later sweep: no load fails because of what another one has left.

    An executor that hangs, or that is cut off, may hold a lock on it for as long as Postgres believes that it lives.
    And it may be another role's.
    """
    try:
        with short_transaction(engine) as connection:
            name = f"{schema_of_tables(connection, statements)}.{quote(table)}"
            partitions = connection.exec_driver_sql(statements.partitions, (name.replace("%%", "%"),)).scalars().all()
        names = [*(one.replace("%", "%%") for one in partitions), name]
        for first in range(0, len(names), TABLES_PER_TRANSACTION):
            with short_transaction(engine) as connection:
                connection.exec_driver_sql(statements.bound_wait, (f"{DROP_SECONDS}s",))
                connection.exec_driver_sql(statements.drop_tables(names[first : first + TABLES_PER_TRANSACTION]))
    except DBAPIError as error:
        if is_outage(error):
            raise
        _log.warning("the staging table %s cannot be dropped (%s); a later load will try again", table, error.orig)


def sweep_staging(engine: Engine, statements: LoadStatements, prefix: str, abandoned_seconds: float) -> tuple[str, ...]:
    """Drop the staging tables of runs without a recent heartbeat, and return their names.

    Such a run can still be resumed: its events are staged anew.
    """
    start = f"^{re.escape(prefix)}bulk_load_staging_"
    values = (statements.bulk_load, f"{start}[0-9a-f]{{12}}_[0-9]+$", f"{start}([0-9a-f]{{12}})_", abandoned_seconds)
    with short_transaction(engine) as connection:
        found = connection.exec_driver_sql(statements.abandoned_staging, values).scalars().all()
    for table in found:
        _log.info("dropping the abandoned staging table %s", table)
        _drop(engine, statements, table)
    return tuple(found)


def schema_of_tables(connection: Connection, statements: LoadStatements) -> str:
    """Return the schema that our tables are in, quoted as Postgres and psycopg's placeholders need it."""
    schema = str(connection.exec_driver_sql(statements.schema_of_tables, (statements.bulk_load,)).scalar_one())
    return schema.replace("%", "%%")


_log = logging.getLogger("txbox.spark")
