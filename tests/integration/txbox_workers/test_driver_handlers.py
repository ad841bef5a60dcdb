"""Handlers that work with psycopg's own connection, or a cursor of it, in the transaction that a worker lends."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from support.waiting import wait_until
from support.workers.business import Business, once
from support.workers.memory_worker import AT_ONCE, messages, work_off
from txbox import AsyncInbox, Inbox, InvalidConfiguration, Message, Outbox, Outcome
from txbox.leases import PostgresLedger
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.memory_source import MemorySource
from txbox_workers.postgres import PostgresWorker
from txbox_workers.worker import Worker

if TYPE_CHECKING:
    import psycopg as elsewhere
    from psycopg import Connection as Somewhere

APPLY = "INSERT INTO effect (message_id, body) VALUES (%s, %s)"

Behaviour = Callable[["psycopg.Cursor[Any]"], object]


def values(message: Message) -> tuple[str, str]:
    return message.id, message.body.decode()


def by_cursor(behaviour: Behaviour = lambda _: None) -> Any:
    def handle(cursor: psycopg.Cursor, message: Message) -> None:
        cursor.execute(APPLY, values(message))
        if message.id == "bad":
            behaviour(cursor)

    return {"handler": handle}


def by_connection(behaviour: Behaviour = lambda _: None) -> Any:
    def handle(connection: "psycopg.Connection[Any]", message: Message) -> None:
        with connection.cursor() as cursor:
            cursor.execute(APPLY, values(message))
        if message.id == "bad":
            behaviour(connection.cursor())

    return {"handler": handle}


def in_batches(behaviour: Behaviour = lambda _: None) -> Any:
    def handle(cursor: psycopg.Cursor, messages: list[Message]) -> None:
        cursor.executemany(APPLY, [values(message) for message in messages])
        if "bad" in {message.id for message in messages}:
            behaviour(cursor)

    return {"batch_handler": handle}


in_ways = pytest.mark.parametrize("way", [by_cursor, by_connection, in_batches])


@in_ways
def test_effect_and_record_are_one_commit(engine: Engine, business: Business, way: Any) -> None:
    source = MemorySource(messages("a", "b", "a", "c"))
    worker = work_off(source, engine, **way())
    assert business.applied() == once("abc")
    assert business.recorded() == {"a", "b", "c"}
    assert worker.counts == {Outcome.PROCESSED: 3, Outcome.DUPLICATE: 1}


def commits(cursor: "psycopg.Cursor[Any]") -> None:
    cursor.connection.commit()


def hides_its_commit(cursor: "psycopg.Cursor[Any]") -> None:
    with suppress(Exception):
        cursor.connection.commit()
    with suppress(Exception):
        cursor.execute("COMMIT")
    cursor.execute(APPLY, ("bad", "again"))


def rolls_back(cursor: "psycopg.Cursor[Any]") -> None:
    cursor.connection.rollback()


def ends_a_block_of_the_connection(cursor: "psycopg.Cursor[Any]") -> None:
    with cursor.connection:
        cursor.execute(APPLY, ("bad", "again"))


def swallows_an_error(cursor: "psycopg.Cursor[Any]") -> None:
    with suppress(psycopg.Error):
        cursor.execute("SELECT 1 / 0")


def leaves_a_stream(cursor: "psycopg.Cursor[Any]") -> None:
    stream = cursor.connection.cursor().stream("SELECT generate_series(1, 10)")
    next(stream)
    _left.append(stream)


def leaves_a_pipeline(cursor: "psycopg.Cursor[Any]") -> None:
    pipeline = cursor.connection.pipeline()
    pipeline.__enter__()
    _left.append(pipeline)


def leaves_a_copy(cursor: "psycopg.Cursor[Any]") -> None:
    copy = cursor.copy("COPY effect (message_id, body) FROM STDIN")
    copy.__enter__()
    _left.append(copy)


REFUSED: list[Any] = [
    commits,
    hides_its_commit,
    rolls_back,
    ends_a_block_of_the_connection,
    swallows_an_error,
    leaves_a_stream,
    leaves_a_pipeline,
    leaves_a_copy,
    pytest.param(lambda cursor: cursor.execute("COMMIT"), id="commits by SQL"),
    pytest.param(lambda cursor: cursor.execute("ROLLBACK"), id="rolls back by SQL"),
    pytest.param(lambda cursor: cursor.connection.close(), id="closes the connection"),
    pytest.param(lambda cursor: setattr(cursor.connection, "autocommit", True), id="wants autocommit"),
    pytest.param(lambda _: 1 / 0, id="raises"),
]

_left: list[Any] = []


@pytest.mark.parametrize("behaviour", REFUSED)
@in_ways
def test_a_handler_that_undoes_or_ends_the_transaction_fails_alone(
    engine: Engine, business: Business, way: Any, behaviour: Behaviour
) -> None:
    source = MemorySource(messages("a", "bad", "c"))
    work_off(source, engine, max_attempts=2, **way(behaviour))
    _left.clear()
    assert business.applied() == once("ac")
    assert business.recorded() == {"a", "c"}, "what is recorded was applied, and nothing else"
    assert business.letters() == {"bad": "failed"}


def works_in_a_savepoint(cursor: "psycopg.Cursor[Any]") -> None:
    with suppress(psycopg.errors.DivisionByZero), cursor.connection.transaction():
        cursor.execute(APPLY, ("bad", "again"))
        cursor.execute("SELECT 1 / 0")


def sends_a_pipeline(cursor: "psycopg.Cursor[Any]") -> None:
    with cursor.connection.pipeline():
        for amount in (1, 2):
            cursor.execute("UPDATE account SET balance = balance + %s WHERE account_id = 1", [amount])


@pytest.mark.parametrize(
    "behaviour",
    [works_in_a_savepoint, sends_a_pipeline, pytest.param(lambda cursor: cursor.close(), id="closes its cursor")],
)
@in_ways
def test_a_handler_may_use_savepoints_and_pipelines(
    engine: Engine, business: Business, way: Any, behaviour: Behaviour
) -> None:
    handler = {"transactions": "message"} if way is not in_batches else {}
    work_off(MemorySource(messages("a", "bad", "c")), engine, max_attempts=1, **way(behaviour), **handler)
    assert business.applied() == once(["a", "bad", "c"])
    assert business.letters() == {}
    assert business.balance() == (3 if behaviour is sends_a_pipeline else 0)


@pytest.mark.parametrize("kept", ["cursor", "connection", "cursor of the connection"])
def test_what_outlives_its_handler_is_refused_and_touches_no_other_transaction(
    engine: Engine, business: Business, kept: str
) -> None:
    over, errors = threading.Event(), []

    def late(cursor: "psycopg.Cursor[Any]") -> None:
        assert over.wait(20)
        try:
            cursor.execute(APPLY, ("late", "late"))
        except psycopg.Error as error:
            errors.append(error)

    threads: list[threading.Thread] = []

    def handle(connection: psycopg.Connection, message: Message) -> None:
        connection.execute(APPLY, values(message))
        if message.id == "a":
            cursor = connection.cursor()
            given = {"cursor": lambda: cursor, "connection": connection.cursor}.get(kept, lambda: cursor)
            threads.append(threading.Thread(target=lambda: late(given())))
            threads[0].start()
        elif message.id == "c":
            over.set()
            threads[0].join(20)

    work_off(MemorySource(messages("a", "b", "c")), engine, handle, transactions="message")
    assert business.applied() == once("abc")
    assert [type(error) for error in errors] == [psycopg.OperationalError]


def test_a_statement_under_way_when_its_handler_returns_fails_that_message(engine: Engine, business: Business) -> None:
    def handle(cursor: psycopg.Cursor, message: Message) -> None:
        cursor.execute(APPLY, values(message))
        if message.id == "bad":
            thread = threading.Thread(target=sleep, args=[cursor.connection.cursor()])
            thread.start()
            wait_until(lambda: cursor.connection.lock.locked(), "it is under way")

    def sleep(cursor: "psycopg.Cursor[Any]") -> None:
        with suppress(psycopg.Error):
            cursor.execute("SELECT pg_sleep(60)")

    work_off(MemorySource(messages("a", "bad", "c")), engine, handle, max_attempts=1, transactions="message")
    assert business.applied() == once("ac")
    assert business.letters() == {"bad": "failed"}


def test_statements_are_prepared_on_the_connection_and_the_hosts_settings_are_kept(
    schema_url: str, business: Business
) -> None:
    seen: set[Any] = set()

    def handle(cursor: psycopg.Cursor, message: Message) -> None:
        cursor.execute(APPLY, values(message))
        prepared = "INSERT INTO effect (message_id, body) VALUES ($1, $2)"
        found = cursor.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement = %s", [prepared])
        seen.add((found.fetchone(), type(cursor)))

    class Own(psycopg.Cursor[Any]):
        pass

    engine = create_engine(schema_url, pool_size=1, connect_args={"cursor_factory": Own})
    work_off(MemorySource(messages(*(f"m{number}" for number in range(12)))), engine, handle)
    engine.dispose()
    assert len(business.order()) == 12
    assert seen == {((0,), Own), ((1,), Own)}


def test_it_works_with_types_leases_and_the_outbox(engine: Engine, business: Business) -> None:
    def handle(cursor: psycopg.Cursor, value: dict[str, int], message: Message, *, lease: Any) -> None:
        assert lease.attempt == 1
        cursor.execute(APPLY, (message.id, str(value["cents"])))

    ledger = PostgresLedger("billing", engine=engine)
    worker = PostgresWorker(inbox=Inbox("billing"), ledger=ledger, engine=engine, handler=handle)
    with engine.begin() as connection:
        Outbox().publish(connection, "inbox:billing", '{"cents": 5}', message_id="m1")
    worker.start()
    wait_until(lambda: not business.rows("SELECT 1 FROM outbox_message"))
    assert worker.stop()
    assert business.order("body") == ["5"]
    assert business.recorded() == {"m1"}


async def sleeps(cursor: "psycopg.AsyncCursor[Any]") -> None:
    await cursor.execute("SELECT pg_sleep(0.01)")


async def awaits_a_commit(cursor: "psycopg.AsyncCursor[Any]") -> None:
    await cursor.connection.commit()


async def awaits_a_rollback(cursor: "psycopg.AsyncCursor[Any]") -> None:
    await cursor.connection.rollback()


async def awaits_a_division(cursor: "psycopg.AsyncCursor[Any]") -> None:
    with suppress(psycopg.Error):
        await cursor.execute("SELECT 1 / 0")


@pytest.mark.parametrize("as_cursor", [True, False], ids=["cursor", "connection"])
@pytest.mark.parametrize(
    ("behaviour", "fails"),
    [(sleeps, False), (awaits_a_commit, True), (awaits_a_rollback, True), (awaits_a_division, True)],
)
def test_coroutines(
    schema_url: str,
    business: Business,
    behaviour: Callable[["psycopg.AsyncCursor[Any]"], Awaitable[None]],
    fails: bool,
    as_cursor: bool,
) -> None:
    kept: list[Any] = []

    async def with_cursor(cursor: psycopg.AsyncCursor, message: Message) -> None:
        await cursor.execute(APPLY, values(message))
        if message.id == "bad":
            await behaviour(cursor)
        kept.append(cursor)

    async def with_connection(connection: psycopg.AsyncConnection, message: Message) -> None:
        await with_cursor(connection.cursor(), message)

    async def consume() -> None:
        engine = create_async_engine(schema_url)
        source = MemorySource(messages("a", "bad", "c"))
        handler = with_cursor if as_cursor else with_connection
        async with AsyncWorker(
            source, inbox=AsyncInbox("billing"), engine=engine, handler=handler, max_attempts=2, backoff=AT_ONCE
        ):
            assert await asyncio.to_thread(source.wait_until_empty, 60)
        for cursor in kept:
            with pytest.raises(psycopg.OperationalError, match="closed"):
                await cursor.execute("SELECT 1")
        await engine.dispose()

    asyncio.run(consume())
    assert business.applied() == once(["a", "c"] if fails else ["a", "bad", "c"])
    assert business.letters() == ({"bad": "failed"} if fails else {})


def takes_an_async_cursor(cursor: psycopg.AsyncCursor, message: Message) -> None: ...


def takes_a_server_cursor(cursor: psycopg.ServerCursor, message: Message) -> None: ...


def takes_what_is_not_there(connection: "Somewhere", message: Message) -> None: ...


def takes_what_may_be_a_connection(connection: "elsewhere.Connection", message: Message) -> None: ...


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (takes_an_async_cursor, r"must be a session, psycopg.Connection or psycopg.Cursor, not psycopg.AsyncCursor"),
        (takes_a_server_cursor, r"not psycopg.ServerCursor"),
        (takes_what_may_be_a_connection, r"import it also at run time"),
    ],
)
def test_what_cannot_be_given_is_refused(engine: Engine, handler: Any, says: str) -> None:
    with pytest.raises(InvalidConfiguration, match=says):
        Worker(MemorySource(), inbox=Inbox("billing"), engine=engine, handler=handler)


def test_a_session_factory_has_no_use_then(engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match="session_factory"):
        Worker(
            MemorySource(),
            inbox=Inbox("billing"),
            engine=engine,
            session_factory=sessionmaker(engine),
            **by_cursor(),
        )
