"""An archive against the inbox, by a real Spark and a real Postgres; what to expect is worked out in Python."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.schema import CreateSchema

from support.spark.event_files import Read
from txbox import DeadLetter, DeadLetters, InvalidConfiguration, Reason, SchemaMissing
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.schema import tables
from txbox_spark import JobProgress
from txbox_spark.reconcile import Reconciliation, _inbox, reconcile
from txbox_spark.runtime.jdbc import jdbc_options

MONDAY = datetime(2026, 3, 2, 12, 30, 15, 123456, tzinfo=UTC)

ODD_IDS = ("it's", 'say "hi"', "back\\slash", "\\'; --", "question?", "100%s", "naïve-Ωμέγα-🎉", "$1", "new\nline", " ")


def record(engine: Engine, ids: Iterable[str], subscriber: str = "billing", **place: str) -> None:
    """Record ids as processed one second after another, in order."""
    table = tables(place.get("schema"), place.get("prefix", "")).processed_message
    values = [
        {"subscriber_id": subscriber, "message_id": one, "processed_at": MONDAY + timedelta(seconds=number)}
        for number, one in enumerate(ids)
    ]
    with engine.begin() as connection:
        if values:
            connection.execute(table.insert(), values)


@pytest.fixture
def archive(spark: SparkSession) -> Callable[..., DataFrame]:
    """Make events with these ids, each with a number of its own."""

    def archive(ids: Iterable[str | None]) -> DataFrame:
        events = [(one, number) for number, one in enumerate(ids)]
        return spark.createDataFrame(events, "event_id string, number int").coalesce(1)

    return archive


def expected(archived: list[str | None], processed: list[str], sample: int = 10) -> dict[str, Any]:
    valid = [one for one in archived if one]
    never = sorted(set(valid) - set(processed))
    lost = sorted(set(processed) - set(valid))
    times = {one: MONDAY + timedelta(seconds=number) for number, one in enumerate(processed)}
    return {
        "archived": len(set(valid)),
        "rejected": len(archived) - len(valid),
        "duplicate_in_archive": len(valid) - len(set(valid)),
        "processed": len(processed),
        "never_processed": len(never),
        "parked": 0,
        "expired": 0,
        "discarded": 0,
        "never_processed_sample": tuple(never[:sample]),
        "not_archived": len(lost),
        "not_archived_sample": tuple({"message_id": one, "processed_at": times[one]} for one in lost[:sample]),
        "output": None,
        "complete": not never and len(valid) == len(archived),
    }


def test_both_directions(engine: Engine, schema_url: str, archive: Callable[..., DataFrame]) -> None:
    archived: list[str | None] = [f"event-{number}" for number in range(0, 600, 2)]
    archived += [*ODD_IDS[::2], None, None, "", "event-0", "event-0", "event-2", ODD_IDS[0]]
    processed = [f"event-{number}" for number in range(0, 300, 3)] + list(ODD_IDS[:4])
    record(engine, processed)
    record(engine, ["event-598", "elsewhere"], subscriber="shipping")
    found = reconcile(archive(archived), url=schema_url, subscriber_id="billing", message_id="event_id", sample=7)
    assert found.as_dict() == expected(archived, processed, sample=7)
    assert found.archived - found.never_processed == found.processed - found.not_archived
    assert not found.complete


@pytest.mark.parametrize(
    ("archived", "processed"),
    [([], ["a", "b"]), (["a", "b"], []), ([], []), (ODD_IDS, [*ODD_IDS, "more than the archive has"])],
)
def test_nothing_on_one_side_and_nothing_lost(
    engine: Engine, schema_url: str, archive: Callable[..., DataFrame], archived: list[str | None], processed: list[str]
) -> None:
    record(engine, processed)
    found = reconcile(archive(archived), url=schema_url, subscriber_id="billing", message_id="event_id")
    assert found.as_dict() == expected(archived, processed)


@pytest.mark.parametrize("rotating", [False, True])
def test_what_is_parked_expired_or_discarded_was_not_processed(
    engine: Engine, schema_url: str, archive: Callable[..., DataFrame], rotating: bool
) -> None:
    record(engine, ["a", "b"])
    if rotating:
        assert InboxConversion(engine).forward()
        assert Generations(engine).rotate()
        record(engine, ["e"])
    letters = DeadLetters(engine)
    for message_id in ("c", "x", "g", "in no archive"):
        reason = Reason.EXPIRED if message_id == "x" else Reason.FAILED
        number = letters.park(DeadLetter("billing", message_id, reason, "no", 3, "queue", message_id.encode()))
        if message_id == "g":
            letters.discard(number or 0, note="why")
    found = reconcile(archive("abcdegx"), url=schema_url, subscriber_id="billing", message_id="event_id")
    never = tuple("cdgx") if rotating else tuple("cdegx")
    assert (found.processed, found.never_processed_sample) == (7 - len(never), never)
    assert (found.parked, found.expired, found.discarded, found.not_archived) == (1, 1, 1, 0)


def test_malformed_lines_are_rejected(engine: Engine, schema_url: str, read: Read) -> None:
    lines = '{"event_id":"a","number":1}\n{"event_id":"b","number":"many"}\n{broken\n'
    record(engine, ["a"])
    events = read("archive.jsonl", lines, schema="event_id string, number int")
    found = reconcile(events, url=schema_url, subscriber_id="billing", message_id="event_id")
    assert (found.archived, found.rejected, found.never_processed) == (1, 2, 0)
    assert not found.complete


def test_the_id_may_be_an_expression(engine: Engine, schema_url: str, archive: Callable[..., DataFrame]) -> None:
    record(engine, ["event-0", "event-1"])
    found = reconcile(
        archive(["x", "y", "z"]), url=schema_url, subscriber_id="billing", message_id="concat('event-', number)"
    )
    assert found.never_processed_sample == ("event-2",)
    assert found.not_archived == 0


def test_the_output_has_all_of_it_and_is_never_overwritten(
    spark: SparkSession, engine: Engine, schema_url: str, archive: Callable[..., DataFrame], tmp_path: Path
) -> None:
    processed = ["c", "d", ODD_IDS[2]]
    record(engine, processed)
    output = str(tmp_path / "report")
    events = archive(["a", "b", "b", "c", None, ODD_IDS[0]])

    def run() -> Reconciliation:
        return reconcile(
            events, url=schema_url, subscriber_id="billing", message_id="event_id", output=output, sample=1
        )

    found = run()
    assert found.output == output
    assert found.never_processed_sample == ("a",)
    never = spark.read.parquet(f"{output}/never_processed")
    assert never.dtypes == [("event_id", "string"), ("number", "int")]
    rows = sorted(tuple(row) for row in never.collect())
    assert [row[0] for row in rows] == sorted(["a", "b", ODD_IDS[0]])
    assert rows[0] == ("a", 0)
    assert rows[1] in [("b", 1), ("b", 2)]
    assert len(never.inputFiles()) <= spark.sparkContext.defaultParallelism, "not one for each partition of a shuffle"
    lost = spark.read.parquet(f"{output}/not_archived").selectExpr("message_id", "unix_micros(processed_at)")
    assert {row[0]: row[1] for row in lost.collect()} == {
        one: int((MONDAY - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1)) + 1_000_000 * number
        for number, one in enumerate(processed)
        if one != "c"
    }
    with pytest.raises(InvalidConfiguration, match=r"there is something at .*never_processed already"):
        run()


def test_a_schema_and_a_prefix_that_need_quotes(fresh_database: str, archive: Callable[..., DataFrame]) -> None:
    place = {"schema": 'Odd "schema" %s', "prefix": "Pre fix'"}
    engine = create_engine(fresh_database)
    with engine.begin() as connection:
        connection.execute(CreateSchema(place["schema"]))
        tables(place["schema"], place["prefix"]).metadata.create_all(connection)
    record(engine, ["a", "b", "c"], subscriber="it's ?", **place)
    engine.dispose()
    found = reconcile(
        archive(["b", "x"]), url=fresh_database, subscriber_id="it's ?", message_id="event_id", partitions=3, **place
    )
    assert found.never_processed_sample == ("x",)
    assert [one.message_id for one in found.not_archived_sample] == ["a", "c"]


def test_the_inbox_is_read_in_even_parts(spark: SparkSession, engine: Engine, schema_url: str) -> None:
    ids = [*ODD_IDS, *(f"event-{number}" for number in range(190))]
    record(engine, ids)
    record(engine, [f"x-{number}" for number in range(1000)], subscriber="shipping")
    frame = _inbox(spark, make_url(schema_url), "billing", None, "", 5)
    parts = frame.selectExpr("spark_partition_id() AS part", "processed_id").collect()
    assert frame.rdd.getNumPartitions() == 5
    assert sorted(row.processed_id for row in parts) == sorted(ids)
    in_order = sorted(parts, key=lambda row: row.processed_id)
    assert [row.part for row in in_order] == sorted(row.part for row in parts)
    assert {sum(row.part == part for row in parts) for part in range(5)} <= {39, 40, 41}
    record(engine, ODD_IDS, subscriber="odd")
    frame = _inbox(spark, make_url(schema_url), "odd", None, "", len(ODD_IDS))
    assert frame.rdd.getNumPartitions() == len(ODD_IDS)
    assert sorted(row[0] for row in frame.select("processed_id").collect()) == sorted(ODD_IDS)
    assert _inbox(spark, make_url(schema_url), "odd", None, "", None).rdd.getNumPartitions() == 1


def test_a_large_inbox_is_cut_by_a_sample_and_its_size(
    spark: SparkSession, engine: Engine, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"event-{number}" for number in range(5000)]
    record(engine, ids)
    with engine.connect() as connection:
        size = connection.exec_driver_sql("SELECT pg_relation_size('processed_message')").scalar_one()
    module = import_module("txbox_spark.runtime.jdbc")
    monkeypatch.setattr(module, "PARTITION_BYTES", -(-size // 4))
    monkeypatch.setattr(module, "SAMPLED_BYTES", size // 2)
    frame = _inbox(spark, make_url(schema_url), "billing", None, "", None)
    assert frame.rdd.getNumPartitions() == 4
    assert sorted(row[0] for row in frame.select("processed_id").collect()) == sorted(ids)
    monkeypatch.setattr(module, "SAMPLED_BYTES", 0)
    assert _inbox(spark, make_url(schema_url), "billing", None, "", None).count() == len(ids)


def test_an_inbox_that_is_missing(fresh_database: str, archive: Callable[..., DataFrame]) -> None:
    with pytest.raises(SchemaMissing, match="processed_message"):
        reconcile(archive(["a"]), url=fresh_database, subscriber_id="billing", message_id="event_id")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"sample": -1}, "sample must not be negative"),
        ({"partitions": 0}, "partitions must be at least 1"),
        ({"url": "no url"}, "not a database URL"),
        ({"url": "postgresql://u:secret@127.0.0.1:port/x"}, "not a database URL"),
        ({"subscriber_id": "a\0b"}, "Inbox.subscriber_id must be 1 to 200 bytes of text"),
        ({"message_id": "no_such_column"}, "no_such_column"),
    ],
)
def test_arguments_that_cannot_work(
    schema_url: str, archive: Callable[..., DataFrame], arguments: dict[str, Any], why: str
) -> None:
    given = {"url": schema_url, "subscriber_id": "billing", "message_id": "event_id", **arguments}
    with pytest.raises(InvalidConfiguration, match=why):
        reconcile(archive(["a"]), **given)


def test_jdbc_options_reach_the_database(spark: SparkSession, engine: Engine, schema_url: str) -> None:
    """With a search path, an application name, and a user and password full of what URLs are made of."""
    user, password = 'o\'brien "&?" %40', "p@ss:w/ord?&#%41+ =é'\"\\"
    with engine.begin() as connection:
        raw = connection.connection.cursor()
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        name = sql.Identifier(user)
        raw.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(name, sql.Literal(password)))
        raw.execute(sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(sql.Identifier(schema), name))
        raw.execute(sql.SQL("GRANT SELECT ON processed_message TO {}").format(name))
    record(engine, ["a", "b"])
    url = make_url(schema_url).set(username=user, password=password)
    url = url.update_query_dict({"application_name": "night & day", "connect_timeout": "7"})
    try:
        options = jdbc_options(url)
        assert password not in options["url"]
        query = (
            "SELECT count(*) AS found, current_user::text AS who, current_setting('application_name') AS name "
            "FROM processed_message"
        )
        row = spark.read.format("jdbc").options(**options).option("query", query).load().collect()[0]
        assert tuple(row) == (2, user, "night & day")
        with pytest.raises(Exception, match=r"FAILED_JDBC\.CONNECTION|password authentication failed"):
            spark.read.format("jdbc").options(**{**options, "password": "wrong"}).option("query", query).load()
    finally:
        with engine.begin() as connection:
            connection.connection.cursor().execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(name))


def test_progress_and_a_name_that_nobody_has(
    engine: Engine, schema_url: str, archive: Callable[..., DataFrame], caplog: pytest.LogCaptureFixture
) -> None:
    record(engine, ["a"], subscriber="billing")
    told: list[JobProgress] = []
    found = reconcile(
        archive(["a"]), url=schema_url, subscriber_id="biling", message_id="event_id", on_progress=told.append
    )
    assert (found.processed, found.never_processed) == (0, 1)
    assert caplog.messages == ["biling has no id in the inbox; there are ids of billing"]
    assert told[-1].stage == "compare"
    assert 0 < told[-1].done <= told[-1].total
