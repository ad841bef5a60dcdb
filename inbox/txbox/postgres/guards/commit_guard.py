"""The commit guard: in a transaction that a handler works in, any COMMIT but ours fails, and nothing is committed.

Reading the statements cannot find every COMMIT: one may go to the driver's own connection, or hide in a text that only
Postgres can parse. And if a handler commits a transaction that recorded messages, those whose handlers have not run yet
are lost::

    txbox     BEGIN; DECLARE guard … WITH HOLD ── record m1, m2 ── handler(m1) ── handler(m2) ── CLOSE guard; COMMIT
    handler                                                           └ COMMIT: refused, m1 and m2 are rolled back

A cursor WITH HOLD outlives its transaction, so COMMIT has to read it to its end; the query of this one fails when it is
read. Only txbox closes it. If a handler has rolled back, the guard is gone with its transaction, and CLOSE fails: what
came after the rollback is rolled back too. Either way the server decides.

Over psycopg the guard costs no round trip: it goes out with BEGIN, and CLOSE with COMMIT, 15 us together (an empty
transaction takes 20 to 40). Over another driver each costs a round trip.

https://www.postgresql.org/docs/current/sql-declare.html
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.errors import TransactionEnded
from txbox.postgres.round_trip import PreparedLost, Reply, Statement, Step, StepFailed, rows_of, run_steps
from txbox.postgres.server import SERVER
from txbox.postgres.sqlstates import INVALID_CURSOR_NAME, sqlstate

REFUSAL = "txbox refuses this COMMIT: it commits this transaction itself"

DECLARE_GUARD = Statement.of(
    f"DECLARE txbox_guard CURSOR WITH HOLD FOR SELECT ('{REFUSAL} ' || pg_catalog.random())::pg_catalog.int4",
    has_plan=False,
)
"""Makes COMMIT fail in this transaction. Because of ``random``, the cast happens only when the cursor is read."""

CLOSE_GUARD = Statement.of("CLOSE txbox_guard", has_plan=False)
"""Lets COMMIT succeed again; fails in any transaction but the one that has the guard."""


COMMIT = Statement.of("COMMIT", has_plan=False)

_DECLARE, _CLOSE_AND_COMMIT = [Step(DECLARE_GUARD)], [Step(CLOSE_GUARD), Step(COMMIT)]
_BACKEND_PID = Step(Statement.of(SERVER.backend_pid, has_plan=False))


def begin(
    connection: Connection,
    *steps: Step,
    then: Step | None = None,
    after: Sequence[Step] = (),
    guarded: bool = True,
) -> Reply | None:
    """Begin a transaction in one round trip, in place of BEGIN.

    Args:
        connection: in a transaction of SQLAlchemy's; the server may have begun it already.
        steps: statements to run in the same round trip.
        then: one more statement, which may fail.
        after: statements behind that one, which may fail, too.
        guarded: let only ``commit`` commit it.

    Returns:
        The answer to ``then``, if there is one; the error, if it or one behind it has failed.

    Raises:
        psycopg.Error: it could not be begun, or one of the steps failed.
        PreparedLost: run the transaction again.
    """
    every = [*_DECLARE, *steps] if guarded else [*steps]
    try:
        results = begin_with(connection, *every, *([] if then is None else [then, *after]))
    except StepFailed as failure:
        if failure.number >= len(every):
            return Reply(error=failure.error)
        raise failure.error from None
    return None if then is None else Reply(results[len(every)], behind=results[len(every) + 1 :])


def begin_with(connection: Connection, *steps: Step, level: psycopg.IsolationLevel | None = None) -> list[Any]:
    """Begin a transaction without a guard, and run statements in the same round trip; return their results.

    Args:
        connection: as for ``begin``.
        steps: the statements.
        level: the transaction's; None: that of the connection.

    Raises:
        StepFailed: a step failed; number -1 is BEGIN.
        psycopg.Error: the connection was lost.
        PreparedLost: run the transaction again.
    """
    driver: Any = connection.connection.driver_connection
    begun = driver.pgconn.transaction_status == TransactionStatus.INTRANS
    first = [] if begun else [_begin(level or driver.isolation_level, driver.read_only, driver.deferrable)]
    every = [*first, *steps]
    try:
        try:
            results = run_steps(connection, every)
        except PreparedLost:
            if begun:
                raise
            connection.connection.rollback()
            results = run_steps(connection, every)
    except StepFailed as failure:
        _tell_pool(connection)
        raise StepFailed(failure.number - len(first), failure.error) from failure.error
    except psycopg.Error:
        _tell_pool(connection)
        raise
    return results[len(first) :]


def _tell_pool(connection: Connection) -> None:
    """If the connection is lost, make SQLAlchemy discard the others of its pool: they are most likely lost, too."""
    driver: Any = connection.connection.dbapi_connection
    if driver.closed:
        with suppress(DBAPIError):
            connection.exec_driver_sql(SERVER.backend_pid)


def commit(connection: Connection, *steps: Step, guarded: bool = True) -> list[Any]:
    """Commit the transaction that ``begin`` began, in one round trip; return the results of the steps.

    Args:
        connection: in that transaction.
        steps: statements to run before; if one fails, nothing is committed.
        guarded: as for ``begin``.

    Raises:
        StepFailed: one of the steps failed.
        TransactionEnded: this is another transaction. Nothing is committed.
        psycopg.Error: it cannot be committed, or it is unknown whether it was.
    """
    try:
        return run_steps(connection, [*steps, *_CLOSE_AND_COMMIT[not guarded :]])[: len(steps)]
    except StepFailed as failure:
        if failure.number < len(steps):
            raise
        if isinstance(failure.error, psycopg.errors.InvalidCursorName):
            raise TransactionEnded from failure.error
        raise failure.error from None


def pipelines(connection: Connection) -> bool:
    """Whether the connection's driver can send several statements in one round trip."""
    return isinstance(connection.connection.driver_connection, psycopg.Connection | psycopg.AsyncConnection)


