"""A DataFrame through format txbox, with real Spark and Postgres: each event is applied once, and counts add up."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from sqlalchemy import Engine
from sqlalchemy.schema import DropSchema

from support.postgres.tables import make_tables
from support.spark.bulk_loads import APPLY, APPLY_ALLOWED, COLUMNS, SUBSCRIBER, Books, Purchase, purchases
from txbox import InvalidConfiguration
from txbox_spark.source import TxboxSource

COUNTS = ("read", "rejected", "duplicate_in_source", "already_processed", "parked", "expired", "applied")


def frame(spark: SparkSession, events: Sequence[Sequence[Any]], partitions: int = 3) -> DataFrame:
    mixed = list(events)
    random.Random(7).shuffle(mixed)
    return spark.createDataFrame(mixed, COLUMNS).repartition(partitions)


def write(events: DataFrame, url: str, **changed: str) -> None:
    given = {"subscriber": SUBSCRIBER, "message_id": "event_id", "apply": APPLY, **changed}
    events.write.format("txbox").mode("append").options(url=url, **given).save()


def loads(books: Books) -> list[dict[str, Any]]:
    """The runs of the ledger, the last first, with the sums of their chunks."""
    names = ("run_id", "rows_read", "rows_rejected", "error", "finished", "chunks", *COUNTS[3:], "pieces")
    found = books.rows(
        "SELECT run_id, run.rows_read, run.rows_rejected, error, finished_at IS NOT NULL, chunks, "
        "coalesce(sum(already_processed - parked), 0)::int, coalesce(sum(parked), 0)::int, "
        "coalesce(sum(expired), 0)::int, coalesce(sum(applied), 0)::int, array_agg(chunk ORDER BY chunk) "
        "FROM bulk_load AS run LEFT JOIN bulk_load_chunk USING (run_id) GROUP BY run_id ORDER BY started_at DESC"
    )
    return [dict(zip(names, row, strict=True)) for row in found]


def test_each_event_is_applied_once(spark: SparkSession, schema_url: str, books: Books) -> None:
    events = purchases(3_000)
    before = events[:700]
    books.record(one[0] for one in before)
    bad: list[Purchase] = [(None, 1, 1), ("", 1, 1), ("x" * 1_001, 1, 1), ("a\0b", 1, 1)]
    source = [*events, *events[::3], *events[::5], *bad]
    write(frame(spark, source), schema_url)
    books.require_applied(events[700:], recorded=[one[0] for one in before])
    (run,) = loads(books)
    assert run["finished"]
    assert run["error"] is None
    assert run["pieces"] == list(range(run["chunks"]))
    assert (run["rows_read"], run["rows_rejected"], run["applied"]) == (len(source), 4, 2_300)
    write(frame(spark, source), schema_url)
    books.require_applied(events[700:], recorded=[one[0] for one in before])
    again = loads(books)[0]
    assert (again["rows_read"], again["rows_rejected"], again["applied"]) == (len(source), 4, 0)


def test_tables_in_another_schema_under_a_prefix(
    spark: SparkSession, engine: Engine, schema_url: str, books: Books
) -> None:
    schema, prefix = f"{books.rows('SELECT current_schema()')[0][0]}_Odd", "Odd'%_"
    make_tables(engine, schema, prefix)
    events = purchases(60)
    elsewhere = {"schema": schema, "prefix": prefix}
    try:
        write(frame(spark, [*events, *events[:20]]), schema_url, **elsewhere)
        write(frame(spark, events[:30]), schema_url, **elsewhere)
        assert books.effects() == Counter(events)
        assert books.inbox() == [], "the tables of the search path are others"
        read = spark.read.format("txbox").options(url=schema_url, **elsewhere)
        inbox = read.option("table", "inbox").option("partitions", "2").load()
        assert sorted(row[0] for row in inbox.select("message_id").collect()) == sorted(one[0] for one in events)
        runs = read.option("table", "loads").load().select("read", "applied").collect()
        assert sorted(map(tuple, runs)) == [(30, 0), (80, 60)]
    finally:
        with engine.begin() as connection:
            connection.execute(DropSchema(schema, cascade=True))


def test_duplicates_are_known_as_such_where_each_partition_is_sorted(
    spark: SparkSession, schema_url: str, books: Books
) -> None:
    events = purchases(500)
    books.record(one[0] for one in events[:50])
    source = frame(spark, [*events, *events[::2]])
    write(source.repartition(2, "event_id").sortWithinPartitions("event_id"), schema_url)
    (run,) = loads(books)
    assert (run["rows_read"], run["already_processed"], run["applied"]) == (750, 50, 450)


def test_rejected_rows_may_end_a_write(spark: SparkSession, schema_url: str, books: Books) -> None:
    events = [*purchases(20), (None, 1, 1)]
    with pytest.raises(PySparkException, match=r"1 rows cannot be loaded \(no message id\): mend them"):
        write(frame(spark, events, 1), schema_url, on_rejected="fail")
    assert books.inbox() == []
    (run,) = loads(books)
    assert not run["finished"]
    assert "1 rows cannot be loaded (no message id)" in run["error"]


def test_a_failed_effect_is_in_the_ledger_and_what_committed_stays(
    spark: SparkSession, schema_url: str, books: Books
) -> None:
    events = purchases(400)
    books.run(f"INSERT INTO forbidden VALUES ('{events[0][0]}')")
    with pytest.raises(PySparkException, match="this one is forbidden") as raised:
        write(frame(spark, events, 4), schema_url, apply=APPLY_ALLOWED)
    assert "password" not in str(raised.value)
    (run,) = loads(books)
    assert not run["finished"]
    assert "this one is forbidden" in run["error"]
    applied = {key for key, *_ in books.effects()}
    assert set(books.inbox()) == applied
    assert events[0][0] not in applied
    books.run("DELETE FROM forbidden")
    write(frame(spark, events, 4), schema_url, apply=APPLY_ALLOWED)
    books.require_applied(events)


def test_what_cannot_work_is_refused_before_anything_is_written(
    spark: SparkSession, schema_url: str, books: Books
) -> None:
    with pytest.raises(PySparkException, match="subscribr is no option of a write; did you mean subscriber"):
        write(frame(spark, purchases(3), 1), schema_url, subscribr="x")
    assert loads(books) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"message_id": "concat(event_id, 'x')"}, "a data source cannot work an expression out, so add it as a column"),
        ({"message_id": "price"}, r"message_id 'price' is of type decimal\(12,2\), in which the id 1 may become 1.0"),
        ({"apply": "no_such_module:apply"}, "no_such_module:apply cannot be imported"),
        ({"apply": "nowhere.sql"}, "cannot read nowhere.sql"),
        ({"apply": "SELECT 1"}, "apply does not name fresh_event"),
        ({"on_rejected": "ignore"}, "on_rejected is count or fail, not 'ignore'"),
        ({"lock_seconds": "long"}, "lock_seconds is a number, not 'long'"),
        ({"types": "amount"}, "types are as in order_id=uuid"),
        ({"sent_at": "amount"}, "sent_at must name a column of the events that is a timestamp"),
    ],
)
def test_options_and_columns_that_cannot_work(schema_url: str, changed: dict[str, str], said: str) -> None:
    given = {"url": schema_url, "subscriber": SUBSCRIBER, "message_id": "event_id", "apply": APPLY, **changed}
    columns = StructType().add("event_id", "string").add("account_id", "integer").add("amount", "long")
    columns = columns.add("price", "decimal(12,2)")
    with pytest.raises(InvalidConfiguration, match=said):
        TxboxSource(given).writer(columns, overwrite=False)


def test_a_url_that_cannot_be_read_is_not_shown(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="this is not a database URL") as raised:
        write(frame(spark, purchases(3), 1), "postgresql://localhost:hidden/database")
    assert "hidden" not in str(raised.value)
    with pytest.raises(PySparkException, match="nothing can be written: ") as raised:
        write(frame(spark, purchases(3), 1), "postgresql://me:hidden@127.0.0.1:1/database?connect_timeout=1")
    assert "hidden" not in str(raised.value)


def test_a_source_that_fails_is_in_the_ledger(spark: SparkSession, schema_url: str, books: Books) -> None:
    def fail(rows: Iterable[Any]) -> Iterable[Any]:
        raise RuntimeError("the source is gone")

    with pytest.raises(PySparkException, match="the source is gone"):
        write(frame(spark, purchases(3), 1).mapInArrow(fail, COLUMNS), schema_url)
    (run,) = loads(books)
    assert not run["finished"]
    assert "write again: what has been applied is not applied again" in run["error"]


def test_overwrite_is_refused(spark: SparkSession, schema_url: str) -> None:
    given = {"url": schema_url, "subscriber": SUBSCRIBER, "message_id": "event_id", "apply": APPLY}
    with pytest.raises(PySparkException, match="what was applied cannot be overwritten"):
        frame(spark, purchases(3), 1).write.format("txbox").mode("overwrite").options(**given).save()
