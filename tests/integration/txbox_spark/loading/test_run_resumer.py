"""Runs that fail, are resumed, come twice, or lose their staging table; what has committed is asked of Postgres."""

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.schema import CreateSchema, DropSchema

from support.spark.bulk_loads import (
    COPY_FIRST,
    WRITE_EFFECT,
    Books,
    counts,
    failed,
    frame,
    load,
    purchases,
)
from txbox import InvalidConfiguration
from txbox.schema import tables
from txbox_spark import EventSource, RunNotFound, SparkSetupError
from txbox_spark.runtime import session


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_a_wrong_statement(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    events = purchases(300)
    source = frame(spark, [*events, *events[:30], (None, 1, 1)])
    wrong = failed(
        source, schema_url, writer, r'relation "acount" does not exist', apply=f"{WRITE_EFFECT}; TABLE acount"
    )
    assert (wrong.done, wrong.chunks) == (0, 4)
    assert wrong.run_id in str(wrong)
    assert "chunk " in str(wrong)
    assert (books.effects(), books.inbox(), books.chunks(wrong.run_id)) == ({}, [], [])
    assert "acount" in books.ledger(wrong.run_id)["error"]
    report = load(source, schema_url, writer, resume=wrong.run_id)
    assert (report.run_id, report.attempts) == (wrong.run_id, 2)
    assert counts(report) == {
        "read": 331, "rejected": 1, "duplicate_in_source": 30, "already_processed": 0, "applied": 300
    }  # fmt: skip
    books.require_applied(events)
    assert books.staging_tables() == []
    assert books.ledger(report.run_id)["error"] is None


def commits(connection: Connection) -> None:
    connection.execute(text(WRITE_EFFECT))
    connection.commit()


def swallows(connection: Connection) -> None:
    try:
        connection.execute(text(f"{WRITE_EFFECT}; SELECT 1 / 0"))
    except Exception:  # noqa: BLE001 - any
        return


def raises(connection: Connection) -> None:
    connection.execute(text(WRITE_EFFECT))
    raise KeyError("no such account")


@pytest.mark.parametrize("writer", COPY_FIRST)
@pytest.mark.parametrize(
    ("apply", "said"),
    [
        (commits, "the handler ended the worker's transaction"),
        (swallows, "a statement failed and the handler went on"),
        (raises, "applying the events failed: KeyError: 'no such account'"),
        (f"{WRITE_EFFECT}; COMMIT", "the chunk is the transaction: leave BEGIN"),
    ],
)
def test_effects_that_are_refused(
    spark: SparkSession, books: Books, schema_url: str, writer: str, apply: Any, said: str
) -> None:
    """Nothing is committed; and the same run ends well with an effect that can work.

    One of each kind: what else ends a transaction is in ``merging/test_chunk_merger.py``.
    """
    if callable(apply):
        # Sent whole: the workers cannot import this file.
        import sys

        from pyspark import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[apply.__module__])
    events = purchases(12)
    source = frame(spark, events)
    wrong = failed(source, schema_url, writer, said, apply=apply)
    assert (books.effects(), books.inbox(), books.chunks(wrong.run_id)) == ({}, [], [])
    load(source, schema_url, writer, resume=wrong.run_id)
    books.require_applied(events)


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_the_same_load_twice(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    events = purchases(300)
    source = frame(spark, [*events, *events[:50], (None, 1, 1)])
    first = load(source, schema_url, writer)
    second = load(source, schema_url, writer, apply="SELECT 1 / 0")  # nothing is first, so it is not asked to
    assert second.run_id != first.run_id
    assert counts(second) == {
        "read": 351, "rejected": 1, "duplicate_in_source": 50, "already_processed": 300, "applied": 0
    }  # fmt: skip
    again = load(source, schema_url, "auto", resume=first.run_id, apply="SELECT 1 / 0")
    assert counts(again) == counts(first)
    assert (again.run_id, again.attempts, again.writer) == (first.run_id, 1, writer)
    books.require_applied(events)


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_what_cannot_be_resumed(spark: SparkSession, books: Books, schema_url: str, writer: str) -> None:
    source = frame(spark, purchases(10))
    files = EventSource("files", b"digest")
    run = failed(source, schema_url, writer, "division by zero", apply="SELECT 1 / 0", source=files).run_id
    other = {"copy": "jdbc", "jdbc": "copy"}[writer]
    for changed, said in (
        ({"source": EventSource("files", b"other")}, "has begun to load files, and this is not the same"),
        ({"source": None}, "this is not the same"),
        ({"message_id": "concat(event_id, '')"}, "this is not the same"),
        ({"subscriber_id": "shipping"}, "is of subscriber billing, not shipping"),
        ({"writer": other}, f"was begun with writer {writer}; resume it with that one"),
    ):
        given = {"writer": writer, "source": files, **changed}
        with pytest.raises(InvalidConfiguration, match=said):
            load(source, schema_url, given.pop("writer"), resume=run, **given)
    with pytest.raises(RunNotFound, match="no bulk load 'ffffffffffff'"):
        load(source, schema_url, writer, resume="ffffffffffff")
    assert (books.ledger(run)["attempts"], books.inbox()) == (1, [])
    assert load(source, schema_url, "auto", resume=run, source=files).attempts == 2
    books.require_applied(purchases(10))


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_a_run_is_resumed_with_its_own_events_alone(
    spark: SparkSession, books: Books, schema_url: str, writer: str
) -> None:
    """Whether it is finished or not, and whatever the source says of itself; their order does not matter."""
    events = purchases(20)
    first, *rest = events
    files = EventSource("files", b"digest")
    run = failed(
        frame(spark, events), schema_url, writer, "division by zero", apply="SELECT 1 / 0", source=files
    ).run_id
    others = [purchases(20, start=20), rest, [*rest, rest[0]], [*events, first], [*rest, (None, 1, 1)], []]
    for finished in (False, True):
        for other in others[:1] if finished else others:
            with pytest.raises(InvalidConfiguration, match=f"run {run} .* 20 rows of files, .* have other message ids"):
                load(frame(spark, other), schema_url, writer, resume=run, source=files)
        assert books.inbox() == sorted(str(one[0]) for one in events if finished)
        report = load(frame(spark, events[::-1]).repartition(5), schema_url, writer, resume=run, source=files)
        assert (report.run_id, report.attempts, report.applied) == (run, 2, 20)
        books.require_applied(events)


def test_a_missing_driver_hides_no_other_refusal_and_is_no_attempt(
    spark: SparkSession, books: Books, schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = purchases(20)
    run = failed(frame(spark, events), schema_url, "jdbc", "division by zero", apply="SELECT 1 / 0").run_id
    monkeypatch.setattr(session, "JDBC_DRIVER_CLASS", "org.postgresql.NoDriver")
    with pytest.raises(InvalidConfiguration, match="have other message ids"):
        load(frame(spark, events[1:]), schema_url, "jdbc", resume=run)
    with pytest.raises(InvalidConfiguration, match="is of subscriber billing, not shipping"):
        load(frame(spark, events), schema_url, "jdbc", resume=run, subscriber_id="shipping")
    with pytest.raises(SparkSetupError, match="and it is too late to add it"):
        load(frame(spark, events), schema_url, "jdbc", resume=run)
    assert books.ledger(run)["attempts"] == 1


@pytest.fixture
def odd_place(database_url: str) -> Iterator[tuple[Engine, str, str]]:
    """An engine without search path, a schema and a prefix with characters that something might choke on."""
    schema, prefix = "Per%cent \"s\" 'x'", "Ärger %s $1-"
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(CreateSchema(schema))
        tables(schema, prefix).metadata.create_all(connection)
        connection.exec_driver_sql("CREATE SCHEMA elsewhere")
        connection.exec_driver_sql("CREATE TABLE elsewhere.effect (event_id text)")
    yield engine, schema, prefix
    with engine.begin() as connection:
        connection.execute(DropSchema(schema, cascade=True))
        connection.execute(DropSchema("elsewhere", cascade=True))
    engine.dispose()


@pytest.mark.parametrize("writer", COPY_FIRST)
def test_places(spark: SparkSession, database_url: str, odd_place: tuple[Engine, str, str], writer: str) -> None:
    engine, schema, prefix = odd_place
    apply = "INSERT INTO elsewhere.effect SELECT event_id FROM fresh_event"
    source = frame(spark, purchases(210))
    where = {"schema": schema, "prefix": prefix}
    wrong = failed(source, database_url, writer, "acount", apply="TABLE acount", **where)
    report = load(source, database_url, writer, apply=apply, resume=wrong.run_id, **where)
    assert (report.applied, report.chunks) == (210, 3)
    described = tables(schema, prefix)
    with engine.connect() as connection:
        assert len(connection.execute(described.processed_message.select()).all()) == 210
        assert connection.exec_driver_sql("SELECT count(DISTINCT event_id) FROM elsewhere.effect").scalar() == 210
        left = connection.execute(
            text("SELECT relname FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace WHERE nspname = :schema "
                 "AND relname LIKE '%staging%'"), {"schema": schema},
        )  # fmt: skip
        assert left.all() == []
