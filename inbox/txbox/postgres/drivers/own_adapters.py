"""How psycopg reads and writes the values of our statements, whatever the host has registered for its own.

A host may register loaders and dumpers for all connections or for one: text is stripped or comes as bytes, numbers are
Decimal, jsonb stays text. An id might then not come back as the id that was sent. So our statements run on cursors that
have psycopg's own adapters, and none of the host's.

https://www.psycopg.org/psycopg3/docs/advanced/adapt.html
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import postgres
from psycopg.adapt import AdaptersMap, Buffer, Loader, Transformer
from psycopg.types import TypesRegistry
from psycopg.types.array import register_all_arrays
from psycopg.types.json import set_json_dumps, set_json_loads
from sqlalchemy import Connection

AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


class _TextLoader(Loader):
    """Reads text. On an SQL_ASCII connection, where psycopg returns bytes, it decodes UTF-8, as our databases send."""

    def __init__(self, oid: int, context: Any = None) -> None:
        super().__init__(oid, context)
        encoding = "utf-8" if self.connection is None else self.connection.info.encoding
        self._encoding = "utf-8" if encoding == "ascii" else encoding

    def load(self, data: Buffer) -> str:
        return str(data, self._encoding)


def _own_adapters() -> AdaptersMap:
    own = AdaptersMap(types=TypesRegistry(postgres.types))
    postgres.register_default_adapters(own)
    register_all_arrays(own)
    set_json_loads(json.loads, own)  # a host may have set another function for all connections
    set_json_dumps(json.dumps, own)
    for name in ("text", "varchar", "bpchar", "name"):
        own.register_loader(name, _TextLoader)
    own.register_loader(0, _TextLoader)  # for types that have no loader
    return own


_ADAPTERS = _own_adapters()


def driver_of(connection: Connection) -> Any:
    """Return the driver's own connection, also of one that was detached from its pool."""
    pooled = connection.connection
    if pooled.driver_connection is None and pooled.dbapi_connection is not None:
        return connection.dialect.get_driver_connection(pooled.dbapi_connection)
    return pooled.driver_connection


class OwnCursor(psycopg.Cursor[Any]):
    @property
    def adapters(self) -> AdaptersMap:
        return _ADAPTERS


class OwnAsyncCursor(psycopg.AsyncCursor[Any]):
    @property
    def adapters(self) -> AdaptersMap:
        return _ADAPTERS


class _Context:
    __slots__ = ("connection",)
    adapters = _ADAPTERS

    def __init__(self, driver: AnyConnection) -> None:
        self.connection = driver


def reader_of(driver: AnyConnection) -> Any:
    """Return a psycopg Transformer that reads the results of our statements on a connection."""
    context: Any = _Context(driver)
    return Transformer(context)


@contextmanager
def own_cursors(connection: Connection) -> Iterator[None]:
    """Make every cursor opened in the block one of ours, on a connection of psycopg.

    This is for connections on which only our statements run.
    """
    driver: Any = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        yield
        return
    given = driver.cursor_factory
    driver.cursor_factory = _kind_for(driver)
    try:
        yield
    finally:
        driver.cursor_factory = given


def open_next_as_ours(driver: Any) -> Any:
    """Make the next cursor opened on a psycopg connection one of ours; return the factory that is restored after it.

    This gives our cursor to a statement that SQLAlchemy runs in the host's transaction. Statements of listeners to that
    one get the host's cursors.
    """
    given = driver.cursor_factory
    own = _kind_for(driver)

    def open_cursor(connection: Any, **options: Any) -> Any:
        driver.cursor_factory = given
        return own(connection, **options)

    driver.cursor_factory = open_cursor
    return given


def _kind_for(driver: AnyConnection) -> Any:
    return OwnAsyncCursor if isinstance(driver, psycopg.AsyncConnection) else OwnCursor
