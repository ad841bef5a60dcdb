"""Database URLs: the only place that reads them."""

from typing import TYPE_CHECKING

from txbox.errors import InvalidConfiguration

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

DATABASE_URL_VARIABLE = "TXBOX_DATABASE_URL"
"""The environment variable from which our programs take the database URL."""

PROGRAM_CONNECT_SECONDS = 5
"""How long a program waits for a database to answer."""


def database_url(given: "str | URL") -> "URL":
    """Read a database URL: ``postgresql://``, ``postgres://`` or ``postgresql+psycopg://``, all with psycopg 3.

    Raise ``InvalidConfiguration`` for any other text.
    """
    from sqlalchemy import make_url  # imported late: the command line's help only names the variable
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(given)
    except (ArgumentError, ValueError) as error:
        raise InvalidConfiguration(f"this is not a database URL; {_URL_FORM}") from error
    if url.drivername in ("postgres", "postgresql"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername != "postgresql+psycopg":
        raise InvalidConfiguration(f"{url.drivername}:// cannot be used: Postgres with psycopg 3 is; {_URL_FORM}")
    if "@" in (url.host or ""):
        raise InvalidConfiguration("the host in the database URL has an @; in a password, write it as %40")
    return url


def database_engine(url: "URL", **options: object) -> "Engine":
    """Return an engine that waits for an unreachable server for ``PROGRAM_CONNECT_SECONDS``."""
    from txbox.postgres.engines import open_engine

    query = dict(url.query)
    query.setdefault("connect_timeout", str(PROGRAM_CONNECT_SECONDS))
    query.setdefault("application_name", "txbox")
    try:
        return open_engine(url.set(query=query), **options)
    except ValueError as error:
        raise InvalidConfiguration(f"the database URL cannot be used: {error}; {_URL_FORM}") from error


_URL_FORM = "give postgresql://user:password@host:5432/database"
