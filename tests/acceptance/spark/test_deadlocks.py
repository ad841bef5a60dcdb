"""Bulk loads whose statements lock rows in any order: no deadlock among chunks, and a way out of one with others."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, make_url
from sqlalchemy.exc import DBAPIError

from support.spark.bulk_load_moments import connected
from support.spark.bulk_loads import WRITERS
from support.spark.purchases import WRITE_EFFECT, Books, Purchases, adds_up
from support.waiting import wait_until
from txbox.postgres.sqlstates import DEADLOCK_DETECTED, sqlstate
from txbox_spark import BulkLoadReport, bulk_load, read_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first needs a JVM, and a machine may be slow

PURCHASES = Purchases.make(1_500, twice=100)

IN_ANY_ORDER = f"""
{WRITE_EFFECT};
DO $each$
DECLARE added record;
BEGIN
  FOR added IN SELECT account_id, sum(amount) AS amount FROM fresh_event GROUP BY account_id ORDER BY random() LOOP
    UPDATE account SET balance = balance + added.amount WHERE account_id = added.account_id;
    PERFORM pg_sleep(0.02);
  END LOOP;
END $each$"""
"""Locks the accounts one by one, in an order of each chunk's own."""

Load = Callable[..., BulkLoadReport]


@pytest.fixture
def load(spark: "SparkSession", fresh_database: str, tmp_path: Path) -> Load:
    events = read_events(spark, [PURCHASES.write(tmp_path / "archive")])

    def load(deadlock_timeout: str = "1s", **settings: Any) -> BulkLoadReport:
        place = make_url(fresh_database).update_query_dict({"options": f"-cdeadlock_timeout={deadlock_timeout}"})
        settings = {"chunk_rows": 250, "parallelism": 2, **settings}
        return bulk_load(events, url=place, subscriber_id="billing", message_id="purchase_id", **settings)

    return load


def deadlocks(engine: Engine) -> int:
    """How many deadlocks there were; a connection has told of its own at the latest when it has ended."""
    wait_until(lambda: connected(engine) == 0, "all others are gone")
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        return int(found.scalar_one())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_chunks_that_lock_the_same_rows_in_different_orders_do_not_meet_in_a_deadlock(
    writer: str, parallelism: int, engine: Engine, books: Books, load: Load
) -> None:
    report = load(deadlock_timeout="10ms", writer=writer, parallelism=parallelism, apply=IN_ANY_ORDER)
    assert report.chunks >= 6
    assert report.attempts == 1
    adds_up(report, PURCHASES)
    books.assert_exact(PURCHASES)
    assert deadlocks(engine) == 0


@pytest.mark.parametrize("writer", WRITERS)
def test_many_live_transactions_that_lock_in_any_order(writer: str, engine: Engine, books: Books, load: Load) -> None:
    """They move money to and fro, and come out at nothing."""
    ended = threading.Event()
    moved, victims = 0, 0

    def move() -> None:
        nonlocal moved, victims
        with engine.connect() as connection:
            while not ended.is_set():
                try:
                    connection.exec_driver_sql(
                        "SELECT set_config('deadlock_timeout', '50ms', true); "
                        "DO $$ DECLARE one int; BEGIN "
                        "FOR one IN SELECT account_id FROM account ORDER BY random() LIMIT 3 LOOP "
                        "UPDATE account SET balance = balance + 0 WHERE account_id = one; PERFORM pg_sleep(0.01); "
                        "END LOOP; END $$"
                    )
                    connection.commit()
                    moved += 1
                except DBAPIError as error:
                    if sqlstate(error) != DEADLOCK_DETECTED:
                        raise
                    connection.rollback()
                    victims += 1

    with ThreadPoolExecutor(2) as pool:
        movers = [pool.submit(move) for _ in range(2)]
        try:
            report = load(deadlock_timeout="20ms", writer=writer, apply=IN_ANY_ORDER)
        finally:
            ended.set()
        for mover in movers:
            mover.result(30)
    adds_up(report, PURCHASES)
    books.assert_exact(PURCHASES)
    assert deadlocks(engine) > victims, "some of them were the load's"
    assert moved
