"""Maintainers beside each other, beside workers and operators, and killed between their steps."""

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from integration.txbox.maintenance.conftest import KEPT, StartMaintainer, found, left, letter, record
from support.postgres.statements import run
from support.postgres.transaction_pooler import transaction_pooler
from support.waiting import wait_until
from txbox import DeadLetter, DeadLetters, Inbox
from txbox.backoff import Backoff
from txbox.maintenance import Maintainer, Retention
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.maintenance.transactions import LeaseGone

BILLING = Retention(inbox={"billing": KEPT})

KILLED = """
import os, signal, sys
from datetime import timedelta
from sqlalchemy import create_engine, event
from txbox.backoff import Backoff
from txbox.maintenance import Maintainer, Retention

url, moment = sys.argv[1:]
engine = create_engine(url)
deleted, committed = [], []  # a delete that takes too long is rolled back, and another begins

@event.listens_for(engine, "before_cursor_execute")
def before(connection, cursor, statement, *_):
    if "DELETE FROM processed_message" in statement:
        if moment == "before the delete":
            os.kill(os.getpid(), signal.SIGKILL)
        deleted.append(True)

@event.listens_for(engine, "commit")
def commit(connection):
    if deleted:
        if moment == "before its commit":
            os.kill(os.getpid(), signal.SIGKILL)
        committed.append(True)

@event.listens_for(engine, "begin")
def begin(connection):
    if committed and moment == "after its commit":
        os.kill(os.getpid(), signal.SIGKILL)

Maintainer(
    engine, Retention(inbox={"billing": timedelta(days=30)}), budget_ms_per_second=1000, rows_per_transaction=500
).run_once()
"""


def expire_lease(engine: Engine) -> None:
    run(engine, "UPDATE maintenance SET expires_at = now() - interval '1 ms' WHERE task = 'lease'")


@pytest.mark.parametrize("moment", ["before the delete", "before its commit", "after its commit"])
def test_one_that_is_killed_has_moved_the_horizon_first_and_another_finishes(
    engine: Engine, schema_url: str, make_maintainer: StartMaintainer, moment: str
) -> None:
    record(engine, "billing", "old-", 3_000, days_ago=31)
    record(engine, "billing", "young-", 100, days_ago=1)
    killed = subprocess.run([sys.executable, "-c", KILLED, schema_url, moment], timeout=60, check=False)
    assert killed.returncode == -9
    removed = 3_000 - left(engine)["old-"]
    # One transaction's rows, which are fewer after a delete that took too long.
    assert 0 < removed <= 500 if moment == "after its commit" else removed == 0
    assert found(engine, "SELECT sum(removed) FROM maintenance WHERE task = 'inbox'") == (removed or None)
    assert found(engine, "SELECT now() - horizon BETWEEN '30 days' AND '30 days 1 minute' FROM inbox_horizon")
    waiting = make_maintainer(BILLING)
    assert not waiting.run_once().worked, "it may still be at work"
    assert 3_000 - left(engine)["old-"] == removed
    assert found(engine, "SELECT expires_at < now() + interval '31 seconds' FROM maintenance WHERE task = 'lease'")
    expire_lease(engine)
    assert waiting.run_once().worked
    assert left(engine) == {"young-": 100}
    assert found(engine, "SELECT removed FROM maintenance WHERE task = 'inbox'") == 3_000


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_nothing_goes_before_every_transaction_can_see_the_horizon(
    engine: Engine,
    make_maintainer: StartMaintainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    level: str,
) -> None:
    record(engine, "billing", "old-", 100, days_ago=31)
    with monkeypatch.context() as patch, engine.execution_options(isolation_level=level).connect() as recording:
        patch.setattr("txbox.maintenance.maintainer.SETTLE_SECONDS", 0.1)
        pid = recording.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        for _ in range(2):  # also another maintainer goes on with what the first one has waited for
            assert make_maintainer(BILLING).run_once().removed["inbox"] == 0
        assert found(engine, "SELECT count(*) FROM inbox_horizon") == 1, "it has moved"
        assert not Inbox("billing").record(recording, "old-7")
        assert re.search(rf"server processes .*\b{pid}\b", caplog.text)
    assert make_maintainer(BILLING).run_once().removed["inbox"] == 100


