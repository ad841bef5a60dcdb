"""Runs one bulk load, from the survey to the report.

::

    choose the writer ── begin_run: survey, bounds, ledger ──┐
                      └─ resume_run: ledger, same events? ───┴─ write_chunks ── complete ── report
                                                                 │      ▲
                                                                 └──────┘ chunks that failed may succeed
"""

import logging
import math
import time
from contextlib import suppress
from dataclasses import replace

from sqlalchemy.exc import SQLAlchemyError

from txbox import InvalidConfiguration
from txbox.backoff import Backoff
from txbox.postgres.sqlstates import is_outage
from txbox_spark.loading.context import BulkLoadFailed, ExecutorsLost, LoadContext
from txbox_spark.loading.copy_writer import CopyWriter
from txbox_spark.loading.jdbc_writer import JdbcWriter
from txbox_spark.loading.ledger import Run, heartbeat
from txbox_spark.loading.writer import FEW, StagingLost, Writer, WriterChoice, choose_writer, require_packages
from txbox_spark.merging.chunk_ranges import chunk_bounds
from txbox_spark.merging.merge_plan import FailedChunk
from txbox_spark.options import AUTO, COPY, JDBC, TABLE
from txbox_spark.rejects.rejects_table import RejectsTable, write_rejects
from txbox_spark.rejects.remarks import TooManyRejected, refuse_too_many
from txbox_spark.report import BulkLoadReport
from txbox_spark.runtime.session import require_jdbc_driver
from txbox_spark.survey import Survey, content_digest, count_rejected_rows, survey, survey_few

ROWS_OF_A_CHUNK = 5_000
"""About how many rows a chunk has, unless ``chunk_rows`` is less; see ``MergeSizer`` for chunks per transaction."""

MIN_CHUNK_ROWS = 2_500
"""A smaller chunk costs more as a transaction than merging it in parallel saves."""

LOAD_ATTEMPTS = 5
"""How often chunks that fail for a transient reason are tried."""

LOAD_BACKOFF = Backoff(first_seconds=2.0, longest_seconds=30.0)


def load(context: LoadContext, writer_name: str, resume: str | None) -> BulkLoadReport:
    """Load the events, or the rest of the run ``resume``; ``writer_name`` is "copy", "jdbc" or ``AUTO``."""
    if resume is None:
        choice, few = choose(context, writer_name)
        writer = _writer(context, choice.writer)
        run = begin_run(context, choice.writer, writer, few)
    else:
        run = context.ledger.read(resume)
        if writer_name not in (AUTO, run.writer):
            raise InvalidConfiguration(f"run {resume} was begun with writer {run.writer}; resume it with that one")
        choice = WriterChoice(run.writer, f"run {run.run_id} was begun with it")
        if choice.writer == COPY and not context.are_few(run.rows):
            require_packages(context.spark, context.reporter.executors)
        writer = _writer(context, choice.writer)
        run = resume_run(context, run)
    if not run.finished:
        run = _finish_run(context, writer, run)
    return _report(context, run, choice)


def choose(context: LoadContext, writer_name: str) -> tuple[WriterChoice, Survey | None]:
    """Return the writer of a new load; and the survey, if the events are few.

    Raises:
        SparkSetupError: the writer is jdbc, and Spark lacks the JDBC driver; or writer copy was asked for, and the
            executors lack its packages.
    """
    choice = WriterChoice(writer_name, "asked for")
    few = _survey_few(context) if writer_name != JDBC and context.options.max_rejected is None else None
    if writer_name == AUTO:
        asked = context.spark, context.options.database, context.parallelism, context.reporter.executors
        choice = FEW if few is not None else choose_writer(*asked)
    elif writer_name == COPY and few is None:
        require_packages(context.spark, context.reporter.executors)
    if choice.writer == JDBC:
        require_jdbc_driver(context.spark)
    return choice, few


