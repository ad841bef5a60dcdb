"""The caller's transaction, our own short transactions beside it, and the checks of their tables."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar, cast

import psycopg
from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError, MissingGreenlet, UnboundExecutionError

from txbox.errors import InvalidConfiguration, NotInTransaction, RightsMissing, SchemaMissing, TableLocked
from txbox.postgres.driver_cursor import open_cursor, run
from txbox.postgres.drivers.greenlets import in_greenlet, run_in_greenlet
from txbox.postgres.drivers.own_adapters import own_cursors
from txbox.postgres.drivers.psycopg_connection import (
    HasPsycopgConnection,
    PsycopgConnection,
    held_by_django,
    is_of_django,
    is_psycopg,
)
from txbox.postgres.engines import discard_if_session_broken
from txbox.postgres.guards.session_binds import keep_to
from txbox.postgres.round_trip import Statement, Step, StepFailed, run_steps
from txbox.postgres.server import SERVER
from txbox.postgres.sql import quote, quoted, read_nothing, unescaped
from txbox.postgres.sqlstates import (
    DATABASE_ERRORS,
    INSUFFICIENT_PRIVILEGE,
    LOCK_NOT_AVAILABLE,
    UNDEFINED_COLUMN,
    UNDEFINED_TABLE,
    sqlstate,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

T = TypeVar("T")

ConnectionOrSession: TypeAlias = (
    "Connection | Session | scoped_session[Any] | psycopg.Connection[Any] | HasPsycopgConnection"
)
"""What holds the caller's transaction; the last one is Django's connection."""

AsyncConnectionOrSession: TypeAlias = (
    "AsyncConnection | AsyncSession | async_scoped_session[Any] | psycopg.AsyncConnection[Any]"
)
"""The same for coroutines."""


def in_transaction(connection_or_session: ConnectionOrSession) -> Connection:
    """Return the connection; raise ``NotInTransaction`` if it is in autocommit mode.

    A connection of psycopg or Django becomes a ``PsycopgConnection``, which has as much of SQLAlchemy's interface as
    ``driver_cursor`` and ``engines`` need.
    """
    given: Any = connection_or_session
    connection: Any
    if is_session(given):
        refuse_for_coroutines(given)  # before it starts connecting, which nobody would await
        try:
            connection = given.connection()
        except MissingGreenlet as error:
            raise _for_coroutines(given) from error
    elif isinstance(given, psycopg.Connection):
        connection = PsycopgConnection(given)
    elif isinstance(given, Connection | PsycopgConnection):
        connection = given
    elif is_of_django(given):
        connection = PsycopgConnection(held_by_django(given))
    elif _is_async(given):
        raise _for_coroutines(given)
    else:
        raise TypeError(
            "a Connection or Session of SQLAlchemy, or a connection of psycopg or of Django, is needed, not "
            f"{type(given).__name__}"
        )
    if connection.dialect.is_async and not in_greenlet():
        raise _for_coroutines(given)
    refuse_autocommit(connection)
    if is_session(given):
        from sqlalchemy.orm import scoped_session

        keep_to(given() if isinstance(given, scoped_session) else given, connection)
    return cast(Connection, connection)


def is_session(given: object) -> "TypeGuard[Session | scoped_session[Any]]":
    """Whether it is a session. This does not import sqlalchemy.orm: whoever has a session has imported it."""
    if "sqlalchemy.orm" not in sys.modules:
        return False
    from sqlalchemy.orm import Session, scoped_session

    return isinstance(given, Session | scoped_session)


def refuse_for_coroutines(session: "Session | scoped_session[Any]", mapper: Any = None) -> None:
    """Raise ``TypeError`` for the session inside an ``AsyncSession``, outside of a greenlet in which it may wait.

    ``mapper`` is that of the class in question, as a session may have engines by class.
    """
    if "greenlet" in sys.modules and not in_greenlet() and _is_bound_to_async(session, mapper):
        raise _for_coroutines(session)


async def run_on(connection_or_session: Any, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run one of our functions on what holds a coroutine's transaction, and return its result.

    Args:
        connection_or_session: an AsyncConnection or AsyncSession of SQLAlchemy, over any driver, or an AsyncConnection
            of psycopg.
        work: gets the connection or session as a sync function would, followed by the other arguments.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(connection_or_session, psycopg.AsyncConnection):
        return await run_in_greenlet(work, PsycopgConnection(connection_or_session), *args, **kwargs)
    if not _is_async(connection_or_session):
        for_functions = isinstance(connection_or_session, Connection | Engine | psycopg.Connection) or is_session(
            connection_or_session
        )
        remedy = ": for that, take the class without Async in its name" if for_functions else ""
        raise TypeError(
            "an AsyncConnection or AsyncSession of SQLAlchemy, or an AsyncConnection of psycopg, is needed, not "
            f"{type(connection_or_session).__name__}{remedy}"
        )
    done: T = await connection_or_session.run_sync(work, *args, **kwargs)
    return done


def _is_async(connection_or_session: object) -> bool:
    # Without importing sqlalchemy.ext.asyncio, which a service without coroutines does not need.
    return hasattr(connection_or_session, "run_sync") or isinstance(connection_or_session, psycopg.AsyncConnection)


def _is_bound_to_async(session: Any, mapper: Any) -> bool:
    try:
        return bool(session.get_bind(mapper).dialect.is_async)
    except UnboundExecutionError:  # it has engines for other classes only
        return False


def _for_coroutines(connection_or_session: object) -> TypeError:
    return TypeError(
        f"{type(connection_or_session).__name__} is one for coroutines: take AsyncInbox, AsyncOutbox or "
        "AsyncWatermarks, and await their methods; for entities, async_update_once or async_update_if_newer"
    )


@contextmanager
def short_transaction(engine: Engine, *, sets_level: bool = True) -> Iterator[Connection]:
    """Open a connection for one transaction at READ COMMITTED, whatever the host prefers.

    Statements that settle races by row locks need that level: at a higher one they would fail with 40001 instead of
    waiting, and in autocommit mode the lock would be gone before it is used. The level is set on the connection: on an
    engine, a level that ``execution_options`` had set before would win.

    If a statement fails because of the session's state, the connection does not return to the pool.

    ``sets_level``: False leaves it to ``begin_with``, which must come first. SQLAlchemy sets and resets a level by four
    calls of the driver.
    """
    with engine.connect() as connection:
        if sets_level:
            connection.execution_options(isolation_level="READ COMMITTED")
        try:
            with own_cursors(connection), connection.begin():
                yield connection
        except Exception as error:
            discard_if_session_broken(connection, error)
            raise


def unless_locked(connection: Connection, what: str, work: Callable[[], T]) -> T | None:
    """Run statements in one transaction that waits for no lock, and return their result; None if it would have to wait.

    This is for what only the status needs, on a connection that has other work to do: another session's transaction may
    lock such a table, or a row of it, for hours. That is logged.

    Args:
        connection: without a transaction; it may be in autocommit mode.
        what: names in the log the work that is left out.
        work: runs the statements on the connection.
    """
    try:
        driver = connection.connection.dbapi_connection
        if driver is not None and driver.autocommit:
            run(connection, "BEGIN")
        run(connection, SERVER.bound_wait, {"lock_timeout": NO_WAIT})
        done = work()
        connection.commit()
    except DBAPIError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        connection.rollback()
        _log.warning("left out, because another session's transaction has locked the table or the row: %s", what)
        return None
    return done


def end_session(connection: Connection) -> None:
    """Close a connection that was detached from its pool, whatever it is doing.

    ``Connection.close`` leaves the driver's connection open if it is detached and the engine is one for coroutines.
    """
    if not connection.closed and not connection.invalidated:
        if (driver := connection.connection.dbapi_connection) is not None:
            driver.close()
        connection.invalidate()
    connection.close()


@contextmanager
def driver_cursor(connection: Connection) -> Iterator[Any]:
    """Open the driver's own cursor: a statement costs a tenth of a millisecond less of this process's time.

    Errors are the driver's, those of steps too (``round_trip``). If the connection is lost, SQLAlchemy discards it, as
    after an error of its own cursor.
    """
    driver: Any = connection.connection
    cursor = open_cursor(connection)
    try:
        yield cursor
    except Exception as raised:
        error: Any = raised.error if isinstance(raised, StepFailed) else raised
        if connection.dialect.is_disconnect(error, driver.dbapi_connection, cursor):
            connection.invalidate(error)
        if error is raised:
            raise
        raise error from None
    cursor.close()


def parse(connection: Connection, statement: Statement) -> None:
    """Have the server parse a statement, and check its names and types if it has a plan. It does not run.

    Raises:
        sqlalchemy.exc.DBAPIError: the server refuses it; the transaction is aborted.
    """
    try:
        with driver_cursor(connection):
            run_steps(connection, [Step(statement, None)])
    except psycopg.Error as error:
        raise DBAPIError.instance(
            statement.text.decode(), None, error, psycopg.Error, connection_invalidated=connection.invalidated
        ) from error


def check_table(connection: Connection, table: Table) -> None:
    """Raise unless a table can be read, by reading nothing from it. It cannot be altered until the transaction ends.

    Raises:
        SchemaMissing: it does not exist, or is of an older version.
        RightsMissing: this user may not read it.
        InvalidConfiguration: row-level security may hide rows of it from this user.
        TableLocked: another session has locked it.
    """
    try:
        with bounded_wait(connection, table):
            may_hide = run(connection, read_nothing(table)).scalar_one()
    except DATABASE_ERRORS as error:
        if (missing := missing_schema(error, unescaped(quoted(table)))) is not None:
            raise missing from error
        if sqlstate(error) == INSUFFICIENT_PRIVILEGE:
            raise _rights_missing(error, table) from error
        raise
    if may_hide:
        name = unescaped(quoted(table))
        raise InvalidConfiguration(
            f"row-level security may hide rows of {name} from this user: ALTER TABLE {name} DISABLE ROW LEVEL "
            "SECURITY, or give the user's role BYPASSRLS"
        )


@contextmanager
def bounded_wait(connection: Connection, table: Table) -> Iterator[None]:
    """Run statements on a table, waiting for each lock for ``LOCK_SECONDS``, or as long as the session's setting says.

    Raises:
        TableLocked: another session has locked the table, or a row of it.
    """
    unbounded = run(connection, SERVER.lock_timeout).scalar_one() == "0"
    if unbounded:
        run(connection, SERVER.bound_wait, {"lock_timeout": f"{LOCK_SECONDS * 1000:.0f}ms"})
    try:
        yield
    except DATABASE_ERRORS as error:
        if sqlstate(error) == LOCK_NOT_AVAILABLE:
            raise TableLocked(unescaped(quoted(table))) from error
        raise
    if unbounded:
        run(connection, SERVER.bound_wait, {"lock_timeout": "0"})


def _rights_missing(error: DBAPIError | psycopg.Error, table: Table) -> RightsMissing:
    # The server names what it refused, in whatever language: the table, or its schema.
    if table.schema is not None and table.name not in str(getattr(error, "orig", error)):
        return RightsMissing(f"SCHEMA {unescaped(quote(table.schema))}", "USAGE")
    return RightsMissing(unescaped(quoted(table)), "SELECT")


def missing_schema(error: DBAPIError | psycopg.Error, table: str) -> SchemaMissing | None:
    """Return the error to raise if a statement of ours failed because its table is missing or of an older version."""
    code = sqlstate(error)
    if code == UNDEFINED_COLUMN:
        return SchemaMissing(table, str(getattr(error, "orig", error)).splitlines()[0])
    return SchemaMissing(table) if code == UNDEFINED_TABLE else None


def valid_lock_timeout(wait_seconds: float, argument: str) -> str:
    """Return a wait as a value of ``lock_timeout``; raise ``InvalidConfiguration``, naming the argument, if invalid."""
    if not 0.001 <= wait_seconds <= _MAX_WAIT_SECONDS:
        raise InvalidConfiguration(f"{argument} must be from 0.001 to {_MAX_WAIT_SECONDS}, not {wait_seconds!r}")
    return f"{round(wait_seconds * 1000)}ms"


def refuse_autocommit(connection: Connection) -> None:
    """Raise ``NotInTransaction`` if the connection is in autocommit mode."""
    if commits_by_itself(connection):
        raise NotInTransaction


def commits_by_itself(connection: Connection) -> bool:
    if is_psycopg(connection):
        return bool(cast(Any, connection).commits_by_itself)
    dbapi_connection = connection.connection.dbapi_connection
    return dbapi_connection is not None and bool(dbapi_connection.autocommit)  # every Postgres driver has it


_MAX_WAIT_SECONDS = 3600

LOCK_SECONDS = 10.0
"""How long a start, a status report or a pause waits for a table that another session has locked."""

NO_WAIT = "50ms"
"""About the shortest wait for a lock that is still longer than working sessions hold one."""

_log = logging.getLogger("txbox.postgres")
