"""The database that a job of Spark works with, as its caller names it."""

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from txbox import InvalidConfiguration

__all__ = ["database_url"]


def database_url(url: str | URL) -> URL:
    """Return a database's URL with the driver that is used, whichever one it names.

    Raises:
        InvalidConfiguration: it is no URL, or one of another kind of database.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        raise InvalidConfiguration("url is not a database URL; give postgresql://user:password@host/name") from error
    if parsed.get_backend_name() not in ("postgres", "postgresql"):
        raise InvalidConfiguration(f"url names a database of kind {parsed.drivername}; give postgresql://…")
    return parsed.set(drivername="postgresql+psycopg")
