"""asyncpg's connections: how their statements take values, and what a pooler does to the names of statements.

Parameters are $1, $2, …, and values are sent in binary, by the types of Postgres. psycopg tells Postgres each value's
type, and Postgres converts the value to what the statement casts it to. asyncpg instead asks Postgres for each
parameter's type, and then accepts no other value: no text for an array, no text for a number. So each parameter is
first cast to the type of its value::

    INSERT … SELECT %(subscriber_id)s::text, … unnest(%(message_ids)s::text[])       psycopg
    INSERT … SELECT $1::text::text, … unnest($2::text::text[])                       asyncpg: the array as a literal

A statement has values of the same types each time, so each has only one or two texts, which asyncpg prepares.

Behind a pooler in transaction mode no statement may have a name. asyncpg and SQLAlchemy prepare every statement, and
keep it for the next transaction, which another server may run. Each process counts up the names, so there
``__asyncpg_stmt_1f__`` may be another client's statement, which Postgres would run without an error. So on a new
connection of an adopted engine we first run a statement without a name in a transaction: if another server answers than
the one that accepted the connection, the engine's connections are made with ``WITHOUT_NAMES``. The server that runs a
statement without a name parses it anew each time.

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
    """Return the empty name, under which a server keeps no statement."""
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
    """Make an asyncpg engine prepare nothing once a pooler answers; a second call changes nothing."""
    dialect = engine.dialect
    with _adopting:
        if dialect in _adopted:
            return
        _adopted.add(dialect)
        event.listen(engine, "do_connect", _connect)
        event.listen(engine, "checkout", partial(_discard_earlier, time.time()))


def refuse_names(connection: Connection, pid: int) -> None:
    """Raise ``InvalidConfiguration`` if a pooler answers, and asyncpg's prepared statements have names there.

    The connection is closed then, as in its next transaction it would run what others have prepared.

    Args:
        connection: one of asyncpg.
        pid: what ``pg_backend_pid()`` returned on it.
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
    """Return a connection on which we checked for a pooler; None leaves it to SQLAlchemy to connect."""
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
        if isinstance(error, Exception):  # of the kind that SQLAlchemy expects if it cannot connect
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
    """Discard a connection that was in the pool before the engine was adopted: nobody checked it for a pooler."""
    if record.starttime < adopted_at:
        raise DisconnectionError("it was made before its engine was adopted")


async def _ask_pid(driver: Any) -> int:
    async with driver.transaction():  # one server
        return int(await (await driver.prepare(SERVER.backend_pid, name="")).fetchval())


_adopted: "WeakSet[Dialect]" = WeakSet()
_pooled: "WeakSet[Dialect]" = WeakSet()
_renaming: "WeakSet[Dialect]" = WeakSet()
"""Dialects whose pooler renames prepared statements, as PgBouncer does since 1.21."""
_adopting = threading.Lock()

_log = logging.getLogger("txbox.postgres")


def translated(sql: str, parameters: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return one of our statements, and its values, for asyncpg.

    Args:
        sql: with ``%(name)s`` for its parameters, and ``%%`` for a percent sign.
        parameters: their values, by name; extra ones are ignored.
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
    """Refuse a connection on which the host has set codecs for the types of our values; each one is checked once.

    Such codecs would change an id as it is stored or as it is read.

    Raises:
        InvalidConfiguration: the connection has such codecs.
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
"""The types of our values and results; Postgres gives them the same numbers everywhere."""


def _type_of(value: Any) -> str:
    if isinstance(value, list):
        element = next((one for one in value if one is not None), None)
        return f"{_type_of(element)}[]"
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "text")


_PLACEHOLDER = re.compile(r"%%|%\((\w+)\)s")

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int, as a bool is an int too
    (int, "bigint"),
    (float, "double precision"),
    (bytes, "bytea"),
    (datetime, "timestamptz"),
    (timedelta, "interval"),
)
"""Other values are sent as text, None included, as null has no type."""
