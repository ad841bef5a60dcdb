"""Many ids at once: in one statement, in one order, and against other batches."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine

from support.postgres.blocking import backend_pid, wait_until_blocked
from support.postgres.statements import statements_sent
from support.txbox.inbox import recorded
from txbox import Inbox


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


def test_overlapping_batches_in_opposite_orders_wait_and_do_not_deadlock(
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
