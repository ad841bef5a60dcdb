"""Shapes of hosts: how each makes its engines and sessions, and what kind of database it has."""

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import psycopg
from psycopg.adapt import Loader
from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from support.postgres.tables import table_statements
from support.postgres.transaction_pooler import transaction_pooler
from support.workers.business import TABLES
from support.workers.mapped import Base


@dataclass(frozen=True)
class Server:
    """Where a test's tables are.

    Attributes:
        url: of a schema with our tables and those of ``Business``.
        admin: an engine on it, with all rights.
        make_database: makes another database and returns its URL.
    """

    url: str
    admin: Engine
    make_database: Callable[..., str]


Database = Callable[[Server], AbstractContextManager[str]]
"""Gives the URL that a host connects with."""


class Upper(Loader):
    def load(self, data: Any) -> Any:
        return bytes(data).decode().upper()


class AsBytes(Loader):
    def load(self, data: Any) -> Any:
        return bytes(data)


class AsText(Loader):
    def load(self, data: Any) -> Any:
        return bytes(data).decode()


class AsDecimal(Loader):
    def load(self, data: Any) -> Any:
        return Decimal(bytes(data).decode())


@contextmanager
def plain(server: Server) -> Iterator[str]:
    yield server.url


def with_settings(*settings: str) -> Database:
    """Have the sessions of a host begin with settings of the server."""

    @contextmanager
    def database(server: Server) -> Iterator[str]:
        url = make_url(server.url)
        options = " ".join([str(url.query["options"]), *(f"-c{one}" for one in settings)])
        yield text_of(url.update_query_dict({"options": options}))

    return database


@contextmanager
def pooled(server: Server) -> Iterator[str]:
    with transaction_pooler(server.url, size=3) as (_, through):
        yield through


def encoded(encoding: str) -> Database:
    """Have the database of a host be in another encoding than UTF-8."""

    @contextmanager
    def database(server: Server) -> Iterator[str]:
        url = server.make_database(f"ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
        with psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(False)) as connection:
            connection.execute(f"{table_statements()};{TABLES}".encode())
        yield url

    return database


@contextmanager
def off_the_search_path(server: Server) -> Iterator[str]:
    yield text_of(make_url(server.url).update_query_dict({"options": "-csearch_path=pg_catalog"}))


@contextmanager
def in_another_schema_first(server: Server) -> Iterator[str]:
    """A search path whose first schema, the host's own, lacks our tables."""
    own = f"own_{uuid.uuid4().hex[:8]}"
    path = str(make_url(server.url).query["options"]).partition("=")[2]
    execute(server.admin, f"CREATE SCHEMA {own}")
    yield text_of(make_url(server.url).update_query_dict({"options": f"-csearch_path={own},{path}"}))
    execute(server.admin, f"DROP SCHEMA {own}")


def row_security(tables: tuple[str, ...], policy: str | None) -> Database:
    """Have a host be a role for which tables have row-level security."""

    @contextmanager
    def database(server: Server) -> Iterator[str]:
        path = str(make_url(server.url).query["options"]).partition("=")[2]
        role = f"host_{uuid.uuid4().hex[:8]}"
        execute(
            server.admin,
            f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {path} TO {role};"
            f"GRANT ALL ON ALL TABLES IN SCHEMA {path} TO {role}; GRANT ALL ON ALL SEQUENCES IN SCHEMA {path} TO {role}",
        )
        for table in tables:
            execute(server.admin, f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            if policy:
                execute(server.admin, f"CREATE POLICY host ON {table} {policy}")
        yield text_of(make_url(server.url).update_query_dict({"options": f"-csearch_path={path} -crole={role}"}))
        for table in tables:
            execute(server.admin, f"DROP POLICY IF EXISTS host ON {table}")
            execute(server.admin, f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
        execute(server.admin, f"DROP OWNED BY {role}; DROP ROLE {role}")

    return database


def text_of(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def execute(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)


def no_options(engine: Engine) -> dict[str, Any]:
    return {}


def binds(engine: Any) -> dict[str, Any]:
    return {"binds": {Base: engine}}


def routing(engine: Any) -> dict[str, Any]:
    plain_engine = getattr(engine, "sync_engine", engine)

    class Routing(Session):
        def get_bind(self, *_: Any, **__: Any) -> Engine:
            return plain_engine

    return {"class_": Routing}


@dataclass(frozen=True, kw_only=True)
class Host:
    """How a host makes what it gives to txbox.

    Attributes:
        database: where it connects to.
        options: of ``create_engine``.
        sessions: options of ``sessionmaker``, by the engine.
        loaders: of psycopg, by type, which each connection has.
    """

    database: Database = plain
    options: Mapping[str, Any] = field(default_factory=dict)
    sessions: Callable[[Engine], dict[str, Any]] = no_options
    loaders: Mapping[str, type[Loader]] = field(default_factory=dict)

    def engine(self, url: str) -> Engine:
        """Make an engine for functions."""
        return self._prepared(create_engine(url, **self.options))

    def async_engine(self, url: str) -> Any:
        """Make one for coroutines."""
        engine = create_async_engine(url, **self.options)
        self._prepared(engine.sync_engine)
        return engine

    def register(self, driver: Any) -> None:
        """Register the host's loaders at a connection of the driver's."""
        for name, loader in self.loaders.items():
            driver.adapters.register_loader(name, loader)

    def _prepared(self, engine: Engine) -> Engine:
        @event.listens_for(engine, "connect")
        def connected(dbapi_connection: Any, _: object) -> None:
            self.register(getattr(dbapi_connection, "driver_connection", dbapi_connection))

        return engine


OURS = ("processed_message", "outbox_message", "dead_letter", "message_failure")

HOSTS: dict[str, Host] = {
    "an engine and `Session`": Host(),
    "sessions with `binds`": Host(sessions=binds),
    "sessions with `get_bind`": Host(sessions=routing),
    "sessions with `twophase=True`": Host(sessions=lambda _: {"twophase": True}),
    "a loader of text": Host(loaders={"text": Upper}),
    "a loader of text as bytes": Host(loaders={"text": AsBytes}),
    "a loader of jsonb": Host(loaders={"jsonb": AsText}),
    "a loader of int8": Host(loaders={"int8": AsDecimal}),
    "an engine in `AUTOCOMMIT`": Host(options={"isolation_level": "AUTOCOMMIT"}),
    "a pooler in transaction mode": Host(database=pooled),
    "prepared statements off": Host(options={"connect_args": {"prepare_threshold": None}}),
    "a database in LATIN1": Host(database=encoded("LATIN1")),
    "a database in SQL_ASCII": Host(database=encoded("SQL_ASCII")),
    "`client_encoding=LATIN1`": Host(database=with_settings("client_encoding=LATIN1")),
    "tables in a later schema of `search_path`": Host(database=in_another_schema_first),
    "tables off the `search_path`": Host(database=off_the_search_path),
    "row-level security on its own tables": Host(
        database=row_security(("effect",), "USING (message_id <> 'theirs') WITH CHECK (true)")
    ),
    "row-level security without a policy": Host(database=row_security(OURS, None)),
    "row-level security that hides": Host(database=row_security(OURS, "USING (false) WITH CHECK (true)")),
    "`statement_timeout`": Host(database=with_settings("statement_timeout=2000")),
    "`default_transaction_read_only`": Host(database=with_settings("default_transaction_read_only=on")),
}
