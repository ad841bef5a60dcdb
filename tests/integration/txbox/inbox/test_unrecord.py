"""Taking back what this very transaction has recorded."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from support.postgres.blocking import backend_pid, wait_until_blocked
from support.waiting import wait_until
from txbox import Inbox


def test_what_is_taken_back_was_never_recorded(engine: Engine, inbox: Inbox) -> None:
    with engine.begin() as connection:
        assert inbox.record_many(connection, ["a", "b", "c"]) == {"a", "b", "c"}
        assert inbox.unrecord(connection, ["c", "b"]) == 2
    with engine.begin() as connection:
        assert inbox.record_many(connection, ["a", "b", "c"]) == {"b", "c"}


def test_what_other_transactions_have_recorded_is_left_alone(engine: Engine, inbox: Inbox) -> None:
    with engine.begin() as connection:
        inbox.record(connection, "a")
    with engine.begin() as connection:
        Inbox("invoicing").record(connection, "b")
        assert inbox.unrecord(connection, ["a", "b", "nobody's"]) == 0
    with engine.begin() as connection:
        assert inbox.record(connection, "a") is False
        assert Inbox("invoicing").record(connection, "b") is False


@pytest.mark.parametrize("isolation_level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_who_waits_for_an_id_that_is_taken_back_is_first(
    engine: Engine, inbox: Inbox, pool: ThreadPoolExecutor, isolation_level: str
) -> None:
    def record() -> bool:
        with engine.connect() as waiting, waiting.execution_options(isolation_level=isolation_level).begin():
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
