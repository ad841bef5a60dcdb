"""The driver's cursor: one row for a statement of ours, in the caller's transaction, without SQLAlchemy's result.

SQLAlchemy takes 40 us of the client to make a result of a text and describe its columns: as much as psycopg takes for
an INSERT. Where the host listens to statements, or logs them, or its transaction is not begun, or stands no more,
SQLAlchemy runs the statement as any other.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection


def fetch_one(connection: Connection, sql: str, parameters: Mapping[str, Any]) -> Any:
    """Run a statement in the caller's transaction, and return its first row; None if it returns none.

    Args:
        connection: in a transaction, or about to begin one.
        sql: a statement that returns rows, with ``%(name)s`` for its parameters.
        parameters: their values, by name.

    Raises:
        sqlalchemy.exc.DBAPIError, and whatever else ``Connection.exec_driver_sql`` raises: in the same cases.
    """
    if _is_observed(connection) or not _is_begun(connection):
        return connection.exec_driver_sql(sql, dict(parameters)).fetchone()
    cursor = connection.connection.cursor()
    try:
        cursor.execute(sql, parameters)
        row = cursor.fetchone()
    except BaseException as error:  # noqa: BLE001 - SQLAlchemy raises it again
        of_driver = isinstance(error, connection.dialect.loaded_dbapi.Error)
        # Wraps it, calls listeners for errors, and invalidates a connection that is lost, as for its own statements.
        connection._handle_dbapi_exception(error, sql if of_driver else None, dict(parameters), cursor, None)  # noqa: SLF001 - no other way
    cursor.close()
    return row


def _is_observed(connection: Connection) -> bool:
    """Whether the host sees each statement: it listens for them, or logs them."""
    return bool(
        connection._has_events  # noqa: SLF001 - as SQLAlchemy itself asks before each statement
        or connection.engine._has_events  # noqa: SLF001
        or connection._echo  # noqa: SLF001
        or len(connection.dialect.dispatch.do_execute)
    )


def _is_begun(connection: Connection) -> bool:
    """Whether the connection is in a transaction of SQLAlchemy's that can be used."""
    transaction, nested = connection.get_transaction(), connection.get_nested_transaction()
    if transaction is None or not transaction.is_active or (nested is not None and not nested.is_active):
        return False
    block = connection._trans_context_manager  # noqa: SLF001 - of a transaction that may have ended within it
    return block is None or block._transaction_is_active()  # noqa: SLF001
