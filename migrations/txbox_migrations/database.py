"""Upgrade a database by our own alembic history, as ``txbox db upgrade`` does."""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.engine import URL, Connection, Engine

from txbox.errors import InvalidConfiguration
from txbox.postgres.engines import open_engine
from txbox.postgres.urls import database_url
from txbox_migrations.environment import VersionChange
from txbox_migrations.errors import MigrationError
from txbox_migrations.steps import LATEST
from txbox_migrations.version_mark import require_prefix, require_version

_HISTORY: Final = Path(__file__).parent / "history"
_STEPS: Final = Path(__file__).parent / "steps"

# alembic.context and alembic.op belong to the process, not the thread: two runs at once would mix them up.
_ALEMBIC: Final = threading.Lock()


def upgrade_database(
    database: str | URL | Engine, *, schema: str | None = None, prefix: str = "", to: int = LATEST
) -> VersionChange:
    """Create our tables or bring them up to a version, in one transaction.

    The version is kept in our own table, ``txbox_version``, so the host's alembic history is never touched. Runs that
    collide wait for each other. Do not call it inside an alembic environment: a revision calls
    ``txbox_migrations.upgrade``.

    Args:
        database: the URL of a Postgres database, or an engine.
        schema: the schema of the tables, created if it does not exist; None: the connection's search path.
        prefix: put before the name of every table, index and constraint.
        to: the version to reach, BASELINE (10) to LATEST; at or above it nothing happens.

    Returns:
        The version before and after.

    Raises:
        MigrationError: another alembic history manages the tables, they are from before the baseline, a version is
            unknown, or the prefix is too long.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be reached, or refuses.
    """
    require_version("to", to, lowest=1)
    require_prefix(prefix)
    return _run(command.upgrade, str(to), database, schema, prefix)


def downgrade_database(
    database: str | URL | Engine, *, schema: str | None = None, prefix: str = "", to: int = 0
) -> VersionChange:
    """Take our tables back down to a version, in one transaction; what the dropped tables held is lost.

    Args:
        database: the URL of a Postgres database, or an engine.
        schema: the schema of the tables, which stays; None: the connection's search path.
        prefix: the prefix of every name.
        to: the version to reach, up to LATEST; 0: no tables, no version table.

    Returns:
        The version before and after.

    Raises:
        MigrationError: another alembic history manages the tables, they are below ``to``, or a version is unknown.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be reached, or refuses.
    """
    require_version("to", to)
    return _run(command.downgrade, str(to) if to else "base", database, schema, prefix)


def migration_sql(*, since: int = 0, to: int = LATEST, schema: str | None = None, prefix: str = "") -> str:
    """Return the SQL that ``upgrade_database`` or ``downgrade_database`` would run, for a person to run.

    Args:
        since: the version the tables will be at when the script runs; 0: no tables.
        to: the version to reach: an upgrade if above ``since``, a downgrade if below.
        schema: the schema of the tables; None: the search path in which the script is run.
        prefix: the prefix of every name.

    Returns:
        A script for psql, one transaction.

    Raises:
        MigrationError: a version is unknown, or both are the same.
    """
    require_version("since", since)
    require_version("to", to)
    if since == to:
        raise MigrationError(f"since={since} and to={to}: there is nothing to do between a version and itself")
    if to > since:
        require_prefix(prefix)
    script = io.StringIO()
    config = _config(schema, prefix, output_buffer=script)
    change = command.upgrade if to > since else command.downgrade
    with _ALEMBIC:
        change(config, f"{since or 'base'}:{to or 'base'}", sql=True)
    return script.getvalue()


@contextmanager
def connected(database: str | URL | Engine) -> Iterator[Connection]:
    """Yield a READ COMMITTED connection for one run; raise ``MigrationError`` if the URL is not of a Postgres."""
    if isinstance(database, Engine):
        with database.connect() as connection:
            yield connection.execution_options(isolation_level="READ COMMITTED")
        return
    engine = open_engine(_psycopg_url(database), poolclass=sa.NullPool, isolation_level="READ COMMITTED")
    with engine.connect() as connection:
        yield connection


def _run(
    change: Callable[[Config, str], None],
    revision: str,
    database: str | URL | Engine,
    schema: str | None,
    prefix: str,
) -> VersionChange:
    with connected(database) as connection:
        config = _config(schema, prefix, attributes={"connection": connection})
        with _ALEMBIC:
            try:
                change(config, revision)
            except MigrationError:
                raise
            except CommandError as error:
                if "not a valid downgrade target" in str(error):
                    below = f"the tables are below version {revision}, so they cannot be taken down to it"
                    raise MigrationError(f"{below}; `txbox db upgrade --to {revision}` brings them up to it") from error
                raise MigrationError(str(error)) from error
    done = config.attributes["change"]
    assert isinstance(done, VersionChange)  # noqa: S101 # what history/env.py has left there
    return done


def _config(
    schema: str | None,
    prefix: str,
    *,
    attributes: dict[str, Any] | None = None,
    output_buffer: io.StringIO | None = None,
) -> Config:
    config = Config(attributes={"schema": schema, "prefix": prefix, **(attributes or {})}, output_buffer=output_buffer)
    config.set_main_option("script_location", str(_HISTORY).replace("%", "%%"))
    config.set_main_option("version_locations", str(_STEPS).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    return config


def _psycopg_url(url: str | URL) -> URL:
    try:
        return database_url(url)
    except InvalidConfiguration as error:
        raise MigrationError(str(error)) from error