def test_of_several_that_begin_at_once_one_works(
    engine: Engine, make_maintainer: StartMaintainer, pool: ThreadPoolExecutor
) -> None:
    several = [make_maintainer(BILLING)._transactions for _ in range(4)]
    for _ in range(5):  # the first time there is no row, and then one whose end is over
        together = Barrier(len(several))
        acquired = pool.map(lambda one, together=together: together.wait() >= 0 and one.acquire(), several)
        assert sum(acquired) == 1
        expire_lease(engine)


def test_one_that_was_frozen_between_two_transactions_does_nothing_more(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    frozen, other = make_maintainer(BILLING)._transactions, make_maintainer(BILLING)._transactions
    assert frozen.acquire()
    assert not other.acquire()
    expire_lease(engine)
    assert other.acquire()
    with pytest.raises(LeaseGone):
        frozen.run(lambda connection: connection.exec_driver_sql("INSERT INTO paused VALUES ('subscriber', 'a', 'b')"))
    assert found(engine, "SELECT count(*) FROM paused") == 0
    assert not frozen.acquire()
    other.release()
    assert frozen.acquire()


def test_one_that_is_frozen_within_a_transaction_keeps_the_others_out_until_the_server_ends_it(
    engine: Engine, make_maintainer: StartMaintainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.maintenance.transactions.IDLE_SECONDS", 2)
    frozen, other = make_maintainer()._transactions, make_maintainer()._transactions
    assert frozen.acquire()

    def freeze() -> None:
        with frozen._leased(10_000):
            assert not other.acquire(), "its row is locked"
            wait_until(
                lambda: not found(engine, "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in tr%%'"),
                "the server ends the transaction",
            )
            expire_lease(engine)
            assert other.acquire()

    with pytest.raises(DBAPIError, match="idle-in-transaction"):
        freeze()


def test_an_end_that_is_too_far_away_is_one_of_a_clock_that_was_set_back(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    assert make_maintainer()._transactions.acquire()
    run(engine, "UPDATE maintenance SET expires_at = now() + interval '1 day' WHERE task = 'lease'")
    assert make_maintainer()._transactions.acquire()


def test_a_row_that_another_transaction_has_locked_is_left_for_later(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    record(engine, "billing", "first-", 1, days_ago=31)
    make_maintainer(BILLING).run_once()
    record(engine, "billing", "old-", 1_000, days_ago=31)
    with engine.connect() as other:
        other.exec_driver_sql("SELECT FROM processed_message WHERE message_id = 'old-500' FOR UPDATE")
        make_maintainer(BILLING).run_once()
        assert left(engine) == {"old-": 1}
    make_maintainer(BILLING).run_once()
    assert left(engine) == {}


def test_a_redrive_and_a_maintainer_do_not_wait_for_each_other(
    engine: Engine, make_maintainer: StartMaintainer
) -> None:
    letters = DeadLetters(engine)
    number = letters.park(letter("parked"))
    run(engine, "UPDATE processed_message SET processed_at = now() - interval '40 days'")
    make_maintainer(BILLING).run_once()
    record(engine, "billing", "old-", 100, days_ago=31)

    def send(_: DeadLetter) -> None:  # the redrive has deleted the row of the inbox, and is not committed
        assert make_maintainer(Retention(inbox={"billing": KEPT}, letters=timedelta(days=1))).run_once().worked
        assert left(engine) == {"parked": 1}

    letters.redrive(number, send)
    assert left(engine) == {}
    with engine.begin() as connection:
        assert Inbox("billing").record(connection, "parked"), "the copy that was sent is the first"


def test_ids_that_are_recorded_meanwhile_stay(
    engine: Engine, make_maintainer: StartMaintainer, pool: ThreadPoolExecutor
) -> None:
    record(engine, "billing", "old-", 30_000, days_ago=31)
    stop: list[bool] = []
    counts = Counter[str]()

    def keep_recording(worker: str) -> None:
        inbox = Inbox("billing")
        while not stop:
            with engine.begin() as connection:
                assert inbox.record(connection, f"new{worker}-{counts[worker]}")
            counts[worker] += 1

    workers = [pool.submit(keep_recording, worker) for worker in "ab"]
    try:
        wait_until(lambda: len(counts) == 2 or any(worker.done() for worker in workers), "both record")
        make_maintainer(BILLING, rows_per_transaction=500).run_once()
    finally:
        stop.append(True)
    for worker in workers:
        worker.result(timeout=30)
    assert left(engine) == {f"new{worker}-": count for worker, count in counts.items()}


@pytest.mark.parametrize("code", ["40P01", "40001", "55P03"])
def test_a_transaction_that_meets_others_is_run_again(
    engine: Engine, make_maintainer: StartMaintainer, code: str
) -> None:
    run(engine, "CREATE SEQUENCE deletes")
    run(
        engine,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF nextval('deletes') IN (1, 3) THEN "
        f"RAISE EXCEPTION 'another transaction' USING ERRCODE = '{code}'; END IF; RETURN NULL; END $$",
    )
    run(engine, "CREATE TRIGGER refuse AFTER DELETE ON processed_message EXECUTE FUNCTION refuse()")
    record(engine, "billing", "old-", 2_000, days_ago=31)
    report = make_maintainer(BILLING, rows_per_transaction=500).run_once()
    assert report.removed["inbox"] == 2_000
    assert left(engine) == {}
    assert found(engine, "SELECT removed FROM maintenance WHERE task = 'inbox'") == 2_000


def test_behind_a_pooler_in_transaction_mode(schema_url: str, engine: Engine) -> None:
    record(engine, "billing", "old-", 2_000, days_ago=31)
    with transaction_pooler(schema_url, size=2) as (_, url):
        through = create_engine(url)
        try:
            report = Maintainer(through, BILLING, budget_ms_per_second=1000, rows_per_transaction=500).run_once()
        finally:
            through.dispose()
    assert report.removed["inbox"] == 2_000
    assert left(engine) == {}


def test_as_services_one_works_and_another_takes_over(engine: Engine, make_maintainer: StartMaintainer) -> None:
    services = [make_maintainer(BILLING, interval_seconds=0.05) for _ in range(2)]
    for service in services:
        service.start()
    try:
        record(engine, "billing", "old-", 2_000, days_ago=31)
        wait_until(lambda: not left(engine), "the old ids are gone")
        first = next(one for one in services if one._is_at_work)
        assert first.stop(20)
        record(engine, "billing", "again-", 2_000, days_ago=31)
        wait_until(lambda: not left(engine), "the other one has taken over")
        assert found(engine, "SELECT finished_at > now() - interval '1 minute' FROM maintenance WHERE task = 'lease'")
    finally:
        for service in services:
            assert service.stop(20)
    assert found(engine, "SELECT expires_at FROM maintenance WHERE task = 'lease'") is None


def test_a_service_on_a_server_that_takes_no_writes_says_so_and_goes_on_when_it_does(
    engine: Engine, make_maintainer: StartMaintainer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.maintenance.maintainer.AGAIN", Backoff(first_seconds=0.05, longest_seconds=0.1))
    read_only = engine.execution_options()
    refuses = [False]

    @event.listens_for(read_only, "begin")
    def begin(connection: Connection) -> None:
        if refuses[0]:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")

    service = make_maintainer(BILLING, engine=read_only, interval_seconds=0.05)
    service.start()
    try:
        refuses[0] = True
        wait_until(lambda: "this server takes no writes" in caplog.text, "it says what is wrong")
        record(engine, "billing", "old-", 10, days_ago=31)
        refuses[0] = False
        wait_until(lambda: not left(engine), "it goes on by itself")
    finally:
        refuses[0] = False
        assert service.stop(20)


def test_an_inbox_that_begins_to_rotate_in_a_round_loses_no_young_id(
    schema_url: str, engine: Engine, make_maintainer: StartMaintainer
) -> None:
    """The place of an old row in the first generation is that of a young row in the second."""
    record(engine, "billing", "old-", 100, days_ago=40)
    own = create_engine(schema_url)
    turned: list[bool] = []

    @event.listens_for(own, "before_cursor_execute")
    def turn(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "DELETE FROM processed_message" in statement and not turned:
            turned.append(InboxConversion(engine).forward() and Generations(engine).rotate())
            record(engine, "billing", "young-", 100, days_ago=0)

    make_maintainer(BILLING, engine=own).run_once()
    own.dispose()
    assert turned == [True]
    assert left(engine) == {"old-": 100, "young-": 100}
