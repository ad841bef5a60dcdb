"""What every writer of bulk loads must do: the suite of ``txbox_spark.loading.writer.Writer``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from txbox.postgres.transactions import short_transaction
from txbox_spark.bulk_load import opened_context
from txbox_spark.loading.context import LoadContext
from txbox_spark.loading.ledger import Run
from txbox_spark.loading.loader import begin_run
from txbox_spark.loading.writer import RowCounts, Writer
from txbox_spark.options import ValidLoadOptions
from txbox_spark.runtime.lazy_imports import SparkSession

__all__ = ["LoadUnderTest", "WriterConformance"]

COLUMNS = "event_id string, amount int"
Event = tuple[str | None, int]


class LoadUnderTest(Protocol):
    """What a test's load works with.

    Attributes:
        spark: a session with all that the writer needs.
        url: an empty database with txbox's tables.
        name: the writer's name in the ledger, ``copy`` or ``jdbc``.
    """

    spark: SparkSession
    url: str
    name: str

    def writer(self, context: LoadContext) -> Writer:
        """Return the writer of a load."""


@dataclass
class _Begun:
    context: LoadContext
    writer: Writer
    run: Run = field(init=False)

    def sql(self, statement: str) -> Sequence[Any]:
        with short_transaction(self.context.engine) as connection:
            found = connection.exec_driver_sql(statement)
            return found.all() if found.returns_rows else ()

    def applied(self) -> list[str]:
        return sorted(event_id for (event_id,) in self.sql("SELECT event_id FROM applied"))


class WriterConformance:
    """Subclass it, and override ``loads``."""

    @pytest.fixture
    def loads(self) -> LoadUnderTest:
        """Return what a test's load works with."""
        raise NotImplementedError

    def test_every_event_is_applied_once_and_every_row_is_counted(self, loads: LoadUnderTest) -> None:
        events = numbered(250)
        with begun(loads, [*events, *events[:30]]) as load:
            assert load.run.chunks > 1
            assert load.run.chunks <= load.writer.max_chunks
            assert load.writer.write(load.run) == []
            assert load.applied() == sorted(id_ for id_, _ in events)
            counts = row_counts(load)
            assert (counts.expected, counts.rejected) == (280, 0)
            assert counts.found == counts.expected
            assert load.writer.remarks(load.context.ledger.read(load.run.run_id)).causes == ()

    def test_what_is_merged_is_not_merged_again(self, loads: LoadUnderTest) -> None:
        with begun(loads, numbered(150)) as load:
            assert load.writer.write(load.run) == []
            merged = load.context.ledger.totals(load.run.run_id)
            assert load.writer.write(load.context.ledger.read(load.run.run_id)) == []
            assert len(load.applied()) == 150
            assert load.context.ledger.totals(load.run.run_id) == merged

    def test_what_another_run_has_applied_is_not_applied_again(self, loads: LoadUnderTest) -> None:
        with begun(loads, numbered(120)) as load:
            assert load.writer.write(load.run) == []
        with begun(loads, numbered(150)) as load:
            assert load.writer.write(load.run) == []
            totals = load.context.ledger.totals(load.run.run_id)
            assert (totals.applied, totals.already_processed) == (30, 120)
            assert len(load.applied()) == 150

    def test_a_chunk_that_fails_is_named_and_nothing_of_it_is_applied_before_the_next_attempt(
        self, loads: LoadUnderTest
    ) -> None:
        with begun(loads, numbered(250)) as load:
            load.sql("INSERT INTO forbidden VALUES ('event-007')")
            failed = load.writer.write(load.run)
            assert {("forbidden" in one.error, one.transient) for one in failed} == {(True, False)}
            totals = load.context.ledger.totals(load.run.run_id)
            assert totals.chunks + len(failed) <= load.run.chunks
            assert "event-007" not in load.applied()
            assert len(load.applied()) == totals.applied
            load.sql("DELETE FROM forbidden")
            again = load.context.ledger.begin_attempt(load.run.run_id)
            assert load.writer.write(again) == []
            assert load.applied() == sorted(id_ for id_, _ in numbered(250))

    def test_rows_that_cannot_be_loaded_are_counted_and_remarked(self, loads: LoadUnderTest) -> None:
        with begun(loads, [*numbered(150), (None, 1), (None, 2)]) as load:
            assert load.writer.write(load.run) == []
            counts = row_counts(load)
            assert counts.rejected == 2
            assert counts.found == counts.expected
            remarks = load.writer.remarks(load.context.ledger.read(load.run.run_id))
            assert sum(cause.rows for cause in remarks.causes) == 2

    def test_nothing_of_a_finished_run_is_left_in_the_database(self, loads: LoadUnderTest) -> None:
        tables = "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace ORDER BY 1"
        with begun(loads, numbered(120)) as load:
            before = load.sql(tables)
            assert load.writer.write(load.run) == []
            run = load.context.ledger.read(load.run.run_id)
            load.writer.clean_up(run)
            load.writer.clean_up(run)
            assert load.sql(tables) == before
            assert len(load.applied()) == 120


def numbered(count: int) -> list[tuple[str, int]]:
    return [(f"event-{number:03}", number) for number in range(count)]


@contextmanager
def begun(loads: LoadUnderTest, events: Sequence[Event]) -> Iterator[_Begun]:
    """Begin a load in chunks of fifty events, whose effect fails for events that are forbidden."""
    frame = loads.spark.createDataFrame(events, COLUMNS).repartition(3)
    options = ValidLoadOptions.given_to(
        "bulk_load",
        {
            "url": loads.url,
            "subscriber_id": "conformance",
            "message_id": "event_id",
            "chunk_rows": 50,
            "force": True,
            "apply": "INSERT INTO applied SELECT event_id FROM fresh_event; "
            "DO $$ BEGIN IF EXISTS (SELECT FROM fresh_event JOIN forbidden USING (event_id)) THEN "
            "RAISE 'it is forbidden'; END IF; END $$",
        },
    )
    with opened_context(frame, options, None, None) as context:
        load = _Begun(context, loads.writer(context))
        load.sql("CREATE TABLE IF NOT EXISTS applied (event_id text)")
        load.sql("CREATE TABLE IF NOT EXISTS forbidden (event_id text)")
        load.run = begin_run(context, loads.name, load.writer, None)
        yield load


def row_counts(load: _Begun) -> RowCounts:
    """Return the row counts of a run whose chunks are all merged."""
    ledger = load.context.ledger
    return load.writer.row_counts(ledger.read(load.run.run_id), ledger.totals(load.run.run_id))
