"""One bulk load at work: from the survey to the report, with every try in between."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sqlalchemy import URL, Engine
from sqlalchemy.exc import SQLAlchemyError

from txbox import InvalidConfiguration, TxboxError
from txbox.backoff import Backoff
from txbox.postgres.sqlstates import is_outage
from txbox_spark.loading.copy_writer import CopyTask, copy_chunks, lay_out
from txbox_spark.loading.effects import Apply
from txbox_spark.loading.failed_chunk import FailedChunk
from txbox_spark.loading.jdbc_writer import MOST_PARTITIONS, StagingLost, drop_staging, holds, merge_staged, stage
from txbox_spark.loading.ledger import Ledger, Run, heartbeat
from txbox_spark.loading.merge import Limits, MergePlan
from txbox_spark.loading.refused_message import MessageRefused
from txbox_spark.loading.repeated_chunks import likely_known
from txbox_spark.loading.statements import Statements, statements
from txbox_spark.reading.events import Events, chunk_bounds, content, survey
from txbox_spark.report import BulkLoadReport
from txbox_spark.runtime.executors import COPY, Choice, choose_writer
from txbox_spark.runtime.explanations import said_by_spark
from txbox_spark.runtime.jdbc import is_about_data
from txbox_spark.runtime.jobs import job_group, small_plans
from txbox_spark.runtime.jvm import MORE_MEMORY, cause_of_death
from txbox_spark.runtime.progress import Reporter
from txbox_spark.runtime.session import require_jdbc_driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["AUTO", "LOAD_ATTEMPTS", "BulkLoadFailed", "Load"]

AUTO = "auto"

FEWEST_CHUNK_ROWS = 5_000
"""A smaller chunk would cost more as a transaction than it saves by being merged beside another one."""

MOST_CHUNKS = 4_096
"""The bounds of the chunks are part of Spark's plan."""

LOAD_ATTEMPTS = 5
"""How often chunks are tried that fail for a passing reason, such as a lost connection."""

LOAD_BACKOFF = Backoff(first_seconds=2.0, longest_seconds=30.0)
"""The pauses between: what was lost may take a moment to come back."""


class BulkLoadFailed(TxboxError):
    """A bulk load has ended before every chunk was merged. What has committed stays; the rest can be resumed.

    Attributes:
        run_id: what to resume.
        why: what has gone wrong.
        done: chunks that are merged.
        chunks: how many there are.
    """

    def __init__(self, run_id: str, why: str, *, done: int, chunks: int, resumable: bool = True) -> None:
        self.run_id = run_id
        self.why = why
        self.done = done
        self.chunks = chunks
        advice = f"; when it is mended, resume run {run_id}" if resumable else ""
        super().__init__(
            f"{why} ({done} of {chunks} chunks are merged, and of the others nothing is committed{advice})"
        )


