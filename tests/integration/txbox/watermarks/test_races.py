"""Two transactions with one watermark, and many: who waits for whom, and what comes of it."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from support.postgres.blocking import backend_pid, second_waits_for_first, wait_until_blocked
from support.postgres.statements import run
from support.txbox.inbox import lock_timeout
from txbox import InFlight
from txbox.postgres.sqlstates import SERIALIZATION_FAILURE, sqlstate
from txbox.watermarks import Advance, Watermarks

APPLIED, STALE, GAP = Advance

ISOLATION_LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
WITH_ONE_SNAPSHOT = ISOLATION_LEVELS[1:]
PATIENT_SECONDS = 60

Call = Callable[..., Advance]

BILLING = Watermarks("billing", wait_seconds=PATIENT_SECONDS)


def billing(options: dict[str, Any]) -> Watermarks:
    """The watermarks under test, with the wait that is taken out of these options."""
    return Watermarks("billing", wait_seconds=options.pop("wait_seconds", PATIENT_SECONDS))


def alone(target: Connection, sequence: int, **options: Any) -> Advance:
    return billing(options).advance(target, "account", "ann", sequence, **options)


def among_many(target: Connection, sequence: int, **options: Any) -> Advance:
    events = [("account", "ann", sequence), ("account", "zoe", 1)]
    return billing(options).advance_many(target, events, **options)[0]


def of_a_relation(target: Connection, sequence: int, *, insist: bool = False, **options: Any) -> Advance:
    """Jumps over gaps, whoever insists."""
    del insist
    target.exec_driver_sql("CREATE TEMPORARY TABLE IF NOT EXISTS fresh_event (name text, at int) ON COMMIT DROP")
    target.exec_driver_sql("TRUNCATE fresh_event")
    target.exec_driver_sql("INSERT INTO fresh_event VALUES ('ann', %s), ('zoe', 1)", (sequence,))
    options = {"wait_seconds": PATIENT_SECONDS, **options, "aggregate_id": "name", "sequence": "at"}
    BILLING.advance_from(target, aggregate_type="account", **options)
    found = target.exec_driver_sql("SELECT FROM fresh_event WHERE name = 'ann'").rowcount
    return APPLIED if found else STALE


every_call = pytest.mark.parametrize("call", [alone, among_many, of_a_relation])
every_case = pytest.mark.parametrize(
    ("call", "begun_at"), [(alone, None), (alone, 4), (among_many, None), (among_many, 4), (of_a_relation, 4)]
)
"""How, and where the watermark was before; None: there was none."""
at_any_level = pytest.mark.parametrize("isolation", ISOLATION_LEVELS)


def begin_at(engine: Engine, sequence: int | None) -> int:
    """Leave a watermark that has committed before, or none; return the sequence that comes next."""
    if sequence is None:
        return 1
    with engine.begin() as connection:
        alone(connection, sequence)
    return sequence + 1


def watermark(engine: Engine) -> int | None:
    """Ann's, read without any code under test."""
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT sequence FROM aggregate_watermark WHERE aggregate_id = 'ann'")
        return found.scalar_one_or_none()


def calls(call: Call, first_at: int, second_at: int, **options: Any) -> list[Callable[[Connection], Any]]:
    """What the first transaction does, and what the second."""
    return [lambda lent: alone(lent, first_at) is APPLIED, lambda lent: call(lent, second_at, **options)]


@every_case
@pytest.mark.parametrize(
    ("insist", "ahead", "answer"),
    [
        *((False, -1, STALE), (False, 0, STALE), (False, 1, APPLIED)),
        # In the second one's snapshot, the first of these is the next event, and the others are ahead of that.
        *((True, -1, STALE), (True, 0, STALE), (True, 1, APPLIED), (True, 2, GAP)),
    ],
)
def test_who_waits_for_a_commit_is_judged_by_it_at_read_committed(
    engine: Engine,
    pool: ThreadPoolExecutor,
    call: Call,
    begun_at: int | None,
    insist: bool,
    ahead: int,
    answer: Advance,
) -> None:
    at = begin_at(engine, begun_at) + 1
    if answer is GAP and call is of_a_relation:
        answer = APPLIED
    both = calls(call, at, at + ahead, insist=insist)
    with second_waits_for_first(engine, pool, *both) as (first, second, waiting):
        first.commit()
        assert waiting.result(30) is answer
        second.commit()
    assert watermark(engine) == (at + ahead if answer is APPLIED else at)


@every_case
@pytest.mark.parametrize("isolation", WITH_ONE_SNAPSHOT)
@pytest.mark.parametrize("ahead", [0, 1], ids=["same", "above"])
def test_who_waits_for_a_commit_with_an_older_snapshot_has_to_run_again(
    engine: Engine, pool: ThreadPoolExecutor, call: Call, begun_at: int | None, isolation: str, ahead: int
) -> None:
    at = begin_at(engine, begun_at)
    with second_waits_for_first(engine, pool, *calls(call, at, at + ahead), isolation) as (first, second, waiting):
        first.commit()
        with pytest.raises(OperationalError) as caught:
            waiting.result(30)
        assert sqlstate(caught.value) == SERIALIZATION_FAILURE
        second.rollback()
        assert call(second, at + ahead) is (APPLIED if ahead else STALE), "with a newer snapshot, the truth comes out"
        second.commit()
    assert watermark(engine) == at + ahead


