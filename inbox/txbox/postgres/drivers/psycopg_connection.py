"""psycopg's own connections, for code without SQLAlchemy: as much of SQLAlchemy's interface as our statements need.

The transaction is the caller's, as with SQLAlchemy. The cursors are ours; they return tuples, with values as psycopg
itself reads them. Errors are psycopg's own.

Django's connection holds one of psycopg's. We recognise it by its attributes, because Django is not imported here.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import Dialect

from txbox.postgres.drivers.greenlets import wait_for
from txbox.postgres.drivers.own_adapters import OwnAsyncCursor, OwnCursor
from txbox.postgres.sql import psycopg_dialect


class Rows:
    def __init__(self, rows: Sequence[tuple[Any, ...]], rowcount: int) -> None:
        self._rows = rows
        self.rowcount = rowcount

    def fetchone(self) -> Any:
        return self._rows[0] if self._rows else None

    def fetchall(self) -> Sequence[Any]:
        return self._rows

    def scalar_one(self) -> Any:
        ((value,),) = self._rows
        return value


class PsycopgConnection:
    """A connection of psycopg in the caller's transaction: sync, or async in a greenlet.

    Attributes:
        connection: itself, because SQLAlchemy's connection has the driver's connection there.
        dbapi_connection: psycopg's.
        driver_connection: the same.
    """

    def __init__(self, driver: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> None:
        self.dbapi_connection = self.driver_connection = driver
        self.connection = self

    @property
    def dialect(self) -> Dialect:
        return psycopg_dialect()

    @property
    def info(self) -> dict[str, Any]:
        """What we remember about the connection."""
        return _info.setdefault(self.driver_connection, {})

    @property
    def commits_by_itself(self) -> bool:
        driver = self.driver_connection
        if not driver.autocommit:
            return False
        if driver.pgconn.transaction_status == TransactionStatus.ACTIVE:  # in a pipeline whose answers are not here yet
            if isinstance(driver, psycopg.AsyncConnection):
                wait_for(_sync_async(driver))
            else:
                with driver.pipeline():
                    pass
        # A block `with connection.transaction()` begins a transaction in autocommit mode, too.
        return driver.pgconn.transaction_status == TransactionStatus.IDLE

    def exec_driver_sql(self, sql: str, parameters: Mapping[str, Any] | None = None) -> Rows:
        driver = self.driver_connection
        if isinstance(driver, psycopg.AsyncConnection):
            return wait_for(_run_async(driver, sql, parameters))
        with OwnCursor(driver, row_factory=tuple_row) as cursor:
            # A pipeline nested in the caller's waits for the answer, because the next step depends on it.
            with driver.pipeline() if _is_in_pipeline(driver) else nullcontext():
                cursor.execute(_encoded(sql, driver), parameters)
            return Rows(cursor.fetchall() if cursor.description else (), cursor.rowcount)


def is_psycopg(connection: object) -> bool:
    """Whether a connection is psycopg's own, although it stands in for SQLAlchemy's."""
    return isinstance(connection, PsycopgConnection)


class HasPsycopgConnection(Protocol):
    """Django's connection: ``django.db.connection``, or one of ``django.db.connections``."""

    in_atomic_block: bool

    def ensure_connection(self) -> None:
        """Connect, unless it is connected."""


def is_of_django(connection: object) -> bool:
    return hasattr(connection, "in_atomic_block") and hasattr(connection, "ensure_connection")


def held_by_django(connection: Any) -> "psycopg.Connection[Any]":
    """Return the psycopg connection that Django's connection holds.

    Raises:
        TypeError: it holds a connection of another driver.
    """
    connection.ensure_connection()
    driver = connection.connection
    if not isinstance(driver, psycopg.Connection):
        raise TypeError(
            f"Django's connection {getattr(connection, 'alias', '')!r} is one of {type(driver).__module__}, and one of "
            "psycopg 3 is needed: ENGINE django.db.backends.postgresql, with psycopg installed"
        )
    return driver


async def _run_async(driver: "psycopg.AsyncConnection[Any]", sql: str, parameters: Mapping[str, Any] | None) -> Rows:
    async with OwnAsyncCursor(driver, row_factory=tuple_row) as cursor:
        async with driver.pipeline() if _is_in_pipeline(driver) else nullcontext():
            await cursor.execute(_encoded(sql, driver), parameters)
        return Rows(await cursor.fetchall() if cursor.description else (), cursor.rowcount)


async def _sync_async(driver: "psycopg.AsyncConnection[Any]") -> None:
    async with driver.pipeline():
        pass


def _is_in_pipeline(driver: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> bool:
    return driver.pgconn.pipeline_status != PipelineStatus.OFF


def _encoded(sql: str, driver: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> bytes:
    encoding = driver.info.encoding
    return sql.encode("utf-8" if encoding == "ascii" else encoding)  # ascii is SQL_ASCII, which converts nothing


_info: "WeakKeyDictionary[Any, dict[str, Any]]" = WeakKeyDictionary()
