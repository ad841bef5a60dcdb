"""A bulk load, by a real Spark into a real Postgres; what is to come of it is worked out in Python."""

import uuid
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import StatusCode
from pyspark.sql import SparkSession
from sqlalchemy import Engine

from integration.test_rights import granted
from support.documents import blocks
from support.spark.bulk_loads import (
    ADD_UP,
    COPY_FIRST,
    SUBSCRIBER,
    WRITE_EFFECT,
    WRITERS,
    Books,
    counts,
    failed,
    frame,
    load,
    purchases,
)
from support.txbox.traces import Traces, attributes, parent, span_id
from txbox import SchemaMissing
from txbox_spark import JobProgress, SparkSetupError

by_both = pytest.mark.parametrize("writer", WRITERS)
by_copy_first = pytest.mark.parametrize("writer", COPY_FIRST)

PAGE = Path(__file__).parents[3] / "docs" / "bulk-loads.md"


@by_both
def test_spans_and_progress_tell_of_its_stages_and_its_chunks(
    spark: SparkSession, books: Books, schema_url: str, writer: str
) -> None:
    traces, told = Traces(), list[JobProgress]()
    load(frame(spark, purchases(300)), schema_url, writer, tracing=traces.tracing, on_progress=told.append)
    stages = list(dict.fromkeys(one.stage for one in told))
    assert stages == (["survey", "merge"] if writer == "copy" else ["survey", "staging", "merge"])
    last = told[-1]
    assert (last.stage, last.done, last.total, last.applied) == ("merge", 3, 3, 300)
    assert (last.rows, last.total_rows) == (300, 300)
    (whole,) = traces.named("txbox.bulk_load")
    assert (attributes(whole)["txbox.writer"], attributes(whole)["txbox.applied"]) == (writer, 300)
    (merge,) = traces.named("txbox.bulk_load merge")
    assert parent(merge) == span_id(whole)
    chunks = traces.named("txbox.bulk_load chunk")
    assert sorted(attributes(span)["txbox.chunk"] for span in chunks) == [0, 1, 2]
    assert {parent(span) for span in chunks} == {span_id(merge)}
    times = [(merge.start_time, span.start_time, span.end_time, merge.end_time) for span in chunks]
    assert all(sorted(some, key=lambda time: time or 0) == list(some) for some in times)
    assert {span.status.status_code for span in chunks} == {StatusCode.UNSET}
    traces = Traces()
    failing = "SELECT count(*) / 0 FROM fresh_event"
    source = frame(spark, purchases(50, start=300))
    failed(source, schema_url, writer, "division by zero", apply=failing, tracing=traces.tracing)
    chunks = traces.named("txbox.bulk_load chunk")
    assert {span.status.status_code for span in chunks} == {StatusCode.ERROR}


