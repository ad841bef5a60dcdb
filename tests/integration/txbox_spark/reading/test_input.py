"""What a source may hold: rows that cannot be loaded, ids of every make, columns of every name."""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql
from sqlalchemy import Engine

from support.spark.bulk_loads import COLUMNS, COPY_FIRST, WRITERS, Books, as_dicts, counts, frame, load, purchases
from txbox import InvalidConfiguration
from txbox_spark import read_events
from txbox_spark.reading.event_rows import prepare

KEEP_IDS = "INSERT INTO effect (event_id) SELECT message_id FROM fresh_event"

ODD_IDS = (
    "it's", 'say "hi"', "back\\slash", "\\.", "\\N", "%", "100%s", "%(a)s", "?", "naïve-Ωμέγα-🎉", "\uffff", "$1",
    "a,b", "new\nline", "\r", " ", "\t", "NULL", "null", "\x01", r"\u0000", "x" * 1000, "é" * 500,
)  # fmt: skip


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_rows_that_cannot_be_loaded(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    columns = f"{COLUMNS}, said string, words array<string>, more struct<a: string>, things map<string, string>"
    good = [(*one, "fine", ["fine"], ("fine",), {"a": "fine"}) for one in purchases(300)]
    fine = ("fine", ["fine"], ("fine",), {"a": "fine"})
    bad = {
        "no message id": (None, 1, 10, *fine),
        "empty message id": ("", 1, 10, *fine),
        "message id of more than 1000 bytes": ("y" * 1001, 1, 10, *fine),
        "message id of more than 1000 bytes, in bytes": ("é" * 501, 1, 10, *fine),
        "NUL character in the message id": ("nul\0", 1, 10, *fine),
        "NUL character, which Postgres cannot keep": ("bad-text", 1, 10, "a\0b", *fine[1:]),
        "NUL character, which Postgres cannot keep, in an array": ("bad-array", 1, 10, "fine", ["\0"], *fine[2:]),
        "NUL character, which Postgres cannot keep, in a struct": ("bad-struct", 1, 10, *fine[:2], ("\0",), fine[3]),
        "NUL character, which Postgres cannot keep, in a map": ("bad-map", 1, 10, *fine[:3], {"\0": "x"}),
    }
    report = load(frame(spark, [*good, *bad.values(), bad["no message id"]], columns), schema_url, writer)
    assert counts(report) == {
        "read": 310, "rejected": 10, "duplicate_in_source": 0, "already_processed": 0, "applied": 300
    }  # fmt: skip
    books.require_applied([one[:3] for one in good])
    assert books.ledger(report.run_id)["rows_rejected"] == 10
    reasons = {one.partition(":")[0] for one in report.rejected_sample}
    assert reasons <= {reason.partition(", in ")[0] for reason in bad}
    if writer == "copy":
        assert sorted(one.partition(":")[0] for one in report.rejected_sample) == sorted(
            [reason.partition(", in ")[0] for reason in bad] + ["no message id"]
        )
        shown = next(one for one in report.rejected_sample if '"bad-text"' in one)
        assert '"said":"a\\u0000b"' in shown
    assert all(len(one) < 360 for one in report.rejected_sample)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("width", [22, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_many_columns_of_text(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path, width: int, writer: str
) -> None:
    """Spark's plan does not double with each column. That a file, and not a list, is read is part of it."""
    names = [f"t{number}" for number in range(width)]
    file = tmp_path / "wide.csv"
    file.write_text("\n".join([",".join(names), ",".join(f"{name} of a" for name in names)]) + "\n")
    books.run("CREATE TABLE wide (first text, last text)")
    apply = f"INSERT INTO wide SELECT t1, t{width - 1} FROM fresh_event"
    load(read_events(spark, [str(file)]), schema_url, writer, message_id="t0", apply=apply)
    assert books.rows("SELECT first, last FROM wide") == [("t1 of a", f"t{width - 1} of a")]
    assert spark.conf.get("spark.sql.constraintPropagation.enabled", "true") == "true"


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_nothing_but_rejected_rows(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    """Ids that Postgres cannot keep must not become the bounds of chunks, which the ledger keeps."""
    events = [(f"nul\0{number}", 1, 10) for number in range(150)] + [(None, 1, 10)] * 150
    report = load(frame(spark, events), schema_url, writer)
    assert counts(report) == {
        "read": 300, "rejected": 300, "duplicate_in_source": 0, "already_processed": 0, "applied": 0
    }  # fmt: skip
    assert (books.effects(), books.inbox(), books.staging_tables()) == ({}, [], [])


@pytest.mark.parametrize("writer", COPY_FIRST)
@pytest.mark.parametrize("kind", ["json", "csv"])
def test_lines_that_cannot_be_read(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path, writer: str, kind: str
) -> None:
    events = purchases(240)
    if kind == "json":
        lines = [json.dumps(one) for one in as_dicts(events)]
        bad = ['{"event_id": "broken', "no json", '{"event_id": "e", "amount": "a lot"}', '"nul" \0 in a line', "[1]"]
    else:
        lines = ["event_id,account_id,amount", *(",".join(map(str, one)) for one in events)]
        bad = ["too,few", "e,1,2,too many", "e,one,2", "nul\0,one,2"]
    path = tmp_path / f"events.{kind}"
    path.write_text("\n".join([*lines[:100], *bad, *lines[100:]]), encoding="utf-8")
    report = load(read_events(spark, [str(path)], schema=COLUMNS), schema_url, writer)
    assert counts(report) == {
        "read": 240 + len(bad), "rejected": len(bad), "duplicate_in_source": 0, "already_processed": 0, "applied": 240
    }  # fmt: skip
    books.require_applied(events)
    said = {f"malformed record: {line}".replace("\0", "\\u0000") for line in bad}
    assert set(report.rejected_sample) == said if writer == "copy" else set(report.rejected_sample) < said


@pytest.mark.parametrize("writer", WRITERS)
def test_odd_ids(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    """Every one of them is the bound of a chunk once, and some are known."""
    books.record(ODD_IDS[::3])
    report = load(
        frame(spark, [(one,) for one in ODD_IDS * 2], "event_id string"),
        schema_url,
        writer,
        apply=KEEP_IDS,
        chunk_rows=1,
        parallelism=3,
    )
    assert report.chunks == len(ODD_IDS)
    assert (report.duplicate_in_source, report.already_processed) == (len(ODD_IDS), len(ODD_IDS[::3]))
    assert books.inbox() == sorted(ODD_IDS)
    assert sorted(one[0] for one in books.effects().elements()) == sorted(set(ODD_IDS) - set(ODD_IDS[::3]))


def test_ids_made_from_columns(spark: SparkSession) -> None:
    events = spark.sql("""
        SELECT *, named_struct('id', concat('n', number)) AS nested, 'x' AS `a.b` FROM VALUES
        (10L, DATE'2026-01-01', 12.00BD, 'a'),
        (9L, DATE'2026-01-02', 9.99BD, 'b'),
        (-1L, DATE'9999-12-31', -0.10BD, 'c')
        AS t (number, a_date, amount, name)
    """)
    for message_id, expected in (
        ("number", ["10", "9", "-1"]),
        ("concat('tenant-', number, '/', `a.b`)", ["tenant-10/x", "tenant-9/x", "tenant--1/x"]),
        ("a_date", ["2026-01-01", "2026-01-02", "9999-12-31"]),
        ("CAST(amount AS string)", ["12.00", "9.99", "-0.10"]),
        ("nested.id", ["n10", "n9", "n-1"]),
        ("NAME", ["a", "b", "c"]),
    ):
        ids = prepare(events, message_id).checked_ids.collect()
        assert [tuple(row) for row in ids] == [(one, None) for one in expected]


@pytest.mark.parametrize(
    ("message_id", "said"),
    [
        ("CAST(number AS double)", "is of type double, in which the id 1 may become 1.0; an id is text or a whole"),
        ("array(number)", "is of type array<int>; an id is text"),
        ("true", "is of type boolean"),
        ("evnt_id", r"message_id 'evnt_id' is neither a column of the events \(event_id, number\) nor an expression"),
        ("concat(event_id", "is neither a column of the events"),
        ("count(*)", "is neither a column of the events"),
        ("", "is neither a column of the events"),
        ("uuid()", "may be another one each time that it is asked for"),
        ("concat(event_id, rand())", "may be another one each time"),
        ("monotonically_increasing_id()", "may be another one each time"),
        ("'x'", "is the same for every event"),
        ("coalesce('x', event_id)", "is the same for every event"),
        ("constant", "is the same for every event"),
    ],
)
def test_what_is_no_id(spark: SparkSession, books: Books, schema_url: str, message_id: str, said: str) -> None:
    events = spark.createDataFrame([("e1", 1)], "event_id string, number int")
    if message_id == "constant":
        events = events.withColumn("constant", sql.lit("x"))
    with pytest.raises(InvalidConfiguration, match=said):
        load(events, schema_url, "copy", message_id=message_id, apply=KEEP_IDS)
    assert books.rows("SELECT FROM bulk_load") == []


NAMES = (
    "UPPER", "with blank", 'quo"te', "per%cent", "%s", "naïve", "日本語", "a.b", "tick`s", "semi;colon", "select",
    "user", "chunk", "rejected", "event", "malformed", "c0", "c1", "c7", "fresh_event", "incoming", "processed",
    "subscriber_id", "x" * 63, "é" * 31, "1st", "back\\slash", "new\nline", "'", "$1", ":name", "(s)",
)  # fmt: skip


@pytest.mark.parametrize("writer", COPY_FIRST)
@pytest.mark.parametrize("identity", ["event", "own column", "message_id"])
def test_names(spark: SparkSession, engine: Engine, schema_url: str, writer: str, identity: str) -> None:
    names = [*NAMES, *{"event": [], "own column": ["event_id"], "message_id": ["message_id"]}[identity]]
    values = [f"value of {name}" for name in names]
    events = spark.createDataFrame([tuple(values), tuple(values)]).toDF(*names)
    message_id = {"event": "event", "own column": "event_id", "message_id": "message_id"}[identity]
    report = load(events, schema_url, writer, message_id=message_id, apply="CREATE TABLE loaded AS TABLE fresh_event")
    assert (report.applied, report.duplicate_in_source) == (1, 1)
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT * FROM loaded").mappings().one()
    assert dict(found) == {"message_id": f"value of {message_id}", **dict(zip(names, values, strict=True))}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["event_id", "x" * 64], "Postgres takes names of 1 to 63 bytes; rename it"),
        (["event_id", "é" * 32], "Postgres takes names of 1 to 63 bytes; rename it"),
        (["event_id", ""], "Postgres takes names of 1 to 63 bytes; rename it"),
        (["event_id", "nul\0"], "rename it"),
        (["event_id", "ctid"], "column 'ctid': Postgres has its own of that name; rename it"),
        (["event_id", "event_id"], "two columns named 'event_id' and 'event_id'; rename one"),
        (["event_id", "Said", "said"], "two columns named 'Said' and 'said'; rename one"),
        (["event_id", "message_id"], "a column named message_id, which is not the id; rename it, or load it as the id"),
    ],
)
def test_names_that_are_refused(
    spark: SparkSession, books: Books, schema_url: str, names: list[str], said: str
) -> None:
    events = spark.createDataFrame([tuple(names)]).toDF(*names)
    with pytest.raises(InvalidConfiguration, match=said):
        load(events, schema_url, "copy", apply=KEEP_IDS)
    assert books.rows("SELECT FROM bulk_load") == []
