"""asyncpg's connections: how their statements take values, and what a pooler does to their statements' names.

Parameters are $1, $2, …, and values are sent in binary, by the types of Postgres.
psycopg says of each value which type it has; Postgres converts it to what the statement casts it to. asyncpg asks
Postgres which type a parameter has, and then takes no other value: no text for an array, no text for a number. So here
each parameter is cast to the type of its value first::

    INSERT … SELECT %(subscriber_id)s::text, … unnest(%(message_ids)s::text[])       psycopg
    INSERT … SELECT $1::text::text, … unnest($2::text::text[])                       asyncpg: the array as a literal

A statement has the same values each time, so there are one or two texts of each, which asyncpg prepares.

Behind a pooler in transaction mode no statement may have a name. asyncpg and SQLAlchemy prepare every statement, and
keep it for the next transaction, which another server may run. The names are counted up in each process:
``__asyncpg_stmt_1f__`` may be another client's statement there, and Postgres would run it without an error. So a new
connection of an adopted engine is asked first, by a statement without a name in a transaction: if another server
answers than the one that let the connection in, the engine's connections are made with ``WITHOUT_NAMES``. A statement
without a name is parsed anew for each run, at the server that runs it.

https://docs.sqlalchemy.org/en/20/dialects/postgresql.html#prepared-statement-cache
"""

import logging
import re
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache, partial
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


def translated(sql: str, parameters: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return a statement of ours, and its values, for asyncpg.

    Args:
        sql: with ``%(name)s`` for its parameters, and ``%%`` for a percent sign.
        parameters: their values, by name; there may be others.
    """
    text, names = _numbered(sql, tuple((name, _type_of(value)) for name, value in parameters.items()))
    return text, tuple([parameters[name] for name in names])


@lru_cache(maxsize=1024)
def _numbered(sql: str, types: tuple[tuple[str, str], ...]) -> tuple[str, tuple[str, ...]]:
    type_of = dict(types)
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        name = match[1]
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}::{type_of[name]}"

    return _PLACEHOLDER.sub(number, sql), tuple(names)


def refuse_codecs(connection: Connection) -> None:
    """Refuse a connection on which the host has set codecs for the types of our values; looks once at each.

    They would change what is kept of an id, or what comes back of it.

    Raises:
        InvalidConfiguration: it has some.
    """
    if _LOOKED in connection.info:
        return
    driver: Any = connection.connection.driver_connection
    settings = driver.get_settings()
    names = [
        name
        for name, oid in _OIDS.items()
        if settings.get_data_codec(oid) is not settings.get_data_codec(oid, ignore_custom_codec=True)
    ]
    if names:
        raise InvalidConfiguration(
            f"this connection of asyncpg has a codec of yours for {', '.join(names)}, which changes what txbox keeps "
            "and reads: give txbox an engine without it (set_type_codec on the columns' own types, such as a domain)"
        )
    connection.info[_LOOKED] = True


_LOOKED = "txbox_codecs_looked_at"

_OIDS = {
    "bool": 16,
    "bytea": 17,
    "int8": 20,
    "int4": 23,
    "text": 25,
    "float8": 701,
    "timestamptz": 1184,
    "interval": 1186,
    "text[]": 1009,
    "int8[]": 1016,
    "bytea[]": 1001,
}
"""The types of our values and results, which Postgres numbers the same everywhere."""


def _type_of(value: Any) -> str:
    if isinstance(value, list):
        element = next((one for one in value if one is not None), None)
        return f"{_type_of(element)}[]"
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "text")


_PLACEHOLDER = re.compile(r"%%|%\((\w+)\)s")

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int, which it is too
    (int, "bigint"),
    (float, "double precision"),
    (bytes, "bytea"),
    (datetime, "timestamptz"),
    (timedelta, "interval"),
)
"""The others are sent as text: None, too, as null has no type."""