@by_both
def test_into_an_inbox_that_has_some_of_them(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    events = purchases(400)
    known = [one[0] for one in events[::3]]
    books.record([*known, "of-another-archive"])
    books.record([one[0] for one in events], subscriber="shipping")
    report = load(frame(spark, events + events[::4] + [events[5]] * 50), schema_url, writer)
    new = [one for number, one in enumerate(events) if number % 3]
    assert counts(report) == {
        "read": 550, "rejected": 0, "duplicate_in_source": 150, "already_processed": 134, "applied": 266
    }  # fmt: skip
    books.require_applied(new, recorded=[*known, "of-another-archive"])
    assert books.inbox("shipping") == sorted(str(one[0]) for one in events)
    assert (report.writer, report.attempts, report.chunks, report.rejected_sample) == (writer, 1, 6, ())
    assert report.subscriber_id == SUBSCRIBER
    assert books.chunks(report.run_id) == [0, 1, 2, 3, 4, 5]
    assert books.staging_tables() == []
    ledger = books.ledger(report.run_id)
    assert ledger["finished_at"] is not None
    columns = ("error", "staging_table", "rows_read", "rows_rejected")
    assert [ledger[column] for column in columns] == [None, None, 550, 0]


@by_both
@pytest.mark.parametrize("kind", ["no rows", "no partitions", "filtered"])
def test_nothing_to_load(spark: SparkSession, books: Books, schema_url: str, writer: str, kind: str) -> None:
    events = {
        "no rows": lambda: spark.createDataFrame([], "event_id string, account_id int, amount bigint"),
        "no partitions": lambda: frame(spark, purchases(3)).limit(0),
        "filtered": lambda: frame(spark, purchases(3)).where("amount < 0"),
    }[kind]()
    report = load(events, schema_url, writer)
    assert set(counts(report).values()) == {0}
    assert books.effects() == {}
    assert books.ledger(report.run_id)["finished_at"] is not None
    assert books.staging_tables() == []


@by_both
def test_only_ids(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    events = frame(spark, [(f"e{number}",) for number in range(30)], "message_id string")
    apply = "INSERT INTO effect (event_id) SELECT message_id FROM fresh_event"
    assert load(events, schema_url, writer, message_id="message_id", apply=apply).applied == 30
    assert books.inbox() == sorted(f"e{number}" for number in range(30))


@by_both
def test_a_script_of_many_statements(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    """What one leaves behind, a temporary table or a setting, must not be in the way of the next chunk."""
    books.run("CREATE TABLE note (said text)")
    script = f"""
        -- COMMIT; is only a comment here, and 100 % harmless;
        SELECT 1 / (current_setting('application_name') <> 'mine')::int;
        CREATE TEMP TABLE per_account AS
          SELECT account_id, sum(amount) AS amount FROM fresh_event GROUP BY 1;
        /* so is /* this; */ COMMIT; */
        INSERT INTO note SELECT 'it''s 5 % 3 = ' || 5 % 3 || $q$; COMMIT; %s$q$ || $txbox$ $txbox_do$ $txbox$;
        DO $$ BEGIN PERFORM 1; END $$;
        SELECT count(*) FROM per_account WHERE account_id::text LIKE '%1%';
        UPDATE account SET balance = balance + per_account.amount
        FROM per_account WHERE account.account_id = per_account.account_id;
        {WRITE_EFFECT};;
        SET application_name = 'mine';
        -- the end"""
    events = purchases(400)
    report = load(frame(spark, events), schema_url, writer, apply=script, parallelism=1)
    assert report.chunks == 4
    books.require_applied(events)
    assert books.rows("SELECT DISTINCT said FROM note") == [("it's 5 % 3 = 2; COMMIT; %s $txbox_do$ ",)]


@by_copy_first
def test_a_callable_of_a_module(
    spark: SparkSession, books: Books, schema_url: str, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.spark import bulk_loads

    # Spark's workers are processes of their own, and find modules by their own path.
    root = bulk_loads.__file__.rpartition("/support/")[0]
    monkeypatch.setitem(spark.sparkContext.environment, "PYTHONPATH", root)
    events = purchases(250)
    assert load(frame(spark, events), schema_url, writer, apply=bulk_loads.write_effect).applied == 250
    books.require_applied(events)


@by_copy_first
def test_tables_missing(spark: SparkSession, fresh_database: str, writer: str) -> None:
    with pytest.raises(SchemaMissing, match="processed_message does not exist; create it with `txbox db upgrade`"):
        load(frame(spark, purchases(3)), fresh_database, writer)


@by_copy_first
def test_a_value_that_is_not_of_its_type(
    spark: SparkSession, books: Books, schema_url: str, writer: str, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    """The message and the column are named; what people load is not for logs."""
    events = [(f"e{number}\n", "line\nbreak", str(uuid.UUID(int=number))) for number in range(9)]
    wrong = ("e5", "x\r\ny", f"{uuid.UUID(int=9)}, a secret")
    some = frame(spark, [*events, wrong], "event_id string, order_id string, order_id2 string")
    for type_, why in (
        ("uuid", "invalid input syntax for type uuid"),
        ("varchar(36)", "value too long for type character varying(36)"),
    ):
        books.run("TRUNCATE processed_message", "DROP TABLE IF EXISTS kept")
        asked = {"column_types": {"order_id2": type_}, "apply": "SELECT", "rejected_to": "table:kept"}
        report = load(some, schema_url, writer, **asked)
        assert (report.applied, [one.cause for one in report.rejected_causes]) == (9, [f"column order_id2: {why}"])
        assert books.rows("SELECT message_id, column_name, value FROM kept") == [("e5", "order_id2", wrong[2][:40])]
        assert "secret" not in "".join([caplog.text, *capfd.readouterr()])
    assert books.inbox() == [one[0] for one in events]


@by_copy_first
def test_an_event_that_the_effect_fails_for(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    """The cause quotes no data."""
    books.run("CREATE TABLE strict (said text CHECK (said <> 'a secret'))")
    events = frame(spark, [("e1", "a secret"), ("e2", "7")], "event_id string, said string")
    for apply, why in (
        ("INSERT INTO strict SELECT said FROM fresh_event", 'violates check constraint "strict_said_check"'),
        ("SELECT said::int FROM fresh_event", "invalid input syntax for type integer"),
        ("SELECT 1 / (said <> 'a secret')::int FROM fresh_event", "division by zero"),
    ):
        books.run("TRUNCATE processed_message")
        report = load(events, schema_url, writer, apply=apply)
        (cause,) = report.rejected_causes
        assert why in cause.cause
        assert "secret" not in cause.cause
        assert (report.applied, books.inbox()) == (1, ["e2"])


@by_copy_first
def test_what_is_probably_not_meant_is_warned_of(
    spark: SparkSession, books: Books, schema_url: str, writer: str, caplog: pytest.LogCaptureFixture
) -> None:
    for subscriber in ("shipping", "mailing", "a"):
        books.record(["x"], subscriber=subscriber)
    load(frame(spark, purchases(3)), schema_url, writer, apply="SELECT 1")
    assert caplog.messages == ["billing has no id in the inbox; there are ids of a, mailing, shipping"]
    caplog.clear()
    load(frame(spark, purchases(3)), schema_url, writer)
    assert caplog.messages == []


def test_a_driver_that_is_missing_is_told_before_anything_is_read(
    spark: SparkSession, books: Books, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: SparkSession) -> None:
        raise SparkSetupError("there is no driver")

    monkeypatch.setattr("txbox_spark.loading.loader.require_jdbc_driver", missing)
    told: list[JobProgress] = []
    with pytest.raises(SparkSetupError):
        load(frame(spark, purchases(3)), schema_url, "jdbc", on_progress=told.append)
    assert told == []
    assert load(frame(spark, purchases(3)), schema_url, "copy").applied == 3


@by_both
def test_the_rights_that_the_page_grants_are_enough(
    spark: SparkSession, books: Books, engine: Engine, writer: str
) -> None:
    with granted(engine, ("txbox_loader",), [block.text for block in blocks(PAGE)]) as (loader,):
        with loader.connect() as connection:
            schema, role = connection.exec_driver_sql("SELECT current_schema(), current_user").one()
        if writer == "jdbc":
            books.run(f"GRANT CREATE ON SCHEMA {schema} TO {role}")
        url = loader.url.render_as_string(hide_password=False)
        assert load(frame(spark, purchases(10)), url, writer, apply=ADD_UP).applied == 10
    assert len(books.inbox()) == 10
