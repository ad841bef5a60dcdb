"""Events that are few: surveyed in one job, and merged by the driver, without Python on the executors."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import txbox_spark.loading.context
import txbox_spark.survey
from support.spark.bulk_loads import APPLY_ALLOWED, COLUMNS, Books, as_dicts, counts, failed, load, purchases
from txbox_spark import read_events
from txbox_spark.loading.writer import FEW
from txbox_spark.reading.event_rows import prepare
from txbox_spark.survey import content_digest, seem_few, survey, survey_few

Read = Callable[[list[tuple[Any, ...]]], DataFrame]


@pytest.fixture
def read(spark: SparkSession, write: Callable[..., str]) -> Read:
    """Read events from a file."""

    def read(events: list[tuple[Any, ...]]) -> DataFrame:
        path = write("events.jsonl", "\n".join(map(json.dumps, as_dicts(events))))
        return read_events(spark, [path], schema=COLUMNS)

    return read


@pytest.fixture
def no_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to run Python on the executors."""

    def refuse(*_: object) -> DataFrame:
        raise AssertionError("a task would run Python")

    monkeypatch.setattr("pyspark.sql.classic.dataframe.DataFrame.mapInArrow", refuse)
    monkeypatch.setattr("pyspark.RDD.map", refuse)


@pytest.mark.usefixtures("no_tasks")
@pytest.mark.parametrize("writer", ["auto", "copy"])
def test_they_are_counted_as_others(read: Read, books: Books, schema_url: str, writer: str) -> None:
    events = purchases(250)
    books.record([events[0][0], events[249][0]])
    bad = [(None, 1, 1), ("", 1, 1), ("x" * 2000, 1, 1), ("nul\0", 1, 1)]
    report = load(read([*bad, *events, *events[100:110]]), schema_url, writer)
    assert counts(report) == {
        "read": 264, "rejected": 4, "duplicate_in_source": 10, "already_processed": 2, "applied": 248
    }  # fmt: skip
    assert (report.writer, report.chunks) == ("copy", 3)
    assert report.writer_reason == (FEW.reason if writer == "auto" else "asked for")
    assert len(report.rejected_sample) == 4
    books.require_applied(events[1:249], recorded=[events[0][0], events[249][0]])
    assert books.chunks(report.run_id) == [0, 1, 2]


@pytest.mark.usefixtures("no_tasks")
def test_a_run_is_resumed(read: Read, books: Books, schema_url: str) -> None:
    events = purchases(250)
    forbidden = sorted(str(event[0]) for event in events)[150]
    books.run(f"INSERT INTO forbidden VALUES ('{forbidden}')")
    error = failed(read(events), schema_url, "auto", "forbidden", apply=APPLY_ALLOWED, lock_seconds=1e-9)
    assert (error.done, error.chunks) == (1, 3)
    books.run("DELETE FROM forbidden")
    report = load(read(events), schema_url, "auto", apply=APPLY_ALLOWED, resume=error.run_id)
    assert (report.run_id, report.attempts, report.applied) == (error.run_id, 2, 250)
    books.require_applied(events)


def test_what_is_more_than_it_seems_is_left_to_the_executors(
    read: Read, books: Books, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (txbox_spark.loading.context, txbox_spark.survey):
        monkeypatch.setattr(module, "FEW_ROWS", 249)
    events = purchases(250)
    report = load(read(events), schema_url, "auto")
    assert report.writer_reason == "the executors have psycopg and reach Postgres"
    books.require_applied(events)


def test_the_short_survey_finds_what_the_long_one_finds(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [None, "", "x" * 2000, "nul\0", "é", "\U0001f600", "\uffee", *(event[0] for event in purchases(200))]
    for some in ([], ids, ids * 2):
        events = prepare(read([(one, 1, 1) for one in some]), "event_id")
        found = survey_few(events)
        assert found == survey(events, count_rejected=False)
        assert found.content == survey(events, count_rejected=True).content
        assert (found.rows, found.content) == content_digest(events)
    monkeypatch.setattr(txbox_spark.survey, "FEW_ROWS", len(ids) - 1)
    assert survey_few(prepare(read([(one, 1, 1) for one in ids]), "event_id")) is None


def test_few_is_what_spark_can_tell_without_reading(
    spark: SparkSession, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seem_few(read([("e", 1, 1)]))
    assert not seem_few(spark.createDataFrame([("e", 1, 1)], COLUMNS)), "of an RDD it knows nothing"
    assert not seem_few(spark.range(1)), "it is not from files"
    monkeypatch.setattr(txbox_spark.survey, "FEW_BYTES", 10)
    assert not seem_few(read([("e", 1, 1)]))
