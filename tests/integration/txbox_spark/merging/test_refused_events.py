"""The search for events that an effect fails for: what it finds, how often it tries, and how long others wait."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, Engine

from support.spark.bulk_loads import SUBSCRIBER, Books
from support.waiting import wait_until
from txbox.postgres.guards.transaction_guard import guard
from txbox.postgres.transactions import short_transaction
from txbox_spark.merging import refused_events
from txbox_spark.merging.chunk_merger import MOST_SEARCHES, begin_chunk, merge_chunk
from txbox_spark.merging.effect_runner import ApplyFailed
from txbox_spark.merging.merge_plan import ChunkCounts, MergePlan
from txbox_spark.options import Apply
from txbox_spark.reading.columns import EventColumn

RUN = "0123456789ab"
COLUMNS = (EventColumn("number", "c0", "integer"),)
APPLY = "INSERT INTO effect SELECT message_id, number FROM fresh_event"
RECORD = f"INSERT INTO processed_message (subscriber_id, message_id) VALUES ('{SUBSCRIBER}', 'e0000')"


@pytest.fixture
def books(engine: Engine) -> Books:
    books = Books(engine)
    books.run(
        "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds) "
        f"VALUES ('{RUN}', '{SUBSCRIBER}', 'a test', '', 'jdbc', 1, '[]')",
        'CREATE TABLE incoming (message_id text COLLATE "C", c0 integer)',
        "CREATE SEQUENCE tries",
    )
    return books


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def merge(engine: Engine, books: Books, events: int, apply: Apply = APPLY) -> int:
    """Merge so many events, e0000 and so on, in one chunk; return how many were applied."""
    books.run(f"INSERT INTO incoming SELECT 'e' || lpad(i::text, 4, '0'), i FROM generate_series(0, {events - 1}) AS i")
    plan = MergePlan(run_id=RUN, subscriber_id=SUBSCRIBER, columns=COLUMNS, apply=apply)
    with short_transaction(guard(engine)) as connection:
        assert begin_chunk(connection, plan, 0)
        counts = ChunkCounts(events, 0, events)
        return merge_chunk(connection, plan, 0, ("", None), counts, staged="incoming", pause=lambda _: None).applied


def applied(books: Books) -> list[int]:
    """Return the numbers of the events that are applied, which must be those in the inbox."""
    numbers = [number for (number,) in books.rows("SELECT account_id FROM effect ORDER BY account_id")]
    assert books.inbox() == [f"e{number:04}" for number in numbers]
    return numbers


def alone(connection: Connection) -> bool:
    """Whether the effect is applied to a part of the events."""
    return bool(connection.exec_driver_sql("SELECT count(*) < 8 FROM fresh_event").scalar_one())


@pytest.mark.parametrize(
    ("events", "bad", "most"),
    [
        (1000, "number IN (3, 400, 401, 998)", 4 * 14),  # log2(1000 / 4) is 8
        (1000, "number < 500", 500 + 500 + 20),
        (1000, "number = 999", 30),
        (300, "number >= 0", 600),
    ],
)
def test_the_tries_grow_with_the_refused_events(
    engine: Engine, books: Books, monkeypatch: pytest.MonkeyPatch, events: int, bad: str, most: int
) -> None:
    """A sequence is not rolled back, so it knows how often the effect was tried."""
    monkeypatch.setattr(refused_events, "TURN_SECONDS", 600.0, raising=False)
    bad = bad.replace("number", "account_id")
    books.run(f"ALTER TABLE effect ADD CHECK (NOT ({bad}))")
    refused = books.rows(f"SELECT count(*) FROM generate_series(0, {events - 1}) AS account_id WHERE {bad}")[0][0]
    assert merge(engine, books, events, f"SELECT nextval('tries'); {APPLY}") == events - refused
    assert len(applied(books)) == events - refused
    assert books.rows("SELECT last_value <= %s FROM tries", most) == [(True,)]
    assert books.rows("SELECT rows_rejected FROM bulk_load_chunk") == [(refused,)]


@pytest.mark.parametrize(("quoted", "most"), [("NEW.account_id", 65), ("'nothing'", 110), ("'e0999'", 110)])
def test_what_postgres_quotes_leads_to_the_event(
    engine: Engine, books: Books, monkeypatch: pytest.MonkeyPatch, quoted: str, most: int
) -> None:
    """It quotes the event that it refuses, none, or another one: then the search takes longer, and finds the same."""
    monkeypatch.setattr(refused_events, "TURN_SECONDS", 600.0)
    books.run(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN RAISE check_violation USING MESSAGE = 'no ' || {quoted}; END$$",
        "CREATE TRIGGER refuse BEFORE INSERT ON effect FOR EACH ROW WHEN (NEW.account_id %% 100 = 7) "
        "EXECUTE FUNCTION refuse()",
    )
    assert merge(engine, books, 1000, f"SELECT nextval('tries'); {APPLY}") == 990
    assert applied(books) == [number for number in range(1000) if number % 100 != 7]
    assert books.rows("SELECT last_value FROM tries WHERE last_value > %s", most) == []


@pytest.mark.parametrize("good", ["account_id = 19", "account_id = 7"])
def test_good_events_behind_many_refused_ones_are_applied(
    engine: Engine, books: Books, monkeypatch: pytest.MonkeyPatch, good: str
) -> None:
    monkeypatch.setattr(refused_events, "ALL_REFUSED", 7)
    books.run(f"ALTER TABLE effect ADD CHECK ({good})")
    merge(engine, books, 21)
    assert applied(books) in ([19], [7])


def test_two_events_that_exclude_each_other(engine: Engine, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes back and on after each part, and still knows what it has applied before."""
    monkeypatch.setattr(refused_events, "TURN_SECONDS", 0.0, raising=False)
    books.run("CREATE UNIQUE INDEX ON effect ((account_id / 2)) WHERE account_id < 20")
    assert merge(engine, books, 40) == 30
    assert applied(books) == [*range(0, 20, 2), *range(20, 40)]


