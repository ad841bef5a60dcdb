"""Which of several rows with one id is taken, and that rows which differ are told."""

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.spark.bulk_loads import WRITERS, Books, frame, load
from txbox import InvalidConfiguration, SqlEffect
from txbox.effects.fields import read_fields
from txbox_spark.reading.row_order import row_order
from txbox_spark.runtime.jobs import changed_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
COLUMNS = "event_id string, version int, changed_at timestamp, at_text string"
APPLY = "INSERT INTO taken SELECT event_id, version FROM fresh_event"


@pytest.fixture
def taken(books: Books) -> Books:
    books.run("CREATE TABLE taken (event_id text, version int)")
    return books


def versions(ids: int, each: int) -> list[tuple[Any, ...]]:
    """Several versions of each id; of every third one all are the same. The zone changes, so texts are in no order."""
    rows = []
    for number in range(ids):
        for version in range(each):
            same = number % 3 == 0
            changed = BEGIN + timedelta(hours=0 if same else version)
            west = not (same or version % 2)
            zone = "-11:00" if west else "+00:00"
            local = changed - timedelta(hours=11 if west else 0)
            rows.append((f"id-{number:04}", 0 if same else version, changed, f"{local:%Y-%m-%dT%H:%M:%S}{zone}"))
    random.Random(3).shuffle(rows)
    return [row for row in rows if row[1] != 0] + [row for row in rows if row[1] == 0]


@pytest.mark.parametrize("writer", WRITERS)
def test_the_latest_and_the_earliest(spark: "SparkSession", taken: Books, schema_url: str, writer: str) -> None:
    rows = [*versions(250, 4), ("id-0001", 99, None, None)]
    for keep, version in (("latest:changed_at", 3), ("earliest:version", 0)):
        taken.run("TRUNCATE taken", "TRUNCATE processed_message")
        report = load(frame(spark, rows, COLUMNS), schema_url, writer, apply=APPLY, keep=keep)
        assert (report.read, report.applied, report.duplicate_in_source) == (1001, 250, 751)
        expected = [(f"id-{number:04}", version if number % 3 else 0) for number in range(250)]
        assert taken.rows("SELECT * FROM taken ORDER BY 1") == expected
        assert report.differing == sum(1 for number in range(250) if number % 3)
        assert len(report.differing_sample) == 10
        assert set(report.differing_sample) < {f"id-{number:04}" for number in range(250) if number % 3}


def test_texts_are_ordered_by_the_type_of_their_field(
    spark: "SparkSession", taken: Books, schema_url: str, tmp_path: Path
) -> None:
    effect = tmp_path / "effect.sql"
    effect.write_text("INSERT INTO taken SELECT message_id, version FROM fresh_event")
    rows = [(one, str(version), at) for one, version, _, at in versions(30, 12)]
    events = frame(spark, rows, "event_id string, version string, at_text string")
    fields = SqlEffect(effect, fields="version integer, at_text timestamptz")
    for keep in ("latest:at_text", "latest:version"):
        taken.run("TRUNCATE taken", "TRUNCATE processed_message")
        load(events, schema_url, "copy", apply=fields, keep=keep)
        assert taken.rows("SELECT * FROM taken ORDER BY 1") == [
            (f"id-{number:04}", 11 if number % 3 else 0) for number in range(30)
        ]


TYPED = {
    "digits decimal(38,18)": (Decimal("1.000000000000000001"), Decimal("1.000000000000000002")),
    "large decimal(38,0)": (Decimal(5), Decimal(10) ** 33),
    "small double": (1e-9, 2e-9),
    "huge double": (5.0, 1e33),
    "endless double": (1e300, float("inf")),
    "micros timestamp": (BEGIN, BEGIN + timedelta(microseconds=1)),
    # Clocks in Berlin leave 02:30 out.
    "local timestamp_ntz": tuple(map(datetime.fromisoformat, ("2026-03-29 02:30:00", "2026-03-29 03:10:00"))),
}
"""Columns with an older and a newer value."""

TEXTS = {
    "digits numeric": ("0.00000001", "0.00000002"),
    "large numeric": ("5", "1e33"),
    "negative numeric": ("-1e33", "-5"),
    "money numeric(20,10)": ("12.00000001", "12.00000002"),
    "small double precision": ("1e-9", "2e-9"),
    "huge double precision": ("5", "1e33"),
    "whole bigint": ("9", "10"),
    "nanos timestamptz": ("2026-03-29T02:30:00.123456788+02:00", "2026-03-29T00:30:00.123456789Z"),
    "local timestamp without time zone": ("2026-03-29T02:30:00.9", "2026-03-29T03:10:00"),
    "local_nanos timestamp without time zone": ("2026-03-29 02:30:00.12345678", "2026-03-29 02:30:00.123456781"),
}
"""Fields with an older and a newer text."""


