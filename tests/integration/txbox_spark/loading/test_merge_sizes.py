"""Several chunks in one transaction: as many as its time allows; the ledger, the report and a resumed run add up."""

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Connection, Engine, text

from support.spark.bulk_loads import APPLY_ALLOWED, WRITERS, Books, counts, failed, frame, load, purchases
from txbox.maintenance.rotation import Generations, InboxConversion

LONG, SHORT = 60.0, 1e-6
EVENTS = purchases(400)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten rows, about."""
    monkeypatch.setattr("txbox_spark.loading.loader.ROWS_OF_A_CHUNK", 10)
    monkeypatch.setattr("txbox_spark.loading.loader.MIN_CHUNK_ROWS", 10)


def transactions(books: Books) -> int:
    return len(books.rows("SELECT DISTINCT xmin::text FROM bulk_load_chunk"))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_transaction_takes_as_many_chunks_as_its_time_allows(
    spark: SparkSession, books: Books, engine: Engine, schema_url: str, writer: str
) -> None:
    books.record([one[0] for one in EVENTS[:7]])
    given = frame(spark, [*EVENTS, *EVENTS[:50], (None, 1, 1), ("", 1, 1)])
    found = {}
    for lock_seconds in (SHORT, LONG):
        with engine.begin() as connection:
            connection.execute(text("TRUNCATE processed_message, bulk_load_chunk, effect"))
            connection.execute(text("UPDATE account SET balance = 0"))
        books.record([one[0] for one in EVENTS[:7]])
        report = load(given, schema_url, writer, chunk_rows=100, lock_seconds=lock_seconds)
        assert counts(report) == {
            "read": 452, "rejected": 2, "duplicate_in_source": 50, "already_processed": 7, "applied": 393
        }  # fmt: skip
        books.require_applied(EVENTS[7:], recorded=[one[0] for one in EVENTS[:7]])
        assert books.rows("SELECT count(*) FROM bulk_load_chunk") == [(report.chunks,)]
        found[lock_seconds] = report.chunks, transactions(books)
    chunks, each = found[SHORT]
    assert chunks == each >= 20
    chunks, together = found[LONG]
    assert chunks / 10 <= together <= chunks / 2


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("rotating", [False, True])
def test_a_transaction_takes_one_chunk_while_workers_record_ids(
    spark: SparkSession, books: Books, engine: Engine, schema_url: str, writer: str, *, rotating: bool
) -> None:
    if rotating:
        assert InboxConversion(engine).forward()
        assert Generations(engine).rotate()
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO processed_message (subscriber_id, message_id) VALUES ('other', 'm')"))
        report = load(frame(spark, EVENTS), schema_url, writer, chunk_rows=100, lock_seconds=LONG)
    assert report.chunks == transactions(books) >= 20
    books.require_applied(EVENTS)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("is_callable", [False, True])
def test_chunks_of_statements_share_a_session(
    spark: SparkSession, books: Books, schema_url: str, writer: str, *, is_callable: bool
) -> None:
    """A callable may change the driver's connection, so each of its chunks has a new one."""
    statement = "INSERT INTO seen SELECT pg_backend_pid() FROM fresh_event LIMIT 1"

    def apply(connection: Connection) -> None:
        connection.exec_driver_sql(statement)

    books.run("CREATE TABLE seen (pid int)")
    settings = {"chunk_rows": 100, "lock_seconds": SHORT, "parallelism": 1}
    report = load(frame(spark, EVENTS), schema_url, writer, apply=apply if is_callable else statement, **settings)
    ((transactions, sessions),) = books.rows("SELECT count(*), count(DISTINCT pid) FROM seen")
    assert transactions == report.chunks >= 20
    assert sessions == (transactions if is_callable else 1)


@pytest.mark.parametrize("writer", WRITERS)
def test_what_failed_is_resumed(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    """All the chunks of a transaction that fails are left, and no other."""
    books.run(f"INSERT INTO forbidden VALUES ('{max(EVENTS)[0]}')")
    settings = {"apply": APPLY_ALLOWED, "chunk_rows": 100, "lock_seconds": LONG, "parallelism": 1}
    error = failed(frame(spark, EVENTS), schema_url, writer, "this one is forbidden", **settings)
    (done,) = books.rows("SELECT count(*), sum(applied)::int FROM bulk_load_chunk")
    assert 0 < error.done == done[0] < 40
    assert sum(books.effects().values()) == done[1] < 400
    books.run("DELETE FROM forbidden")
    report = load(frame(spark, EVENTS), schema_url, writer, resume=error.run_id, **settings)
    assert (report.applied, report.attempts) == (400, 2)
    books.require_applied(EVENTS)


def test_what_is_loaded_again_takes_few_transactions(spark: SparkSession, books: Books, schema_url: str) -> None:
    """Ids alone lock nothing, whatever the time."""
    load(frame(spark, EVENTS), schema_url, "copy", chunk_rows=100)
    books.run("DELETE FROM bulk_load_chunk")
    again = load(frame(spark, EVENTS), schema_url, "copy", chunk_rows=100, lock_seconds=SHORT)
    assert (again.already_processed, again.applied) == (400, 0)
    assert transactions(books) <= again.chunks / 5


def test_few_new_ids_are_merged_with_the_counts_of_their_group(
    spark: SparkSession, books: Books, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in other chunks than the first one of each group, too."""
    monkeypatch.setattr("txbox_spark.loading.copy_writer.FEW_NEW_SHARE", 0.5)
    known = sorted(EVENTS)
    new = [known.pop(place) for place in (395, 250, 115, 114, 13)]
    books.record([one[0] for one in known])
    report = load(frame(spark, [*EVENTS, *new, (None, 1, 1)]), schema_url, "copy", chunk_rows=100, lock_seconds=SHORT)
    assert counts(report) == {
        "read": 406, "rejected": 1, "duplicate_in_source": 5, "already_processed": 395, "applied": 5
    }  # fmt: skip
    assert transactions(books) <= report.chunks / 5
    books.require_applied(new, recorded=[one[0] for one in known])
