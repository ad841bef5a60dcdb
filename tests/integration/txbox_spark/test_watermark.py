"""Watermarks in a bulk load: events that carry their account's state, of which the newest is to stay."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Connection, Engine

from support.spark.bulk_loads import COPY_FIRST, Books, frame, load
from txbox.watermarks import Advance, Watermarks

COLUMNS = "event_id string, account_id int, version int, balance bigint"
ACCOUNTS, VERSIONS = 20, 30

Event = tuple[str, int, int, int]


def balance_at(account: int, version: int) -> int:
    return random.Random(account * 1_000 + version).randrange(1, 10**6)


def every_event() -> list[Event]:
    """Every version of every account, each with the balance that it has then."""
    return [
        (f"{account}-{version}", account, version, balance_at(account, version))
        for account in range(ACCOUNTS)
        for version in range(1, VERSIONS + 1)
    ]


def keep_newest() -> Callable[[Connection], None]:
    """Make the effect: nested, so that it is sent to the executors whole."""

    def apply(connection: Connection) -> None:
        options: dict[str, Any] = {"aggregate_id": "account_id", "sequence": "version", "newest_only": True}
        Watermarks("billing").advance_from(connection, aggregate_type="account", **options)
        connection.exec_driver_sql(
            "UPDATE account SET balance = event.balance FROM fresh_event AS event "
            "WHERE account.account_id = event.account_id"
        )
        connection.exec_driver_sql("INSERT INTO applied SELECT account_id, version FROM fresh_event")

    return apply


@pytest.fixture
def accounts(books: Books) -> Books:
    books.run("CREATE TABLE applied (account_id int, version int, number serial)")
    return books


def require_newest(accounts: Books, events: list[Event]) -> None:
    """See that each account has the state of the newest of these, by way of versions that only rose."""
    newest: dict[int, Event] = {}
    for event in events:
        newest[event[1]] = max(newest.get(event[1], event), event, key=lambda one: one[2])
    assert accounts.balances() == {account: event[3] for account, event in newest.items()}
    marks = accounts.rows("SELECT aggregate_id::int, sequence FROM aggregate_watermark WHERE subscriber_id = 'billing'")
    assert dict(marks) == {account: event[2] for account, event in newest.items()}
    for account, event in newest.items():
        applied = accounts.rows("SELECT version FROM applied WHERE account_id = %s ORDER BY number", account)
        versions = [row[0] for row in applied]
        assert versions == sorted(set(versions))
        assert versions[-1] == event[2]


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_loads_that_overlap_and_come_out_of_order_leave_the_newest_state(
    spark: SparkSession, accounts: Books, schema_url: str, writer: str
) -> None:
    events = every_event()
    random.Random(5).shuffle(events)
    # Half of the accounts have their newest event in the first load, half in the second; 200 events are in both.
    first, second = events[:400], events[200:]
    for batch, known in ((first, []), (second, first)):
        report = load(frame(spark, batch, COLUMNS), schema_url, writer, apply=keep_newest())
        assert report.applied == len(set(batch) - set(known))
        assert report.chunks > 2, "the events of an account are in several chunks"
        require_newest(accounts, [*known, *batch])


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_a_load_beside_live_workers_leaves_the_newest_state_of_both(
    spark: SparkSession, engine: Engine, accounts: Books, schema_url: str, writer: str
) -> None:
    events = every_event()
    newer = [(f"live-{account}", account, VERSIONS + 1 + account % 3, account + 7) for account in range(ACCOUNTS // 2)]
    older = [(f"late-{account}", account, 2, -1) for account in range(ACCOUNTS)]
    begun = threading.Event()

    def work() -> list[Advance]:
        begun.wait(60)
        billing = Watermarks("billing", wait_seconds=60)
        answers = []
        for _, account, version, balance in [*newer, *older]:
            with engine.begin() as connection:
                answer = billing.advance(connection, "account", str(account), version)
                if answer is Advance.APPLIED:
                    connection.exec_driver_sql(
                        "UPDATE account SET balance = %s WHERE account_id = %s", (balance, account)
                    )
                    connection.exec_driver_sql(
                        "INSERT INTO applied (account_id, version) VALUES (%s, %s)", (account, version)
                    )
                answers.append(answer)
        return answers

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        load(
            frame(spark, events, COLUMNS),
            schema_url,
            writer,
            apply=keep_newest(),
            chunk_rows=50,
            on_progress=lambda _: begun.set(),
        )
        begun.set()
        answers = working.result(60)
    assert answers[: len(newer)] == [Advance.APPLIED] * len(newer), "nothing in the load is above them"
    require_newest(accounts, [*events, *newer])