def begin_guarded(connection: Connection) -> int:
    """Begin a guarded transaction of SQLAlchemy's on the server, in one round trip, over a driver that ``pipelines``.

    Returns:
        The process id of the server that answered.

    Raises:
        sqlalchemy.exc.DBAPIError: it could not be begun.
    """
    with _errors_of_sqlalchemy(connection):
        answer = begin(connection, then=_BACKEND_PID)
        assert answer is not None  # noqa: S101 - for the type checker: there is one more step
        return int(rows_of(connection, answer.result())[0][0])


def commit_guarded(connection: Connection) -> None:
    """Commit a guarded transaction in one round trip, over a driver that ``pipelines``. SQLAlchemy has no work left.

    Raises:
        TransactionEnded: this is another transaction. Nothing is committed.
        sqlalchemy.exc.DBAPIError: it cannot be committed, or it is unknown whether it was.
    """
    with _errors_of_sqlalchemy(connection):
        commit(connection)


@contextmanager
def _errors_of_sqlalchemy(connection: Connection) -> Iterator[None]:
    """Make SQLAlchemy raise the driver's errors as its own, and discard a lost connection."""
    try:
        yield
    except psycopg.Error as error:
        is_told = connection.invalidated  # by ``_tell_pool``
        try:
            connection._handle_dbapi_exception(error, None, None, None, None)  # noqa: SLF001 - no other way
        except DBAPIError as raised:
            raised.connection_invalidated |= is_told
            raise


def add_guard(connection: Connection) -> None:
    """Guard a transaction that SQLAlchemy has begun, over any driver: one round trip."""
    connection.exec_driver_sql(DECLARE_GUARD.text.decode())


def remove_guard(connection: Connection) -> None:
    """Allow a guarded transaction to be committed, over any driver: one round trip.

    Raises:
        TransactionEnded: this is another transaction.
        sqlalchemy.exc.DBAPIError: it is aborted, or the connection was lost.
    """
    try:
        connection.exec_driver_sql(CLOSE_GUARD.text.decode())
    except DBAPIError as error:
        if sqlstate(error) == INVALID_CURSOR_NAME:
            raise TransactionEnded from error
        raise


def is_refused_commit(error: BaseException) -> bool:
    """Whether an error is, or was caused by, a COMMIT that a guard refused."""
    return any(
        isinstance(cause, psycopg.errors.InvalidTextRepresentation) and REFUSAL in str(cause)
        for cause in _causes(error)
    )


@cache
def _begin(level: int | None, read_only: bool | None, deferrable: bool | None) -> Step:
    """Return BEGIN with a connection's own settings, such as those that SQLAlchemy's ``isolation_level`` set."""
    parts = ["BEGIN"]
    if level is not None:
        parts.append(f"ISOLATION LEVEL {psycopg.IsolationLevel(level).name.replace('_', ' ')}")
    if read_only is not None:
        parts.append("READ ONLY" if read_only else "READ WRITE")
    if deferrable is not None:
        parts.append("DEFERRABLE" if deferrable else "NOT DEFERRABLE")
    return Step(Statement.of(" ".join(parts), has_plan=False))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        yield current
        seen.append(current)
        current = getattr(current, "orig", None) or current.__cause__ or current.__context__
