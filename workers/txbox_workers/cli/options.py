"""Options that several commands share, and what they stand for."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from sqlalchemy import URL, Engine

from txbox import InvalidConfiguration
from txbox_workers.cli.errors import UsageError
from txbox_workers.settings import DATABASE_URL_VARIABLE, Settings, database_engine, database_url

__all__ = [
    "PREFIX_VARIABLE",
    "SCHEMA_VARIABLE",
    "Database",
    "JsonOption",
    "PrefixOption",
    "SchemaOption",
    "UrlOption",
    "database",
    "read_url",
    "require_queue_url",
]

SCHEMA_VARIABLE = "TXBOX_DATABASE_SCHEMA"
PREFIX_VARIABLE = "TXBOX_TABLE_PREFIX"

UrlOption = Annotated[
    str | None,
    typer.Option("--url", help=f"The database, postgresql://user:password@host/name. Or {DATABASE_URL_VARIABLE}."),
]
SchemaOption = Annotated[
    str | None,
    typer.Option(
        "--schema", help=f"The schema of the tables. Or {SCHEMA_VARIABLE}; without either, the search path decides."
    ),
]
PrefixOption = Annotated[
    str | None, typer.Option("--prefix", help=f"What the tables' names start with. Or {PREFIX_VARIABLE}.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(frozen=True, slots=True)
class Database:
    """Where the tables are."""

    url: URL
    schema: str | None
    prefix: str

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """Open an engine for one command."""
        engine = database_engine(self.url)
        try:
            yield engine
        finally:
            engine.dispose()


def database(url: str | None, schema: str | None, prefix: str | None) -> Database:
    """Return the database that the options, or else the environment, name.

    Raises:
        UsageError: neither names one, or not in a way that can be read.
    """
    settings = Settings()
    text = url or (settings.database_url.get_secret_value() if settings.database_url else None)
    if not text:
        raise UsageError(f"no database is named; give --url or set {DATABASE_URL_VARIABLE} (`txbox dev` starts one)")
    return Database(
        read_url(text), schema or settings.database_schema, settings.table_prefix if prefix is None else prefix
    )


def read_url(text: str) -> URL:
    """Read a database URL.

    Raises:
        UsageError: it is not the URL of a Postgres database.
    """
    try:
        return database_url(text)
    except InvalidConfiguration as error:
        raise UsageError(str(error)) from error


def require_queue_url(text: str) -> None:
    """Refuse what cannot be the URL of an SQS queue; a queue's name alone is not one.

    Raises:
        UsageError: it is not such a URL.
    """
    if not re.fullmatch(r"https?://[^/\s]+/\d+/[\w.-]+", text):
        raise UsageError(f"--queue must be the URL of a queue, https://HOST/ACCOUNT/NAME, not {text!r}")
