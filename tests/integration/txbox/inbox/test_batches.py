"""Many ids at once: in one statement, in one order, and against other batches."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from support.postgres.blocking import backend_pid, wait_until_blocked
from support.postgres.statements import statements_sent
from support.txbox.inbox import recorded
from txbox import Inbox
from txbox.postgres.sqlstates import DEADLOCK_DETECTED, sqlstate


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
