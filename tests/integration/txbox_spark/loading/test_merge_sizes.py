"""Several chunks in one transaction: as many as its time allows; the ledger, the report and a resumed run add up."""

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine, text

from support.spark.bulk_loads import APPLY_ALLOWED, WRITERS, Books, counts, failed, frame, load, purchases

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
    assert chunks == each >= 40
    chunks, together = found[LONG]
    assert chunks / 10 <= together <= chunks / 2


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
