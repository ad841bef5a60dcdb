"""The edge where environment variables are read. AWS's are boto3's own business."""

import os

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError

from txbox import InvalidConfiguration
from txbox.connections import open_engine

__all__ = ["DATABASE_URL_VARIABLE", "Settings", "aws_endpoint", "database_engine", "database_url"]

DATABASE_URL_VARIABLE = "TXBOX_DATABASE_URL"

CONNECT_SECONDS = 5
"""How long the command line waits for a database to answer."""


class Settings(BaseSettings):
    """What the environment says; the command line's options come before it."""

    model_config = SettingsConfigDict(env_prefix="TXBOX_", extra="ignore")

    database_url: SecretStr | None = Field(default=None, description="the database, as an SQLAlchemy URL")
    database_schema: str | None = Field(default=None, description="the schema of the tables")
    table_prefix: str = Field(default="", description="what the tables' names start with")


def aws_endpoint() -> str | None:
    """Where boto3 will look for SQS, if that is not AWS itself."""
    return os.environ.get("AWS_ENDPOINT_URL_SQS") or os.environ.get("AWS_ENDPOINT_URL")


def database_url(text: str) -> URL:
    """Read a database URL; ``postgres://`` and ``postgresql://`` mean psycopg 3.

    Raises:
        InvalidConfiguration: it is not the URL of a Postgres database.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise InvalidConfiguration(f"this is not a database URL; {_URL_FORM}") from error
    if url.drivername in ("postgres", "postgresql"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername != "postgresql+psycopg":
        raise InvalidConfiguration(f"a database of kind {url.drivername} cannot be used; {_URL_FORM}")
    if "@" in (url.host or ""):
        raise InvalidConfiguration("the host in the database URL has an @; in a password, write it as %40")
    return url


def database_engine(url: URL, **options: object) -> Engine:
    """Make an engine that gives up on an unreachable server after ``CONNECT_SECONDS``."""
    query = dict(url.query)
    query.setdefault("connect_timeout", str(CONNECT_SECONDS))
    query.setdefault("application_name", "txbox")
    try:
        return open_engine(url.set(query=query), **options)
    except ValueError as error:
        raise InvalidConfiguration(f"the database URL cannot be used: {error}; {_URL_FORM}") from error


_URL_FORM = "give postgresql://user:password@host:5432/database"
