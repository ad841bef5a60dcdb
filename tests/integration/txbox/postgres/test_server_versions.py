"""A server that is older than those txbox was tried with is refused at the first contact, on every road."""

import asyncio
from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from support.postgres.transaction_pooler import transaction_pooler
from support.txbox.publishers import RecordingPublisher
from support.workers.memory_worker import make
from txbox import Inbox, InvalidConfiguration
from txbox.coroutines import AsyncInbox
from txbox.leases import PostgresLedger
from txbox.maintenance import Maintainer, Retention
from txbox.outbox import Outbox
from txbox.postgres.urls import database_engine, database_url
from txbox.relay import Relay
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone, posts_and_patches
from txbox_migrations import upgrade_database
from txbox_workers.memory_source import MemorySource

REFUSED = r"^this server is PostgreSQL 13\.9, and txbox needs 14 or newer; upgrade the server$"


@pytest.fixture
def old(make_database: Callable[..., str]) -> Iterator[str]:
    """A database with our tables, whose server says of itself that it is PostgreSQL 13."""
    url = make_database()
    upgrade_database(url)
    with transaction_pooler(url, size=4, version="13.9 (Debian 13.9-1)") as (_, through):
        yield through


@pytest.fixture
def make_old_engine(old: str) -> Iterator[Callable[[], Engine]]:
    engines: list[Engine] = []

    def made() -> Engine:
        engines.append(create_engine(old, poolclass=NullPool, connect_args={"prepare_threshold": None}))
        return engines[-1]

    yield made
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize(
    "start",
    [
        lambda engine: make(MemorySource(), engine).start(),
        lambda engine: Relay(engine, {"own": RecordingPublisher()}).start(),
        lambda engine: Maintainer(engine).start(),
        lambda engine: Maintainer(engine, Retention()).plan(),
        lambda engine: PostgresLedger("mailing", engine=engine).check(),
        lambda engine: PostgresLedger("mailing", engine=engine).acquire("m1"),
        lambda engine: upgrade_database(engine),
    ],
    ids=["worker", "relay", "maintainer", "plan", "ledger", "lease", "migrations"],
)
def test_what_starts_is_refused(make_old_engine: Callable[[], Engine], start: Callable[[Engine], object]) -> None:
    engine = make_old_engine()
    for _ in range(2):
        with pytest.raises(InvalidConfiguration, match=REFUSED):
            start(engine)


@pytest.mark.parametrize(
    "use",
    [
        lambda connection: Inbox("billing").record(connection, "m1"),
        lambda connection: Outbox().publish(connection, "own:x", "{}"),
        lambda connection: Inbox("billing").check(connection),
        lambda connection: Outbox().check(connection),
    ],
    ids=["record", "publish", "inbox", "outbox"],
)
def test_a_transaction_of_the_callers_is_refused(
    make_old_engine: Callable[[], Engine], old: str, use: Callable[["Connection | psycopg.Connection"], object]
) -> None:
    """The caller's own engine, and psycopg's own connection."""
    with make_old_engine().connect() as connection, pytest.raises(InvalidConfiguration, match=REFUSED):
        use(connection)
    plain = make_url(old).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as connection, pytest.raises(InvalidConfiguration, match=REFUSED):
        use(connection)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_coroutines_are_refused(old: str, driver: str) -> None:
    url = make_url(old).set(drivername=f"postgresql+{driver}", query={})

    async def record() -> None:
        engine = create_async_engine(url, poolclass=NullPool)
        async with engine.connect() as connection:
            await AsyncInbox("billing").record(connection, "m1")

    with pytest.raises(InvalidConfiguration, match=REFUSED):
        asyncio.run(record())


def test_a_request_is_refused(make_old_engine: Callable[[], Engine]) -> None:
    sessions = sessionmaker(make_old_engine())
    once = Idempotency(InTransaction(sessions, Inbox("billing")), caller=everyone)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("done", 201)(scope, receive, send)

    client = TestClient(IdempotencyMiddleware(answer, once, covers=posts_and_patches))
    with pytest.raises(InvalidConfiguration, match=REFUSED):
        client.post("/", headers={"idempotency-key": "k1"})


def test_commands_are_refused(old: str) -> None:
    engine = database_engine(database_url(old))
    with pytest.raises(InvalidConfiguration, match=REFUSED):
        engine.connect()
    engine.dispose()


@pytest.mark.parametrize("version", ["14.0", "19beta1", "18.1 (Debian 18.1-1)"])
def test_others_are_not(make_database: Callable[..., str], version: str) -> None:
    url = make_database()
    upgrade_database(url)
    with transaction_pooler(url, size=2, version=version) as (_, through):
        engine = create_engine(through, poolclass=NullPool, connect_args={"prepare_threshold": None})
        with engine.begin() as connection:
            assert Inbox("billing").record(connection, "m1")
        engine.dispose()
