"""Servers for the tests: one Postgres and one SQS per run, one schema and one queue per test.

Which Postgres: ``TXBOX_TEST_DATABASE_URL`` names one; ``TXBOX_TEST_POSTGRES_IMAGE`` starts a container of that image;
otherwise an embedded one is started.

A run in several processes (``pytest -n``) has these servers once in each of them, but for the named Postgres, which
they share. The process that the others report to has none: it says on the last lines what they have used.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

import boto3
import hypothesis
import pytest
from sqlalchemy import Engine, QueuePool, create_engine, make_url

from support.postgres.engines import NO_HSTORE
from support.postgres.schemas import Schemas
from support.postgres.tcp_proxy import CountingProxy
from support.waiting import wait_until
from txbox_local import LocalAws, LocalPostgres

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

# In a job that a script has put into the background Ctrl-C is ignored, and programs that it starts inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's matter; pytest's own time-out ends what hangs.
hypothesis.settings.register_profile("txbox", deadline=None)
hypothesis.settings.load_profile("txbox")

pytest_plugins = [
    "support.garbage",
    "support.memory_disk",
    "support.postgres.pooled_database",
    "support.side_by_side",
    "support.spark.spark_session",
]

_servers_used: set[str] = set()

GIVEN_BACK_SECONDS = 10.0
"""A renewal or a retry that was under way at a test's end takes less."""


@pytest.fixture(scope="session")
def note_server() -> Callable[[str], None]:
    """Have the last lines of the run say which server was used."""
    return _servers_used.add


@pytest.fixture(scope="session")
def database_url(note_server: Callable[[str], None]) -> Iterator[str]:
    """The URL of a Postgres on which tests may create databases and schemas."""

    def noted(url: str, origin: str) -> str:
        engine = create_engine(url)
        with engine.connect() as connection:
            version = connection.exec_driver_sql("SHOW server_version").scalar_one()
        engine.dispose()
        note_server(f"Postgres used: {version} ({origin})")
        return url

    if url := os.environ.get("TXBOX_TEST_DATABASE_URL"):
        yield noted(url, "TXBOX_TEST_DATABASE_URL")
    elif image := os.environ.get("TXBOX_TEST_POSTGRES_IMAGE"):
        from testcontainers.community.postgres import PostgresContainer

        container = PostgresContainer(image, driver="psycopg")
        with container.with_command("postgres -c fsync=off -c max_connections=200 -c max_prepared_transactions=2"):
            yield noted(container.get_connection_url(), f"container of {image}")
    else:
        with LocalPostgres(durable=False, settings={"max_prepared_transactions": "2"}) as server:
            engine = create_engine(server.url)
            with engine.begin() as connection:  # hashed once: each of thousands of connections hashes it as often
                connection.exec_driver_sql("UPDATE pg_settings SET setting = '1' WHERE name = 'scram_iterations'")
                connection.exec_driver_sql(f"ALTER ROLE CURRENT_USER PASSWORD '{engine.url.password}'")
            engine.dispose()
            yield noted(server.url, "embedded")


@pytest.fixture(scope="session")
def admin_engine(database_url: str) -> Iterator[Engine]:
    """An engine that makes and drops what each test has to itself: one connection, for a connection takes its time."""
    engine = create_engine(database_url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
    yield engine
    engine.dispose()


@pytest.fixture
def make_database(database_url: str, admin_engine: Engine) -> Iterator[Callable[..., str]]:
    """Make an empty database and return its URL: make_database(options="")."""
    made: list[str] = []

    def make(options: str = "") -> str:
        name = f"test_{uuid.uuid4().hex[:12]}"
        with admin_engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name} {options}")
        made.append(name)
        return make_url(database_url).set(database=name).render_as_string(hide_password=False)

    yield make
    with admin_engine.connect() as connection:
        for name in made:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def fresh_database(make_database: Callable[..., str]) -> str:
    """The URL of an empty database, made for one test."""
    return make_database()


