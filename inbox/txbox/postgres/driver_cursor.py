"""The driver's cursor: our statements in the caller's transaction, over any driver and connection.

Statements are written for psycopg, with ``%(name)s`` for parameters; ``drivers`` adapts them for other drivers. A
statement that returns one row has a short cut without SQLAlchemy's result: making a result of a text and describing its
columns takes 40 us of the client's time, as much as psycopg takes for an INSERT. SQLAlchemy runs the statement as any
other if the host listens to statements or logs them, or if its transaction has not begun or is no longer usable. Either
way, our own adapters read and write the values.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import psycopg
from sqlalchemy import Connection

from txbox.postgres.drivers.asyncpg_connection import refuse_codecs, translated
from txbox.postgres.drivers.own_adapters import OwnCursor, driver_of, open_next_as_ours
from txbox.postgres.drivers.psycopg_connection import is_psycopg

NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})


def run(connection: Connection, sql: str, parameters: Mapping[str, Any] = NO_PARAMETERS) -> Any:
    """Run a statement in the caller's transaction, and return SQLAlchemy's result.

    Args:
        connection: in a transaction, or about to begin one.
        sql: a statement, with ``%(name)s`` for its parameters.
        parameters: their values, by name.

    Raises:
        InvalidConfiguration: the host has set asyncpg codecs for our types of values.
        sqlalchemy.exc.DBAPIError, and whatever else ``Connection.exec_driver_sql`` raises; psycopg.Error on psycopg's
            own connection.
    """
    if _is_asyncpg(connection):
        refuse_codecs(connection)
        return connection.exec_driver_sql(*translated(sql, parameters))
    driver = driver_of(connection)
    if is_psycopg(connection) or not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return connection.exec_driver_sql(sql, dict(parameters))
    given = open_next_as_ours(driver)
    try:
        return connection.exec_driver_sql(sql, dict(parameters))
    finally:
        driver.cursor_factory = given


def fetch_one(connection: Connection, sql: str, parameters: Mapping[str, Any]) -> Any:
    """Run a statement in the caller's transaction, and return its first row; None if it returns none.

    Arguments and errors are those of ``run``.
    """
    if is_psycopg(connection) or _is_observed(connection) or not _is_begun(connection):
        return run(connection, sql, parameters).fetchone()
    values: Any = parameters
    if _is_asyncpg(connection):
        refuse_codecs(connection)
        sql, values = translated(sql, parameters)
    cursor = open_cursor(connection)
    try:
        cursor.execute(sql, values)
        row = cursor.fetchone()
    except BaseException as error:  # noqa: BLE001 - SQLAlchemy raises it again
        of_driver = isinstance(error, connection.dialect.loaded_dbapi.Error)
        # Wraps the error, calls error listeners, and invalidates a lost connection, as for SQLAlchemy's own statements.
        connection._handle_dbapi_exception(error, sql if of_driver else None, values, cursor, None)  # noqa: SLF001 - no other way
    cursor.close()
    return row


def open_cursor(connection: Connection) -> Any:
    """Open a cursor of the driver for our statements; the caller closes it."""
    driver = driver_of(connection)
    if isinstance(driver, psycopg.Connection):
        return OwnCursor(driver)
    if not isinstance(driver, psycopg.AsyncConnection):
        return connection.connection.cursor()
    given = open_next_as_ours(driver)
    try:
        return connection.connection.cursor()
    finally:
        driver.cursor_factory = given


def _is_asyncpg(connection: Connection) -> bool:
    return connection.dialect.driver == "asyncpg"


def _is_observed(connection: Connection) -> bool:
    """Whether the host sees each statement, because it listens for them or logs them."""
    return bool(
        connection._has_events  # noqa: SLF001 - as SQLAlchemy itself asks before each statement
        or connection.engine._has_events  # noqa: SLF001
        or connection._echo  # noqa: SLF001
        or len(connection.dialect.dispatch.do_execute)
    )


def _is_begun(connection: Connection) -> bool:
    """Whether the connection is in a usable transaction of SQLAlchemy's."""
    transaction, nested = connection.get_transaction(), connection.get_nested_transaction()
    if transaction is None or not transaction.is_active or (nested is not None and not nested.is_active):
        return False
    block = connection._trans_context_manager  # noqa: SLF001 - the transaction may have ended inside its block
    return block is None or block._transaction_is_active()  # noqa: SLF001
