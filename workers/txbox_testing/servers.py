"""The Postgres of the fixtures, and each test's own database."""

import contextlib
import uuid
from collections.abc import Callable, Iterator

from psycopg import sql
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url

from txbox import InvalidConfiguration

CREATE = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
COPY_FILES = sql.SQL(" STRATEGY file_copy")
DROP = sql.SQL("DROP DATABASE {} WITH (FORCE)")

FAST_COPY_SINCE = 150000
"""By default, PostgreSQL 15 writes a copy to its log, which takes three times as long for a database this small."""

EMPTY = "template0"


@contextlib.contextmanager
def postgres(server: str) -> Iterator[str]:
    """Yield the URL of a server: an embedded one, a container of the image ``server``, or the URL itself.

    Raises:
        InvalidConfiguration: what it needs is not installed.
        LocalServerError: the embedded server does not start.
    """
    if "://" in server:
        yield server
    elif server == "embedded":
        from txbox_local import LocalPostgres

        with LocalPostgres(durable=False) as embedded:
            yield embedded.url
    else:
        try:
            from testcontainers.community.postgres import PostgresContainer
        except ImportError as error:
            raise InvalidConfiguration(
                f"txbox_postgres = {server} is an image, and needs testcontainers: pip install 'testcontainers>=4.15'"
            ) from error
        with PostgresContainer(server, driver="psycopg").with_command("postgres -c fsync=off") as container:
            yield container.get_connection_url()


@contextlib.contextmanager
def template(server: str, prepare: Callable[[Engine], object]) -> Iterator[str]:
    """Yield the URL of a new database with txbox's tables and what ``prepare`` creates."""
    import txbox_migrations

    with _created(make_url(server), EMPTY) as url:
        txbox_migrations.upgrade_database(url)
        engine = create_engine(url, poolclass=NullPool)  # a database that has sessions cannot be copied
        prepare(engine)
        engine.dispose()
        yield url.render_as_string(hide_password=False)


@contextlib.contextmanager
def copied(url: str) -> Iterator[str]:
    origin = make_url(url)
    with _created(origin, origin.database or "") as copy:
        yield copy.render_as_string(hide_password=False)


@contextlib.contextmanager
def _created(server: URL, origin: str) -> Iterator[URL]:
    name = f"txbox_test_{uuid.uuid4().hex[:12]}"
    engine = create_engine(server.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        create = CREATE.format(sql.Identifier(name), sql.Identifier(origin))
        _execute(connection, create + COPY_FILES if _version(connection) >= FAST_COPY_SINCE else create)
    try:
        yield server.set(database=name)
    finally:
        with engine.connect() as connection:
            _execute(connection, DROP.format(sql.Identifier(name)))


def _execute(connection: Connection, statement: sql.Composed) -> None:
    connection.exec_driver_sql(statement.as_string(None))


def _version(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SHOW server_version_num").scalar_one())
