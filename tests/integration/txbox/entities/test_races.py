"""Races for one row, at every isolation level: each message is applied once."""

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from support.postgres.blocking import second_waits_for_first
from support.txbox.entities import LEVELS, Account, add, replace, row
from txbox.postgres.sqlstates import SERIALIZATION_FAILURE, sqlstate

APPLY: dict[str, Callable[[Any], bool]] = {
    "once": lambda where: add(where, "m-1", 5),
    "newer": lambda where: replace(where, 1, 5),
}


@pytest.mark.parametrize("how", APPLY)
def test_at_read_committed_the_second_waits_and_finds_the_id(
    engine: Engine, pool: ThreadPoolExecutor, how: str
) -> None:
    with second_waits_for_first(engine, pool, APPLY[how], APPLY[how]) as (first, second, later):
        first.commit()
        assert later.result(20) is False
        second.commit()
    assert row(engine).cents == 5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", APPLY)
def test_the_second_applies_what_the_first_rolls_back(
    engine: Engine, pool: ThreadPoolExecutor, how: str, level: str
) -> None:
    with second_waits_for_first(engine, pool, APPLY[how], APPLY[how], level) as (first, second, later):
        first.rollback()
        assert later.result(20) is True
        second.commit()
    assert row(engine).cents == 5


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("how", APPLY)
def test_a_snapshot_that_is_older_than_the_firsts_commit_fails_to_be_run_again(
    engine: Engine, pool: ThreadPoolExecutor, how: str, level: str
) -> None:
    with second_waits_for_first(engine, pool, APPLY[how], APPLY[how], level) as (first, second, later):
        first.commit()
        with pytest.raises(OperationalError) as failure:
            later.result(20)
        assert sqlstate(failure.value) == SERIALIZATION_FAILURE
        second.rollback()
        assert APPLY[how](second) is False
        second.commit()
    assert row(engine).cents == 5


def test_a_row_that_comes_while_it_is_looked_for_is_no_duplicate(engine: Engine, pool: ThreadPoolExecutor) -> None:
    # The second waits for the row that the first deletes; what the first has put in its place has no memory yet.
    calls = [lambda where: add(where, "m-0", 100), lambda where: add(where, "m-1", 5)]
    with second_waits_for_first(engine, pool, *calls) as (first, second, later):
        first.exec_driver_sql("DELETE FROM account WHERE account_id = 'ann'")
        first.exec_driver_sql("INSERT INTO account (account_id, cents) VALUES ('ann', 1000)")
        first.commit()
        assert later.result(20) is True
        second.commit()
    assert (row(engine).cents, row(engine).recent_message_ids) == (1005, ["m-1"])
    with engine.begin() as connection:
        assert add(connection, "m-0", 100), "the memory went with the row"


@pytest.mark.parametrize("level", LEVELS)
def test_sixteen_threads_with_the_same_messages_apply_each_once(
    engine: Engine, pool: ThreadPoolExecutor, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Account, "recent_message_ids_kept", 50)
    amounts = {f"m-{number}": 3**number for number in range(12)}
    leveled = engine.execution_options(isolation_level=level)

    def deliver_all(seed: int) -> Counter[str]:
        applied: Counter[str] = Counter()
        for message_id in random.Random(seed).sample(sorted(amounts), len(amounts)):
            while True:
                try:
                    with leveled.begin() as connection:
                        was_applied = add(connection, message_id, amounts[message_id])
                    break
                except OperationalError as error:
                    if sqlstate(error) != SERIALIZATION_FAILURE:
                        raise
            applied[message_id] += was_applied
        return applied

    total = sum(pool.map(deliver_all, range(16)), Counter())
    assert total == dict.fromkeys(amounts, 1)
    assert row(engine).cents == sum(amounts.values())
    assert sorted(row(engine).recent_message_ids) == sorted(amounts)


def test_sixteen_threads_with_events_out_of_order_leave_the_highest(engine: Engine, pool: ThreadPoolExecutor) -> None:
    def deliver_all(seed: int) -> list[int]:
        applied = []
        for event_id in random.Random(seed).sample(range(30), 30):
            with engine.begin() as connection:
                if replace(connection, event_id, event_id * 7):
                    applied.append(event_id)
        return applied

    applied = [event_id for part in pool.map(deliver_all, range(16)) for event_id in part]
    assert len(applied) == len(set(applied)), "none was applied twice"
    assert (row(engine).cents, row(engine).highest_event_ids) == (29 * 7, {"shop": 29})
