"""Loaders that hosts register with psycopg: what Postgres sends comes to them as something else."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from psycopg.adapt import Loader
from sqlalchemy import Engine, event


class AsBytes(Loader):
    """Leaves all as bytes."""

    def load(self, data: Any) -> Any:
        """As psycopg asks."""
        return bytes(data)


class AsText(Loader):
    """Leaves all as text."""

    def load(self, data: Any) -> Any:
        """As psycopg asks."""
        return bytes(data).decode()


class Upper(Loader):
    """Strips text, and has it in upper case."""

    def load(self, data: Any) -> Any:
        """As psycopg asks."""
        return bytes(data).decode().strip().upper()


class AsDecimal(Loader):
    """Makes decimals of numbers."""

    def load(self, data: Any) -> Any:
        """As psycopg asks."""
        return Decimal(bytes(data).decode())


Loaders = Mapping[str, type[Loader]]
"""By the names of types."""


def register_loaders(engine: Engine, loaders: Loaders) -> None:
    """Register loaders at each new connection of an engine, for functions or for coroutines."""

    @event.listens_for(engine, "connect")
    def register(dbapi_connection: Any, _: object) -> None:
        register_at(getattr(dbapi_connection, "driver_connection", dbapi_connection), loaders)


def register_at(connection: Any, loaders: Loaders) -> None:
    """Register loaders at a connection of psycopg."""
    for name, loader in loaders.items():
        connection.adapters.register_loader(name, loader)
