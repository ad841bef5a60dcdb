"""Pooled connections that were left in a state in which our statements fail: they go, and new ones are made."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from support.txbox.outbox import OUTBOX, OWN
from support.txbox.publishers import RecordingPublisher
from support.workers.memory_worker import at_work, make, numbered, work_off
from txbox import Inbox, InvalidConfiguration, Message, SchemaMissing
from txbox.dead_letters import Failures
from txbox.leases import PostgresLedger
from txbox.postgres.urls import database_engine, database_url
from txbox.relay import Relay
from txbox_migrations import MigrationError, upgrade_database
from txbox_workers.memory_source import MemorySource

POISONS = ["SET default_transaction_read_only = on", "SET ROLE pg_monitor", "SET search_path = nowhere"]
CONNECTIONS = 4


@pytest.fixture(params=POISONS)
def poison(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def poisoned(engine: Engine, poison: str, connections: int = CONNECTIONS) -> Engine:
    """Leave all of a pool's connections in this state."""
    with ExitStack() as stack:
        for connection in [stack.enter_context(engine.connect()) for _ in range(connections)]:
            connection.exec_driver_sql(poison)
            connection.commit()
    return engine


@pytest.fixture
def pool(schema_url: str) -> Iterator[Engine]:
    """An engine whose pool has no connections but these."""
    engine = create_engine(schema_url, pool_size=CONNECTIONS, max_overflow=0)
    yield engine
    engine.dispose()


def test_a_worker_goes_on(pool: Engine, engine: Engine, poison: str) -> None:
    def handle(session: Session, message: Message) -> None:
        if message.id == "m0003":
            session.execute(text(poison))

    source = MemorySource(numbered(12))
    work_off(source, poisoned(pool, "SELECT 1"), handle, transactions="message", threads=2, max_attempts=2)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM processed_message").scalar_one() == 12
        assert connection.exec_driver_sql("SELECT count(*) FROM dead_letter").scalar_one() == 0


@pytest.mark.usefixtures("without_reports")
def test_what_is_lent_when_a_connection_is_found_poisoned_is_closed_in_the_end(pool: Engine) -> None:
    source = MemorySource(numbered(1))
    worker = make(source, pool, lambda *_: None)
    poisoned(pool, POISONS[0])
    with pool.connect() as lent:
        driver = lent.connection.driver_connection
        with at_work(worker):
            assert source.wait_until_empty(20), "the worker never came back"
    pool.dispose()
    assert driver.closed


def test_a_worker_s_probe_asks_a_new_connection(pool: Engine, poison: str) -> None:
    worker = make(MemorySource(), pool)
    poisoned(pool, poison)
    worker._processor.check_recording()


def test_a_ledger_goes_on(pool: Engine, poison: str) -> None:
    ledger = PostgresLedger("mailing", engine=pool)
    poisoned(pool, poison)
    lease = ledger.acquire("m1").lease
    assert lease is not None
    poisoned(pool, poison)
    ledger.complete(lease)
    poisoned(pool, poison)
    ledger.check()


def test_a_ledger_without_rights_says_so(schema_url: str) -> None:
    nobody = create_engine(f"{schema_url}%20-crole%3Dpg_monitor")
    with pytest.raises(SchemaMissing):  # it may not look into the schema
        PostgresLedger("mailing", engine=nobody).acquire("m1")
    nobody.dispose()


def test_bookkeeping_recovers_one_connection_at_a_time(pool: Engine, poison: str) -> None:
    make(MemorySource(), pool)  # adopts the engine
    poisoned(pool, poison)
    failures = Failures(pool, "billing")
    for _ in range(CONNECTIONS):
        with pytest.raises(Exception, match=r"read-only|permission denied|does not exist"):
            failures.fail("m1", ValueError("no"))
    assert failures.fail("m1", ValueError("no")).attempts == 1


def test_a_relay_goes_on(pool: Engine, engine: Engine, poison: str) -> None:
    broker = RecordingPublisher()
    relay = Relay(pool, {"own": broker}, senders=2)
    relay.start()
    poisoned(pool, poison, CONNECTIONS - 1)  # the relay looks over the last one
    with engine.begin() as connection:
        for number in range(20):
            OUTBOX.publish(connection, OWN, str(number), key=str(number))
    broker.wait_for(20)
    assert relay.stop()


def test_a_connection_that_was_left_in_another_encoding_is_not_lent_again(pool: Engine, engine: Engine) -> None:
    cyrillic = "\u0436"

    def handle(session: Session, message: Message) -> None:
        session.execute(text("SELECT CAST(:text AS text)"), {"text": cyrillic})
        if message.id == "m0003":
            session.execute(text("SET client_encoding = 'LATIN1'"))

    source = MemorySource([*numbered(8), Message(cyrillic, b"", {})])
    work_off(source, pool, handle, transactions="message", max_attempts=2)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM processed_message").scalar_one() == 9
        assert connection.exec_driver_sql("SELECT count(*) FROM dead_letter").scalar_one() == 0
    poisoned(pool, "SET client_encoding = 'LATIN1'")
    assert PostgresLedger("mailing", engine=pool).acquire(cyrillic).lease is not None


@pytest.fixture
def latin(make_database: Callable[..., str]) -> str:
    return make_database("ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0")


def test_a_database_that_is_not_utf_8_is_refused_at_the_start(latin: str) -> None:
    engine, own, euro = create_engine(latin), create_engine(latin), "\u20ac"
    ours = database_engine(database_url(latin))
    with own.connect() as connection:
        for refused in (
            lambda: make(MemorySource(), engine).start(),
            lambda: Relay(engine, {"own": RecordingPublisher()}).start(),
            lambda: PostgresLedger("mailing", engine=engine).check(),
            lambda: PostgresLedger("mailing", engine=engine).acquire("m1"),
            lambda: Inbox("billing").check(connection),
            lambda: OUTBOX.check(connection),
            lambda: Inbox("billing").record(connection, euro),
            lambda: OUTBOX.publish(connection, OWN, euro, key=euro),
            lambda: upgrade_database(engine),
            ours.connect,
            ours.connect,
        ):
            with pytest.raises(InvalidConfiguration, match="has the encoding LATIN1"):
                refused()
    with pytest.raises((InvalidConfiguration, MigrationError), match="has the encoding LATIN1"):
        upgrade_database(latin)
    for one in (engine, own, ours):
        one.dispose()


def test_a_database_without_an_encoding_is_refused_too(make_database: Callable[..., str]) -> None:
    url = make_database("ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0")
    engine = create_engine(url)
    for refused in (
        database_engine(database_url(url)).connect,
        lambda: make(MemorySource(), engine).start(),
        lambda: PostgresLedger("mailing", engine=engine).acquire("m1"),
    ):
        with pytest.raises(InvalidConfiguration, match="has the encoding SQL_ASCII"):
            refused()
    engine.dispose()