@every_case
@pytest.mark.parametrize("isolation", WITH_ONE_SNAPSHOT)
def test_a_commit_that_an_older_snapshot_cannot_see_is_read_neither_as_stale_nor_as_a_gap(
    engine: Engine, call: Call, begun_at: int | None, isolation: str
) -> None:
    at = begin_at(engine, begun_at)
    with engine.execution_options(isolation_level=isolation).connect() as older:
        backend_pid(older)
        begin_at(engine, at)
        for insist in (False, True):
            for sequence in (at, at + 1, at + 5):
                with pytest.raises(OperationalError) as caught, older.begin_nested():
                    call(older, sequence, insist=insist)
                assert sqlstate(caught.value) == SERIALIZATION_FAILURE
    assert watermark(engine) == at


@every_case
@pytest.mark.parametrize(
    ("isolation", "killed"), [*((level, False) for level in ISOLATION_LEVELS), ("READ COMMITTED", True)]
)
@pytest.mark.parametrize("insist", [False, True], ids=["", "insist"])
def test_who_waits_for_a_rollback_is_judged_as_if_it_had_never_been(
    engine: Engine,
    pool: ThreadPoolExecutor,
    call: Call,
    begun_at: int | None,
    isolation: str,
    killed: bool,
    insist: bool,
) -> None:
    at = begin_at(engine, begun_at)
    both = calls(call, at + 7, at + insist, insist=insist)
    with second_waits_for_first(engine, pool, *both, isolation) as (first, second, waiting):
        if killed:
            first.invalidate()  # the connection is cut, as it is when a process dies
        else:
            first.rollback()
        answer = GAP if insist and call is not of_a_relation else APPLIED
        assert waiting.result(30) is answer
        second.commit()
    assert watermark(engine) == (begun_at if answer is GAP else at + insist)


@every_case
@at_any_level
def test_who_waits_for_somebody_that_does_not_end_gives_up_in_time(
    engine: Engine, pool: ThreadPoolExecutor, call: Call, begun_at: int | None, isolation: str
) -> None:
    at = begin_at(engine, begun_at)
    isolated = engine.execution_options(isolation_level=isolation)
    with isolated.connect() as first, isolated.connect() as second:
        alone(first, at)
        for insist in (False, True):
            begun = second.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
            waiting = pool.submit(call, second, at + 1, wait_seconds=0.1, insist=insist)
            with pytest.raises(InFlight) as caught:
                waiting.result(10)  # far less than for ever, far more than 0.1 seconds on a busy machine
            second.rollback()
            ended = second.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
            assert (ended - begun).total_seconds() >= 0.1, "the bound is waited out and not cut short"
            assert caught.value.subscriber_id == "billing"
            assert caught.value.message_ids[0] == (
                "an aggregate of fresh_event" if call is of_a_relation else "account ann"
            )
            assert lock_timeout(second) == "0", "the rollback has put the setting back too"
            second.rollback()
        first.commit()
    assert watermark(engine) == at


def test_a_relation_that_waits_as_long_as_its_transaction_says_has_the_errors_of_that(engine: Engine) -> None:
    with engine.connect() as first, engine.connect() as second:
        alone(first, 1)
        second.exec_driver_sql("SET LOCAL lock_timeout = '20ms'")
        with pytest.raises(OperationalError) as caught:
            of_a_relation(second, 2, wait_seconds=None)
        assert sqlstate(caught.value) == "55P03"


@every_call
@at_any_level
def test_what_is_known_to_be_stale_waits_for_nobody_and_keeps_nobody_waiting(
    engine: Engine, call: Call, isolation: str
) -> None:
    begin_at(engine, 4)
    isolated = engine.execution_options(isolation_level=isolation)
    with isolated.connect() as first, isolated.connect() as second, isolated.connect() as third:
        # Sets also advance zoe: of her, there is one transaction at a time.
        assert call(first, 4) is STALE
        assert alone(second, 5, wait_seconds=0.2) is APPLIED
        first.rollback()
        assert call(third, 3, wait_seconds=0.2) is STALE
        second.commit()
    assert watermark(engine) == 5


@pytest.mark.parametrize("insist", [False, True], ids=["", "insist"])
def test_overlapping_batches_in_opposite_orders_wait_and_do_not_deadlock(
    engine: Engine, pool: ThreadPoolExecutor, insist: bool
) -> None:
    # While somebody else holds bob, both batches are brought to their wait: the first holds ann and waits for bob, and
    # the second waits for ann with nothing in its hands. In the order given, it would hold bob and wait for ann.
    # Ann has a watermark and bob has none, so that rows which are there and rows which are not share one order.
    begin_at(engine, 1)
    forth = [("account", "ann", 2), ("account", "bob", 1)]
    back = [("account", "bob", 1), ("account", "ann", 2)]
    with engine.connect() as holder, engine.connect() as one, engine.connect() as other:
        pids = backend_pid(one), backend_pid(other)
        BILLING.advance(holder, "account", "bob", 1)
        first = pool.submit(BILLING.advance_many, one, forth, insist=insist)
        wait_until_blocked(engine, pids[0], by=backend_pid(holder))
        second = pool.submit(BILLING.advance_many, other, back, insist=insist)
        wait_until_blocked(engine, pids[1], by=pids[0])
        holder.rollback()
        assert first.result(30) == [APPLIED, APPLIED]
        one.commit()
        assert second.result(30) == [STALE, STALE]
        other.commit()


