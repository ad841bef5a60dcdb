"""What a handler works with in the worker's transaction: a session, or psycopg's own connection or a cursor of it.

A handler asks for the driver's by the annotation of its first parameter. It gets a copy of the connection object that
shares the server's session with the original, and refuses to commit and to roll back. When its transaction is over, the
copy is closed and the original is not. So a thread that outlives the handler gets an error, and not a place in the next
message's transaction.
"""

import copy
from functools import cache
from typing import Any, Protocol

from psycopg import AsyncConnection, pq
from sqlalchemy import Connection

from txbox.errors import StatementLeftOpen, TransactionEnded
from txbox.postgres.guards.session_binds import bind_to
from txbox.postgres.guards.transaction_guard import is_intact, left_in_use, refuse_aborted
from txbox_workers.handlers import SessionFactory


class HandlerConnection(Protocol):
    """What the handlers of one transaction are given."""

    given: Any

    def finish(self) -> None:
        """Flush what a handler has left, and raise unless the transaction is still intact.

        Raises:
            StatementLeftOpen, TransactionAborted, TransactionEnded: it is not.
        """

    def was_closed(self) -> bool:
        """Whether a handler has closed the driver's connection; it was not lost."""

    def close(self) -> None:
        """Refuse all further use."""


class HandlerSession:
    """A session that works in the worker's transaction."""

    def __init__(self, connection: Connection, factory: SessionFactory) -> None:
        """Open one; ``connection`` is in the transaction."""
        # rollback_only: session.commit() in a handler flushes and does not end the transaction; session.rollback() does
        # end it, and it is then found inactive.
        self._connection = connection
        pooled = connection.connection
        self._dbapi, self._driver = pooled.dbapi_connection, pooled.driver_connection
        self.given = factory(bind=connection, join_transaction_mode="rollback_only")
        bind_to(self.given, connection)

    def finish(self) -> None:
        """As ``HandlerConnection``."""
        if not is_intact(self._driver) and left_in_use(self._connection):
            raise StatementLeftOpen
        if self.given.in_nested_transaction():
            # Closing the session would roll back an open savepoint, yet the message would count as processed. A commit
            # releases savepoints, as it does for every session; the transaction itself remains the worker's.
            self.given.commit()
        else:
            self.given.flush()
        if not is_intact(self._driver):
            refuse_aborted(self._connection)

    def was_closed(self) -> bool:
        """As ``HandlerConnection``."""
        return _was_closed(self._dbapi)

    def close(self) -> None:
        """As ``HandlerConnection``; it would wait for ever for what is left in use."""
        if not left_in_use(self._connection):
            self.given.close()


class DriverConnection:
    """A copy of psycopg's connection, or a cursor of it."""

    def __init__(self, connection: Connection, *, as_cursor: bool) -> None:
        """Copy the one of a transaction."""
        self._connection = connection
        original: Any = connection.connection.driver_connection
        kind: Any = type(original)
        self._copy = copy.copy(original)
        self._copy.__class__ = _lent(kind)
        self.given = self._copy.cursor() if as_cursor else self._copy

    def finish(self) -> None:
        """As ``HandlerConnection``."""
        if not is_intact(self._copy):
            refuse_aborted(self._connection)

    def was_closed(self) -> bool:
        """As ``HandlerConnection``."""
        return _was_closed(self._copy)

    def close(self) -> None:
        """As ``HandlerConnection``."""
        self._copy.pgconn = _CLOSED


@cache
def _lent(kind: Any) -> type[Any]:
    def refuse(_: Any) -> None:
        raise TransactionEnded

    async def refuse_on_loop(_: Any) -> None:
        raise TransactionEnded

    refusal = refuse_on_loop if issubclass(kind, AsyncConnection) else refuse
    return type(kind.__name__, (kind,), {"commit": refusal, "rollback": refusal, "__module__": kind.__module__})


def _was_closed(driver: Any) -> bool:
    """Whether a connection was closed from this side and not lost; see psycopg's ``Connection.broken``."""
    return bool(getattr(driver, "closed", False)) and not getattr(driver, "broken", True)


_CLOSED = pq.PGconn.connect_start(b"closed")  # it refuses this text, and connects to nothing
_CLOSED.finish()