def test_nobody_waits_for_an_id_that_the_search_tries(engine: Engine, books: Books) -> None:
    tried: list[int] = []

    def apply(connection: Connection) -> None:
        if alone(connection):
            with engine.begin() as worker:
                worker.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
                tried.append(worker.exec_driver_sql(RECORD).rowcount)
                worker.rollback()
        connection.exec_driver_sql(APPLY)

    books.run("ALTER TABLE effect ADD CHECK (account_id <> 5)")
    assert merge(engine, books, 9, apply) == 8
    assert tried
    assert 5 not in applied(books)


def test_who_waits_for_a_row_has_it_when_the_search_has_gone_back(
    engine: Engine, books: Books, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """It waits for a part that was applied, and has the row before the good events are applied the next time."""
    monkeypatch.setattr(refused_events, "TURN_SECONDS", 600.0, raising=False)
    monkeypatch.setattr(refused_events, "TURN_PARTS", 2, raising=False)
    waiter: list[Future[object]] = []
    change = "UPDATE account SET balance = balance + 1 WHERE account_id = 0"

    def wait() -> None:
        with engine.begin() as worker:
            worker.exec_driver_sql(change)

    def waiting() -> bool:
        return bool(books.rows("SELECT FROM pg_stat_activity WHERE query = %s AND wait_event_type = 'Lock'", change))

    def apply(connection: Connection) -> None:
        part = connection.exec_driver_sql("SELECT number FROM fresh_event ORDER BY number").scalars().all()
        if waiter:
            waiter[0].result(10)
        elif part == [1, 2]:  # e0000 is applied
            waiter.append(pool.submit(wait))
            wait_until(waiting, "a worker waits for the row")
        connection.exec_driver_sql(f"{APPLY}; {change}")

    books.run("ALTER TABLE effect ADD CHECK (account_id <> 5)")
    assert merge(engine, books, 9, apply) == 8
    assert books.balances()[0] == 2


@pytest.mark.parametrize("during", ["the search", "the last merge"])
def test_what_changes_during_a_search_is_searched_again(
    engine: Engine, books: Books, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """Somebody takes the key of a good event."""
    monkeypatch.setattr(refused_events, "TURN_SECONDS", 0.0 if during == "the search" else 600.0, raising=False)
    calls: list[bool] = []

    def apply(connection: Connection) -> None:
        good = connection.exec_driver_sql("SELECT count(*) FROM fresh_event WHERE number = 0").scalar_one()
        calls.append(alone(connection))
        again = calls.count(False) == 2 if during == "the last merge" else calls.count(True) > 3 and good
        if again and not taken.is_set():
            taken.set()
            books.run("INSERT INTO effect VALUES ('other', 0)")
        connection.exec_driver_sql(APPLY)

    taken = threading.Event()
    books.run("CREATE UNIQUE INDEX ON effect (account_id)", "ALTER TABLE effect ADD CHECK (account_id <> 5)")
    assert merge(engine, books, 9, apply) == 7
    assert taken.is_set()
    assert books.inbox() == [f"e000{number}" for number in range(9) if number not in (0, 5)]
    assert books.rows("SELECT rows_rejected FROM bulk_load_chunk") == [(2,)]


def test_what_fails_only_for_all_events_is_searched_a_few_times(engine: Engine, books: Books) -> None:
    calls: list[bool] = []

    def apply(connection: Connection) -> None:
        calls.append(alone(connection))
        connection.exec_driver_sql("SELECT 1 / (count(*) < 8)::int FROM fresh_event")

    with pytest.raises(ApplyFailed, match="division by zero"):
        merge(engine, books, 9, apply)
    assert calls.count(False) == 1 + MOST_SEARCHES
    assert books.inbox() == []


def test_a_conflict_in_a_statement_of_the_search_has_the_merge_try_again(engine: Engine, books: Books) -> None:
    books.run(
        "CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN "
        "IF nextval('tries') = 1 THEN RAISE serialization_failure; END IF; RETURN NEW; END$$",
        "ALTER TABLE effect ADD CHECK (account_id <> 5)",
    )
    trigger = "CREATE OR REPLACE TRIGGER conflict BEFORE INSERT ON fresh_event FOR EACH ROW EXECUTE FUNCTION conflict()"

    def apply(connection: Connection) -> None:
        if alone(connection):
            connection.exec_driver_sql(trigger)
        connection.exec_driver_sql(APPLY)

    assert merge(engine, books, 9, apply) == 8
    assert 5 not in applied(books)
    assert books.rows("SELECT last_value > 1 FROM tries") == [(True,)]
