"""Tables of txbox as DataFrames: every row once, whatever the number of tasks, with its time."""

from datetime import UTC, datetime

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import Engine

from pyspark_txbox import DefaultSource
from support.spark.bulk_loads import APPLY, COLUMNS, SUBSCRIBER, Books, purchases
from txbox.maintenance.rotation import Generations, InboxConversion

LETTER = """
INSERT INTO dead_letter (subscriber_id, message_id, reason, error, attempts, source, body, body_hash, headers, envelope)
SELECT CASE WHEN n % 2 = 0 THEN 'billing' ELSE 'other' END, 'm' || n, 'failed', 'broken', 3, 'queue', '\\x00ff',
  sha256(n::text::bytea), '{"a": "b"}', '{}' FROM generate_series(1, 20) AS n
"""
SENT = """
INSERT INTO outbox_sent (message_id, position, destination, headers, body, published_at)
SELECT 'm' || n % 30, n, 'orders', '{}', '\\x01', '2026-01-01 00:00:00.000001Z' FROM generate_series(1, 60) AS n
"""


def read(spark: SparkSession, url: str, table: str, **others: str) -> DataFrame:
    return spark.read.format("txbox").options(url=url, table=table, **others).load()


def test_the_inbox_is_read_by_several_tasks(spark: SparkSession, schema_url: str, books: Books) -> None:
    ids = [f"m{number % 7}-{number} ä" for number in range(500)]
    books.record(ids)
    books.record(ids[:100], "a other")
    frame = read(spark, schema_url, "inbox", partitions="4")
    assert frame.rdd.getNumPartitions() == 4
    rows = frame.select("subscriber_id", "message_id").collect()
    assert sorted(map(tuple, rows)) == sorted(
        [*((SUBSCRIBER, one) for one in ids), *(("a other", one) for one in ids[:100])]
    )
    mine = read(spark, schema_url, "inbox", subscriber=SUBSCRIBER, partitions="3")
    assert sorted(row[0] for row in mine.select("message_id").collect()) == sorted(ids)
    archive = spark.createDataFrame([(ids[0],), ("new",)], "event_id string")
    missing = archive.join(mine, archive.event_id == mine.message_id, "left_anti").collect()
    assert [row[0] for row in missing] == ["new"]


def test_an_inbox_that_rotates_is_written_and_read_as_one_table(
    spark: SparkSession, engine: Engine, schema_url: str, books: Books
) -> None:
    events = purchases(120)
    books.record(one[0] for one in events[:40])
    InboxConversion(engine).forward()
    given = {"url": schema_url, "subscriber": SUBSCRIBER, "message_id": "event_id", "apply": APPLY}
    for first, last in ((20, 80), (60, 120)):
        assert Generations(engine).rotate()
        source = spark.createDataFrame(events[first:last], COLUMNS)
        source.write.format("txbox").mode("append").options(**given).save()
    assert len(books.rows("SELECT FROM pg_partition_tree('processed_message') WHERE isleaf")) == 3
    books.require_applied(events[40:], recorded=[one[0] for one in events[:40]])
    for frame in (read(spark, schema_url, "inbox"), read(spark, schema_url, "inbox", partitions="3")):
        assert sorted(row[0] for row in frame.select("message_id").collect()) == sorted(one[0] for one in events)
        assert frame.where("processed_at IS NULL").count() == 0


def test_times_and_bodies_are_as_in_postgres(spark: SparkSession, engine: Engine, schema_url: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(LETTER.replace("%", "%%"))
        connection.exec_driver_sql(SENT.replace("%", "%%"))
    letters = read(spark, schema_url, "letters", partitions="3")
    assert letters.count() == 20
    assert read(spark, schema_url, "letters", subscriber=SUBSCRIBER).count() == 10
    first = letters.orderBy("dead_letter_id").first()
    assert first is not None
    assert (first.message_id, first.attempts, bytes(first.body), first.headers, first.redriven_at) == (
        "m1", 3, b"\x00\xff", '{"a": "b"}', None,
    )  # fmt: skip
    sent = read(spark, schema_url, "outbox_sent", partitions="4")
    assert sorted(row[0] for row in sent.select("position").collect()) == list(range(1, 61))
    micros = sent.selectExpr("unix_micros(published_at)").distinct().collect()
    assert [row[0] for row in micros] == [int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000 + 1]


def test_it_may_be_registered_under_a_name(spark: SparkSession, schema_url: str, books: Books) -> None:
    class Registered(DefaultSource):
        @classmethod
        def name(cls) -> str:
            return "txbox_registered"

    books.record(["a", "b"])
    spark.dataSource.register(Registered)
    assert spark.read.format("txbox_registered").options(url=schema_url, table="inbox").load().count() == 2


def test_loads_have_the_counts_of_their_reports(spark: SparkSession, schema_url: str, books: Books) -> None:
    events = purchases(50)
    books.record(one[0] for one in events[:5])
    given = {"url": schema_url, "subscriber": SUBSCRIBER, "message_id": "event_id", "apply": APPLY}
    source = spark.createDataFrame([*events, events[7], (None, 1, 1)], COLUMNS).coalesce(1)
    source.write.format("txbox").mode("append").options(**given).save()
    loads = read(spark, schema_url, "loads", subscriber=SUBSCRIBER)
    counts = ("read", "rejected", "duplicate_in_source", "already_processed", "parked", "expired", "applied")
    (row,) = loads.select(*counts, "error", "chunks", "merged").collect()
    assert tuple(row) == (52, 1, 1, 5, 0, 0, 45, None, 1, 1)
    assert row.read == sum(row[name] for name in counts[1:])
    assert loads.where("finished_at >= started_at").count() == 1
    assert read(spark, schema_url, "loads", subscriber="other").count() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"table": "outbox"}, "is one of inbox, outbox_sent, letters, loads, not 'outbox'"),
        ({"table": "inbox", "partition": "3"}, "partition is no option of a read; did you mean partitions"),
        ({"table": "outbox_sent", "subscriber": "x"}, "table outbox_sent has no subscribers"),
        ({"table": "inbox", "prefix": "none_"}, "none_processed_message"),
    ],
)
def test_what_cannot_be_read_is_refused(
    spark: SparkSession, schema_url: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(PySparkException, match=said):
        spark.read.format("txbox").options(url=schema_url, **options).load().count()
