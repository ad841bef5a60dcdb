"""Bulk loads that die at a place, and what the trial of them says."""

import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine

from support.spark.bulk_loads import COPY_FIRST
from txbox import Inbox, InvalidConfiguration
from txbox_spark import BulkLoadReport, bulk_load
from txbox_testing import NotIdempotent, crash_at, load, try_every_point_of_load

Load = Callable[..., BulkLoadReport]

BOOK = "INSERT INTO booking (account_id, note) SELECT 'ann', event_id FROM fresh_event"


@pytest.fixture(params=COPY_FIRST)
def booked(spark: SparkSession, engine: Engine, request: pytest.FixtureRequest) -> Callable[..., Load]:
    """Make a load of 200 events in two chunks."""
    events = spark.createDataFrame([(f"e{number:03}",) for number in range(200)], "event_id string").repartition(3)

    def of(**options: Any) -> Load:
        def bookings(resume: str | None = None) -> BulkLoadReport:
            given = {"apply": BOOK, "message_id": "event_id", "subscriber_id": "billing", "chunk_rows": 100, **options}
            url = engine.url.render_as_string(hide_password=False)
            return bulk_load(events, url=url, writer=request.param, resume=resume, force=True, **given)

        return bookings

    return of


def by_hand(engine: Engine, *own: str) -> Callable[..., Any]:
    """Make a load of one event that needs no Spark: a trial sees of a load what it writes."""

    def bookings(resume: str | None = None) -> Any:
        with engine.begin() as connection:
            for statement in own:
                connection.exec_driver_sql(statement)
            run_id = resume or uuid.uuid4().hex[:12]
            connection.exec_driver_sql(
                "INSERT INTO bulk_load (run_id, subscriber_id, source, digest, writer, chunks, bounds) "
                "VALUES (%s, 'billing', 'e', '', 'copy', 1, '[]') ON CONFLICT DO NOTHING",
                (run_id,),
            )
        with engine.begin() as connection:
            if Inbox("billing").record(connection, "e"):
                connection.exec_driver_sql("INSERT INTO booking (account_id, note) VALUES ('ann', 'e')")
            connection.exec_driver_sql(
                "INSERT INTO bulk_load_chunk (run_id, chunk) VALUES (%s, 0) ON CONFLICT DO NOTHING", (run_id,)
            )
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE bulk_load SET finished_at = now() WHERE run_id = %s", (run_id,))
        return SimpleNamespace(chunks=1)

    return bookings


def test_a_load_that_dies_at_its_second_chunk_is_finished(
    booked: Callable[..., Load], engine: Engine, rows: Callable[[str], list[object]]
) -> None:
    report = load(booked(parallelism=1), engine=engine, fault=crash_at("merging", 2))
    assert (report.attempts, report.already_processed, report.applied) == (2, 0, 200)
    assert rows("SELECT count(DISTINCT note) FROM booking WHERE note LIKE 'e%'") == [200]
    assert rows("SELECT count(*) FROM booking WHERE note LIKE 'e%'") == [200]
    assert rows("SELECT count(*) FROM pg_trigger WHERE tgname = 'txbox_testing_end'") == [0]


@pytest.mark.parametrize(("resumes", "runs"), [(True, 1), (False, 2)])
def test_a_load_that_dies_is_resumed_or_begun_anew(
    engine: Engine, rows: Callable[[str], list[object]], resumes: bool, runs: int
) -> None:
    load(by_hand(engine), engine=engine, fault=crash_at("merged"), resumes=resumes)
    assert rows("SELECT count(*) FROM bulk_load") == [runs]
    assert rows("SELECT count(finished_at) FROM bulk_load") == [1]
    assert rows("SELECT note FROM booking ORDER BY number") == ["opened", "e"]


@pytest.mark.timeout(600)  # seven loads, and the machine may be busy
def test_what_is_in_the_chunk_s_transaction_passes(booked: Callable[..., Load], engine: Engine) -> None:
    report = try_every_point_of_load(booked(), engine=engine)
    assert [point.name for point in report.points] == [
        f"{place}, {how}"
        for place in ('crash_at("merging")', 'crash_at("merging", 2)', 'crash_at("merged")')
        for how in ("resumed", "begun anew")
    ]
    assert all(point.happened for point in report.points)
    assert str(report).startswith("bookings is idempotent: 6 points lead to the same state")


def test_what_the_load_writes_by_itself_is_doubled(engine: Engine) -> None:
    with pytest.raises(NotIdempotent, match=r"booking: 1 row too many: .*a load has begun") as raised:
        try_every_point_of_load(
            by_hand(engine, "INSERT INTO booking (account_id, note) VALUES ('ann', 'a load has begun')"), engine=engine
        )
    assert len(raised.value.report.failed) == 4
    assert "not written by the load's `apply`" in str(raised.value)


def test_what_cannot_befall_a_load_is_refused(engine: Engine) -> None:
    bookings = by_hand(engine)
    with pytest.raises(InvalidConfiguration, match=r'cannot befall a bulk load; crash_at\("merging"\)'):
        load(bookings, engine=engine, fault=crash_at("sent"))
    with pytest.raises(InvalidConfiguration, match="could not happen: the load was finished without it"):
        load(bookings, engine=engine, fault=crash_at("merging", 9))
