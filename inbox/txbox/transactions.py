"""Short transactions of our own, beside the caller's, and a look at their tables."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from txbox.errors import NotInTransaction, SchemaMissing
from txbox.sqlstates import UNDEFINED_TABLE, sqlstate

__all__ = ["check_table", "refuse_autocommit", "short_transaction"]


@contextmanager
def short_transaction(engine: Engine) -> Iterator[Connection]:
    """Lend a connection for one transaction at READ COMMITTED, whatever the host prefers.

    Statements that settle their races by row locks need it: at a higher level they would fail with 40001 instead of
    waiting, and in autocommit mode the lock would be gone before it is used. The level is set on the connection: set on
    an engine that was given a level by ``execution_options`` before, it would lose to the earlier one.
    """
    with engine.connect() as connection:
        connection.execution_options(isolation_level="READ COMMITTED")
        with connection.begin():
            yield connection


def check_table(connection: Connection, statement: str, table: str) -> None:
    """See that a table is there, by a statement that reads nothing from it.

    Raises:
        SchemaMissing: it is not.
    """
    try:
        connection.exec_driver_sql(statement)
    except DBAPIError as error:
        if sqlstate(error) == UNDEFINED_TABLE:
            raise SchemaMissing(table) from error
        raise


def refuse_autocommit(connection: Connection) -> None:
    """Raise NotInTransaction if the connection commits every statement by itself."""
    dbapi_connection = connection.connection.dbapi_connection
    if dbapi_connection is not None and connection.dialect.detect_autocommit_setting(dbapi_connection):
        raise NotInTransaction
