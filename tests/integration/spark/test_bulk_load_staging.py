"""The staging table of writer jdbc: made, lost, made again, abandoned and swept."""

from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine

from support.bulk_loads import APPLY_ALLOWED, Books, counts, failed, frame, load, purchases
from txbox import InvalidConfiguration
from txbox.schema import tables
from txbox_spark.events import partition_keys
from txbox_spark.staging import sweep_staging
from txbox_spark.statements import statements


def test_a_prefix_that_leaves_no_room(spark: SparkSession, database_url: str, engine: Engine, schema_url: str) -> None:
    prefix = "of_thirty_one_characters_and_no_"
    with engine.begin() as connection:
        tables(None, prefix).metadata.create_all(connection)
    with pytest.raises(InvalidConfiguration, match="a staging table's name is too long; use writer copy"):
        load(frame(spark, purchases(3)), schema_url, "jdbc", prefix=prefix)


def lose_by_dropping(books: Books, staging: str) -> None:
    books.run(f"DROP TABLE {staging}")


def lose_by_a_crash(books: Books, staging: str) -> None:
    """Postgres empties every partition when it recovers."""
    books.run(f"TRUNCATE {staging}")


@pytest.mark.parametrize("lose", [lose_by_dropping, lose_by_a_crash])
@pytest.mark.parametrize("chunks_done", [False, True])
def test_a_lost_staging_table_is_made_again(
    spark: SparkSession, books: Books, schema_url: str, lose: Callable[[Books, str], None], chunks_done: bool
) -> None:
    events = purchases(300)
    last = max(str(one[0]) for one in events)
    books.run(f"INSERT INTO forbidden {'VALUES' if chunks_done else 'SELECT'} ('{last}')")
    source = frame(spark, [*events, *events[:60]])
    apply = APPLY_ALLOWED if chunks_done else "SELECT 1 / 0"
    wrong = failed(source, schema_url, "jdbc", "forbidden|division by zero", apply=apply, parallelism=1)
    assert bool(wrong.done) == chunks_done
    [staging] = books.staging_tables()
    assert books.ledger(wrong.run_id)["staging_table"] == staging
    lose(books, staging)
    report = load(source, schema_url, "jdbc", resume=wrong.run_id, parallelism=2)
    assert report.attempts == 3
    assert counts(report) == {
        "read": 360, "rejected": 0, "duplicate_in_source": 60, "already_processed": 0, "applied": 300
    }  # fmt: skip
    books.require_applied(events)
    assert books.staging_tables() == []


def test_abandoned_staging_tables(spark: SparkSession, books: Books, engine: Engine, schema_url: str) -> None:
    """Those of other prefixes, of runs that are alive, and tables that only look like one, are left alone."""
    with engine.begin() as connection:
        for prefix in ("x_", "x."):
            tables(None, prefix).metadata.create_all(connection)
    source = frame(spark, purchases(10))
    runs = {
        prefix: failed(source, schema_url, "jdbc", "division", apply="SELECT 1 / 0", prefix=prefix).run_id
        for prefix in ("", "x_", "x.")
    }
    alike = ("bulk_load_staging_0123", f"my_bulk_load_staging_{runs['']}_1", f"bulk_load_staging_{runs['']}_1x")
    books.run(*(f"CREATE TABLE {one} (n int) PARTITION BY RANGE (n)" for one in alike))
    books.run(f"CREATE TABLE bulk_load_staging_{runs['']}_2 (n int)")  # no partitioned one
    there = sorted([*alike, *(f"{prefix}bulk_load_staging_{run}_1" for prefix, run in runs.items())])
    assert books.staging_tables() == there
    assert sweep_staging(engine, statements(None, ""), "", 3600.0) == ()
    assert sweep_staging(engine, statements(None, "x."), "x.", 0.0) == (f"x.bulk_load_staging_{runs['x.']}_1",)
    assert books.staging_tables() == sorted(set(there) - {f"x.bulk_load_staging_{runs['x.']}_1"})
    load(frame(spark, purchases(10)), schema_url, "copy", abandoned_seconds=0.0)
    assert books.staging_tables() == sorted([*alike, f"x_bulk_load_staging_{runs['x_']}_1"])
    resumed = load(source, schema_url, "jdbc", resume=runs[""])
    assert (resumed.already_processed, resumed.attempts) == (10, 3)
    books.require_applied(purchases(10))


def test_partition_keys_are_sparks_own(spark: SparkSession) -> None:
    from pyspark.sql import functions as sql

    for partitions in (1, 2, 7, 33):
        keys = partition_keys(partitions)
        placed = (
            spark.createDataFrame([(key,) for key in keys], "key int")
            .repartition(partitions, "key")
            .select(sql.spark_partition_id(), "key")
        )
        assert sorted(map(tuple, placed.collect())) == list(enumerate(keys))