@pytest.fixture(scope="session")
def schemas(admin_engine: Engine) -> Schemas:
    """The schemas that tests have, one after the other."""
    return Schemas(admin_engine)


@contextmanager
def _schema_of_its_own(database_url: str, schemas: Schemas, *, with_business: bool = False) -> Iterator[str]:
    name = schemas.take(with_business=with_business)
    yield (
        make_url(database_url)
        .update_query_dict({"options": f"-csearch_path={name}"})
        .render_as_string(hide_password=False)
    )
    schemas.give_back(name)


@pytest.fixture
def schema_url(request: pytest.FixtureRequest, database_url: str, schemas: Schemas) -> Iterator[str]:
    """The URL of a database whose search path is a schema of one test's own, with txbox's tables in it."""
    with _schema_of_its_own(database_url, schemas, with_business="business" in request.fixturenames) as url:
        yield url


@pytest.fixture
def other_schema_url(database_url: str, schemas: Schemas) -> Iterator[str]:
    """As ``schema_url``: for a second place of txbox's tables."""
    with _schema_of_its_own(database_url, schemas) as url:
        yield url


def dispose(engine: Engine) -> None:
    """Close an engine's connections, after threads that outlive a test (a renewer's) have given theirs back.

    One that comes later is left to the garbage collector, which complains in the middle of another test.
    """
    pool = cast(QueuePool, engine.pool)
    with suppress(AssertionError):  # a connection that is never given back is that test's subject
        wait_until(lambda: pool.checkedout() == 0, "all connections are given back", timeout=GIVEN_BACK_SECONDS)
    engine.dispose()


@pytest.fixture
def engine(schema_url: str) -> Iterator[Engine]:
    """An engine on the test's own schema."""
    engine = create_engine(schema_url, pool_size=20, **NO_HSTORE)
    yield engine
    dispose(engine)


@pytest.fixture
def proxy(schema_url: str) -> Iterator[CountingProxy]:
    """A proxy in front of Postgres, which counts what goes there."""
    url = make_url(schema_url)
    with CountingProxy(url.host or "127.0.0.1", url.port or 5432) as proxy:
        yield proxy


@pytest.fixture
def proxied(schema_url: str, proxy: CountingProxy) -> Iterator[Engine]:
    """An engine whose connections pass through the proxy."""
    engine = create_engine(make_url(schema_url).set(host="127.0.0.1", port=proxy.port), pool_size=10, **NO_HSTORE)
    yield engine
    dispose(engine)


@pytest.fixture(scope="session")
def aws(note_server: Callable[[str], None]) -> Iterator[LocalAws]:
    """A local SQS over real HTTP; boto3's variables point to it for the whole run."""
    with LocalAws() as server, pytest.MonkeyPatch.context() as patch:
        note_server(f"SQS used: moto {metadata.version('moto')} (local)")
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def sqs(aws: LocalAws) -> Iterator[SQSClient]:
    """A client of the local SQS."""
    client = boto3.client("sqs")
    yield client
    client.close()


@pytest.fixture
def make_queue(sqs: SQSClient) -> Callable[..., str]:
    """Make a queue and return its URL: make_queue(fifo=False, **attributes)."""

    def make(*, fifo: bool = False, **attributes: Any) -> str:
        name = f"test-{uuid.uuid4().hex[:12]}{'.fifo' if fifo else ''}"
        if fifo:
            attributes["FifoQueue"] = "true"
        return sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]

    return make


@pytest.fixture
def queue(make_queue: Callable[..., str]) -> str:
    """The URL of a standard queue, made for one test."""
    return make_queue()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that this one reports to which servers were used here."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["servers_used"] = sorted(_servers_used)


@pytest.hookimpl(optionalhook=True)  # there is no such hook without pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Learn which servers a process has used that ends; one that was killed does not say."""
    _servers_used.update(getattr(node, "workeroutput", {}).get("servers_used", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say on the last lines which servers were used."""
    for line in sorted(_servers_used):
        terminalreporter.write_line(line)
