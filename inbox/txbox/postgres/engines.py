"""Engines, ours and the host's: how they connect, and what is checked on a new connection.

A pooler in transaction mode (PgBouncer) may use another server for each transaction of a client. A prepared statement
stays on the server that prepared it, under a name that psycopg counts up in each client: there, ``_pg3_0`` may be
another client's statement, which Postgres would run without an error. So we have to notice a pooler before anything is
prepared: ``pg_backend_pid()`` differs from the process id that the connection got when it started. From then on,
nothing is prepared on that connection.

A pooler's process id might match by chance. PgBouncer draws 32 random bits, and we ask the server again in every
transaction that records or publishes, while psycopg prepares a statement only when it runs for the sixth time.
"""

import logging
import math
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import psycopg
from psycopg.pq import Conninfo, TransactionStatus
from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.exc import DisconnectionError

from txbox.errors import InvalidConfiguration
from txbox.postgres.drivers.asyncpg_connection import refuse_names
from txbox.postgres.drivers.greenlets import wait_for
from txbox.postgres.drivers.own_adapters import OwnAsyncCursor, OwnCursor, own_cursors
from txbox.postgres.server import SERVER
from txbox.postgres.sqlstates import is_of_the_session
from txbox.postgres.watchdog import WATCHDOG_SECONDS, bound, note_pooler, watch

T = TypeVar("T")

