"""Poolers in transaction mode and psycopg's prepared statements: no client ever runs another one's statement."""

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from support.postgres.pgbouncer import pgbouncer
from support.postgres.transaction_pooler import transaction_pooler
from support.workers.memory_worker import at_work, make, numbered, work_off
from txbox import Inbox, Message, Outbox, Outcome, Outgoing, SqlEffect
from txbox.postgres.engines import adopt, stop_preparing
from txbox.postgres.urls import database_engine, database_url
from txbox.schema import tables
from txbox_workers.memory_source import MemorySource
from txbox_workers.worker import Worker

MESSAGES = 60
"""More than psycopg's sixth run of a statement in each thread, from which on it prepares."""

POOLERS = [
    "ours",
    *(
        pytest.param(name, marks=pytest.mark.containers)
        for name in ("PgBouncer", "PgBouncer, max_prepared_statements = 0", "PgBouncer, max_prepared_statements = 100")
    ),
]


@pytest.fixture(params=POOLERS)
def pooled_url(request: pytest.FixtureRequest, _kind: str) -> Iterator[str]:
    """A database with our tables, behind a pooler of few servers."""
    size = 5 if _kind == "postgres" else 3  # two of those workers keep one each, for their claims
    is_ours = request.param == "ours"  # its servers have the search path of the test's schema
    url = request.getfixturevalue("schema_url") if is_ours else request.getfixturevalue("make_database")()
    engine = create_engine(url)
    with engine.begin() as connection:
        if not is_ours:
            tables().metadata.create_all(connection)
        for number in (1, 2):
            connection.exec_driver_sql(f"CREATE TABLE account_{number} (id int PRIMARY KEY, balance bigint NOT NULL)")
            connection.exec_driver_sql(f"INSERT INTO account_{number} VALUES (1, 0)")
    engine.dispose()
    if is_ours:
        with transaction_pooler(url, size=size) as (_, through):
            yield through
        return
    _, _, prepares = request.param.partition(" = ")
    with pgbouncer(url, size=size, max_prepared_statements=int(prepares) if prepares else None) as through:
        yield through


@pytest.fixture
def make_engine(pooled_url: str) -> Iterator[Callable[..., Engine]]:
    """Make engines with the driver's own defaults."""
    made: list[Engine] = []

    def make_one(query: str = "", **options: Any) -> Engine:
        made.append(create_engine(pooled_url + query, **options))
        return made[-1]

    yield make_one
    for engine in made:
        engine.dispose()


WAYS = ["handler", "effect", "publishing effect, in batches", "publishing effect"]


def service(number: int, engine: Engine, way: str) -> tuple[MemorySource, Worker]:
    """A worker that adds each message to an account of its own, one way or another, and the source that feeds it."""
    add = f"UPDATE account_{number} SET balance = balance + {{}} WHERE id = 1"
    update = add.format("(SELECT sum(amount) FROM fresh_event)")
    publish = f"SELECT message_id AS body, 'of-{number}' AS key FROM fresh_event"

    def handle(session: Session, _: Message) -> None:
        session.execute(text(add.format(":amount")), {"amount": 1})

    how: dict[str, Any] = {"handler": handle}
    if way == "effect":
        how = {"effect": SqlEffect.of(update, fields="amount int default 1")}
    elif way != "handler":
        outbox: dict[str, Any] = {"outbox": Outbox(), "destination": f"own:service-{number}"}
        how = {"effect": SqlEffect.of(f"{update};{publish}", fields="amount int default 1", **outbox)}
    sent = [replace(message, body=b"{}") for message in numbered(MESSAGES)]
    source = MemorySource(sent + sent[::10], batch_size=3)
    transactions = "batch" if "batches" in way else "message"
    inbox = Inbox(f"service-{number}")
    return source, make(source, engine, inbox=inbox, transactions=transactions, threads=2, **how)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("query", ["", "&prepare_threshold=0"])
def test_two_services_apply_their_own_messages(make_engine: Callable[..., Engine], query: str, way: str) -> None:
    (one, first), (other, second) = (service(number, make_engine(query), way) for number in (1, 2))
    with at_work(first, second):
        assert one.wait_until_empty(60)
        assert other.wait_until_empty(60)
    ids = [message.id for message in numbered(MESSAGES)]
    publishes = way.startswith("publishing")
    with make_engine(connect_args={"prepare_threshold": None}).connect() as connection:

        def rows(sql: str) -> list[Any]:
            return list(connection.exec_driver_sql(sql).scalars())

        for number in (1, 2):
            assert (
                sorted(rows(f"SELECT message_id FROM processed_message WHERE subscriber_id = 'service-{number}'"))
                == ids
            )
            assert rows(f"SELECT balance FROM account_{number}") == [MESSAGES]
            sent = "SELECT convert_from(body, 'UTF8') FROM outbox_message WHERE (destination, key) = "
            assert sorted(rows(f"{sent}('own:service-{number}', 'of-{number}')")) == (ids if publishes else [])
        assert rows("SELECT count(DISTINCT message_id) FROM outbox_message") == [2 * MESSAGES * publishes]
        assert rows("SELECT count(*) FROM dead_letter") == rows("SELECT count(*) FROM message_failure") == [0]


def commit(driver: psycopg.Connection[Any]) -> None:
    driver.commit()


def commit_in_hiding(driver: psycopg.Connection[Any]) -> None:
    driver.execute(r"SELECT E'\''; COMMIT; SELECT 'x'")