def bounds_of(context: LoadContext, writer_name: str, found: Survey) -> tuple[str, ...]:
    rows = ROWS_OF_A_CHUNK if writer_name == COPY else 2 * ROWS_OF_A_CHUNK  # jdbc has a table for each chunk
    chunks = max(1, math.ceil(found.rows / min(context.options.chunk_rows, rows)))
    # Give every task that Spark runs at once equally many chunks, unless they would be tiny.
    even = math.ceil(chunks / context.parallelism) * context.parallelism
    writer = CopyWriter if writer_name == COPY else JdbcWriter
    return chunk_bounds(found.sample, min(even, max(chunks, found.rows // MIN_CHUNK_ROWS), writer.max_chunks))


def _writer(context: LoadContext, name: str) -> Writer:
    return CopyWriter(context) if name == COPY else JdbcWriter(context)


def _survey_few(context: LoadContext) -> Survey | None:
    if not context.seem_few:
        return None
    with context.stage("survey", None):
        return survey_few(context.events)


def begin_run(context: LoadContext, writer_name: str, writer: Writer, found: Survey | None) -> Run:
    """Survey the source unless ``found`` is its survey, cut it into chunks, and record a new run."""
    if found is None:
        with context.stage("survey", None):
            counted = writer.survey_counts_rejected or context.options.max_rejected is not None
            found = survey(context.events, count_rejected=counted)
            refuse_too_many(found.rejected or 0, context.options.most_rejected(found.rows), found.remarks)
            if not writer.survey_counts_rejected:  # its chunks see these rows again, and count them
                found = replace(found, rejected=None)
    context.sample = found.sample
    return context.ledger.begin(
        subscriber_id=context.options.subscriber_id,
        source=context.source,
        digest=context.digest,
        writer=writer_name,
        bounds=bounds_of(context, writer_name, found),
        found=found,
    )


def _finish_run(context: LoadContext, writer: Writer, run: Run) -> Run:
    """Merge the rest of a run, and return the finished run."""
    try:
        with heartbeat(context.ledger, run.run_id):
            run = _write_chunks(context, writer, run)
            return _complete(context, writer, run)
    except BulkLoadFailed as error:
        with suppress(SQLAlchemyError):  # the load may have failed because the database cannot be reached
            context.ledger.record_failure(run.run_id, str(error))
            run = context.ledger.read(run.run_id)
        if not run.finished:
            raise
        # Another process has also resumed the run, finished it, and removed what this process was working on.
        _log.info("bulk load %s has been finished by another process", run.run_id)
        return run
    except SQLAlchemyError as error:
        if not is_outage(error):
            raise
        why = f"the database cannot be reached: {' '.join(str(getattr(error, 'orig', None) or error).split())}"
        raise BulkLoadFailed(run.run_id, why, done=context.merged, chunks=run.chunks) from error


def _write_chunks(context: LoadContext, writer: Writer, run: Run) -> Run:
    """Try until every chunk is merged or one cannot be; return the run at its last attempt.

    Executors may die any number of times, as long as chunks are merged in between. Spark counts deaths per task, and a
    task has many chunks.
    """
    attempt = 0
    while True:
        attempt += 1
        merged = len(context.merged_chunks(run))
        try:
            failed = writer.write(run) if run.rows else []
        except ExecutorsLost as error:
            gets_on = error.done > merged
            # Writer jdbc uses executors only for staging, which starts over and merges nothing.
            if not gets_on and (run.writer != JDBC or attempt == LOAD_ATTEMPTS):
                raise
            _log.warning(
                "bulk load %s: executors were lost; %d of %d chunks are merged, going on with the others: %s",
                run.run_id,
                error.done,
                error.chunks,
                error.why,
            )
            attempt = 0 if gets_on else attempt
            run = context.ledger.begin_attempt(run.run_id)
            continue
        except StagingLost as error:
            _log.warning("bulk load %s: %s; staging the events again", run.run_id, error)
            context.ledger.set_staging_table(run.run_id, None)
            failed = [FailedChunk(0, str(error), transient=True)]
        context.merged_chunks(run)
        if not failed:
            return run
        lasting = [one for one in failed if not one.transient]
        if lasting or attempt == LOAD_ATTEMPTS:
            first = (lasting or failed)[0]
            raise context.failure(run, f"chunk {first.chunk} of run {run.run_id}: {first.error}")
        _log.warning("bulk load %s: %d chunks failed: %s; trying again", run.run_id, len(failed), failed[0].error)
        time.sleep(LOAD_BACKOFF.seconds(attempt))
        run = context.ledger.begin_attempt(run.run_id)


def _complete(context: LoadContext, writer: Writer, run: Run) -> Run:
    """Finish the run, after checking that the chunks have counted every row of the source."""
    run = context.ledger.read(run.run_id)
    rows = writer.row_counts(run, context.ledger.totals(run.run_id))
    if rows.found != rows.expected:  # we cannot know which rows were left out
        raise context.failure(
            run,
            f"{rows.expected:,} events were counted, and {rows.found:,} loaded; the source must not change meanwhile: "
            "begin a new run (what has been applied is not applied again)",
            resumable=False,
        )
    remarks = writer.remarks(run)
    try:
        refuse_too_many(rows.rejected, context.options.most_rejected(run.rows), remarks)
    except TooManyRejected as error:
        raise context.failure(run, str(error)) from None
    if rows.rejected and (table := context.rejects_table(run)) is not None:
        _write_rejects(context, run, table, rows.rejected)
    context.ledger.finish(run.run_id, rejected=rows.rejected, remarks=remarks)
    writer.clean_up(run)
    if context.rejects is not None:
        context.staging.drop(run.run_id)
    return context.ledger.read(run.run_id)


def _write_rejects(context: LoadContext, run: Run, table: RejectsTable, rejected: int) -> None:
    """Write a run's rejected rows to the caller's folder, unless the caller chose a table."""
    folder = str(context.options.rejected_to)
    if folder.startswith(TABLE):
        return
    with context.stage("rejected rows", run):
        written = write_rejects(context.spark, context.engine, table, run.run_id, folder)
    if written < rejected:  # an earlier attempt was not asked to keep them, or its table was dropped as abandoned
        _log.warning("bulk load %s: %d of %d rejected rows were not kept", run.run_id, rejected - written, rejected)


def _report(context: LoadContext, run: Run, choice: WriterChoice) -> BulkLoadReport:
    totals = context.ledger.totals(run.run_id)
    rejected = run.rejected or 0
    return BulkLoadReport(
        run_id=run.run_id,
        subscriber_id=run.subscriber_id,
        source=run.source,
        writer=run.writer,
        writer_reason=choice.reason,
        attempts=run.attempt,
        chunks=run.chunks,
        read=run.rows,
        rejected=rejected,
        rejected_sample=run.remarks.sample,
        duplicate_in_source=run.rows - rejected - totals.already_processed - totals.applied - totals.expired,
        already_processed=totals.already_processed - totals.parked,
        applied=totals.applied,
        seconds=dict(context.seconds),
        parked=totals.parked,
        expired=totals.expired,
        rejected_causes=run.remarks.causes,
        differing=run.remarks.differing,
        differing_sample=run.remarks.differing_sample,
        rejected_to=context.options.rejected_to,
    )


_log = logging.getLogger("txbox.spark")


def resume_run(context: LoadContext, run: Run) -> Run:
    """Check that a run's events are the same, and begin another attempt unless the run is finished.

    With the same source and the same ids, the chunk bounds in the ledger are still right.

    1. A chunk that has a row in ``bulk_load_chunk`` is merged, because the row commits with the chunk's effects. The
       writers skip it (``LoadContext.merged_chunks``), and do not even read it.
    2. A chunk without a row is merged from its beginning, because nothing of it is committed.
       ``chunk_merger.begin_chunk`` claims it: of two attempts at one chunk, one merges it, and the other finds it done.

    The same holds for the next attempt of the same call, and for a task that Spark runs twice.

    Raises:
        InvalidConfiguration: the subscriber, the source or the ids differ; or, with writer jdbc, the number of rows
            that cannot be loaded.
        SparkSetupError: the events are the same, but Spark lacks the JDBC driver that the run's writer needs.
    """
    if run.subscriber_id != context.options.subscriber_id:
        raise InvalidConfiguration(
            f"run {run.run_id} is of subscriber {run.subscriber_id}, not {context.options.subscriber_id}"
        )
    if run.digest != context.digest:
        raise InvalidConfiguration(
            f"run {run.run_id} has begun to load {run.source}, and this is not the same (other files, changed files, "
            "or another message id); begin a new run: what has been applied is not applied again"
        )
    # Compare the ids even if the run is finished or the source has the same name. Otherwise other events would be
    # reported as loaded.
    with context.stage("survey", run):
        rows, content = content_digest(context.events)
    if content != run.content:
        raise InvalidConfiguration(
            f"run {run.run_id} has begun to load {run.rows:,} rows of {run.source}, and these {rows:,} have other "
            "message ids; resume it with the same events, or begin a new run: what has been applied is not applied "
            "again"
        )
    if run.writer == JDBC:
        require_jdbc_driver(context.spark)
        if not run.finished:
            _refuse_other_rejects(context, run)
    return run if run.finished else context.ledger.begin_attempt(run.run_id)


def _refuse_other_rejects(context: LoadContext, run: Run) -> None:
    """Raise if the number of rejected rows has changed, because of other fields or types.

    Chunks of a staging table have no rejected rows, so the run's count must still be right.
    """
    with context.stage("survey", run):
        rejected = count_rejected_rows(context.events)
    if rejected != (run.rejected or 0):
        raise InvalidConfiguration(
            f"run {run.run_id} has begun without {run.rejected or 0:,} rows that cannot be loaded, and now "
            f"{rejected:,} cannot; resume it with the same fields and types, or begin a new run: what has been applied "
            "is not applied again"
        )
