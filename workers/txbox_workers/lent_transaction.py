"""The transaction that a worker lends to its handlers: begun, lent, and ended by the worker."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from txbox import TransactionEnded
from txbox.connections import stop_preparing
from txbox.lent import guard, lent, refuse_aborted
from txbox.sqlstates import is_foreign_statement
from txbox_workers.outages import DatabaseUnavailable, bookkeeping, unavailable, without_values

__all__ = ["LentTransactions", "finish"]


class LentTransactions:
    """Lends transactions on an engine."""

    def __init__(self, engine: Engine) -> None:
        """Take the engine.

        Args:
            engine: the host's; its other connections notice nothing.
        """
        self._engine = guard(engine)

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """One transaction; whatever breaks the connection on the way, COMMIT included, is DatabaseUnavailable.

        A lost answer to COMMIT says neither that it happened nor that it did not. Nothing is assumed: the delivery
        goes back to the broker, and when it comes again the inbox knows.
        """
        with bookkeeping():
            connecting = self._engine.connect()
        with connecting as connection:
            transaction = connection.begin()
            try:
                with lent(connection):
                    yield connection
                if not transaction.is_active or connection.get_transaction() is not transaction:
                    raise TransactionEnded
                transaction.commit()
            except BaseException as error:
                foreign = is_foreign_statement(error)
                broken = _is_broken(connection) or not _rolled_back(connection) or foreign
                if foreign:
                    stop_preparing(connection)
                if broken and not isinstance(error, DatabaseUnavailable):
                    raise unavailable(error, before_handler=foreign) from without_values(error)
                raise


def finish(session: Session, connection: Connection) -> None:
    """Bring everything that a handler did through its session into the transaction, and see that it still stands.

    Raises:
        TransactionAborted, TransactionEnded: it does not.
    """
    _flush(session)
    refuse_aborted(connection)


def _flush(session: Session) -> None:
    """Bring everything that a handler did through its session into the transaction."""
    if session.in_nested_transaction():
        # Closing the session would roll an open savepoint back, and the message would count as processed. A commit
        # releases savepoints, as it does for every session; the transaction itself stays the worker's.
        session.commit()
    else:
        session.flush()


def _rolled_back(connection: Connection) -> bool:
    """Roll back, and return whether the server has confirmed it."""
    try:
        connection.rollback()
        # For SQLAlchemy, a transaction that a handler has ended is over, and it sends no ROLLBACK. Where the pool does
        # not roll back either (pool_reset_on_return), records without their handlers would wait in the connection for
        # the next commit. Costs nothing where there is nothing left to roll back.
        dbapi_connection = connection.connection.dbapi_connection
        if dbapi_connection is not None:
            dbapi_connection.rollback()
    except Exception:  # noqa: BLE001 - the error that led here is what gets reported
        connection.invalidate()
        return False
    return True


def _is_broken(connection: Connection) -> bool:
    """Whether the connection to the server is gone, so that nothing is known about what it was asked last."""
    if connection.closed or connection.invalidated:
        return True
    dbapi_connection = connection.connection.dbapi_connection
    return dbapi_connection is None or bool(getattr(dbapi_connection, "closed", False))