def roll_back(driver: psycopg.Connection[Any]) -> None:
    driver.rollback()


def break_off(driver: psycopg.Connection[Any]) -> None:
    """What is left of a process that was killed."""
    with socket.socket(fileno=os.dup(driver.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("misbehave", [commit, commit_in_hiding, roll_back, break_off])
def test_what_becomes_of_one_transaction_is_left_behind_at_no_server(
    make_engine: Callable[..., Engine], misbehave: Callable[[psycopg.Connection[Any]], None]
) -> None:
    calls: Counter[str] = Counter()

    def handle(session: Session, message: Message) -> None:
        driver = session.connection().connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        calls[message.id] += 1
        session.execute(text("UPDATE account_1 SET balance = balance + 1 WHERE id = 1"))
        if calls[message.id] == 1 and message.id.endswith("3"):
            misbehave(driver)

    source = MemorySource(numbered(40))
    workers = [make(source, make_engine(), handle) for _ in range(2)]
    with at_work(*workers):
        assert source.wait_until_empty(60)
    left: set[int] = set()
    servers: set[int] = set()
    with make_engine(connect_args={"prepare_threshold": None}).connect() as connection:
        look = "SELECT pg_backend_pid(), (SELECT count(*) FROM pg_cursors WHERE is_holdable)"
        # Servers are lent in turn.
        for _ in range(10):
            server, cursors = connection.exec_driver_sql(look).one()
            servers.add(server)
            left.add(cursors)
            connection.rollback()
        balance = connection.exec_driver_sql("SELECT balance FROM account_1").scalar_one()
        recorded = connection.exec_driver_sql("SELECT count(*) FROM processed_message").scalar_one()
    assert (left, balance, recorded) == ({0}, 40, 40)
    assert len(servers) > 1 or misbehave is break_off, "every server was to be looked at"


@pytest.mark.parametrize("what", ["record", "record_many", "publish", "publish_many"])
def test_a_session_of_the_user_s_prepares_nothing_once_it_has_recorded_or_published(
    make_engine: Callable[..., Engine], what: str
) -> None:
    inbox, outbox = Inbox("billing"), Outbox()
    with make_engine().connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        statements: list[str] = []
        event.listen(connection, "before_cursor_execute", lambda _c, _u, statement, *_: statements.append(statement))
        if what == "record":
            assert inbox.record(connection, "m1")
        elif what == "record_many":
            assert inbox.record_many(connection, ["m1", "m2"]) == {"m1", "m2"}
        elif what == "publish":
            outbox.publish(connection, "own:there", "hello")
        else:
            outbox.publish_many(connection, [Outgoing("own:there", "hello"), Outgoing("own:there", "again")])
        connection.commit()
        assert len(statements) == 1, "one round trip"
        assert driver.prepare_threshold is None
        for _ in range(10):
            connection.exec_driver_sql("SELECT 1 FROM account_1")
            connection.commit()
        assert not driver._prepared._names


def test_without_a_pooler_statements_are_prepared_as_ever(engine: Engine) -> None:
    source = MemorySource(numbered(20))
    work_off(source, engine, lambda _session, _message: None, transactions="message")
    with ExitStack() as stack:  # the worker's connection, and that of its reports
        pooled = [stack.enter_context(engine.connect()) for _ in range(engine.pool.checkedin())]
        drivers = [connection.connection.driver_connection for connection in pooled]
        assert {driver.prepare_threshold for driver in drivers} == {5}
        assert any(driver._prepared._names for driver in drivers)


@pytest.mark.parametrize(("said", "threshold"), [("None", None), ("none", None), ("0", 0), ("7", 7)])
def test_the_url_may_say_when_statements_are_prepared(schema_url: str, said: str, threshold: int | None) -> None:
    engine = database_engine(database_url(f"{schema_url}&prepare_threshold={said}"))
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver.prepare_threshold == threshold
    engine.dispose()


@pytest.mark.parametrize("statement", ["EXECUTE _pg3_77", "PREPARE _pg3_77 AS SELECT 1; PREPARE _pg3_77 AS SELECT 1"])
def test_a_prepared_statement_of_another_client_is_no_failure_of_the_message(
    engine: Engine, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    # A pooler that tells the right process id by chance is not noticed before.
    thresholds: list[int | None] = []

    def handle(session: Session, _: Message) -> None:
        driver = session.connection().connection.driver_connection
        thresholds.append(driver.prepare_threshold)
        if len(thresholds) == 1:
            driver.execute(statement)

    source = MemorySource(numbered(1))
    worker = work_off(source, engine, handle, max_attempts=1)
    assert thresholds == [5, None]
    assert "prepare_threshold=None" in caplog.text
    assert worker.counts.keys() == {Outcome.IN_FLIGHT, Outcome.PROCESSED}
    assert worker.counts[Outcome.PROCESSED] == 1


def test_connections_that_the_pool_had_prepare_nothing_either_once_a_pooler_is_noticed(engine: Engine) -> None:
    adopt(engine)
    with engine.connect() as one, engine.connect() as other:
        drivers = [connection.connection.driver_connection for connection in (one, other)]
    assert [driver.prepare_threshold for driver in drivers if driver] == [5, 5]
    with engine.connect() as connection:
        stop_preparing(connection)
    with engine.connect() as connection:
        kept = connection.connection.driver_connection
        assert kept in drivers
        assert kept is not None
        assert kept.prepare_threshold is None
