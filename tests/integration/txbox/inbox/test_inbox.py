"""What one transaction records for whom, and what it takes back; answers and errors are those of ``styles``."""

import random
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Engine
from sqlalchemy.orm import scoped_session, sessionmaker

from support.postgres.blocking import backend_pid, wait_until_blocked
from support.txbox.inbox import recorded
from support.waiting import wait_until
from txbox import Inbox


def test_a_scoped_session_is_a_session(engine: Engine, inbox: Inbox) -> None:
    session = scoped_session(sessionmaker(engine))
    assert inbox.record(session, "m-1") is True
    session.rollback()
    session.remove()
    assert recorded(engine) == []


def test_each_subscriber_has_a_space_of_its_own(engine: Engine) -> None:
    with engine.begin() as connection:
        assert Inbox("billing").record(connection, "m-1") is True
        assert Inbox("shipping").record(connection, "m-1") is True
        assert Inbox("shipping").record_many(connection, ["m-1", "m-2"]) == {"m-2"}
        assert Inbox("billing").record(connection, "m-2") is True
    assert recorded(engine) == [("billing", "m-1"), ("billing", "m-2"), ("shipping", "m-1"), ("shipping", "m-2")]


def test_a_savepoint_that_is_rolled_back_leaves_nothing(engine: Engine, inbox: Inbox) -> None:
    with engine.begin() as connection:
        assert inbox.record(connection, "outer")
        savepoint = connection.begin_nested()
        assert inbox.record(connection, "inner")
        savepoint.rollback()
        assert inbox.record(connection, "inner again")
    assert recorded(engine) == [("billing", "inner again"), ("billing", "outer")]


def test_the_longest_id_of_the_longest_subscriber_fits_into_the_key(engine: Engine) -> None:
    # Random, because Postgres compresses: a thousand times the same letter would prove nothing.
    letters = random.Random(1)
    longest = "".join(chr(letters.randrange(0x21, 0x7F)) for _ in range(1_000))
    subscriber = "".join(chr(letters.randrange(0x21, 0x7F)) for _ in range(200))
    with engine.begin() as connection:
        assert Inbox(subscriber).record(connection, longest) is True
        assert Inbox(subscriber).record(connection, longest) is False


def test_what_other_transactions_have_recorded_is_not_taken_back(engine: Engine, inbox: Inbox) -> None:
    with engine.begin() as connection:
        inbox.record(connection, "a")
    with engine.begin() as connection:
        Inbox("invoicing").record(connection, "b")
        assert inbox.unrecord(connection, ["a", "b", "nobody's"]) == 0
    with engine.begin() as connection:
        assert inbox.record(connection, "a") is False
        assert Inbox("invoicing").record(connection, "b") is False


def test_who_waits_for_an_id_that_is_taken_back_is_first(
    engine: Engine, leveled: Engine, inbox: Inbox, pool: ThreadPoolExecutor
) -> None:
    def record() -> bool:
        with leveled.begin() as waiting:
            pids.append(backend_pid(waiting))
            return inbox.record(waiting, "a")

    pids: list[int] = []
    with engine.begin() as connection:
        inbox.record(connection, "a")
        first = pool.submit(record)
        wait_until(lambda: pids, "its transaction has begun")
        wait_until_blocked(engine, pids[0])
        inbox.unrecord(connection, ["a"])
    assert first.result(20) is True
