"""What one transaction records for whom, and what it takes back; answers and errors are those of ``styles``."""

import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import scoped_session, sessionmaker

from support.postgres.blocking import backend_pid, second_waits_for_first, wait_until_blocked
from support.processes import start_python
from support.txbox.inbox import bill, recorded
from support.waiting import wait_until
from txbox import Inbox, Mismatch, Recorded


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


# --- fingerprints: the same id with another body is a mismatch -------------------------------------------------------


@pytest.fixture
def careful() -> Inbox:
    return Inbox("billing", fingerprint=True, wait_seconds=60)


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
    calls = [lambda lent, body=body: careful.record(lent, "m-1", body) for body in (b"body", b"other")]
    with second_waits_for_first(engine, pool, *calls) as (first, second, waiting):
        first.commit()
        with pytest.raises(Mismatch):
            waiting.result(30)
        second.rollback()
        assert careful.record(second, "m-1", b"body") is False


# --- processes that die ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "left"), [("between record and update", 0), ("before commit", 0), ("after commit", 10)]
)
def test_a_process_that_is_killed_leaves_all_or_nothing_and_the_next_one_finishes(
    engine: Engine, schema_url: str, moment: str, left: int
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (balance int)")
        connection.exec_driver_sql("INSERT INTO account VALUES (0)")

    def balance() -> int:
        with engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT balance FROM account").scalar_one())

    killed = start_python(
        "-c", "import sys; from support.txbox.inbox import bill; bill(*sys.argv[1:])", schema_url, moment
    )
    assert killed.wait(60) == -signal.SIGKILL
    assert balance() == left
    assert recorded(engine) == ([("billing", "m-1")] if left else [])
    bill(schema_url)
    assert balance() == 10
    assert recorded(engine) == [("billing", "m-1")]