KEEPALIVES: dict[str, object] = {
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq's parameters for TCP: we notice a dead peer within 30 seconds. In seconds, except the last, in milliseconds.
https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-KEEPALIVES
"""


CONNECT_SECONDS = 10
"""How long one host may take to accept a connection, if neither parameters nor environment set another time."""

OLDEST_SERVER = 14
"""The oldest major version of Postgres that we test. Versions newer than the tested ones are accepted."""


def open_engine(url: str | URL, **options: Any) -> Engine:
    """Make an engine with the options of ``create_engine``, and adopt it.

    ``prepare_threshold`` in the URL's query may be a number or ``None``. It may also be written ``prepareThreshold``,
    as for the JDBC driver.
    """
    return adopt(create_engine(url, **options))


def adopt(engine: Engine) -> Engine:
    """Set up the connections that an engine makes from now on, and return the engine; a second call changes nothing.

    New connections get ``KEEPALIVES`` and ``CONNECT_SECONDS``, unless their parameters say otherwise. A connection
    through a pooler prepares no statements. The watchdog (see ``watchdog``) ends a wait for an answer that does not
    come; the parameter ``txbox_watchdog_seconds``, in the URL's query or in ``connect_args``, says after how long it
    asks the server. A connection to a server that is too old, or to a database that is not UTF-8, is closed again, and
    raises ``InvalidConfiguration``. Drivers other than psycopg are left alone.
    """
    dialect = engine.dialect
    if dialect.driver != "psycopg":
        return engine
    with _adopting:
        if dialect in _adopted:
            return engine
        _adopted.add(dialect)
        event.listen(engine, "do_connect", _complete)
        # Before SQLAlchemy first queries a server: that may wait for an answer, and cannot read SQL_ASCII.
        event.listen(engine, "connect", _check_new, insert=True)
        event.listen(engine, "checkout", partial(_check_out, dialect))
    return engine


def discard_if_session_broken(connection: Connection, error: BaseException) -> bool:
    """Discard a connection if a statement of ours failed because of the state of its session.

    Return whether another connection may succeed: this one, of an adopted engine, was discarded and was not new.
    """
    if connection.closed or connection.invalidated or not is_of_the_session(error):
        return False
    was_used = bool(connection.info.get(_CHECKOUTS, 0) > 1)
    connection.invalidate()
    return was_used


def retry_on_new_connections(engine: Engine, work: Callable[[Connection], T]) -> T:
    """Run repeatable statements; after an error of the session, run them on the next connection, until a new one fails.

    ``work`` gets each connection, and commits or rolls back itself; its result is returned.
    """
    while True:
        with engine.connect() as connection:
            try:
                with own_cursors(connection):
                    return work(connection)
            except Exception as error:
                if not discard_if_session_broken(connection, error):
                    raise


def require_server(connection: Connection) -> None:
    """Raise ``InvalidConfiguration`` if the server is too old, or the database is not UTF-8.

    A database in another encoding cannot keep every id and every error. The server sends its version and encoding when
    a connection starts, so this reads them once, and asks nothing.
    """
    info = connection.info
    _require_version(connection)
    if _UTF8 not in info:
        _require_utf8(connection.connection.driver_connection)
        info[_UTF8] = True


def note_server(connection: Connection, pid: int) -> None:
    """Compare the server that answered a statement, by its ``pg_backend_pid()``, with the connection's own.

    If they differ, a pooler is in between, and psycopg prepares nothing from then on.

    Raises:
        InvalidConfiguration: the server is too old; or asyncpg keeps prepared statements under names that other clients
            use there.
    """
    _require_version(connection)
    if connection.dialect.driver == "asyncpg":
        refuse_names(connection, pid)
        return
    _compare(connection.connection.driver_connection, pid)


def stop_preparing(connection: Connection) -> None:
    """Discard a connection that ran into another client's statement through a pooler; prepare nothing on the others."""
    _unprepared.add(connection.dialect)
    connection.invalidate()


def _require_version(connection: Connection) -> None:
    info = connection.info
    if _VERSION not in info:
        _refuse_old(connection.connection.driver_connection)
        info[_VERSION] = True


def _refuse_old(driver: Any) -> None:
    if (info := getattr(driver, "info", None)) is not None:  # psycopg's
        version = info.parameter_status("server_version") or ""
    elif (settings := getattr(driver, "get_settings", None)) is not None:  # asyncpg's
        version = getattr(settings(), "server_version", "")
    else:
        return
    found = re.match(r"(\d+)[\w.]*", version)
    if found is not None and int(found[1]) < OLDEST_SERVER:
        raise InvalidConfiguration(
            f"this server is PostgreSQL {found[0]}, and txbox needs {OLDEST_SERVER} or newer; upgrade the server"
        )


def _require_utf8(driver: Any) -> None:
    info: Any = getattr(driver, "info", None)  # psycopg's
    encoding = None if info is None else info.parameter_status("server_encoding")
    if encoding not in (None, "UTF8"):
        raise InvalidConfiguration(
            f"the database {info.dbname} has the encoding {encoding}, which cannot keep every message id; create one "
            "with UTF-8: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )


def _compare(driver: Any, pid: int) -> None:
    pgconn = getattr(driver, "pgconn", None)  # psycopg's
    if pgconn is None or pgconn.backend_pid == pid:
        return
    note_pooler(driver, pid)
    if driver.prepare_threshold is None:
        return
    driver.prepare_threshold = None
    _log.info("a pooler is between here and the database: this connection prepares no statements")


def complete(parameters: dict[str, Any]) -> None:
    """Add ``KEEPALIVES`` and ``CONNECT_SECONDS`` to libpq's parameters, unless these say otherwise."""
    if "service" in parameters:  # its file may say otherwise
        return
    for name, value in KEEPALIVES.items():
        parameters.setdefault(name, value)
    if not any(one.keyword == b"connect_timeout" and one.val for one in Conninfo.get_defaults()):
        seconds = math.ceil(min(CONNECT_SECONDS, bound()))
        parameters.setdefault("connect_timeout", seconds)  # only if PGCONNECT_TIMEOUT is not set


def _complete(dialect: Dialect, record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
    complete(parameters)
    record.info[_WATCHDOG] = _read_seconds(parameters.pop(_WATCHDOG, WATCHDOG_SECONDS))
    # The name of the JDBC driver, for which the same URL may be meant: there, 0 means to prepare nothing.
    if (as_jdbc_has_it := parameters.pop("prepareThreshold", None)) is not None:
        parameters.setdefault("prepare_threshold", "None" if str(as_jdbc_has_it) == "0" else as_jdbc_has_it)
    threshold = parameters.get("prepare_threshold")
    if dialect in _unprepared:
        parameters["prepare_threshold"] = None
    elif isinstance(threshold, str):
        parameters["prepare_threshold"] = _read_threshold(threshold)


def _read_threshold(text: str) -> int | None:
    """Read psycopg's ``prepare_threshold`` as a URL has it: a number, or None."""
    if text.strip().lower() in ("none", ""):
        return None
    try:
        return int(text)
    except ValueError as error:
        raise InvalidConfiguration(
            f"prepare_threshold must be a number, or None for no prepared statements, not {text!r}"
        ) from error


def _read_seconds(given: Any) -> float:
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidConfiguration(f"{_WATCHDOG} must be a number of seconds, or 0 to switch it off, not {given!r}")
    return seconds


def _check_new(dbapi_connection: Any, record: Any) -> None:
    record.info[_CHECKED] = True
    driver = _driver_of(dbapi_connection)
    try:
        _refuse_old(driver)
        _require_utf8(driver)
    except InvalidConfiguration:
        dbapi_connection.close()
        raise
    watch(driver, record.info.get(_WATCHDOG, WATCHDOG_SECONDS))
    if driver.info.transaction_status != TransactionStatus.IDLE:
        dbapi_connection.rollback()
    by_itself = dbapi_connection.autocommit
    dbapi_connection.autocommit = True  # one round trip instead of three
    try:
        if isinstance(driver, psycopg.AsyncConnection):
            pid = wait_for(_ask_pid(driver))
        else:
            with OwnCursor(driver) as cursor:
                row: Any = cursor.execute(SERVER.backend_pid, prepare=False).fetchone()
                pid = int(row[0])
    finally:
        if not driver.closed:
            dbapi_connection.autocommit = by_itself
    _compare(driver, pid)


async def _ask_pid(driver: psycopg.AsyncConnection[Any]) -> int:
    async with OwnAsyncCursor(driver) as cursor:
        row: Any = await (await cursor.execute(SERVER.backend_pid, prepare=False)).fetchone()
        return int(row[0])


def _driver_of(dbapi_connection: Any) -> Any:
    """Return psycopg's connection; SQLAlchemy wraps an async one."""
    return getattr(dbapi_connection, "driver_connection", dbapi_connection)


def _check_out(dialect: Dialect, dbapi_connection: Any, record: Any, _checked_out: Any) -> None:
    """Count the checkouts of a connection; check one that was in the pool before the engine was adopted.

    Raise DisconnectionError to discard one that was returned with another encoding: text that this encoding lacks would
    fail in the driver, message after message, and no error of the server would show it.
    """
    driver = _driver_of(dbapi_connection)
    if dialect in _unprepared:  # this one was in the pool when a pooler was noticed
        driver.prepare_threshold = None
    if not driver.closed:
        encoding = driver.pgconn.parameter_status(b"client_encoding")
        if record.info.setdefault(_CLIENT_ENCODING, encoding) != encoding:
            raise DisconnectionError("its client_encoding was changed")
    times = record.info.get(_CHECKOUTS, 0)
    record.info[_CHECKOUTS] = min(times + 1, 2)
    if _CHECKED not in record.info:
        record.info[_CHECKOUTS] = 2
        try:
            _check_new(dbapi_connection, record)
        except psycopg.Error:  # whoever uses it finds it lost, as always
            _log.debug("a connection of the pool could not be checked", exc_info=True)


_CLIENT_ENCODING = "txbox_client_encoding"
_CHECKED = "txbox_checked"
_WATCHDOG = "txbox_watchdog_seconds"
_CHECKOUTS = "txbox_checkouts"
_UTF8 = "txbox_utf8"
_VERSION = "txbox_version"
_adopted: "WeakSet[Dialect]" = WeakSet()
_unprepared: "WeakSet[Dialect]" = WeakSet()
_adopting = threading.Lock()

_log = logging.getLogger("txbox.postgres")
