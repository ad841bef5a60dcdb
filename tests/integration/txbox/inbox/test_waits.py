"""Two transactions with the same message: the second one waits for the end of the first, within bounds.

Who waits for a commit is a test of all styles: ``styles/test_inbox.py``.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from support.postgres.blocking import backend_pid, second_waits_for_first
from support.txbox.inbox import lock_timeout, recorded
from txbox import Inbox, InFlight
from txbox.postgres.sqlstates import SERIALIZATION_FAILURE, sqlstate

ISOLATION_LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


def record(lent: Connection) -> bool:
    return Inbox("billing", wait_seconds=60).record(lent, "m-1")


@pytest.mark.parametrize("isolation", ISOLATION_LEVELS[1:])
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
@pytest.mark.parametrize("end", [Connection.rollback, Connection.invalidate], ids=["rolls back", "is killed"])
def test_who_waits_for_somebody_that_does_not_commit_is_first(
    engine: Engine, pool: ThreadPoolExecutor, isolation: str, end: Callable[[Connection], None]
) -> None:
    with second_waits_for_first(engine, pool, record, record, isolation) as (first, second, waiting):
        end(first)
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
        begun = second.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
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
        ended = second.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
        assert (ended - begun).total_seconds() >= 0.2, "the bound is waited out and not cut short"
        assert lock_timeout(second) == "0", "the rollback has put the setting back too"
        first.commit()
    assert recorded(engine) == [("billing", "m-1")]


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
