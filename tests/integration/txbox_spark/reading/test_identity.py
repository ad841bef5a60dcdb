"""Ids that would be others when the events are read again: judged by the plan that makes them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from support.spark.event_files import Read, Write
from txbox import InvalidConfiguration
from txbox_spark import read_events
from txbox_spark.reading.event_rows import prepare

CHANGING: dict[str, Callable[[DataFrame], DataFrame]] = {
    "column": lambda made: made,
    "repartition": lambda made: made.repartition(2, "id"),
    "filter": lambda made: made.where("number > 0"),
    "distinct": lambda made: made.distinct(),
    "drop duplicates": lambda made: made.dropDuplicates(["number"]),
    "join": lambda made: made.join(made.sparkSession.range(9).toDF("number"), "number"),
    "first of a union": lambda made: made.union(made.select("event_id", "number", "event_id")),
    "second of a union": lambda made: made.select("event_id", "number", sql.col("event_id").alias("id")).union(made),
    "window": lambda made: made.withColumn("nth", sql.expr("row_number() OVER (PARTITION BY number ORDER BY id)")),
    "explode": lambda made: made.withColumn("id", sql.explode(sql.array("id"))),
    "map": lambda made: made.mapInArrow(lambda batches: batches, made.schema),
    "limit": lambda made: made.orderBy("number").limit(3),
    "sample": lambda made: made.sample(0.9),
    "expression": lambda made: made.withColumn("id", sql.expr("concat(event_id, '-', id)")),
}


@pytest.fixture
def events(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """Events of a file."""
    spark.sql("SELECT concat('e', id) AS event_id, id AS number FROM range(8)").write.parquet(f"{tmp_path}/events")
    return spark.read.parquet(f"{tmp_path}/events")


@pytest.mark.parametrize("way", CHANGING)
def test_ids_made_anew_each_time_are_refused(events: DataFrame, way: str) -> None:
    changing = CHANGING[way](events.withColumn("id", sql.expr("uuid()")))
    with pytest.raises(InvalidConfiguration, match="'id' may be another one each time"):
        prepare(changing, "id")


@pytest.mark.parametrize("made_by", ["uuid()", "CAST(rand() AS string)", "monotonically_increasing_id()"])
@pytest.mark.parametrize("message_id", ["id", "concat(event_id, id)", "IF(number > 3, event_id, id)"])
def test_whatever_makes_them(events: DataFrame, made_by: str, message_id: str) -> None:
    changing = events.withColumn("id", sql.expr(made_by)).where("number >= 0")
    with pytest.raises(InvalidConfiguration, match="may be another one each time"):
        prepare(changing, message_id)


def test_neither_a_cache_nor_inline_rows_hide_them(spark: SparkSession, events: DataFrame) -> None:
    cached = events.withColumn("id", sql.expr("uuid()")).cache()
    inline = spark.sql("SELECT uuid() AS id, number FROM VALUES (1), (2) AS t (number)")
    try:
        for changing in (cached, cached.where("number > 0"), inline, inline.where("number > 0")):
            with pytest.raises(InvalidConfiguration, match="may be another one each time"):
                prepare(changing, "id")
    finally:
        cached.unpersist()


@pytest.mark.parametrize("rule", ["", "org.apache.spark.sql.catalyst.optimizer.ColumnPruning"])
def test_the_rules_of_the_optimizer_are_put_back(spark: SparkSession, events: DataFrame, rule: str) -> None:
    setting = "spark.sql.optimizer.excludedRules"
    if rule:
        spark.conf.set(setting, rule)
    try:
        prepare(events, "event_id")
        assert spark.conf.get(setting, "") == rule
    finally:
        spark.conf.unset(setting)


@pytest.mark.parametrize(
    "stable",
    [
        lambda events: events.sample(0.5),
        lambda events: events.randomSplit([0.5, 0.5])[0],
        lambda events: events.sampleBy("number", {1: 0.5}),
        lambda events: events.where(sql.rand() < 0.5),
        lambda events: events.orderBy(sql.rand()).limit(3),
        lambda events: events.withColumn("order", sql.rand()).where("order < 0.5").drop("order"),
        lambda events: events.withColumn("row", sql.expr("uuid()")).repartition(2),
        lambda events: events.withColumn("at", sql.current_timestamp()).distinct(),
        lambda events: events.union(events),
        lambda events: events.groupBy("event_id").agg(sql.sum("number").alias("number")),
        lambda events: events.withColumn("event_id", sql.udf(lambda one: one)("event_id")),
        lambda events: events.selectExpr("sha2(event_id, 256) AS event_id", "_metadata.file_path AS file"),
    ],
)
def test_rows_may_be_chosen_at_random_and_other_columns_may_change(
    events: DataFrame, stable: Callable[[DataFrame], DataFrame]
) -> None:
    prepare(stable(events), "event_id")


@pytest.mark.parametrize("type_", ["decimal(12,2)", "decimal(3,1)", "float", "double"])
def test_fractions_are_no_ids(events: DataFrame, type_: str) -> None:
    """What they look like as text depends on the type, which one fraction among whole numbers changes."""
    with pytest.raises(InvalidConfiguration, match=r"is of type .*whole number.*name its type text.*CAST") as refused:
        prepare(events.withColumn("id", sql.col("number").cast(type_)), "id")
    assert "\n" not in str(refused.value)


def test_whole_decimals_are_ids(events: DataFrame) -> None:
    whole = events.withColumn("id", sql.col("number").cast("decimal(38,0)"))
    assert sorted(row[0] for row in prepare(whole, "id").ids.collect()) == list("01234567")


def test_a_fraction_among_ids_of_json_changes_none(spark: SparkSession, write: Write) -> None:
    path = write("events.jsonl", '{"id": 1}\n{"id": 2}\n{"id": 1.5}\n')
    with pytest.raises(InvalidConfiguration, match="'id' is of type decimal"):
        prepare(read_events(spark, [path]), "id")
    ids = prepare(read_events(spark, [path], schema="id string"), "id").ids.collect()
    assert sorted(row[0] for row in ids) == ["1", "1.5", "2"]


@pytest.mark.parametrize("message_id", ["id", "concat('order-', id)"])
@pytest.mark.parametrize(
    "text",
    [
        "id\r\na\r\nb\nc\r\nd\r\n",  # two lines, the first of which ends otherwise than that of the header
        'id\r\na\r\n"b\r\nc"\r\n"b\nc"\r\nd\r\n',  # two ids, which Spark reads alike
        'id\na\n"b\rc"\nd\n"\u00e9\n"\n',
    ],
)
def test_ids_of_csv_hold_no_line_break(read: Read, text: str, message_id: str) -> None:
    encoding = None if text.isascii() else "latin1"
    events = read("events.csv", text.encode(encoding or "utf-8"), encoding=encoding)
    found = prepare(events.repartition(2), message_id).checked_ids.collect()
    assert sorted(one[-1] for one, rejected in found if rejected is None) == ["a", "d"]
    reasons = {json.loads(rejected)["cause"] for _, rejected in found if rejected is not None}
    assert reasons == {"line break in a message id of CSV"}


def test_other_ids_may_hold_line_breaks(read: Read) -> None:
    events = read("events.jsonl", '{"id": "a\\r\\nb"}\n')
    assert [tuple(row) for row in prepare(events, "id").checked_ids.collect()] == [("a\r\nb", None)]