@dataclass
class Load:
    """One bulk load at work.

    Attributes:
        spark: the session of the events.
        engine: the database, for this process.
        url: the same, for the executors.
        events: the source, understood.
        subscriber_id: who processes them.
        apply: the effect.
        schema: of txbox's tables; None leaves it to the search path.
        prefix: of their names.
        source: what is loaded, in words.
        digest: what another attempt must find again.
        parallelism: how many chunks are merged at once.
        chunk_rows: rows in a chunk, about.
        reporter: tells how far it is.
        limits: how long a chunk may keep others waiting.
        seconds: how long each stage took.
        done: how many chunks were merged when the ledger was last asked.
        likely_known: chunks to be tried with their ids alone first.
    """

    spark: "SparkSession"
    engine: Engine
    url: URL
    events: Events
    subscriber_id: str
    apply: Apply
    schema: str | None
    prefix: str
    source: str
    digest: bytes
    parallelism: int
    chunk_rows: int
    reporter: Reporter
    limits: Limits = field(default_factory=Limits)
    seconds: dict[str, float] = field(default_factory=dict)
    done: int = 0
    likely_known: tuple[int, ...] = ()

    @property
    def sql(self) -> Statements:
        """The statements."""
        return statements(self.schema, self.prefix)

    @property
    def ledger(self) -> Ledger:
        """The ledger."""
        return Ledger(self.engine, self.sql)

    def run(self, writer: str, resume: str | None) -> BulkLoadReport:
        """Load the events, or what is left of them."""
        if resume is None:
            choice = choose_writer(self.spark, self.url) if writer == AUTO else Choice(writer, "asked for")
            self._require_driver(choice.writer)
            run = self._begin(choice.writer)
        else:
            run = self._resume(resume, writer)
            choice = Choice(run.writer, f"run {run.run_id} was begun with it")
            self._require_driver(choice.writer)
        if not run.finished:
            try:
                with heartbeat(self.ledger, run.run_id):
                    run = self._merge(run)
            except BulkLoadFailed as error:
                with suppress(SQLAlchemyError):  # it may be the database that is away
                    self.ledger.give_up(run.run_id, str(error))
                    run = self.ledger.read(run.run_id)
                if not run.finished:
                    raise
                # Someone else has resumed the run, too, has finished it, and has cleared away what this was working on.
                _log.info("bulk load %s has been finished by someone else", run.run_id)
            except SQLAlchemyError as error:
                if not is_outage(error):
                    raise
                why = f"the database cannot be reached: {' '.join(str(getattr(error, 'orig', None) or error).split())}"
                raise BulkLoadFailed(run.run_id, why, done=self.done, chunks=run.chunks) from error
        return self._report(run, choice)

    def _done(self, run: Run) -> tuple[int, ...]:
        """Return the chunks that are merged."""
        done = self.ledger.done(run.run_id)
        self.done = len(done)
        return done

    def _require_driver(self, writer: str) -> None:
        if writer != COPY:
            require_jdbc_driver(self.spark)

    def _begin(self, writer: str) -> Run:
        with self._stage("survey", None):
            found = survey(self.events, judge=writer != COPY)
        chunks = max(1, math.ceil(found.rows / self.chunk_rows))
        # Every task that Spark runs at once gets as many chunks as the others, unless they would be tiny.
        even = math.ceil(chunks / self.parallelism) * self.parallelism
        most = MOST_CHUNKS if writer == COPY else MOST_PARTITIONS
        chunks = min(even, max(chunks, found.rows // FEWEST_CHUNK_ROWS), most)
        bounds = chunk_bounds(found.sample, chunks)
        if writer == COPY:
            self.likely_known = likely_known(self.engine, self.sql, self.subscriber_id, found.sample, bounds)
        return self.ledger.begin(
            subscriber_id=self.subscriber_id,
            source=self.source,
            digest=self.digest,
            writer=writer,
            bounds=bounds,
            found=found,
        )

    def _resume(self, run_id: str, writer: str) -> Run:
        run = self.ledger.read(run_id)
        if run.subscriber_id != self.subscriber_id:
            raise InvalidConfiguration(f"run {run_id} is of subscriber {run.subscriber_id}, not {self.subscriber_id}")
        if run.digest != self.digest:
            raise InvalidConfiguration(
                f"run {run_id} has begun to load {run.source}, and this is not the same (other files, changed files, "
                "or another message id); begin a new run: what has been applied is not applied again"
            )
        if writer not in (AUTO, run.writer):
            raise InvalidConfiguration(f"run {run_id} was begun with writer {run.writer}; resume it with that one")
        # Whatever the source is called, and whether the run is finished or not: other events would be taken for these.
        with self._stage("survey", run):
            rows, ids = content(self.events, judge=run.writer != COPY)
        if ids != run.content:
            raise InvalidConfiguration(
                f"run {run_id} has begun to load {run.rows:,} rows of {run.source}, and these {rows:,} have other "
                "message ids; resume it with the same events, or begin a new run: what has been applied is not applied "
                "again"
            )
        return run if run.finished else self.ledger.take_up(run_id)

    def _merge(self, run: Run) -> Run:
        """Try until every chunk is merged, or one of them cannot be."""
        if not run.rows:
            return self._complete(run)
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            failed = self._try(run)
            done = self._done(run)
            lasting = [one for one in failed if not one.passing]
            if not failed:
                return self._complete(run)
            if lasting or attempt == LOAD_ATTEMPTS:
                first = (lasting or failed)[0]
                why = f"chunk {first.chunk} of run {run.run_id}: {first.error}"
                raise BulkLoadFailed(run.run_id, why, done=len(done), chunks=run.chunks)
            _log.warning("bulk load %s: %d chunks failed: %s; trying again", run.run_id, len(failed), failed[0].error)
            time.sleep(LOAD_BACKOFF.seconds(attempt))
            run = self.ledger.take_up(run.run_id)
        raise AssertionError("the last attempt returns or raises")

    def _try(self, run: Run) -> list[FailedChunk]:
        """Merge the chunks that are not merged yet; return those that failed."""
        if run.writer == COPY:
            return self._copy(run)
        try:
            return self._merge_staged(run)
        except StagingLost as error:
            _log.warning("bulk load %s: %s; staging the events anew", run.run_id, error)
            self.ledger.staged(run.run_id, None)
            return [FailedChunk(0, str(error), passing=True)]

    def _plan(self, run: Run) -> MergePlan:
        columns = self.events.columns
        return MergePlan(
            run.run_id, self.subscriber_id, columns, self.apply, self.schema, self.prefix, limits=self.limits
        )

    def _copy(self, run: Run) -> list[FailedChunk]:
        slots = self.spark.sparkContext.defaultParallelism
        at_once = self.parallelism if self.parallelism < slots else None
        task = CopyTask(self.url.render_as_string(hide_password=False), self._plan(run), run.bounds)
        known, self.likely_known = self.likely_known, ()
        with self._stage("merge", run), self.reporter.merge_stage(self.ledger, run):
            if known:
                ids = lay_out(self.events.judged, run.bounds, set(range(run.chunks)).difference(known), at_once)
                if failed := copy_chunks(ids, replace(task, ids_alone=True)):
                    return failed
            done = self._done(run)
            if len(done) == run.chunks:
                return []
            return copy_chunks(lay_out(self.events.staged, run.bounds, done, at_once), task)

    def _merge_staged(self, run: Run) -> list[FailedChunk]:
        if run.staging_table is not None and not holds(self.engine, self.sql, run, self.events.columns):
            _log.info("bulk load %s: the columns are not those that were staged; staging the events anew", run.run_id)
            run = self.ledger.staged(run.run_id, None)
        if run.staging_table is None:
            try:
                with self._stage("staging", run):
                    table = stage(self.engine, self.url, self.events, run, self.sql, self.prefix, self.parallelism)
            except MessageRefused as error:
                failed = BulkLoadFailed(run.run_id, str(error), done=len(self._done(run)), chunks=run.chunks)
                raise failed from None  # the cause quotes the value
            run = self.ledger.staged(run.run_id, table)
        todo = sorted(set(range(run.chunks)) - set(self._done(run)))
        with self._stage("merge", run), self.reporter.merge_stage(self.ledger, run):
            return merge_staged(self.engine, self._plan(run), run, todo, self.parallelism)

    def _complete(self, run: Run) -> Run:
        """See that every row of the source has had its turn, and write down that the run is finished."""
        run = self.ledger.read(run.run_id)
        totals = self.ledger.totals(run.run_id)
        if run.writer == COPY:
            self._require_rows(run, run.rows, totals.read)
            rejected, sample = totals.rejected, self.ledger.rejected_sample(run.run_id)
        else:
            # A task that was run again has staged its rows again; they count as read twice, and are applied once.
            loadable = run.rows - (run.rejected or 0)
            distinct = totals.already_processed + totals.applied
            self._require_rows(run, loadable, max(distinct, min(loadable, totals.read)))
            rejected, sample = run.rejected or 0, run.rejected_sample
        self.ledger.finish(run.run_id, rejected=rejected, sample=sample)
        if run.writer != COPY:
            drop_staging(self.engine, self.sql, self.prefix, run.run_id)
        return self.ledger.read(run.run_id)

    def _require_rows(self, run: Run, expected: int, found: int) -> None:
        """Fail if the source did not give the rows that were counted: then it is not known what was left out."""
        if found != expected:
            raise BulkLoadFailed(
                run.run_id,
                f"{expected:,} events were counted, and {found:,} loaded; the source must not change meanwhile: begin "
                "a new run (what has been applied is not applied again)",
                done=len(self._done(run)),
                chunks=run.chunks,
                resumable=False,
            )

    def _report(self, run: Run, choice: Choice) -> BulkLoadReport:
        totals = self.ledger.totals(run.run_id)
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
            rejected_sample=run.rejected_sample,
            duplicate_in_source=run.rows - rejected - totals.already_processed - totals.applied,
            already_processed=totals.already_processed - totals.parked,
            applied=totals.applied,
            seconds=dict(self.seconds),
            parked=totals.parked,
        )

    @contextmanager
    def _stage(self, name: str, run: Run | None) -> Iterator[None]:
        """Time a stage, name its jobs in Spark's pages, and cancel them if the caller is interrupted."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        started = time.monotonic()
        try:
            with (
                small_plans(self.spark),
                job_group(self.spark.sparkContext, f"txbox bulk load of {self.source}: {name}") as group,
            ):
                run_id = None if run is None else run.run_id
                with nullcontext() if name == "merge" else self.reporter.spark_stage(name, run_id, group):
                    yield
        except (PySparkException, Py4JError, OSError, EOFError) as error:
            died = cause_of_death()
            if died is None and not isinstance(error, PySparkException | Py4JError):
                raise
            if run is None:
                raise TxboxError(
                    f"the events cannot be read: {_said(error)}" if died is None else f"{died}; then run it again"
                ) from error
            done = len(self._done(run))
            why = f"Spark failed: {_said(error)}" if died is None else died
            quotes_values = died is None and is_about_data(error)
            failed = BulkLoadFailed(run.run_id, why, done=done, chunks=run.chunks)
            raise failed from (None if quotes_values else error)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def _said(error: Exception) -> str:
    """Return what an error of Spark says, without the Java around it."""
    if "java.lang.OutOfMemoryError" in str(error):
        return f"Spark's JVM ran out of memory; {MORE_MEMORY}"
    return said_by_spark(str(error))


_log = logging.getLogger("txbox")
