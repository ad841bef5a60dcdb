"""Bulk loads that die at a place, and what the trial of them says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import Engine

from support.spark.bulk_loads import COPY_FIRST
from txbox import InvalidConfiguration
from txbox_spark import BulkLoadReport, bulk_load
from txbox_testing import NotIdempotent, crash_at, load, try_every_point_of_load

Load = Callable[..., BulkLoadReport]

BOOK = "INSERT INTO booking (account_id, note) SELECT 'ann', event_id FROM fresh_event"


@pytest.fixture(params=COPY_FIRST)
def booked(spark: SparkSession, engine: Engine, request: pytest.FixtureRequest) -> Callable[..., Load]:
    """Make a load of 200 events in two chunks."""
    by_executors = spark.createDataFrame([(f"e{number:03}",) for number in range(200)], "event_id string").repartition(
        3
    )

    def of(events: DataFrame = by_executors, **options: Any) -> Load:
        def bookings(resume: str | None = None) -> BulkLoadReport:
            given = {"apply": BOOK, "message_id": "event_id", "subscriber_id": "billing", "chunk_rows": 100, **options}
            url = engine.url.render_as_string(hide_password=False)
            return bulk_load(events, url=url, writer=request.param, resume=resume, force=True, **given)

        return bookings

    return of


@pytest.fixture
def few(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """The same events from a file, so that the driver merges them."""
    (tmp_path / "events.csv").write_text("".join(f"e{number:03}\n" for number in range(200)))
    return spark.read.schema("event_id string").csv(str(tmp_path))


@pytest.mark.parametrize(("resumes", "attempts", "already"), [(True, 2, 0), (False, 1, 100)])
def test_a_load_that_dies_at_its_second_chunk_is_finished(
    booked: Callable[..., Load],
    engine: Engine,
    rows: Callable[[str], list[object]],
    resumes: bool,
    attempts: int,
    already: int,
) -> None:
    report = load(booked(parallelism=1), engine=engine, fault=crash_at("merging", 2), resumes=resumes)
    assert (report.attempts, report.already_processed, report.applied) == (attempts, already, 200 - already)
    assert rows("SELECT count(DISTINCT note) FROM booking WHERE note LIKE 'e%'") == [200]
    assert rows("SELECT count(*) FROM booking WHERE note LIKE 'e%'") == [200]
    assert rows("SELECT count(*) FROM pg_trigger WHERE tgname = 'txbox_testing_end'") == [0]


@pytest.mark.timeout(600)  # fourteen loads, and the machine may be busy
def test_what_is_in_the_chunk_s_transaction_passes(booked: Callable[..., Load], few: DataFrame, engine: Engine) -> None:
    report = try_every_point_of_load(booked(few), engine=engine)
    assert [point.name for point in report.points] == [
        f"{place}, {how}"
        for place in ('crash_at("merging")', 'crash_at("merging", 2)', 'crash_at("merged")')
        for how in ("resumed", "begun anew")
    ]
    assert all(point.happened for point in report.points)
    assert str(report).startswith("bookings is idempotent: 6 points lead to the same state")


def test_what_the_load_writes_by_itself_is_doubled(booked: Callable[..., Load], few: DataFrame, engine: Engine) -> None:
    def counted(resume: str | None = None) -> BulkLoadReport:
        with engine.begin() as own:
            own.exec_driver_sql("INSERT INTO booking (account_id, note) VALUES ('ann', 'a load has begun')")
        return booked(few, chunk_rows=1_000)(resume)

    with pytest.raises(NotIdempotent, match=r"booking: 1 row too many: .*a load has begun") as raised:
        try_every_point_of_load(counted, engine=engine)
    assert len(raised.value.report.failed) == 4
    assert "not written by the load's `apply`" in str(raised.value)
    engine.dispose()


def test_what_cannot_befall_a_load_is_refused(booked: Callable[..., Load], engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match=r'cannot befall a bulk load; crash_at\("merging"\)'):
        load(booked(), engine=engine, fault=crash_at("sent"))
    with pytest.raises(InvalidConfiguration, match="could not happen: the load was finished without it"):
        load(booked(), engine=engine, fault=crash_at("merging", 9))
