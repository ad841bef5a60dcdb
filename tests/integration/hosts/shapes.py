"""Shapes of hosts: how each makes its engines and sessions, and what kind of database it has."""

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from support.postgres.host_loaders import AsBytes, AsDecimal, AsText, Loaders, Upper, register_loaders
from support.postgres.statements import run
from support.postgres.tables import table_statements
from support.postgres.transaction_pooler import transaction_pooler
from support.waiting import wait_until
from support.workers.business import TABLES
from support.workers.mapped import Base


@dataclass(frozen=True)
class Server:
    """Where a test's tables are.

    Attributes:
        url: of a schema with our tables and those of ``Business``.
        admin: an engine on it, with all rights.
        make_database: makes another database and returns its URL.
        replicated: returns the URLs of another server, and of its replica.
    """

    url: str
    admin: Engine
    make_database: Callable[..., str]
    replicated: Callable[[], tuple[str, str]]

    @property
    def schema(self) -> str:
        """The schema's name."""
        return str(make_url(self.url).query["options"]).removeprefix("-csearch_path=")

    def with_options(self, options: str) -> str:
        """Return the URL with other options of the session."""
        return text_of(make_url(self.url).update_query_dict({"options": options}))


@dataclass(frozen=True)
class Place:
    """What a host connects to.

    Attributes:
        url: as the host has it.
        truth: a URL by which all that was done can be read; None: there is nothing to read.
        catch_up: waits until what was done there can be read by ``url``.
    """

    url: str
    truth: str | None
    catch_up: Callable[[], None] = lambda: None


Database = Callable[[Server], AbstractContextManager[Place]]


@contextmanager
def plain(server: Server) -> Iterator[Place]:
    yield Place(server.url, server.url)


def with_settings(*settings: str) -> Database:
    """Have the sessions of a host begin with settings of the server."""

    @contextmanager
    def database(server: Server) -> Iterator[Place]:
        options = " ".join([f"-csearch_path={server.schema}", *(f"-c{one}" for one in settings)])
        yield Place(server.with_options(options), server.url)

    return database


@contextmanager
def pooled(server: Server) -> Iterator[Place]:
    with transaction_pooler(server.url, size=3) as (_, through):
        yield Place(through, server.url)


def encoded(encoding: str) -> Database:
    """Have the database of a host be in another encoding than UTF-8."""

    @contextmanager
    def database(server: Server) -> Iterator[Place]:
        url = server.make_database(f"ENCODING '{encoding}' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0")
        with psycopg.connect(text_of(make_url(url).set(drivername="postgresql"))) as connection:
            connection.execute(f"{table_statements()};{TABLES}".encode())
        # Without it, SQLAlchemy itself cannot make an engine's first connection to a database in SQL_ASCII.
        yield Place(text_of(make_url(url).update_query_dict({"options": "-cclient_encoding=UTF8"})), None)

    return database


@contextmanager
def off_the_search_path(server: Server) -> Iterator[Place]:
    yield Place(server.with_options("-csearch_path=pg_catalog"), server.url)


@contextmanager
def in_a_later_schema(server: Server) -> Iterator[Place]:
    """The search path begins with a schema of the host's own, which lacks our tables."""
    own = f"own_{uuid.uuid4().hex[:8]}"
    run(server.admin, f"CREATE SCHEMA {own}")
    yield Place(server.with_options(f"-csearch_path={own},{server.schema}"), server.url)
    run(server.admin, f"DROP SCHEMA {own}")


