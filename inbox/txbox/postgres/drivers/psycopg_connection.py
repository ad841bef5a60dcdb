"""psycopg's own connections, for code without SQLAlchemy: as much of one of SQLAlchemy's as our statements need.

The transaction is the caller's, as with SQLAlchemy. The cursors are ours, which return tuples, and values as psycopg
itself reads them. Errors are psycopg's own.

Django's connection holds one of psycopg's. It is known by what it has, for Django is not imported here.
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
    """What a statement has returned."""

    def __init__(self, rows: Sequence[tuple[Any, ...]], rowcount: int) -> None:
        self._rows = rows
        self.rowcount = rowcount

    def fetchone(self) -> Any:
        """Return the first row; None if there is none."""
        return self._rows[0] if self._rows else None

    def fetchall(self) -> Sequence[Any]:
        """Return all rows."""
        return self._rows

    def scalar_one(self) -> Any:
        """Return the one value of the one row."""
        ((value,),) = self._rows
        return value


class PsycopgConnection:
    """A connection of psycopg, in a transaction of the caller's: sync, or async in a greenlet.

    Attributes:
        connection: itself: what SQLAlchemy's connection has there has the driver's connection.
        dbapi_connection: psycopg's.
        driver_connection: the same.
    """

    def __init__(self, driver: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> None:
        self.dbapi_connection = self.driver_connection = driver
        self.connection = self

    @property
    def dialect(self) -> Dialect:
        """How statements are written for it."""
        return psycopg_dialect()

    @property
    def info(self) -> dict[str, Any]:
        """What is remembered of the connection."""
        return _info.setdefault(self.driver_connection, {})

    @property
    def commits_by_itself(self) -> bool:
        """Whether each statement is a transaction of its own."""
        driver = self.driver_connection
        if not driver.autocommit:
            return False
        if driver.pgconn.transaction_status == TransactionStatus.ACTIVE:  # in a pipeline, until its answers are here
            if isinstance(driver, psycopg.AsyncConnection):
                wait_for(_sync_async(driver))
            else:
                with driver.pipeline():
                    pass
        # A block `with connection.transaction()` begins one in autocommit mode, too.
        return driver.pgconn.transaction_status == TransactionStatus.IDLE

    def exec_driver_sql(self, sql: str, parameters: Mapping[str, Any] | None = None) -> Rows:
        """Run a statement, and return its rows."""
        driver = self.driver_connection
        if isinstance(driver, psycopg.AsyncConnection):
            return wait_for(_run_async(driver, sql, parameters))
        with OwnCursor(driver, row_factory=tuple_row) as cursor:
            # In the caller's pipeline, one within it waits for the answer: what comes next depends on that.
            with driver.pipeline() if _is_in_pipeline(driver) else nullcontext():
                cursor.execute(_encoded(sql, driver), parameters)
            return Rows(cursor.fetchall() if cursor.description else (), cursor.rowcount)


def is_psycopg(connection: object) -> bool:
    """Whether a connection is psycopg's own, although it goes by the name of SQLAlchemy's."""
    return isinstance(connection, PsycopgConnection)


class HasPsycopgConnection(Protocol):
    """Django's connection: ``django.db.connection``, or one of ``django.db.connections``."""

    in_atomic_block: bool

    def ensure_connection(self) -> None:
        """Connect, if it has not yet."""


def is_of_django(connection: object) -> bool:
    """Whether it is a connection of Django's."""
    return hasattr(connection, "in_atomic_block") and hasattr(connection, "ensure_connection")


def held_by_django(connection: Any) -> "psycopg.Connection[Any]":
    """Return psycopg's connection that Django's holds.

    Raises:
        TypeError: it holds one of another driver.
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
    return sql.encode("utf-8" if encoding == "ascii" else encoding)  # ascii is SQL_ASCII, which changes nothing


_info: "WeakKeyDictionary[Any, dict[str, Any]]" = WeakKeyDictionary()
