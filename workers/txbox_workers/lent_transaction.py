"""The transaction that a worker lends to a handler, and keeps the end of for itself.

The worker has recorded the message in it, or a whole batch of messages, before the handler runs. So nobody but the
worker may commit it: that would commit records whose handlers have not run, and those messages would be lost. What
can be refused is refused before it happens (``commit`` and ``COMMIT`` through SQLAlchemy), what can be seen afterwards
is seen before the worker commits (a rollback, a swallowed error). What a handler does to the driver's own connection
behind SQLAlchemy's back, nobody can see in time: leave that to the worker.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session

from txbox import TransactionAborted, TransactionEnded
from txbox_workers.outages import DatabaseUnavailable, bookkeeping

__all__ = ["LentTransactions", "finish"]


class LentTransactions:
    """Lends transactions on an engine."""

    def __init__(self, engine: Engine) -> None:
        """Take the engine.

        Args:
            engine: the host's; its other connections notice nothing.
        """
        # A copy, same pool: our event listeners must not be heard by the host's other connections.
        self._engine = engine.execution_options()
        event.listen(self._engine, "commit", _refuse_foreign_commit)
        event.listen(self._engine, "before_cursor_execute", _refuse_commit_as_sql)

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """One transaction; whatever breaks the connection on the way, COMMIT included, is DatabaseUnavailable.

        A lost answer to COMMIT says neither that it happened nor that it did not. Nothing is assumed: the delivery
        goes back to the broker, and when it comes again the inbox knows.
        """
        with bookkeeping():
            lent = self._engine.connect()
        with lent as connection:
            connection.execution_options(**{_LENT: True})
            transaction = connection.begin()
            try:
                yield connection
                if not transaction.is_active or connection.get_transaction() is not transaction:
                    raise TransactionEnded
                connection.execution_options(**{_LENT: False})  # the handlers are through; this commit is ours
                transaction.commit()
            except BaseException as error:
                broken = _is_broken(connection) or not _rolled_back(connection)
                if broken and not isinstance(error, DatabaseUnavailable):
                    raise DatabaseUnavailable(str(error)) from error
                raise


def finish(session: Session, connection: Connection) -> None:
    """Bring everything that a handler did through its session into the transaction, and see that it still stands.

    Raises:
        TransactionAborted, TransactionEnded: it does not.
    """
    _flush(session)
    _refuse_aborted(connection)


def _refuse_foreign_commit(connection: Connection) -> None:
    """Stop a handler that commits the worker's transaction, before it happens.

    In a batch, it would commit the records of messages whose handlers have not run yet: they would be lost.
    """
    if _is_lent(connection):
        raise TransactionEnded


def _refuse_commit_as_sql(
    connection: Connection, _cursor: object, statement: str, _parameters: object, _context: object, _many: bool
) -> None:
    """Stop a handler that ends the worker's transaction by SQL, for the same reason."""
    if _is_lent(connection) and ends_transaction(statement):
        raise TransactionEnded


def _is_lent(connection: Connection) -> bool:
    """Whether it is the lent connection itself; a handler may open others on the same engine, and commit them."""
    return bool(connection.get_execution_options().get(_LENT))


def ends_transaction(sql: str) -> bool:
    """Whether one of the statements in a text of SQL ends the transaction it is run in.

    A commit may hide behind a comment, an empty statement or another one (``SELECT 1; COMMIT``). What stands in quotes
    or in a function's body is no statement of its own, and ``ROLLBACK TO`` goes back to a savepoint only.
    """
    # The same few texts come for every message, and searching one of ours takes 9 us; long ones hold values perhaps.
    return _known(sql) if len(sql) <= _KNOWN_CHARACTERS else _search(sql)


def _search(sql: str) -> bool:
    if not _MAY_END.search(sql):
        return False
    bare, before = sql, ""
    while bare != before:  # comments nest: the innermost go first
        before, bare = bare, _NO_STATEMENT.sub(" ", bare)
    return any(_ENDS.match(statement) for statement in bare.split(";"))


_KNOWN_CHARACTERS = 4_000
_known = lru_cache(maxsize=256)(_search)

_LENT = "txbox_lent"

_MAY_END = re.compile(r"\b(?:COMMIT|END|ABORT|ROLLBACK|PREPARE)\b", re.IGNORECASE)
_ENDS = re.compile(
    r"\s*(?:COMMIT|END|ABORT|PREPARE\s+TRANSACTION|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b))\b", re.IGNORECASE
)
_NO_STATEMENT = re.compile(
    r"""
    '(?:[^']|'')*'                     # a string
    | "(?:[^"]|"")*"                   # a quoted name
    | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$  # a dollar-quoted body
    | --[^\n]*
    | /\*(?:(?!/\*|\*/).)*\*/          # a comment without a comment in it
    """,
    re.VERBOSE | re.DOTALL,
)


def _flush(session: Session) -> None:
    """Bring everything that a handler did through its session into the transaction."""
    if session.in_nested_transaction():
        # Closing the session would roll an open savepoint back, and the message would count as processed. A commit
        # releases savepoints, as it does for every session; the transaction itself stays the worker's.
        session.commit()
    else:
        session.flush()


def _refuse_aborted(connection: Connection) -> None:
    """Refuse to commit a transaction in which a statement has failed, or which SQL has ended.

    Postgres answers COMMIT in an aborted transaction with ROLLBACK, and drivers take that for success: a handler that
    swallows the error of a statement would have its message acked with nothing done. The driver knows the state from
    the last answer, so asking it costs no round trip.
    """
    match _transaction_status(connection):
        case TransactionStatus.INERROR:
            raise TransactionAborted
        case TransactionStatus.IDLE:
            _log.error(
                "a handler ended the worker's transaction behind SQLAlchemy's back: messages that were recorded in it "
                "and not handled yet may have been committed, and would then be taken for duplicates"
            )
            raise TransactionEnded


def _transaction_status(connection: Connection) -> int:
    """Return libpq's transaction status of a connection; psycopg 3 and psycopg2 spell it alike."""
    dbapi_connection = connection.connection.dbapi_connection
    # psycopg 3 makes an object for each look at ``info``; ``pgconn`` is what that object asks.
    info = getattr(dbapi_connection, "pgconn", None) or getattr(dbapi_connection, "info", None)
    return int(getattr(info, "transaction_status", TransactionStatus.INTRANS))


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


_log = logging.getLogger("txbox")
