"""How long a chunk that is stuck keeps others waiting: on real connections and without Spark."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from support.spark.bulk_loads import Books
from support.waiting import wait_until
from txbox.postgres.guards.transaction_guard import guard
from txbox.postgres.transactions import short_transaction
from txbox.status import find_blocked_loads, read_status
from txbox_cli.app import run as txbox
from txbox_spark.loading import ledger as ledgers
from txbox_spark.loading.copy_writer import end_frozen_copies
from txbox_spark.loading.ledger import LoadLedger
from txbox_spark.merging.chunk_merger import ChunkHeld, EffectsHeld, begin_chunk, merge_chunk
from txbox_spark.merging.fresh_event import create_fresh
from txbox_spark.merging.merge_plan import ChunkCounts, MergePlan
from txbox_spark.options import Apply
from txbox_spark.reading.columns import EventColumn
from txbox_spark.runtime.retries import is_transient

FIRST, SECOND = "00000000000a", "00000000000b"
COLUMNS = (EventColumn("account_id", "c0", "integer"), EventColumn("amount", "c1", "bigint"))
WRITE = "INSERT INTO effect SELECT message_id, account_id, amount FROM fresh_event"
SHORT = {"stalled_seconds": 1.0}

Merge = Callable[..., "Future[int | None]"]


@pytest.fixture
def merge(engine: Engine) -> Iterator[Merge]:
    """Merge a chunk of one event, in a thread: merge(run_id, apply, limits, subscriber)."""
    guarded = guard(engine)

    def run(run_id: str, apply: Apply, limits: dict[str, float], subscriber: str) -> int | None:
        plan = MergePlan(run_id=run_id, subscriber_id=subscriber, columns=COLUMNS, apply=apply, **limits)
        with short_transaction(guarded) as connection:
            if not begin_chunk(connection, plan, 0):
                return None
            connection.exec_driver_sql(create_fresh(COLUMNS))
            connection.exec_driver_sql("INSERT INTO fresh_event VALUES (%s, 1, 5)", (f"event of {run_id}",))
            return merge_chunk(connection, plan, 0, ("", None), ChunkCounts(1, 0, 1), pause=lambda _: None).applied

    with ThreadPoolExecutor() as pool:
        yield lambda run_id, apply=WRITE, limits=None, subscriber="billing": pool.submit(
            run, run_id, apply, limits or {}, subscriber
        )


class Stuck:
    """An effect that begins and does not go on, until it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.goes_on = threading.Event()

    def __call__(self, connection: Connection) -> None:
        connection.exec_driver_sql(WRITE)
        self.begun.set()
        assert self.goes_on.wait(60)
        connection.exec_driver_sql(WRITE)


def applied(books: Books) -> list[str]:
    return sorted(one[0] for one in books.effects())


def test_a_chunk_whose_executor_is_frozen_is_ended_and_the_next_one_goes_on(books: Books, merge: Merge) -> None:
    stuck = Stuck()
    frozen = merge(FIRST, stuck, SHORT)
    assert stuck.begun.wait(60)
    assert merge(SECOND).result(60) == 1
    stuck.goes_on.set()
    with pytest.raises(DBAPIError) as raised:
        frozen.result(60)
    assert is_transient(raised.value)
    assert books.effects() == {(f"event of {SECOND}", 1, 5): 1}
    assert books.inbox() == [f"event of {SECOND}"]
    assert merge(FIRST).result(60) == 1
    assert applied(books) == books.inbox() == [f"event of {FIRST}", f"event of {SECOND}"]


def test_loads_of_other_subscribers_do_not_wait(books: Books, merge: Merge) -> None:
    stuck = Stuck()
    held = merge(FIRST, stuck)
    assert stuck.begun.wait(60)
    assert merge(SECOND, subscriber="shipping").result(60) == 1
    assert not held.done()
    stuck.goes_on.set()
    assert held.result(60) == 1
    assert books.inbox("shipping") == [f"event of {SECOND}"]


