"""The staging table of writer jdbc: made, lost, made again, abandoned and swept."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import Engine

from support.spark.bulk_loads import APPLY_ALLOWED, Books, counts, failed, frame, load, purchases
from txbox import InvalidConfiguration
from txbox.maintenance import Maintainer, Retention
from txbox.schema import tables
from txbox_spark import read_events, source_of
from txbox_spark.loading.staging_table import StagingTables
from txbox_spark.merging.chunk_ranges import partition_keys
from txbox_spark.reading.columns import dates_as_text


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


@pytest.mark.parametrize(
    ("lose", "chunks_done"), [(lose_by_dropping, True), (lose_by_a_crash, True), (lose_by_a_crash, False)]
)
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
    assert StagingTables(engine, None, "").sweep(3600.0) == ()
    assert StagingTables(engine, None, "x.").sweep(0.0) == (f"x.bulk_load_staging_{runs['x.']}_1",)
    assert books.staging_tables() == sorted(set(there) - {f"x.bulk_load_staging_{runs['x.']}_1"})
    books.run("UPDATE bulk_load SET heartbeat_at = heartbeat_at - interval '2 days'")
    load(frame(spark, purchases(10)), schema_url, "copy")
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


def test_a_resumed_run_does_not_take_one_column_for_another(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path
) -> None:
    """Columns are staged by number: staged in one order, they must not be merged in another."""
    ids = [f"e{number}" for number in range(9)]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f'{{"event_id":"{one}","account_id":1,"amount":2}}\n' for one in ids), encoding="utf-8")
    given = {"message_id": "event_id", "source": source_of(spark, [str(path)])}
    first = read_events(spark, [str(path)], schema="event_id string, amount bigint, account_id int")
    wrong = failed(first, schema_url, "jdbc", "division by zero", apply="SELECT 1 / 0", **given)
    assert books.ledger(wrong.run_id)["staging_table"] is not None
    again = read_events(spark, [str(path)], schema="event_id string, account_id int, amount bigint")
    report = load(again, schema_url, "jdbc", resume=wrong.run_id, **given)
    assert (report.applied, report.attempts) == (9, 2)
    books.require_applied([(one, 1, 2) for one in ids])
    assert books.staging_tables() == []


def test_many_partitions_are_created_and_dropped_in_many_transactions(
    spark: SparkSession, books: Books, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them takes locks, for which Postgres has room for some thousands."""
    for module in ("txbox_spark.loading.staging_table", "txbox.status.staging_tables"):
        monkeypatch.setattr(f"{module}.TABLES_PER_TRANSACTION", 3)
    monkeypatch.setattr("txbox_spark.loading.jdbc_writer.JdbcWriter.max_chunks", 10)
    report = load(frame(spark, purchases(40)), schema_url, "jdbc", chunk_rows=1)
    assert (report.chunks, report.applied) == (10, 40)
    assert books.rows("SELECT relname FROM pg_class WHERE relname LIKE 'bulk_load_staging%%'") == []


def test_what_cannot_be_dropped_holds_nobody_up(
    spark: SparkSession, engine: Engine, books: Books, schema_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A staging table that another role has left behind; a run that cannot drop its own has finished all the same."""
    left = f"bulk_load_staging_{'0' * 12}_1"
    view = f"CREATE VIEW looks_at_it AS TABLE {left}"  # so that it cannot be dropped, as if it were another role's
    books.run(f"CREATE TABLE {left} (message_id text) PARTITION BY RANGE (message_id)", view)
    report = load(frame(spark, purchases(20)), schema_url, "copy")
    assert report.applied == 20
    assert f"the staging table {left} cannot be dropped" in caplog.text
    books.run("DROP VIEW looks_at_it")
    load(frame(spark, purchases(20)), schema_url, "copy")
    assert books.staging_tables() == []


def test_a_table_that_spark_has_made_in_place_of_ours(
    spark: SparkSession, engine: Engine, books: Books, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone else finishes the run, and drops its staging tables, before the first row is written to this one."""
    dropped = []

    def lose(rows: DataFrame) -> DataFrame:
        if not dropped:
            dropped.extend(books.staging_tables())
            books.run(f"DROP TABLE {dropped[0]}")
        return dates_as_text(rows)

    monkeypatch.setattr("txbox_spark.loading.jdbc_writer.dates_as_text", lose)
    report = load(frame(spark, purchases(30)), schema_url, "jdbc")
    assert len(dropped) == 1
    assert (report.applied, report.attempts) == (30, 2)
    books.require_applied(purchases(30))
    assert books.rows("SELECT relname FROM pg_class WHERE relname LIKE 'bulk_load_staging%%'") == []


def test_a_maintainer_takes_nothing_from_a_load_at_work_and_a_crashed_one_is_resumed_without_its_table(
    spark: SparkSession, engine: Engine, books: Books, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    maintainer = Maintainer(engine, Retention(staging=timedelta(hours=1)), budget_ms_per_second=1000)
    dropped = []

    def maintain(rows: DataFrame) -> DataFrame:
        """The staging table is there, and empty; no transaction holds a lock on it."""
        dropped.append(maintainer.run_once().removed["staging"])
        return dates_as_text(rows)

    monkeypatch.setattr("txbox_spark.loading.jdbc_writer.dates_as_text", maintain)
    wrong = failed(frame(spark, purchases(30)), schema_url, "jdbc", "division by zero", apply="SELECT 1 / 0")
    assert len(books.staging_tables()) == 1
    books.run("UPDATE bulk_load SET heartbeat_at = now() - interval '2 hours'")
    assert maintainer.run_once().removed["staging"] == 1
    assert books.staging_tables() == []
    report = load(frame(spark, purchases(30)), schema_url, "jdbc", resume=wrong.run_id)
    assert (report.applied, dropped) == (30, [0, 0])
    books.require_applied(purchases(30))
