"""Loads millions of events in bulk, through the inbox that the live workers use.

::

    survey ── ledger: begin ──┬─ copy: each task copies and merges its chunks ──────┬── report ── ledger: finish
                              └─ jdbc: tasks stage, the driver merges the chunks ───┘

A run may be killed at any moment. Each chunk is either in the inbox, the business tables and the ledger, or in none of
them. It is enough to run the load again: the inbox rejects what was applied. Resuming the run is faster, because it
does not even read the chunks that are done.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

from sqlalchemy import Engine

from txbox import SqlEffect
from txbox.effects import Upsert
from txbox.instrumentation import BulkLoaded, Hook, emit
from txbox.postgres.engines import open_engine
from txbox.postgres.guards.transaction_guard import guard
from txbox.postgres.transactions import short_transaction
from txbox.tracing import NO_TRACING, Tracing, error_type
from txbox_spark.loading.context import LoadContext
from txbox_spark.loading.ledger import warn_of_new_subscriber
from txbox_spark.loading.loader import load
from txbox_spark.loading.progress_reporter import ProgressReporter
from txbox_spark.options import TABLE, LoadOptions, ValidLoadOptions
from txbox_spark.reading.columns import CORRUPT_RECORD, MESSAGE_ID, types_as_wanted
from txbox_spark.reading.event_rows import prepare
from txbox_spark.reading.sources import EventSource
from txbox_spark.rejects.rejects_table import RejectsTable
from txbox_spark.report import OUTCOMES, BulkLoadReport, OnProgress
from txbox_spark.runtime.lazy_imports import DataFrame
from txbox_spark.runtime.retries import retry_outages
from txbox_spark.runtime.session import refuse_connect
from txbox_spark.survey import seem_few


def bulk_load(
    events: DataFrame,
    *,
    source: EventSource | None = None,
    resume: str | None = None,
    on_progress: OnProgress | None = None,
    tracing: Tracing = NO_TRACING,
    hooks: Iterable[Hook] = (),
    **options: Unpack[LoadOptions],
) -> BulkLoadReport:
    """Apply every event of a DataFrame exactly once, even if some were applied before or live workers apply them now.

    Spark reads the DataFrame twice, the first time only for its ids. It must return the same rows both times.

    Args:
        events: the events, one per row.
        source: what the events were read from, if they came from files. A run can only be resumed with the same files.
        resume: the id of a run to finish instead of beginning a new one.
        on_progress: called with the progress, from its own thread.
        tracing: makes a span for the load, for each of its stages and for each chunk.
        hooks: receive ``txbox.instrumentation.BulkLoaded`` when the load has succeeded.
        options: those of ``txbox_spark.options.LoadOptions``; ``url``, ``subscriber_id``, ``message_id`` and ``apply``
            are required.

    Returns:
        The report; its counts add up.

    Raises:
        InvalidConfiguration: an argument is invalid.
        BulkLoadFailed: a chunk cannot be merged. Nothing of that chunk is committed, and the run can be resumed.
        RunNotFound: the run to resume does not exist.
        SchemaMissing: txbox's tables do not exist.
        SparkSetupError: the writer is jdbc, and Spark has no JDBC driver.
        ExecutorsMissing: the cluster provided no executor in time; no run was begun.
        ApplyFailed, RightsMissing: the ``Upsert`` does not fit its table, or this user may not write to it.
    """
    valid = ValidLoadOptions.given_to("bulk_load", options)
    report = load_events(events, valid, valid.writer, source, resume, on_progress, tracing)
    emit_loaded(hooks, report, "bulk load")
    return report


def emit_loaded(hooks: Iterable[Hook], report: BulkLoadReport, source: str, batch_id: int | None = None) -> None:
    counts = {name: getattr(report, name) for name in OUTCOMES}
    seconds = sum(report.seconds.values())
    emit(tuple(hooks), BulkLoaded(report.subscriber_id, source, counts, seconds, report.run_id, batch_id))


def load_events(
    events: DataFrame,
    options: ValidLoadOptions,
    writer: str,
    source: EventSource | None,
    resume: str | None = None,
    on_progress: OnProgress | None = None,
    tracing: Tracing = NO_TRACING,
) -> BulkLoadReport:
    """Do what ``bulk_load`` does, with valid options, and with ``writer`` instead of the writer in the options."""
    refuse_connect(events, options.of, 'write it with format txbox: events.write.format("txbox")')
    span = tracing.internal("txbox.bulk_load", {"messaging.consumer.group.name": options.subscriber_id})
    try:
        with span.current(), opened_context(events, options, source, on_progress, tracing) as context:
            if isinstance(options.apply, Upsert):
                context.explain()
            if (to := options.rejected_to) is not None and to.startswith(TABLE):
                context.rejects = RejectsTable.named(context.engine, to.removeprefix(TABLE))
            context.staging.sweep(options.abandoned_seconds)
            report = load(context, writer, resume)
    except BaseException as error:
        span.end(error_type(error))
        raise
    span.end(
        None,
        {
            "txbox.run_id": report.run_id,
            "txbox.writer": report.writer,
            "txbox.chunks": report.chunks,
            "txbox.applied": report.applied,
        },
    )
    return report


@contextmanager
def opened_context(
    events: DataFrame,
    options: ValidLoadOptions,
    source: EventSource | None,
    on_progress: OnProgress | None,
    tracing: Tracing = NO_TRACING,
) -> Iterator[LoadContext]:
    """Yield the context of a load, after checking that the load can begin."""
    spark = events.sparkSession
    chunks_at_once = options.parallelism or max(1, spark.sparkContext.defaultParallelism)
    engine = guard(open_engine(options.database, pool_size=chunks_at_once + _CONNECTIONS_BESIDE_CHUNKS))
    try:
        options = with_upsert_as_statement(options, engine, events)
        context = LoadContext(
            spark=spark,
            engine=engine,
            options=options,
            events=prepare(events, options.message_id, options.column_types, options.fields, options.keep),
            source="a DataFrame" if source is None else source.description,
            digest=_digest(events, source, options.message_id),
            parallelism=chunks_at_once,
            reporter=ProgressReporter(spark, on_progress, options.executor_seconds),
            tracing=tracing,
            seem_few=seem_few(events),
        )
        context.ledger.check()
        warn_of_new_subscriber(engine, options.schema, options.prefix, options.subscriber_id)
        yield context
    finally:
        engine.dispose()


def _digest(events: DataFrame, source: EventSource | None, message_id: str) -> bytes:
    """Return the SHA-256 of what must be the same when a run is resumed.

    The effect is left out, so that a run whose statements were wrong can be resumed with corrected ones.
    """
    files = source.digest if source is not None else events.schema.json().encode()
    return hashlib.sha256(b"\0".join((files, message_id.encode()))).digest()


_CONNECTIONS_BESIDE_CHUNKS = 4
"""Connections for the ledger, the heartbeat and the progress."""


@retry_outages
def with_upsert_as_statement(options: ValidLoadOptions, engine: Engine, events: DataFrame) -> ValidLoadOptions:
    """Return the options of a load with its ``Upsert``, if it has one, turned into a statement over ``fresh_event``.

    The message id's column is written only if the table has it. Texts and arrays are converted to the types of the
    table's columns, so that an error about a value Postgres refuses names its message. Other values keep their types,
    and the statement casts them as an INSERT does.

    Raises:
        InvalidConfiguration: the table does not fit the events.
        RightsMissing: this user may not write to the table.
    """
    upsert = options.apply
    if not isinstance(upsert, Upsert):
        return options
    with short_transaction(engine) as connection:
        target = upsert.check(connection)
    if (fields := upsert.typed_fields) is not None:
        statement = upsert.statement(target, {name: one.of.name for name, one in fields.items()})
        return replace(options, apply=SqlEffect.of(statement, fields=fields))
    message_id = options.message_id
    if message_id in events.columns and all(one.name != message_id for one in target.columns):
        upsert = replace(upsert, ignore_columns=(*upsert.ignore_columns, message_id))  # it is not data of the row
    given = dict(options.column_types or {})
    wanted = {one.name: one.type for one in target.columns if one.name not in given}
    declared, types = types_as_wanted(events.drop(CORRUPT_RECORD, MESSAGE_ID), wanted)
    statement = upsert.statement(target, {**types, **given})
    return replace(options, apply=statement, column_types={**declared, **given})