def test_who_waits_for_a_server_process_that_stands_still_gives_up_and_names_it(
    books: Books, merge: Merge, engine: Engine, schema_url: str, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # A statement that runs, and never ends: from outside, it cannot be told from a process that is stopped.
    running = merge(FIRST, f"{WRITE}; SELECT pg_sleep(300)")
    wait_until(lambda: books.rows("SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep'") != [], "it sleeps")
    ((pid,),) = books.rows("SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
    try:
        waiting = merge(SECOND, limits={"effects_seconds": 3.0})
        with engine.connect() as connection:
            wait_until(lambda: find_blocked_loads(connection) != (), "it waits")
            (found,) = find_blocked_loads(connection, SECOND)
            assert (found.run_id, found.blocker_run_id, found.blocker_pid) == (SECOND, FIRST, pid)
            assert find_blocked_loads(connection, FIRST) == ()
        assert [one.blocker_run_id for one in read_status(engine).blocked_loads] == [FIRST]
        assert txbox(["status", "--url", schema_url]) == 0
        assert f"server process {pid} (bulk load {FIRST}, of " in capsys.readouterr().out
        monkeypatch.setattr(ledgers, "HEARTBEAT_SECONDS", 0.05)
        monkeypatch.setattr(ledgers, "BLOCKED_SECONDS", 0.0)
        with ledgers.heartbeat(LoadLedger(engine), SECOND):
            wait_until(lambda: f"pg_terminate_backend({pid})" in caplog.text, "the log names it")
        with pytest.raises(EffectsHeld, match=rf"server process {pid} .*pg_terminate_backend\({pid}\)"):
            waiting.result(60)
    finally:
        books.run(f"SELECT pg_terminate_backend({pid})")
    with pytest.raises(DBAPIError):
        running.result(60)
    assert merge(SECOND).result(60) == 1
    assert applied(books) == books.inbox() == [f"event of {SECOND}"]


def test_a_chunk_that_waits_for_a_row_lets_others_go_first(books: Books, merge: Merge, engine: Engine) -> None:
    with engine.begin() as other:
        other.exec_driver_sql("UPDATE account SET balance = 1 WHERE account_id = 1")
        waiting = merge(FIRST, f"{WRITE}; UPDATE account SET balance = balance + 5 WHERE account_id = 1", SHORT)
        wait_until(lambda: books.rows("SELECT FROM pg_locks WHERE NOT granted") != [], "it waits")
        assert merge(SECOND).result(60) == 1
        assert not waiting.done()
    assert waiting.result(60) == 1
    assert applied(books) == books.inbox() == [f"event of {FIRST}", f"event of {SECOND}"]
    assert books.balances() == {1: 6}


def test_a_chunk_that_another_attempt_holds_is_given_up_and_may_be_tried_again(books: Books, merge: Merge) -> None:
    stuck = Stuck()
    held = merge(FIRST, stuck)
    assert stuck.begun.wait(60)
    with pytest.raises(ChunkHeld, match="chunk 0 has held it for 1 s") as raised:
        merge(FIRST, limits=SHORT).result(60)
    assert is_transient(raised.value)
    stuck.goes_on.set()
    assert held.result(60) == 1
    assert merge(FIRST).result(60) is None


def test_a_statement_whose_client_is_gone_is_ended(merge: Merge, books: Books) -> None:
    """The server looks for its client while a statement runs, where it can."""
    merging = merge(FIRST, "CREATE TABLE seen AS SELECT current_setting('client_connection_check_interval', true) AS s")
    assert merging.result(60) == 1
    assert books.rows("SELECT s FROM seen") == [("10s",)]


@pytest.mark.parametrize("alive", [False, True])
def test_a_copy_whose_client_is_frozen_is_ended_and_a_slow_one_is_not(engine: Engine, alive: bool) -> None:
    """No time-out of Postgres reaches a server process that reads a COPY."""
    plan = MergePlan(run_id=FIRST, subscriber_id="billing", columns=COLUMNS, apply=WRITE, stalled_seconds=1.0)
    guarded, ended = guard(engine), threading.Event()

    def copy() -> None:
        with short_transaction(guarded) as connection:
            assert begin_chunk(connection, plan, 0)
            connection.exec_driver_sql(create_fresh(COLUMNS))
            driver = connection.connection.driver_connection
            with driver.cursor() as cursor, cursor.copy("COPY pg_temp.fresh_event FROM STDIN") as copying:
                copying.write(f"event of {FIRST}\t1\t5\n" * 10_000)  # more than psycopg holds back
                while not ended.wait(0.1):
                    if alive:
                        copying.write(f"event of {FIRST}\t1\t5\n" * 1_000)

    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copy)
        try:
            claimed = "SELECT FROM pg_stat_progress_copy WHERE bytes_processed > 0"
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                wait_until(lambda: connection.exec_driver_sql(claimed).rowcount, "it copies")
                began = "SELECT FROM pg_stat_activity WHERE query ~ '^COPY' AND query_start < now() - interval '1.5 s'"
                wait_until(lambda: connection.exec_driver_sql(began).rowcount, "its time is over, and it is there")
            assert end_frozen_copies(engine, plan) == (0 if alive else 1)
        finally:
            ended.set()
        if alive:
            copied.result(60)
        else:
            with pytest.raises((DBAPIError, psycopg.OperationalError)):
                copied.result(60)
