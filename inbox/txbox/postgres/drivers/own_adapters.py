"""How psycopg reads and writes the values of our statements, whatever the host has registered for its own.

A host may register loaders and dumpers for all connections or for one: text that is stripped or comes as bytes, numbers
that are Decimal, jsonb that stays text. With them, an id that was recorded would not come back as the id that was
sent. So our statements are run by cursors that have psycopg's own adapters, and nothing of the host's.

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
    """Reads text; as UTF-8 over a connection in SQL_ASCII, for which psycopg returns bytes: our databases send that."""

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
    set_json_loads(json.loads, own)  # a host may set others for all connections
    set_json_dumps(json.dumps, own)
    for name in ("text", "varchar", "bpchar", "name"):
        own.register_loader(name, _TextLoader)
    own.register_loader(0, _TextLoader)  # of types that have no loader
    return own


_ADAPTERS = _own_adapters()


class OwnCursor(psycopg.Cursor[Any]):
    """A cursor for our statements."""

    @property
    def adapters(self) -> AdaptersMap:
        """psycopg's own."""
        return _ADAPTERS


class OwnAsyncCursor(psycopg.AsyncCursor[Any]):
    """The same, for coroutines."""

    @property
    def adapters(self) -> AdaptersMap:
        """psycopg's own."""
        return _ADAPTERS


class _Context:
    """What a Transformer works for."""

    __slots__ = ("connection",)
    adapters = _ADAPTERS

    def __init__(self, driver: AnyConnection) -> None:
        self.connection = driver


def reader_of(driver: AnyConnection) -> Any:
    """Return what reads results of our statements over a connection: a Transformer of psycopg."""
    context: Any = _Context(driver)
    return Transformer(context)


@contextmanager
def own_cursors(connection: Connection) -> Iterator[None]:
    """Have every cursor that is opened on a connection within the block be one of ours, if it is psycopg's.

    For connections on which nothing but our statements runs.
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
    """Have the next cursor that is opened on a connection of psycopg's be one of ours; return what restores the rest.

    This is how a statement that SQLAlchemy runs in the host's transaction gets it. Others, of listeners to that
    statement, are the host's.
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
