"""Plans a bulk load without running it: counts, chunks, and how Postgres would run the effect.

::

    statements, explained ── survey ── ids, one of each, sorted ──┬─ a batch ─▶ known? parked? expired? ── ROLLBACK
                                                                  └─ the next one …

Each batch of ids goes into a temporary table, in a transaction that is rolled back, so nothing stays in the database.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Unpack

from txbox.postgres.server import SERVER
from txbox.postgres.transactions import driver_cursor, short_transaction
from txbox_spark.bulk_load import opened_context
from txbox_spark.loading.context import LoadContext
from txbox_spark.loading.loader import bounds_of, choose
from txbox_spark.merging.chunk_merger import count_parked, drop_expired_events
from txbox_spark.merging.effect_runner import StatementPlan
from txbox_spark.merging.fresh_event import FRESH_EVENT, copy_fresh, create_fresh, csv_lines
from txbox_spark.merging.merge_plan import MergePlan
from txbox_spark.options import LoadOptions, ValidLoadOptions
from txbox_spark.reading.columns import MESSAGE_ID, EventColumn, dates_as_text
from txbox_spark.reading.sources import EventSource
from txbox_spark.rejects.remarks import RejectedCause
from txbox_spark.report import OnProgress
from txbox_spark.runtime.lazy_imports import DataFrame, pyarrow, sql
from txbox_spark.runtime.retries import retry_outages
from txbox_spark.survey import rejected_causes, survey

BATCH_IDS = 100_000
"""How many ids one transaction looks up at most."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a bulk load would do if it began now; each row of the source is counted once.

    ``read`` is the sum of ``rejected``, ``duplicate_in_source``, ``already_processed``, ``parked``, ``expired`` and
    ``to_apply``. These counts come from the rows and ids alone. Of the events to apply, the load also rejects those
    whose values Postgres refuses, or that break a constraint of the effect's target; and workers may process some of
    them first.

    Attributes:
        subscriber_id: the subscriber that the events would be applied for.
        source: what would be loaded.
        writer: "copy" or "jdbc".
        writer_reason: why that writer was chosen.
        chunks: how many chunks there would be.
        read: rows of the source.
        rejected: rows that cannot be loaded, judged by the rows alone.
        rejected_causes: why, the cause with the most rows first.
        duplicate_in_source: rows whose id another row of the source has.
        already_processed: events that were processed before.
        parked: events that wait as dead letters.
        expired: events that were sent before the subscriber's horizon.
        to_apply: events that are first. The load applies at most as many.
        statements: the effect's statements, each with its plan over an empty ``fresh_event``; empty for a callable.
    """

    subscriber_id: str
    source: str
    writer: str
    writer_reason: str
    chunks: int
    read: int
    rejected: int
    rejected_causes: tuple[RejectedCause, ...]
    duplicate_in_source: int
    already_processed: int
    parked: int
    expired: int
    to_apply: int
    statements: tuple[StatementPlan, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of plain values."""
        return asdict(self)


def plan_load(
    events: DataFrame,
    *,
    source: EventSource | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[LoadOptions],
) -> LoadPlan:
    """Return what ``bulk_load`` with the same arguments would do, without changing anything.

    Statements are explained but not run, so the plan does not show what they would do to the events' values. All ids
    pass through this process.

    Args:
        events: the events, one per row.
        source: what the events were read from, if they came from files.
        on_progress: called with the progress, from its own thread.
        options: those of ``txbox_spark.options.LoadOptions``, as for ``bulk_load``.

    Raises:
        InvalidConfiguration: an argument is invalid.
        ApplyFailed: Postgres refuses a statement of the effect.
        SchemaMissing: txbox's tables do not exist.
        RightsMissing: the effect is an ``Upsert``, and this user may not write to its table.
        SparkSetupError: the writer is jdbc, and Spark has no JDBC driver.
    """
    valid = ValidLoadOptions.given_to("plan_load", options)
    with opened_context(events, valid, source, on_progress) as context:
        statements = context.explain()
        choice, _ = choose(context, valid.writer)
        with context.stage("survey", None):
            found = survey(context.events, count_rejected=True)
            rejected = found.rejected or 0
            causes = rejected_causes(context.events) if rejected else ()
        ids = Counter[str]()
        with context.stage("ids", None):
            for batch in _batches(context):
                ids.update(_look_up(context, batch))
        return LoadPlan(
            subscriber_id=valid.subscriber_id,
            source=context.source,
            writer=choice.writer,
            writer_reason=choice.reason,
            chunks=len(bounds_of(context, choice.writer, found)) + 1,
            read=found.rows,
            rejected=rejected,
            rejected_causes=causes,
            duplicate_in_source=found.rows - rejected - ids["distinct"],
            already_processed=ids["processed"] - ids["parked"],
            parked=ids["parked"],
            expired=ids["expired"],
            to_apply=ids["distinct"] - ids["processed"] - ids["expired"],
            statements=statements,
        )


def _batches(context: LoadContext) -> "Iterator[pyarrow.RecordBatch]":
    """Yield the distinct ids in order, each with its ``sent_at`` time if the load has that column, as texts."""
    sent = _sent_at(context)
    events = dates_as_text(context.events.staged.where(sql.col(MESSAGE_ID).isNotNull()))
    # If an id has several events, we cannot know here which one is loaded. With the latest time, the fewest expire.
    times = [sql.max(one.staged_as).cast("string").alias(one.staged_as) for one in sent]
    rows = (
        events.groupBy(MESSAGE_ID).agg(*times) if times else events.select(MESSAGE_ID).distinct()
    ).orderBy(MESSAGE_ID).toLocalIterator()  # fmt: skip
    schema = pyarrow.schema([(name, pyarrow.string()) for name in (MESSAGE_ID, *(one.staged_as for one in sent))])
    while some := list(islice(rows, BATCH_IDS)):
        yield pyarrow.RecordBatch.from_pylist([row.asDict() for row in some], schema=schema)


@retry_outages
def _look_up(context: LoadContext, batch: "pyarrow.RecordBatch") -> dict[str, int]:
    """Count how many of the sorted ids are processed, parked (of those) or expired; the transaction is rolled back."""
    one = context.options
    columns = _sent_at(context)
    plan = MergePlan.of(one, run_id="", columns=columns, apply="")
    with short_transaction(context.engine) as connection:
        connection.exec_driver_sql(SERVER.no_time_limit)
        connection.exec_driver_sql(create_fresh(columns))
        with driver_cursor(connection) as cursor, cursor.copy(copy_fresh(columns)) as copy:
            copy.write(csv_lines(batch))
        connection.exec_driver_sql(f"ANALYZE {FRESH_EVENT} ({MESSAGE_ID})")
        parked = count_parked(connection, plan, FRESH_EVENT)
        found = batch.column(MESSAGE_ID)
        # Postgres stores no NUL character, so the last id followed by \x01 is the next possible id.
        ids = {"subscriber_id": one.subscriber_id, "first_id": found[0].as_py(), "end_id": f"{found[-1].as_py()}\x01"}
        processed = connection.exec_driver_sql(plan.sql.drop_processed, ids).rowcount
        expired = drop_expired_events(connection, plan)
        connection.rollback()
    return {"distinct": batch.num_rows, "processed": processed, "parked": parked, "expired": expired.events}


def _sent_at(context: LoadContext) -> tuple[EventColumn, ...]:
    return tuple(one for one in context.events.columns if one.name == context.options.sent_at)
