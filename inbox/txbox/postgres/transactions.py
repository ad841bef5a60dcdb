"""The caller's transaction, and short ones of our own beside it, with checks of their tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session

from txbox.errors import InvalidConfiguration, NotInTransaction, SchemaMissing
from txbox.postgres.engines import discard_if_session_broken
from txbox.postgres.sql import quoted, read_nothing, unescaped
from txbox.postgres.sqlstates import UNDEFINED_COLUMN, UNDEFINED_TABLE, sqlstate

__all__ = [
    "ConnectionOrSession",
    "check_table",
    "driver_cursor",
    "in_transaction",
    "missing_schema",
    "refuse_autocommit",
    "short_transaction",
    "valid_lock_timeout",
]

ConnectionOrSession = Connection | Session | scoped_session[Any]
"""What holds the caller's transaction."""


def in_transaction(connection_or_session: ConnectionOrSession) -> Connection:
    """Return the connection, or refuse one that commits every statement by itself."""
    if isinstance(connection_or_session, Session | scoped_session):
        connection = connection_or_session.connection()
    elif isinstance(connection_or_session, Connection):
        connection = connection_or_session
    else:
        raise TypeError(
            "an SQLAlchemy Connection or Session is needed (for an AsyncSession: await session.run_sync(...)), "
            f"not {type(connection_or_session).__name__}"
        )
    refuse_autocommit(connection)
    return connection


@contextmanager
def short_transaction(engine: Engine) -> Iterator[Connection]:
    """Open a connection for one transaction at READ COMMITTED, whatever the host prefers.

    Statements that settle their races by row locks need it: at a higher level they would fail with 40001 instead of
    waiting, and in autocommit mode the lock would be gone before it is used. The level is set on the connection: set on
    an engine that was given a level by ``execution_options`` before, it would lose to the earlier one.

    A connection on which a statement fails by the state of its session does not go back to the pool.
    """
    with engine.connect() as connection:
        connection.execution_options(isolation_level="READ COMMITTED")
        try:
            with connection.begin():
                yield connection
        except Exception as error:
            discard_if_session_broken(connection, error)
            raise


@contextmanager
def driver_cursor(connection: Connection) -> Iterator[Any]:
    """Open the driver's own cursor: a statement costs a tenth of a millisecond less of this process's time.

    Errors are the driver's. If the connection is lost, SQLAlchemy discards it, as after an error of its own cursor.
    """
    driver = connection.connection
    cursor = driver.cursor()
    try:
        yield cursor
    except Exception as error:
        if connection.dialect.is_disconnect(error, driver.dbapi_connection, cursor):  # type: ignore[arg-type]
            connection.invalidate(error)
        raise
    cursor.close()


def check_table(connection: Connection, table: Table) -> None:
    """Raise ``SchemaMissing`` if a table is not there or of an older version, by reading nothing from it."""
    try:
        connection.exec_driver_sql(read_nothing(table))
    except DBAPIError as error:
        if (missing := missing_schema(error, unescaped(quoted(table)))) is not None:
            raise missing from error
        raise


def missing_schema(error: DBAPIError, table: str) -> SchemaMissing | None:
    """Return what to raise if a statement of ours has failed because its table is missing, or of an older version."""
    code = sqlstate(error)
    if code == UNDEFINED_COLUMN:
        return SchemaMissing(table, str(error.orig).splitlines()[0])
    return SchemaMissing(table) if code == UNDEFINED_TABLE else None


def valid_lock_timeout(wait_seconds: float, argument: str) -> str:
    """Return a wait as a value of ``lock_timeout``, or raise ``InvalidConfiguration`` for the argument of this name."""
    if not 0.001 <= wait_seconds <= _MAX_WAIT_SECONDS:
        raise InvalidConfiguration(f"{argument} must be from 0.001 to {_MAX_WAIT_SECONDS}, not {wait_seconds!r}")
    return f"{round(wait_seconds * 1000)}ms"


def refuse_autocommit(connection: Connection) -> None:
    """Raise ``NotInTransaction`` if the connection commits every statement by itself."""
    dbapi_connection = connection.connection.dbapi_connection
    if dbapi_connection is not None and dbapi_connection.autocommit:  # every driver for Postgres has it
        raise NotInTransaction


_MAX_WAIT_SECONDS = 3600
