"""Which of several rows with one id is taken, and that rows which differ are told."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.spark.bulk_loads import WRITERS, Books, frame, load
from txbox import InvalidConfiguration, SqlEffect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


def test_few_events(spark: "SparkSession", taken: Books, schema_url: str, tmp_path: Path) -> None:
    """The driver merges them."""
    (tmp_path / "few.csv").write_text("event_id,version\na,1\nb,5\na,10\na,9\nb,5\n")
    events = spark.read.csv(str(tmp_path / "few.csv"), header=True, schema="event_id string, version int")
    report = load(events, schema_url, "auto", apply=APPLY, keep="latest:version")
    assert (report.applied, report.differing, report.differing_sample) == (2, 1, ("a",))
    assert taken.rows("SELECT * FROM taken ORDER BY 1") == [("a", 10), ("b", 5)]


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
