"""The engine of a worker: connections that Django makes according to its settings, and that it can be lent.

SQLAlchemy and Django read values in different ways: Django registers its own readers on its connections (a jsonb is
text there, a time may have no zone). So a connection has both sets, and whoever uses it decides which are in force::

    worker   BEGIN, record ─┐                       ┌─ COMMIT
    lent                    └─ handler with the ORM ─┘
    readers  psycopg's          Django's               psycopg's
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import psycopg
from django.db import DatabaseError, connections
from psycopg.adapt import AdaptersMap
from sqlalchemy import Dialect, Engine, create_engine

from txbox import InvalidConfiguration
from txbox.postgres.engines import adopt, complete


def database_engine(using: str = "default", **options: Any) -> Engine:
    """Make an SQLAlchemy engine for a database of Django's settings; it connects nothing yet.

    Django makes its connections as ``DATABASES`` says, including time zone, role and ``connection_created``. What
    ``OPTIONS`` leaves open is as with other engines: keepalives, and ``connect_timeout``.

    Args:
        using: the alias of the database.
        options: for ``sqlalchemy.create_engine``, such as ``pool_size``.

    Raises:
        InvalidConfiguration: the database is not a PostgreSQL.
    """
    backend = connections[using]
    if backend.vendor != "postgresql":
        raise InvalidConfiguration(f"DATABASES[{using!r}] must be a PostgreSQL, not {backend.vendor}")
    engine = create_engine("postgresql+psycopg://", creator=lambda: _connect(using), **options)
    _lendable.add(engine.dialect)
    return adopt(engine)


def require_lendable(engine: Any, name: str) -> None:
    """Raise ``InvalidConfiguration`` unless ``database_engine`` made this engine."""
    if getattr(engine, "dialect", None) not in _lendable:
        raise InvalidConfiguration(f"{name} must be one that txbox_django.database_engine makes, for Django's ORM")


_lendable: WeakSet[Dialect] = WeakSet()
"""Dialects of engines whose connections can be lent; an engine with ``execution_options`` has the same dialect."""


class LendableConnection(psycopg.Connection[Any]):
    """A psycopg connection that can be lent to Django.

    Attributes:
        lent: whether it is lent now.
    """

    lent = False
    _own: AdaptersMap | None = None

    @property
    def adapters(self) -> AdaptersMap:
        """How values are read and written: in Django's way while the connection is lent, otherwise in psycopg's."""
        if self.lent:
            return super().adapters
        if self._own is None:
            self._own = AdaptersMap(psycopg.adapters)
        return self._own


@contextmanager
def lent(driver: Any, using: str) -> Iterator[Any]:
    """Make a connection, in its transaction, Django's connection of this thread; yield Django's wrapper of it.

    To Django it is not in autocommit mode, so the end of an ``atomic`` block commits nothing.
    """
    wrapper = connections.create_connection(using)
    wrapper.connection = driver
    wrapper.autocommit = False
    own = next((one for one in connections.all(initialized_only=True) if one.alias == using), None)
    factory, driver.cursor_factory = driver.cursor_factory, wrapper.get_connection_params()["cursor_factory"]
    driver.lent = True
    connections[using] = wrapper
    try:
        yield wrapper
    finally:
        driver.lent = False
        driver.cursor_factory = factory
        if own is None:
            del connections[using]
        else:
            connections[using] = own


class _Psycopg:
    """Replaces the module psycopg for Django, and makes connections that can be lent."""

    @staticmethod
    def connect(**parameters: Any) -> LendableConnection:
        connection = LendableConnection.connect(**parameters)
        connection.lent = True
        return connection

    def __getattr__(self, name: str) -> Any:
        return getattr(psycopg, name)


def _connect(using: str) -> LendableConnection:
    maker = connections.create_connection(using).copy()
    options = {name: value for name, value in maker.settings_dict["OPTIONS"].items() if name != "pool"}
    complete(options)
    maker.settings_dict["OPTIONS"] = options
    maker.Database = _Psycopg()
    try:
        maker.connect()
    except DatabaseError as error:  # Django's, around psycopg's, which SQLAlchemy knows
        raise error.__cause__ or error from error
    driver: LendableConnection = maker.connection
    driver.lent = False
    driver.autocommit = False
    driver.cursor_factory = psycopg.Cursor
    return driver