def row_security(tables: tuple[str, ...], policy: str) -> Database:
    """Have a host be a role for which tables have row-level security, with a policy or with none."""

    @contextmanager
    def database(server: Server) -> Iterator[Place]:
        role = f"host_{uuid.uuid4().hex[:8]}"
        rights = f"GRANT ALL ON ALL TABLES IN SCHEMA {server.schema} TO {role}"
        run(server.admin, f"CREATE ROLE {role}; GRANT pg_read_all_stats TO {role}; {rights}")
        run(server.admin, f"GRANT USAGE ON SCHEMA {server.schema} TO {role}; {rights.replace('TABLES', 'SEQUENCES')}")
        for table in tables:
            run(server.admin, f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            if policy:
                run(server.admin, f"CREATE POLICY host ON {table} {policy}")
        yield Place(server.with_options(f"-csearch_path={server.schema} -crole={role}"), server.url)
        run(server.admin, f"DROP OWNED BY {role}; DROP ROLE {role}")

    return database


@contextmanager
def replica(server: Server) -> Iterator[Place]:
    primary, standby = (create_engine(url, isolation_level="AUTOCOMMIT") for url in server.replicated())

    def catch_up() -> None:
        with primary.connect() as here, standby.connect() as there:
            written = here.exec_driver_sql("SELECT pg_current_wal_insert_lsn()").scalar_one()
            reached = f"SELECT pg_last_wal_replay_lsn() >= '{written}'"
            wait_until(lambda: bool(there.exec_driver_sql(reached).scalar_one()), "the replica has caught up")

    yield Place(text_of(standby.url), text_of(primary.url), catch_up)
    primary.dispose()
    standby.dispose()


def text_of(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def no_options(_: Any) -> dict[str, Any]:
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
    sessions: Callable[[Any], dict[str, Any]] = no_options
    loaders: Loaders = field(default_factory=dict)

    def engine(self, url: str) -> Engine:
        """Make an engine for functions."""
        engine = create_engine(url, **self.options)
        register_loaders(engine, self.loaders)
        return engine

    def async_engine(self, url: str) -> Any:
        """Make one for coroutines."""
        engine = create_async_engine(url, **self.options)
        register_loaders(engine.sync_engine, self.loaders)
        return engine


OURS = ("processed_message", "outbox_message", "dead_letter", "message_failure")

HOSTS: dict[str, Host] = {
    "an engine, and `Session`": Host(),
    "sessions with `binds`": Host(sessions=binds),
    "sessions with `get_bind`": Host(sessions=routing),
    "sessions with `twophase=True`": Host(sessions=lambda _: {"twophase": True}),
    "a loader that changes text": Host(loaders={"text": Upper}),
    "a loader of text as bytes": Host(loaders={"text": AsBytes}),
    "a loader of jsonb as text": Host(loaders={"jsonb": AsText}),
    "a loader of int8 as Decimal": Host(loaders={"int8": AsDecimal}),
    "an engine in `AUTOCOMMIT`": Host(options={"isolation_level": "AUTOCOMMIT"}),
    "a pooler in transaction mode": Host(database=pooled),
    "`prepare_threshold=None`": Host(options={"connect_args": {"prepare_threshold": None}}),
    "a database in LATIN1": Host(database=encoded("LATIN1")),
    "a database in SQL_ASCII, read as UTF-8": Host(database=encoded("SQL_ASCII")),
    "`client_encoding=LATIN1`": Host(database=with_settings("client_encoding=LATIN1")),
    "tables in a later schema of `search_path`": Host(database=in_a_later_schema),
    "tables off the `search_path`": Host(database=off_the_search_path),
    "row-level security on your own tables": Host(database=row_security(("effect",), "WITH CHECK (true)")),
    "row-level security on txbox's tables, without a policy": Host(database=row_security(OURS, "")),
    "row-level security on txbox's tables that hides nothing": Host(
        database=row_security(OURS, "USING (true) WITH CHECK (true)")
    ),
    "row-level security on txbox's tables that hides rows": Host(
        database=row_security(OURS, "USING (false) WITH CHECK (true)")
    ),
    "`statement_timeout` of a second": Host(database=with_settings("statement_timeout=1s")),
    "`default_transaction_read_only`": Host(database=with_settings("default_transaction_read_only=on")),
    "a read-only replica": Host(database=replica),
}
