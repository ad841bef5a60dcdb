"""The transaction guard: a handler works in a transaction that only txbox may end.

A handler that committed it would commit records of messages whose effects have not happened yet, and those messages
would be lost. What can be refused is refused before it happens (``commit`` and ``COMMIT`` through SQLAlchemy), what can
be seen afterwards is seen before the commit (a swallowed error). What is done to the driver's own connection, beside
SQLAlchemy, the server refuses: see ``txbox.postgres.guards.commit_guard``.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, event

from txbox.errors import StatementLeftOpen, TransactionAborted, TransactionEnded
from txbox.postgres.guards.connection_users import ConnectionUsers, watch
from txbox.postgres.guards.statement_scanner import statements


def guard(engine: Engine) -> Engine:
    """Return a copy of an engine, with the same pool, whose connections can be protected.

    A copy, because the host's other connections must not call our event listeners.
    """
    guarded = engine.execution_options()
    event.listen(guarded, "commit", _refuse_foreign_commit)
    event.listen(guarded, "before_cursor_execute", _refuse_commit_as_sql)
    watch(guarded)
    return guarded


@contextmanager
def protect(connection: Connection, users: ConnectionUsers) -> Iterator[None]:
    """While the block runs, refuse to end a guarded engine's connection's transaction: ``TransactionEnded``.

    ``users`` are those of the block: when it has ended, what they still have under way is known, and nothing is begun.
    """
    users.attach(connection)
    connection.execution_options(**{_PROTECTED: True})
    try:
        yield
    finally:
        users.end()
        connection.execution_options(**{_PROTECTED: False})


def refuse_aborted(connection: Connection) -> None:
    """Refuse to commit a transaction in which a statement has failed, or which SQL has ended.

    Postgres answers COMMIT in an aborted transaction with ROLLBACK, and drivers take that for success: a handler that
    swallows the error of a statement would have its message acked with nothing done. The driver knows the state from
    the last answer, so asking it costs no round trip.

    Raises:
        StatementLeftOpen, TransactionAborted, TransactionEnded: it cannot be committed.
    """
    if left_in_use(connection):
        raise StatementLeftOpen
    match _transaction_status(connection):
        case TransactionStatus.INERROR:
            raise TransactionAborted
        case TransactionStatus.IDLE:
            raise TransactionEnded


def is_ended(connection: Connection) -> bool:
    """Whether the server has answered last that no transaction is open: one that had begun was ended. Asks nobody."""
    return _transaction_status(connection) == TransactionStatus.IDLE


def left_in_use(connection: Connection) -> bool:
    """Whether a handler has left a statement unfinished on a connection: a stream, a copy, a pipeline.

    psycopg locks a connection for as long as its statement lasts, and a traceback keeps a generator alive: a ROLLBACK
    on such a connection would wait for ever. It can only be closed.
    """
    if connection.closed or connection.invalidated:
        return False
    driver: Any = connection.connection.driver_connection
    if getattr(driver, "closed", False):
        return False
    lock, pgconn = getattr(driver, "lock", None), getattr(driver, "pgconn", None)  # psycopg's
    locked = getattr(lock, "locked", None)
    return (locked is not None and bool(locked())) or bool(getattr(pgconn, "pipeline_status", 0))


def _refuse_foreign_commit(connection: Connection) -> None:
    """Stop a handler that commits the worker's transaction, before it happens; see the module."""
    if _is_protected(connection):
        raise TransactionEnded


def _refuse_commit_as_sql(
    connection: Connection, _cursor: object, statement: str, _parameters: object, _context: object, _many: bool
) -> None:
    """Stop a handler that ends the worker's transaction by SQL, for the same reason."""
    if _is_protected(connection) and ends_transaction(statement):
        raise TransactionEnded


def _is_protected(connection: Connection) -> bool:
    """Whether it is the protected connection itself; a handler may open others on the same engine, and commit them."""
    return bool(connection.get_execution_options().get(_PROTECTED))


def ends_transaction(sql: str) -> bool:
    """Whether one of the statements in a text of SQL ends the transaction it is run in, or removes its commit guard.

    A commit may hide behind a comment, an empty statement or another one (``SELECT 1; COMMIT``). What is in quotes or
    in a function's body is no statement of its own, and ``ROLLBACK TO`` goes back to a savepoint only.
    """
    # The same few texts come for every message, and taking one apart takes up to 100 us; long ones may hold values.
    return _search_cached(sql) if len(sql) <= _MAX_CACHED_CHARACTERS else _search(sql)


def _search(sql: str) -> bool:
    if _FIRST_MAY_END.match(sql) is None and _LATER_MAY_END.search(sql) is None:
        return False
    # What a backslash means in a plain string is the server's setting; one of both meanings is enough.
    readings = (False, True) if "\\" in sql else (False,)
    return any(
        _ENDS.match(statement) for backslashes in readings for statement in statements(sql, backslashes=backslashes)
    )


_MAX_CACHED_CHARACTERS = 4_000
_search_cached = lru_cache(maxsize=256)(_search)

_PROTECTED = "txbox_protected"

_FIRST_MAY_END = re.compile(r"\s*(?:COMMIT|END|ABORT|ROLLBACK|PREPARE|CLOSE|--|/\*)", re.IGNORECASE)
_LATER_MAY_END = re.compile(f";{_FIRST_MAY_END.pattern}", re.IGNORECASE)
"""Wherever a statement may end the transaction, this is found, in strings, too: most texts need not be taken apart."""

_ENDS = re.compile(
    r"\s*(?:(?:COMMIT|END|ABORT|PREPARE\s+TRANSACTION|CLOSE\s+(?:ALL|txbox_guard)"
    r"|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b))\b"
    r'|CLOSE\s*(?:"txbox_guard"|U&"))',
    re.IGNORECASE,
)


def _transaction_status(connection: Connection) -> int:
    driver: Any = connection.connection.driver_connection
    if (is_in_transaction := getattr(driver, "is_in_transaction", None)) is not None:  # asyncpg's, also if aborted
        return TransactionStatus.INTRANS if is_in_transaction() else TransactionStatus.IDLE
    # psycopg 3 makes an object for each look at ``info``; ``pgconn`` is what that object asks.
    info = getattr(driver, "pgconn", None) or getattr(driver, "info", None)
    return int(getattr(info, "transaction_status", TransactionStatus.INTRANS))
