"""The commit guard: in a transaction that a handler works in, any COMMIT but ours fails, and nothing is committed.

Reading what is executed cannot find every COMMIT: one may go to the driver's own connection, or hide in a text that
only Postgres can take apart. And a transaction that recorded messages and was committed by a handler loses those whose
handlers have not run yet::

    txbox     BEGIN; DECLARE guard … WITH HOLD ── record m1, m2 ── handler(m1) ── handler(m2) ── CLOSE guard; COMMIT
    handler                                                           └ COMMIT: refused, m1 and m2 are rolled back

A cursor WITH HOLD outlives its transaction, so COMMIT has to read it to its end; the query of this one fails when it is
read. Only txbox closes it. If a handler has rolled back, the guard is gone with its transaction, and CLOSE fails: what
came after that is rolled back too. Either way the server decides.

The guard costs no round trip: it goes out with BEGIN, and CLOSE with COMMIT, 15 us together (an empty transaction takes
20 to 40). Two statements in one message need Postgres's simple query protocol, for which psycopg has no call that
begins no transaction before it; so these two messages are sent through psycopg's own connection.

https://www.postgresql.org/docs/current/sql-declare.html
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus, TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.errors import TransactionEnded

REFUSAL = "txbox refuses this COMMIT: it commits this transaction itself"

DECLARE_GUARD = (
    f"DECLARE txbox_guard CURSOR WITH HOLD FOR SELECT ('{REFUSAL} ' || pg_catalog.random())::pg_catalog.int4"
)
"""Has COMMIT fail in this transaction. ``random`` has the text cast only when it is read."""

CLOSE_GUARD = "CLOSE txbox_guard"
"""Lets COMMIT succeed again; fails in another transaction than the one that has the guard."""


def begin_guarded(connection: Connection, *also: str) -> None:
    """Begin a transaction that only ``commit_guarded`` can commit: one round trip, which takes the place of BEGIN.

    ``connection`` is in a transaction of SQLAlchemy's; the server may have begun it already. ``also`` are statements to
    be run in the same round trip, without parameters. Raises ``psycopg.Error``.
    """
    driver: Any = connection.connection.dbapi_connection
    begun = driver.pgconn.transaction_status == TransactionStatus.INTRANS
    try:
        _run(connection, *(() if begun else (_begin(driver),)), DECLARE_GUARD, *also)
    except psycopg.Error:
        if driver.closed:
            # SQLAlchemy has to get the error, too: it then discards the other connections of the pool, which are most
            # likely lost as well.
            with suppress(DBAPIError):
                connection.exec_driver_sql(CLOSE_GUARD)
        raise


def commit_guarded(connection: Connection) -> None:
    """Commit the transaction that ``begin_guarded`` has begun, in one round trip.

    Raises:
        TransactionEnded: this is another transaction. Nothing is committed.
        psycopg.Error: it cannot be committed, or whether it was is unknown.
    """
    _closing(connection, CLOSE_GUARD, "COMMIT")


def add_guard(connection: Connection) -> None:
    """Guard a transaction that has begun: one round trip."""
    _run(connection, DECLARE_GUARD)


def remove_guard(connection: Connection) -> None:
    """Let a transaction be committed that ``add_guard`` guards: one round trip. Raises as ``commit_guarded``."""
    _closing(connection, CLOSE_GUARD)


def is_refused_commit(error: BaseException) -> bool:
    """Whether an error is, or was caused by, a COMMIT that a guard has refused."""
    return any(
        isinstance(cause, psycopg.errors.InvalidTextRepresentation) and REFUSAL in str(cause)
        for cause in _causes(error)
    )


def _closing(connection: Connection, *statements: str) -> None:
    try:
        _run(connection, *statements)
    except psycopg.errors.InvalidCursorName as error:
        raise TransactionEnded from error


def _begin(driver: Any) -> str:
    """Return BEGIN as the connection's own settings want it, which SQLAlchemy's ``isolation_level`` sets."""
    parts = ["BEGIN"]
    if driver.isolation_level is not None:
        parts.append(f"ISOLATION LEVEL {psycopg.IsolationLevel(driver.isolation_level).name.replace('_', ' ')}")
    if driver.read_only is not None:
        parts.append("READ ONLY" if driver.read_only else "READ WRITE")
    if driver.deferrable is not None:
        parts.append("DEFERRABLE" if driver.deferrable else "NOT DEFERRABLE")
    return " ".join(parts)


def _run(connection: Connection, *statements: str) -> None:
    driver: Any = connection.connection.dbapi_connection
    with driver.lock:
        driver.pgconn.send_query("; ".join(statements).encode())
        results = driver.wait(generators.execute(driver.pgconn))
    for result in results:
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise psycopg.errors.error_from_result(result, encoding=driver.info.encoding)
    if len(results) != len(statements):
        raise psycopg.OperationalError(f"the connection was lost; {len(results)} of {len(statements)} answers came")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        yield current
        seen.append(current)
        current = getattr(current, "orig", None) or current.__cause__ or current.__context__
