"""Options that several commands share, and what they stand for."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from sqlalchemy import URL, Engine

from txbox_workers.cli.errors import UsageError
from txbox_workers.settings import DATABASE_URL_VARIABLE, Settings, database_engine, database_url

__all__ = ["Database", "JsonOption", "PrefixOption", "SchemaOption", "UrlOption", "database", "print_json"]

UrlOption = Annotated[
    str | None,
    typer.Option("--url", help=f"The database, postgresql://user:password@host/name. Or {DATABASE_URL_VARIABLE}."),
]
SchemaOption = Annotated[
    str | None, typer.Option("--schema", help="The schema of the tables; without it, the search path decides.")
]
PrefixOption = Annotated[str | None, typer.Option("--prefix", help="What the tables' names start with.")]
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
    try:
        parsed = database_url(text)
    except Exception as error:
        raise UsageError(str(error)) from error
    return Database(parsed, schema or settings.database_schema, settings.table_prefix if prefix is None else prefix)


def print_json(value: Mapping[str, Any] | list[Any]) -> None:
    """Print a value as JSON; times in ISO 8601, bytes as text as far as they are."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
