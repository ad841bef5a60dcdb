"""The inbox on a real Postgres: one row, one transaction, and what two of them do to each other."""

import asyncio
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.schema import CreateSchema

from support.blocking import backend_pid, wait_until_blocked
from txbox import (
    Inbox,
    InFlight,
    InvalidMessageId,
    Mismatch,
    NotInTransaction,
    Recorded,
    SchemaMissing,
)
from txbox.schema import tables
from txbox.sqlstates import DEADLOCK_DETECTED, SERIALIZATION_FAILURE, sqlstate

ISOLATION_LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
WITH_ONE_SNAPSHOT = ["REPEATABLE READ", "SERIALIZABLE"]
PLACES = [(None, ""), (None, "txbox_"), ("billing", ""), ("Odd schema-%", ""), ("Odd schema-%", "Odd%_")]


@pytest.fixture
def inbox() -> Inbox:
    """An inbox whose waits outlast every test: who runs into the bound without meaning to fails."""
    return Inbox("billing", wait_seconds=60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def recorded(engine: Engine) -> list[tuple[str, str]]:
    """What the table holds, read without any code under test."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT subscriber_id, message_id FROM processed_message ORDER BY 1, 2")
        return [(row[0], row[1]) for row in rows]


@contextmanager
def statements_sent(engine: Engine) -> Iterator[list[str]]:
    """Collect everything that goes to the server, transaction control included."""
    sent: list[str] = []

    def on_execute(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    def on(what: str) -> Callable[..., None]:
        return lambda *_: sent.append(what)

    listeners: list[tuple[str, Callable[..., None]]] = [
        ("before_cursor_execute", on_execute),
        *((name, on(name.upper())) for name in ("commit", "rollback", "savepoint")),
    ]
    for name, listener in listeners:
        event.listen(engine, name, listener)
    try:
        yield sent
    finally:
        for name, listener in listeners:
            event.remove(engine, name, listener)


# --- one transaction -------------------------------------------------------------------------------------------------


def test_the_first_time_is_true_and_every_other_time_is_false(engine: Engine, inbox: Inbox) -> None:
    answers = []
    for _ in range(3):
        with engine.begin() as connection:
            answers.append(inbox.record(connection, "m-1"))
    assert answers == [True, False, False]
    assert recorded(engine) == [("billing", "m-1")]


def test_a_second_record_in_the_same_transaction_is_a_duplicate(engine: Engine, inbox: Inbox) -> None:
    with engine.begin() as connection:
        assert inbox.record(connection, "m-1") is True
        assert inbox.record(connection, "m-1") is False


def test_a_session_is_as_good_as_a_connection(engine: Engine, inbox: Inbox) -> None:
    with Session(engine) as session, session.begin():
        assert inbox.record(session, "m-1") is True
        assert inbox.record_many(session, ["m-1", "m-2"]) == {"m-2"}
        assert inbox.sort_out(session, ["m-2", "m-3"]) == Recorded(frozenset({"m-3"}), frozenset())
    with Session(engine) as session, session.begin():
        assert inbox.record(session, "m-1") is False
    assert recorded(engine) == [("billing", "m-1"), ("billing", "m-2"), ("billing", "m-3")]


def test_a_scoped_session_is_a_session(engine: Engine, inbox: Inbox) -> None:
    session = scoped_session(sessionmaker(engine))
    assert inbox.record(session, "m-1") is True
    session.rollback()
    session.remove()
    assert recorded(engine) == []


def test_a_session_sees_its_own_unflushed_work_commit_with_the_record(engine: Engine, inbox: Inbox) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (balance int)")
    with Session(engine) as session, session.begin():
        session.connection().exec_driver_sql("INSERT INTO account VALUES (10)")
        assert inbox.record(session, "m-1")
        assert recorded(engine) == [], "nothing is visible to others before the commit"
    assert recorded(engine) == [("billing", "m-1")]
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT balance FROM account").scalar_one() == 10


def test_each_subscriber_has_a_space_of_its_own(engine: Engine) -> None:
    with engine.begin() as connection:
        assert Inbox("billing").record(connection, "m-1") is True
        assert Inbox("shipping").record(connection, "m-1") is True
        assert Inbox("shipping").record_many(connection, ["m-1", "m-2"]) == {"m-2"}
        assert Inbox("billing").record(connection, "m-2") is True
    assert recorded(engine) == [("billing", "m-1"), ("billing", "m-2"), ("shipping", "m-1"), ("shipping", "m-2")]


def test_a_rollback_leaves_nothing(engine: Engine, inbox: Inbox) -> None:
    with engine.connect() as connection:
        assert inbox.record(connection, "m-1")
        assert inbox.record_many(connection, ["m-2"]) == {"m-2"}
        connection.rollback()
    assert recorded(engine) == []
    with engine.begin() as connection:
        assert inbox.record(connection, "m-1") is True


def test_a_savepoint_that_is_rolled_back_leaves_nothing(engine: Engine, inbox: Inbox) -> None:
    with engine.begin() as connection:
        assert inbox.record(connection, "outer")
        savepoint = connection.begin_nested()
        assert inbox.record(connection, "inner")
        savepoint.rollback()
        assert inbox.record(connection, "inner again")
    assert recorded(engine) == [("billing", "inner again"), ("billing", "outer")]


@pytest.mark.parametrize(("schema", "prefix"), PLACES)
def test_the_inbox_may_be_anywhere(fresh_database: str, schema: str | None, prefix: str) -> None:
    engine = create_engine(fresh_database)
    with engine.begin() as connection:
        if schema is not None:
            connection.execute(CreateSchema(schema))
        tables(schema, prefix).metadata.create_all(connection)
    inbox = Inbox("billing", schema=schema, prefix=prefix, fingerprint=True)
    with engine.begin() as connection:
        inbox.check(connection)
        assert inbox.record(connection, "m-%s", b"body") is True
        assert inbox.record(connection, "m-%s", b"body") is False
        assert inbox.record_many(connection, {"m-%s": b"body", "100%": b"body"}) == {"100%"}
        with pytest.raises(Mismatch):
            inbox.record(connection, "100%", b"other")
    with engine.connect() as connection:
        table = tables(schema, prefix).processed_message
        assert sorted(connection.execute(table.select()).scalars()) == ["billing", "billing"]
    engine.dispose()


# --- what is sent, and what is left alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True])
def test_a_first_record_is_one_insert_and_nothing_else(engine: Engine, inbox: Inbox, many: bool) -> None:
    with engine.connect() as connection:
        connection.begin()
        with statements_sent(engine) as sent:
            if many:
                assert len(inbox.record_many(connection, [f"m-{number}" for number in range(50)])) == 50
            else:
                assert inbox.record(connection, "m-1")
        assert len(sent) == 1
        assert sent[0].lstrip().startswith("WITH bound")
        assert sent[0].count("INSERT INTO processed_message") == 1
        assert connection.in_transaction(), "the caller's transaction goes on"
    assert recorded(engine) == [], "nobody has committed it"


def test_a_duplicate_costs_no_second_statement_unless_there_are_fingerprints_to_compare(engine: Engine) -> None:
    plain, careful = Inbox("plain"), Inbox("careful", fingerprint=True)
    with engine.begin() as connection:
        plain.record(connection, "m-1", b"body")
        careful.record(connection, "m-1", b"body")
    with engine.begin() as connection, statements_sent(engine) as sent:
        assert plain.record(connection, "m-1", b"body") is False
        assert len(sent) == 1
        assert careful.record(connection, "m-1", b"body") is False
        assert len(sent) == 3


def lock_timeout(connection: Connection) -> str:
    return str(connection.exec_driver_sql("SHOW lock_timeout").scalar_one())


@pytest.mark.parametrize("own", [None, "SET LOCAL lock_timeout = '7s'", "SET lock_timeout = '7s'"])
@pytest.mark.parametrize("many", [False, True])
def test_the_callers_lock_timeout_is_as_it_was(engine: Engine, inbox: Inbox, own: str | None, many: bool) -> None:
    with engine.connect() as connection:
        if own:
            connection.exec_driver_sql(own)
        before = lock_timeout(connection)
        for first in (True, False):
            answer = bool(inbox.record_many(connection, ["m-1"])) if many else inbox.record(connection, "m-1")
            assert answer is first
            assert lock_timeout(connection) == before
        connection.commit()
        assert lock_timeout(connection) == ("7s" if own and "LOCAL" not in own else "0")


def test_a_caller_who_waits_less_is_made_to_wait_longer_for_this_statement_only(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    with engine.connect() as first, engine.connect() as second:
        inbox.record(first, "m-1")
        second.exec_driver_sql("SET LOCAL lock_timeout = '1ms'")
        pid = backend_pid(second)
        waiting = pool.submit(inbox.record, second, "m-1")
        wait_until_blocked(engine, pid)
        first.rollback()
        assert waiting.result(30) is True
        assert lock_timeout(second) == "1ms"


def test_an_async_session_works_through_run_sync(engine: Engine, schema_url: str, inbox: Inbox) -> None:
    pytest.importorskip("greenlet", reason="SQLAlchemy's asyncio needs greenlet")
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def record_twice() -> list[bool]:
        async_engine = create_async_engine(schema_url)
        answers = []
        for _ in range(2):
            async with AsyncSession(async_engine) as session, session.begin():
                with pytest.raises(TypeError, match=r"await session\.run_sync"):
                    inbox.record(session, "m-1")  # type: ignore[arg-type]
                answers.append(await session.run_sync(inbox.record, "m-1"))
        await async_engine.dispose()
        return answers

    assert asyncio.run(record_twice()) == [True, False]
    assert recorded(engine) == [("billing", "m-1")]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_connection_that_commits_every_statement_is_refused(engine: Engine, inbox: Inbox) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    calls: list[Callable[[Any], object]] = [
        lambda lent: inbox.record(lent, "m-1"),
        lambda lent: inbox.record_many(lent, ["m-1"]),
        lambda lent: inbox.record_many(lent, []),
        lambda lent: inbox.sort_out(lent, ["m-1"]),
    ]
    for call in calls:
        with autocommit.connect() as connection, pytest.raises(NotInTransaction):
            call(connection)
        with Session(autocommit) as session, pytest.raises(NotInTransaction):
            call(session)
    with autocommit.connect() as connection, pytest.raises(NotInTransaction):
        inbox.check(connection)
    assert recorded(engine) == []


def test_a_missing_table_is_named_with_the_remedy(fresh_database: str) -> None:
    engine = create_engine(fresh_database)
    for schema, name in [(None, "processed_message"), ("No such-%", '"No such-%".processed_message')]:
        inbox = Inbox("billing", schema=schema)
        calls: list[Callable[[Connection], object]] = [
            lambda connection, inbox=inbox: inbox.record(connection, "m-1"),  # type: ignore[misc]
            lambda connection, inbox=inbox: inbox.record_many(connection, ["m-1"]),  # type: ignore[misc]
            lambda connection, inbox=inbox: inbox.check(connection),  # type: ignore[misc]
        ]
        for call in calls:
            with engine.connect() as connection, pytest.raises(SchemaMissing, match="txbox db upgrade") as caught:
                call(connection)
            assert caught.value.table == name
            assert isinstance(caught.value.__cause__, DBAPIError)
    engine.dispose()


@pytest.mark.parametrize("message_id", ["", "a\0b", "x" * 1_001, "\ud800"], ids=["empty", "NUL", "long", "surrogate"])
def test_an_id_that_cannot_be_kept_is_refused_and_the_transaction_goes_on(
    engine: Engine, inbox: Inbox, message_id: str
) -> None:
    with engine.begin() as connection:
        for call in (inbox.record, lambda lent, one: inbox.record_many(lent, ["m-0", one])):
            with pytest.raises(InvalidMessageId):
                call(connection, message_id)
        assert inbox.record(connection, "m-1")
    assert recorded(engine) == [("billing", "m-1")]


@pytest.mark.parametrize("wrong", [None, 7, b"m-1"])
def test_an_id_that_is_no_text_is_refused(engine: Engine, inbox: Inbox, wrong: Any) -> None:
    with engine.begin() as connection:
        with pytest.raises(TypeError):
            inbox.record(connection, wrong)
        with pytest.raises(TypeError):
            inbox.record_many(connection, ["m-0", wrong])
    assert recorded(engine) == []


def test_the_longest_id_of_the_longest_subscriber_fits_into_the_key(engine: Engine) -> None:
    # Random, because Postgres compresses: a thousand times the same letter would prove nothing.
    letters = random.Random(1)
    longest = "".join(chr(letters.randrange(0x21, 0x7F)) for _ in range(1_000))
    subscriber = "".join(chr(letters.randrange(0x21, 0x7F)) for _ in range(200))
    with engine.begin() as connection:
        assert Inbox(subscriber).record(connection, longest) is True
        assert Inbox(subscriber).record(connection, longest) is False


def test_errors_of_the_database_pass_through_with_their_cause(engine: Engine, inbox: Inbox) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        with pytest.raises(DBAPIError) as caught:
            inbox.record(connection, "m-1")
    assert sqlstate(caught.value) == "25006"
    assert caught.value.__cause__ is caught.value.orig


# --- two transactions ------------------------------------------------------------------------------------------------


@contextmanager
def second_waits_for_first(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor, isolation: str
) -> Iterator[tuple[Connection, Connection, "Future[bool]"]]:
    """Two transactions with snapshots of their own; the first has recorded m-1, the second waits for its end."""
    engine = engine.execution_options(isolation_level=isolation)
    with engine.connect() as first, engine.connect() as second:
        pid = backend_pid(second)  # the statement also takes the snapshot of a transaction that has but one
        assert inbox.record(first, "m-1") is True
        waiting = pool.submit(inbox.record, second, "m-1")
        try:
            wait_until_blocked(engine, pid)
            yield first, second, waiting
        finally:
            first.invalidate()  # whatever went wrong: nobody waits for the first one any more


def test_who_waits_for_a_commit_finds_a_duplicate_at_read_committed(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    with second_waits_for_first(engine, inbox, pool, "READ COMMITTED") as (first, second, waiting):
        first.commit()
        assert waiting.result(30) is False
        second.commit()
    assert recorded(engine) == [("billing", "m-1")]


@pytest.mark.parametrize("isolation", WITH_ONE_SNAPSHOT)
def test_who_waits_for_a_commit_with_an_older_snapshot_has_to_run_again(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor, isolation: str
) -> None:
    with second_waits_for_first(engine, inbox, pool, isolation) as (first, second, waiting):
        first.commit()
        with pytest.raises(OperationalError) as caught:
            waiting.result(30)
        assert sqlstate(caught.value) == SERIALIZATION_FAILURE
        second.rollback()
        assert inbox.record(second, "m-1") is False, "with a newer snapshot, the truth comes out"
    assert recorded(engine) == [("billing", "m-1")]


@pytest.mark.parametrize("isolation", WITH_ONE_SNAPSHOT)
def test_a_commit_that_an_older_snapshot_cannot_see_is_never_read_as_a_duplicate(
    engine: Engine, inbox: Inbox, isolation: str
) -> None:
    isolated = engine.execution_options(isolation_level=isolation)
    with isolated.connect() as older:
        backend_pid(older)
        with engine.begin() as connection:
            inbox.record(connection, "m-1")
        with pytest.raises(OperationalError) as caught:
            inbox.record_many(older, ["m-1", "m-2"])
        assert sqlstate(caught.value) == SERIALIZATION_FAILURE
    assert recorded(engine) == [("billing", "m-1")]


@pytest.mark.parametrize("isolation", ISOLATION_LEVELS)
def test_who_waits_for_a_rollback_is_first(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor, isolation: str
) -> None:
    with second_waits_for_first(engine, inbox, pool, isolation) as (first, second, waiting):
        first.rollback()
        assert waiting.result(30) is True
        second.commit()
    assert recorded(engine) == [("billing", "m-1")]


@pytest.mark.parametrize("isolation", ISOLATION_LEVELS)
def test_who_waits_for_somebody_that_is_killed_is_first(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor, isolation: str
) -> None:
    with second_waits_for_first(engine, inbox, pool, isolation) as (first, second, waiting):
        first.invalidate()  # the connection is cut, as it is when a process dies
        assert waiting.result(30) is True
        second.commit()
    assert recorded(engine) == [("billing", "m-1")]


@pytest.mark.parametrize("isolation", ISOLATION_LEVELS)
@pytest.mark.parametrize("many", [False, True])
def test_who_waits_for_somebody_that_does_not_end_gives_up_in_time(
    engine: Engine, pool: ThreadPoolExecutor, isolation: str, many: bool
) -> None:
    impatient = Inbox("billing", wait_seconds=0.2)
    isolated = engine.execution_options(isolation_level=isolation)
    with isolated.connect() as first, isolated.connect() as second:
        impatient.record(first, "m-1")
        waiting: Future[Any] = (
            pool.submit(impatient.record_many, second, ["m-0", "m-1"])
            if many
            else pool.submit(impatient.record, second, "m-1")
        )
        with pytest.raises(InFlight) as caught:
            waiting.result(10)  # far less than for ever, far more than 0.2 seconds on a busy machine
        assert caught.value.subscriber_id == "billing"
        assert caught.value.message_ids == (("m-0", "m-1") if many else ("m-1",))
        second.rollback()
        assert lock_timeout(second) == "0", "the rollback has put the setting back too"
        first.commit()
    assert recorded(engine) == [("billing", "m-1")]


def test_the_bound_is_waited_out_and_not_cut_short(engine: Engine, pool: ThreadPoolExecutor) -> None:
    patient = Inbox("billing", wait_seconds=0.4)
    with engine.connect() as first, engine.connect() as second:
        patient.record(first, "m-1")
        begun = second.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
        with pytest.raises(InFlight):
            patient.record(second, "m-1")
        second.rollback()
        ended = second.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
    assert 0.4 <= (ended - begun).total_seconds() < 5


def test_a_savepoint_saves_the_rest_of_the_transaction_from_an_in_flight_duplicate(engine: Engine) -> None:
    impatient = Inbox("billing", wait_seconds=0.05)
    with engine.connect() as first, engine.begin() as second:
        impatient.record(first, "m-1")
        second.exec_driver_sql("SET LOCAL lock_timeout = '7s'")
        with pytest.raises(InFlight), second.begin_nested():
            impatient.record(second, "m-1")
        assert lock_timeout(second) == "7s"
        assert impatient.record(second, "m-2") is True
    assert recorded(engine) == [("billing", "m-2")]


# --- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [["b", "a", "c"], ("a", "b", "c", "a"), {"a", "b", "c"}, iter(["c", "b", "a", "b"]), {"a": b"", "b": "", "c": b""}],
    ids=lambda ids: type(ids).__name__,
)
def test_ids_come_in_any_order_and_in_any_shape(engine: Engine, inbox: Inbox, ids: Any) -> None:
    with engine.begin() as connection:
        inbox.record(connection, "b")
        assert inbox.record_many(connection, ids) == {"a", "c"}
    assert recorded(engine) == [("billing", "a"), ("billing", "b"), ("billing", "c")]


@pytest.mark.parametrize("nothing", [[], {}, iter([])], ids=["list", "mapping", "iterator"])
def test_no_ids_are_no_statement(engine: Engine, nothing: Any) -> None:
    with engine.begin() as connection, statements_sent(engine) as sent:
        assert Inbox("billing", fingerprint=True).record_many(connection, nothing) == set()
        assert sent == []


def test_ten_thousand_ids_are_one_statement(engine: Engine, inbox: Inbox) -> None:
    ids = [f"m-{number}" for number in range(10_000)]
    with engine.begin() as connection:
        inbox.record_many(connection, ids[::3])
    with engine.begin() as connection, statements_sent(engine) as sent:
        assert inbox.record_many(connection, ids) == set(ids) - set(ids[::3])
        assert len(sent) == 1
    assert [message_id for _, message_id in recorded(engine)] == sorted(ids)


def test_ids_are_inserted_in_the_order_of_their_bytes(engine: Engine, inbox: Inbox) -> None:
    # As UTF-16 or by a language's rules, these would be sorted otherwise.
    ids = ["\U0001f600", "ﬀ", "ä", "a", "B", "b", "A", "1"]
    with engine.begin() as connection:
        inbox.record_many(connection, ids)
        stored = connection.exec_driver_sql("SELECT message_id FROM processed_message ORDER BY ctid").scalars().all()
    assert stored == sorted(ids, key=str.encode)


THREADS, ROUNDS, BATCH_SIZE, IDS_PER_ROUND = 16, 8, 400, 1_000


def batch_of(thread: int, number: int) -> list[str]:
    """A random batch, with repeats; batches of one round overlap, and each round has new ids to fight for."""
    dice = random.Random(f"{thread} {number}")
    return [f"m-{number}-{dice.randrange(IDS_PER_ROUND)}" for _ in range(BATCH_SIZE)]


def test_sixteen_threads_with_overlapping_batches_apply_every_id_once(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (message_id text)")
        connection.exec_driver_sql("CREATE TABLE counter (value int)")
        connection.exec_driver_sql("INSERT INTO counter VALUES (0)")
    everybody_ready = threading.Barrier(THREADS)

    def work(thread: int) -> list[str]:
        trouble = []
        for number in range(ROUNDS):
            everybody_ready.wait(60)
            try:
                with engine.begin() as connection:
                    first = inbox.record_many(connection, batch_of(thread, number))
                    connection.exec_driver_sql("INSERT INTO effect SELECT unnest(%s::text[])", (list(first),))
                    connection.exec_driver_sql("UPDATE counter SET value = value + %s", (len(first),))
            except DBAPIError as error:
                trouble.append(sqlstate(error) or str(error))
        return trouble

    trouble = [code for codes in pool.map(work, range(THREADS)) for code in codes]
    assert trouble == [], "sorted batches wait for each other in one order, never in a circle"
    expected = sorted(
        {one for thread in range(THREADS) for number in range(ROUNDS) for one in batch_of(thread, number)}
    )
    with engine.connect() as connection:
        effects = connection.exec_driver_sql("SELECT message_id FROM effect").scalars().all()
        counted = connection.exec_driver_sql("SELECT value FROM counter").scalar_one()
    assert sorted(effects) == expected
    assert counted == len(expected)
    assert [message_id for _, message_id in recorded(engine)] == expected


def test_without_the_order_the_same_batches_deadlock(engine: Engine, pool: ThreadPoolExecutor) -> None:
    """What the sorting is good for: two batches in opposite orders, each holding what the other needs."""
    insert = "INSERT INTO processed_message (subscriber_id, message_id) VALUES ('billing', %s) ON CONFLICT DO NOTHING"
    with engine.connect() as one, engine.connect() as other:
        pid = backend_pid(one)
        one.exec_driver_sql(insert, ("a",))
        other.exec_driver_sql(insert, ("b",))
        waiting = pool.submit(one.exec_driver_sql, insert, ("b",))
        wait_until_blocked(engine, pid)
        codes = []
        for call in (lambda: other.exec_driver_sql(insert, ("a",)), lambda: waiting.result(30)):
            try:
                call()
            except DBAPIError as error:
                codes.append(sqlstate(error))
                other.rollback()
        assert codes == [DEADLOCK_DETECTED]


def test_overlapping_batches_in_opposite_orders_wait_instead(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    # While somebody else holds b, both batches are brought to their wait: the first holds a and waits for b, and the
    # second waits for a with nothing in its hands. Inserted in the order given, it would hold a and wait for b itself.
    with engine.connect() as holder, engine.connect() as one, engine.connect() as other:
        pids = backend_pid(one), backend_pid(other)
        inbox.record(holder, "b")
        first = pool.submit(inbox.record_many, one, ["b", "a"])
        wait_until_blocked(engine, pids[0], by=backend_pid(holder))
        second = pool.submit(inbox.record_many, other, ["a", "b"])
        wait_until_blocked(engine, pids[1], by=pids[0])
        holder.rollback()
        assert first.result(30) == {"a", "b"}
        one.commit()
        assert second.result(30) == set()
        other.commit()
    assert recorded(engine) == [("billing", "a"), ("billing", "b")]


# --- processes that die ----------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from txbox import Inbox

url, moment = sys.argv[1:]

def die_at(here):
    if here == moment:
        os.kill(os.getpid(), signal.SIGKILL)

with Session(create_engine(url)) as session:
    if Inbox("billing").record(session, "m-1"):
        die_at("between record and update")
        session.connection().exec_driver_sql("UPDATE account SET balance = balance + 10")
        die_at("before commit")
    session.commit()
    die_at("after commit")
"""


@pytest.mark.parametrize(
    ("moment", "left"), [("between record and update", 0), ("before commit", 0), ("after commit", 10), ("never", 10)]
)
def test_a_process_that_is_killed_leaves_all_or_nothing_and_the_next_one_finishes(
    engine: Engine, schema_url: str, moment: str, left: int
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (balance int)")
        connection.exec_driver_sql("INSERT INTO account VALUES (0)")

    def run(moment: str) -> int:
        return subprocess.run([sys.executable, "-c", PROGRAM, schema_url, moment], timeout=60, check=False).returncode

    def balance() -> int:
        with engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT balance FROM account").scalar_one())

    assert run(moment) == (0 if moment == "never" else -signal.SIGKILL)
    assert balance() == left
    assert recorded(engine) == ([("billing", "m-1")] if left else [])
    assert run("never") == 0
    assert balance() == 10
    assert recorded(engine) == [("billing", "m-1")]


# --- fingerprints ----------------------------------------------------------------------------------------------------


@pytest.fixture
def careful() -> Inbox:
    return Inbox("billing", fingerprint=True, wait_seconds=60)


def test_the_same_id_with_another_body_is_a_mismatch_and_with_the_same_a_duplicate(
    engine: Engine, careful: Inbox
) -> None:
    with engine.begin() as connection:
        assert careful.record(connection, "m-1", b"Zo\xc3\xab") is True
    with engine.begin() as connection:
        assert careful.record(connection, "m-1", "Zoë") is False, "text counts as its UTF-8"
        with pytest.raises(Mismatch, match="billing has already processed m-1 with another body") as caught:
            careful.record(connection, "m-1", b"other")
        assert caught.value.message_ids == ("m-1",)
        assert careful.record(connection, "m-2", b"") is True, "a mismatch does not end the transaction"
    assert recorded(engine) == [("billing", "m-1"), ("billing", "m-2")]


def test_a_batch_tells_first_duplicate_and_mismatch_apart(engine: Engine, careful: Inbox) -> None:
    with engine.begin() as connection:
        assert careful.record_many(connection, {"same": b"1", "other": "1", "other too": b"1"}) == {
            "same",
            "other",
            "other too",
        }
    batch = {"same": "1", "other": b"2", "other too": "2", "new": b"1"}
    with engine.connect() as connection:
        assert careful.sort_out(connection, batch) == Recorded(frozenset({"new"}), frozenset({"other", "other too"}))
    with engine.connect() as connection, pytest.raises(Mismatch) as caught:
        careful.record_many(connection, batch)
    assert caught.value.message_ids == ("other", "other too")
    assert [message_id for _, message_id in recorded(engine)] == ["other", "other too", "same"]


def test_what_was_recorded_without_a_fingerprint_matches_every_body(engine: Engine, careful: Inbox) -> None:
    with engine.begin() as connection:
        Inbox("billing").record(connection, "m-1", b"ignored")
        assert connection.exec_driver_sql("SELECT fingerprint FROM processed_message").scalar_one() is None
    with engine.begin() as connection:
        assert careful.record(connection, "m-1", b"any") is False
        assert careful.sort_out(connection, {"m-1": b"any"}) == Recorded(frozenset(), frozenset())


def test_an_inbox_without_fingerprints_ignores_bodies(engine: Engine, careful: Inbox) -> None:
    with engine.begin() as connection:
        careful.record(connection, "m-1", b"body")
        assert Inbox("billing").record(connection, "m-1", b"other") is False
        assert Inbox("billing").record_many(connection, {"m-1": b"other"}) == set()


def test_fingerprints_are_compared_within_one_subscriber(engine: Engine, careful: Inbox) -> None:
    with engine.begin() as connection:
        careful.record(connection, "m-1", b"body")
        assert Inbox("shipping", fingerprint=True).record(connection, "m-1", b"other") is True


def test_a_mismatch_with_a_transaction_that_was_waited_for_is_found(
    engine: Engine, careful: Inbox, pool: ThreadPoolExecutor
) -> None:
    # The snapshot of the insert is older than the commit it ran into: only a second statement can see the other body.
    with engine.connect() as first, engine.connect() as second:
        pid = backend_pid(second)
        careful.record(first, "m-1", b"body")
        waiting = pool.submit(careful.record, second, "m-1", b"other")
        wait_until_blocked(engine, pid)
        first.commit()
        with pytest.raises(Mismatch):
            waiting.result(30)
        second.rollback()
        assert careful.record(second, "m-1", b"body") is False


@pytest.mark.parametrize("odd", ['"', "\\", "{", "}", ",", "NULL", " ", "a,b", '","', "%s", "%", "é\U0001f600", "\n"])
def test_an_id_of_any_text_is_recorded_as_it_is(engine: Engine, odd: str) -> None:
    ids = {odd, f"{odd}-2", "plain"}
    inbox = Inbox("billing")
    with engine.begin() as connection:
        assert inbox.record_many(connection, ids) == ids
        assert inbox.record_many(connection, ids) == set()
        assert not inbox.record(connection, odd)
    with engine.connect() as connection:
        assert set(connection.exec_driver_sql("SELECT message_id FROM processed_message").scalars()) == ids