@pytest.mark.parametrize("writer", ["copy", "jdbc", "auto"])
def test_values_are_ordered_by_their_own_type(
    spark: "SparkSession", taken: Books, schema_url: str, tmp_path: Path, writer: str
) -> None:
    rows = [(f"id-{id_}", version, *(TYPED[one][version] for one in TYPED)) for id_ in range(9) for version in (0, 1)]
    events = frame(spark, rows, f"event_id string, version int, {', '.join(TYPED)}")
    if writer == "auto":  # the driver merges what is in a small file
        events.coalesce(1).write.parquet(str(tmp_path / "few"))
        events = spark.read.parquet(str(tmp_path / "few"))
    with changed_settings(spark, {"spark.sql.session.timeZone": "Europe/Berlin"}):
        for column in TYPED:
            name = column.partition(" ")[0]
            require_latest(events, taken, schema_url, writer, name, APPLY)


@pytest.mark.parametrize("writer", ["copy", "jdbc"])
def test_texts_are_ordered_by_all_their_digits(
    spark: "SparkSession", taken: Books, schema_url: str, tmp_path: Path, writer: str
) -> None:
    (effect := tmp_path / "effect.sql").write_text("INSERT INTO taken SELECT message_id, version FROM fresh_event")
    fields = SqlEffect(effect, fields=f"version integer, {', '.join(TEXTS)}")
    rows = [(f"id-{id_}", str(each), *(TEXTS[one][each] for one in TEXTS)) for id_ in range(9) for each in (0, 1)]
    names = [one.partition(" ")[0] for one in TEXTS]
    events = frame(spark, rows, f"event_id string, version string, {', '.join(f'{name} string' for name in names)}")
    with changed_settings(spark, {"spark.sql.session.timeZone": "Europe/Berlin"}):
        for name in names:
            require_latest(events, taken, schema_url, writer, name, fields)


def require_latest(events: "DataFrame", taken: Books, url: str, writer: str, name: str, apply: Any) -> None:
    """See that the newer row of each id is taken; where neither counts as newer, some older one is."""
    taken.run("TRUNCATE taken", "TRUNCATE processed_message")
    load(events, url, writer, apply=apply, keep=f"latest:{name}")
    assert taken.rows("SELECT * FROM taken ORDER BY 1") == [(f"id-{id_}", 1) for id_ in range(9)], name


def test_what_is_not_a_number_is_last(spark: "SparkSession", taken: Books, schema_url: str, tmp_path: Path) -> None:
    rows = [("a", 0, float("nan")), ("a", 1, -float("inf")), ("a", 2, None)]
    few = tmp_path / "few"
    frame(spark, rows, "event_id string, version int, n double").coalesce(1).write.parquet(str(few))
    for writer in ("copy", "jdbc", "auto"):
        for keep in ("latest:n", "earliest:n"):
            taken.run("TRUNCATE taken", "TRUNCATE processed_message")
            load(spark.read.parquet(str(few)), schema_url, writer, apply=APPLY, keep=keep)
            assert taken.rows("SELECT * FROM taken") == [("a", 1)], (writer, keep)


def test_numbers_as_texts_are_ordered_as_python_orders_them(spark: "SparkSession") -> None:
    draw = random.Random(5)
    texts = ["0", "-0.0", "+.5", "5.", "0005", "1e-999", "1E+999", "-1e-999", "9" * 900 + "." + "9" * 90]
    for _ in range(300):
        whole, fraction = str(draw.randrange(10 ** draw.randint(1, 40))), str(draw.randrange(10 ** draw.randint(1, 40)))
        exponent = draw.choice(["", f"e{draw.randint(-50, 50)}"])
        zeros = "0" * draw.randint(0, 3)
        texts.append(f"{draw.choice(['', '-', '+'])}{zeros}{whole}.{zeros[1:]}{fraction}{exponent}")
    rows = frame(spark, [(one,) for one in texts], "n string")
    order = row_order(rows, "latest:n", read_fields("n numeric"), "rows.")
    assert order is not None
    rows = rows.alias("rows")
    found = [Decimal(one) for (one,) in rows.sort(order.value).collect()]
    assert found == sorted(found)
    keys = {Decimal(one): key for one, key in rows.select("n", order.value).collect()}
    assert len(set(keys.values())) == len(keys)


def test_what_has_no_order(spark: "SparkSession", taken: Books, schema_url: str) -> None:
    events = frame(spark, versions(3, 2), COLUMNS)
    for keep, said in (
        ("latest", "keep must be any, latest:COLUMN or earliest:COLUMN"),
        ("latest:no_such", "no column no_such"),
        ("latest:at_text", "must be a number, a date or a time"),
    ):
        with pytest.raises(InvalidConfiguration, match=said):
            load(events, schema_url, "copy", apply=APPLY, keep=keep)
    assert taken.inbox() == []