# --- many at once ----------------------------------------------------------------------------------------------------

THREADS, AGGREGATES, EVENTS = 12, 2, 30


def shuffled(thread: int) -> list[tuple[str, str, int]]:
    """Every event of every aggregate, some twice, in an order of this thread's own."""
    dice = random.Random(thread)
    every = [("account", str(name), at) for name in range(AGGREGATES) for at in range(1, EVENTS + 1)]
    mixed = every + dice.sample(every, 10)
    dice.shuffle(mixed)
    return mixed


def work_until_done(engine: Engine, isolation: str, run: Callable[[Connection], Any]) -> Any:
    """Run a transaction, and again after a serialization failure; roll back now and then, as workers die."""
    while True:
        try:
            with engine.execution_options(isolation_level=isolation).begin() as connection:
                return run(connection)
        except OperationalError as error:
            if sqlstate(error) != SERIALIZATION_FAILURE:
                raise


@at_any_level
@pytest.mark.parametrize("size", [1, 25])
def test_many_threads_with_shuffled_events_apply_each_at_most_once_and_in_order(
    engine: Engine, pool: ThreadPoolExecutor, isolation: str, size: int
) -> None:
    run(engine, "CREATE TABLE effect (number serial, name text, at int)")

    def work(thread: int) -> int:
        applied = 0
        events = shuffled(thread)
        for start in range(0, len(events), size):
            batch = events[start : start + size]
            rolls_back = random.Random(thread * 1_000 + start).random() < 0.1

            def run(connection: Connection, batch: Any = batch, rolls_back: bool = rolls_back) -> int:
                answers = BILLING.advance_many(connection, batch) if size > 1 else [
                    BILLING.advance(connection, *batch[0])
                ]  # fmt: skip
                first = [event for event, answer in zip(batch, answers, strict=True) if answer is APPLIED]
                for _, name, at in first:
                    connection.exec_driver_sql("INSERT INTO effect (name, at) VALUES (%s, %s)", (name, at))
                if rolls_back:
                    connection.rollback()
                return len(first)

            counted = work_until_done(engine, isolation, run)
            if rolls_back:
                counted = work_until_done(engine, isolation, lambda target, run=run: run(target, rolls_back=False))
            applied += counted
        return applied

    applied = sum(pool.map(work, range(THREADS)))
    with engine.connect() as connection:
        effects = connection.exec_driver_sql("SELECT name, at FROM effect ORDER BY number").all()
        marks = dict(connection.exec_driver_sql("SELECT aggregate_id, sequence FROM aggregate_watermark").all())
    assert len(effects) == applied
    assert marks == {str(name): EVENTS for name in range(AGGREGATES)}
    for name in marks:
        seen = [at for of, at in effects if of == name]
        assert seen == sorted(set(seen)), "once at most, and in order"
        assert seen[-1] == EVENTS


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
def test_threads_that_insist_and_take_up_gaps_again_apply_every_event_once_and_in_order(
    engine: Engine, pool: ThreadPoolExecutor, isolation: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (number serial, name text, at int)")
        connection.exec_driver_sql("CREATE TABLE account (name text PRIMARY KEY, total int)")
        for name in range(AGGREGATES):
            connection.exec_driver_sql("INSERT INTO account VALUES (%s, 0)", (str(name),))

    def work(thread: int) -> None:
        waiting = shuffled(thread)
        while waiting:  # the broker, which delivers again what was handed back
            event, *waiting = waiting

            def run(connection: Connection, event: Any = event) -> Advance:
                answer = BILLING.advance(connection, *event, insist=True)
                if answer is APPLIED:
                    _, name, at = event
                    connection.exec_driver_sql("INSERT INTO effect (name, at) VALUES (%s, %s)", (name, at))
                    connection.exec_driver_sql("UPDATE account SET total = total + %s WHERE name = %s", (at, name))
                return answer

            if work_until_done(engine, isolation, run) is GAP:
                waiting.append(event)

    list(pool.map(work, range(6)))
    with engine.connect() as connection:
        totals = connection.exec_driver_sql("SELECT DISTINCT total FROM account").scalars().all()
        for name in range(AGGREGATES):
            statement = "SELECT at FROM effect WHERE name = %s ORDER BY number"
            seen = connection.exec_driver_sql(statement, (str(name),)).scalars().all()
            assert seen == list(range(1, EVENTS + 1))
    assert totals == [EVENTS * (EVENTS + 1) // 2]
