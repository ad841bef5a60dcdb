"""asyncpg behind a pooler in transaction mode: no statement has a name there.

asyncpg and SQLAlchemy prepare every statement, and keep it for the next transaction, which another server may run. The
names are counted up in each process: ``__asyncpg_stmt_1f__`` may be another client's statement there, and Postgres
would run it without an error. So a new connection of an adopted engine is asked first, by a statement without a name in
a transaction: if another server answers than the one that let the connection in, the engine's connections are made
with ``WITHOUT_NAMES``. A statement without a name is parsed anew for each run, at the server that runs it.

https://docs.sqlalchemy.org/en/20/dialects/postgresql.html#prepared-statement-cache
"""

import logging
import threading
import time
from functools import partial
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.exc import DisconnectionError

from txbox.errors import InvalidConfiguration
from txbox.postgres.drivers.greenlets import wait_for
from txbox.postgres.server import SERVER


def no_name() -> str:
    """Return the name of a statement that is not kept."""
    return ""


WITHOUT_NAMES: dict[str, Any] = {
    "statement_cache_size": 0,
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": no_name,
}
"""Parameters of a connection: the first is asyncpg's, the others are SQLAlchemy's."""

REMEDY = (
    "a pooler is between here and the database, where another client's statement may have the name of one that asyncpg "
    'has prepared: make the engine with create_async_engine(…, connect_args={"statement_cache_size": 0, '
    '"prepared_statement_cache_size": 0, "prepared_statement_name_func": lambda: ""})'
)


def notice_pooler(engine: Engine) -> None:
    """Have an engine of asyncpg prepare nothing once a pooler answers; a second call changes nothing."""
    dialect = engine.dialect
    with _adopting:
        if dialect in _adopted:
            return
        _adopted.add(dialect)
        event.listen(engine, "do_connect", _connect)
        event.listen(engine, "checkout", partial(_discard_earlier, time.time()))


def refuse_names(connection: Connection, pid: int) -> None:
    """Raise ``InvalidConfiguration`` if a pooler answers, and asyncpg's prepared statements have names there.

    The connection is closed then, as it would run what others have prepared in its next transaction.

    Args:
        connection: one of asyncpg.
        pid: what ``pg_backend_pid()`` has said over it.
    """
    pooled: Any = connection.connection
    if pooled.driver_connection.get_server_pid() == pid or connection.dialect in _renaming:
        return
    if getattr(pooled.dbapi_connection, "_prepared_statement_cache", None) is None:  # SQLAlchemy keeps none
        return
    if connection.exec_driver_sql(SERVER.named_by_asyncpg).scalar_one():
        connection.invalidate()
        raise InvalidConfiguration(REMEDY)
    _renaming.add(connection.dialect)


def _connect(dialect: Dialect, _record: object, arguments: Any, parameters: dict[str, Any]) -> Any:
    """Make a connection that is to be asked whether a pooler answers; None: SQLAlchemy is to make it."""
    if dialect in _pooled:
        parameters.update(WITHOUT_NAMES)
    if not parameters.get("statement_cache_size", 1) and not parameters.get("prepared_statement_cache_size", 1):
        parameters.setdefault("prepared_statement_name_func", no_name)
        return None
    connection = dialect.connect(*arguments, **parameters)
    driver = dialect.get_driver_connection(connection)
    try:
        pid = wait_for(_ask_pid(driver))
    except BaseException as error:
        driver.terminate()
        if isinstance(error, Exception):  # as SQLAlchemy takes it for a connection that cannot be made
            raise dialect.loaded_dbapi.OperationalError(str(error)) from error
        raise
    if pid == driver.get_server_pid():
        return connection
    connection.close()
    _pooled.add(dialect)
    _log.info("a pooler is between here and the database: asyncpg prepares no statements")
    parameters.update(WITHOUT_NAMES)
    return None


def _discard_earlier(adopted_at: float, _connection: object, record: Any, _checked_out: object) -> None:
    """Discard a connection that the pool had before the engine was adopted: nobody has asked what answers there."""
    if record.starttime < adopted_at:
        raise DisconnectionError("it was made before its engine was adopted")


async def _ask_pid(driver: Any) -> int:
    async with driver.transaction():  # one server
        return int(await (await driver.prepare(SERVER.backend_pid, name="")).fetchval())


_adopted: "WeakSet[Dialect]" = WeakSet()
_pooled: "WeakSet[Dialect]" = WeakSet()
_renaming: "WeakSet[Dialect]" = WeakSet()
"""Whose pooler gives prepared statements names of its own, as PgBouncer does from 1.21 on."""
_adopting = threading.Lock()

_log = logging.getLogger("txbox.postgres")
