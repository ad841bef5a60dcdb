"""What surrounds a bulk load: encodings, time zones, search paths, limits, and a source that changes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow
import pytest
from pyspark.sql import SparkSession
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from support.spark.bulk_load_moments import database
from support.spark.bulk_loads import APPLY, COLUMNS, COPY_FIRST, Books, failed, frame, load, purchases
from txbox_spark import BulkLoadFailed
from txbox_spark.merging.chunk_ranges import chunk_bounds

pytestmark = pytest.mark.parametrize("writer", COPY_FIRST)


def configure(url: str, **settings: str) -> None:
    """Have all new sessions in a database begin with these settings, as far as this Postgres has them."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        there = connection.exec_driver_sql("SELECT name FROM pg_settings WHERE name = ANY(%s)", (list(settings),))
        for name in there.scalars().all():
            connection.exec_driver_sql(f"ALTER DATABASE {make_url(url).database} SET {name} = '{settings[name]}'")


def test_a_source_that_grows_meanwhile(
    spark: SparkSession, books: Books, schema_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """More rows than were counted: so nobody knows whether others are missing."""
    events = purchases(9)
    file = tmp_path / "events.json"
    file.write_text(json.dumps(events[:5]), encoding="utf-8")

    def read(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for _ in batches:
            rows = json.loads(file.read_text(encoding="utf-8"))
            columns = [pyarrow.array(list(values)) for values in zip(*rows, strict=True)]
            columns[1] = columns[1].cast(pyarrow.int32())
            yield pyarrow.RecordBatch.from_arrays(columns, ["event_id", "account_id", "amount"])

    def grow(sample: Sequence[str], chunks: int) -> tuple[str, ...]:
        file.write_text(json.dumps(events), encoding="utf-8")
        return chunk_bounds(sample, chunks)

    monkeypatch.setattr("txbox_spark.loading.loader.chunk_bounds", grow)
    source = spark.range(0, 1, 1, 1).mapInArrow(read, COLUMNS)
    with pytest.raises(BulkLoadFailed, match="the source must not change meanwhile: begin a new run") as raised:
        load(source, schema_url, writer)
    assert "resume" not in str(raised.value)


def test_times_of_an_events_own_session(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    """What zone the active session has does not matter: the events' own one computes them."""
    other = spark.newSession()
    other.conf.set("spark.sql.session.timeZone", "America/New_York")
    events = other.sql(
        "SELECT 'e1' AS event_id, t, array(t) AS more FROM VALUES (TIMESTAMP'2026-01-01 12:00:00Z') AS v (t)"
    )
    assert spark.active().conf.get("spark.sql.session.timeZone") != "America/New_York"
    load(events, schema_url, writer, apply="CREATE TABLE loaded AS TABLE fresh_event")
    assert books.rows("SELECT t = '2026-01-01 12:00Z', more = ARRAY['2026-01-01 12:00Z'::timestamptz] FROM loaded") == [
        (True, True)
    ]


def test_a_table_that_would_hide_the_events(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    """With pg_temp late in the search path, fresh_event might be another one, and events be lost in it."""
    books.run("CREATE TABLE fresh_event AS SELECT 'x' AS event_id, 1 AS account_id, 2 AS amount")
    url = make_url(schema_url)
    late = url.update_query_dict({"options": f"{url.query['options']},pg_temp"}).render_as_string(hide_password=False)
    wrong = failed(
        frame(spark, purchases(20)), late, writer, "another relation named fresh_event comes before the events"
    )
    assert (books.effects(), books.inbox()) == ({}, [])
    books.run("DROP TABLE fresh_event")
    assert load(frame(spark, purchases(20)), late, writer, resume=wrong.run_id).applied == 20
    books.require_applied(purchases(20))


def test_time_limits_of_a_role_do_not_apply(spark: SparkSession, fresh_database: str, writer: str) -> None:
    books = Books(database(fresh_database))
    configure(
        fresh_database, statement_timeout="1s", idle_in_transaction_session_timeout="1s", transaction_timeout="1s"
    )
    events = purchases(10)
    report = load(frame(spark, events), fresh_database, writer, apply=f"{APPLY}; SELECT pg_sleep(1.5)")
    assert (report.applied, report.attempts) == (10, 1)
    books.require_applied(events)
