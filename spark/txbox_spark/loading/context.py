"""What every step of a bulk load needs: the session, the database, the events, the limits."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import Engine

from txbox import SqlEffect, TxboxError
from txbox.effects.sql_script import read_script
from txbox.postgres.transactions import short_transaction
from txbox.tracing import NO_SPAN, NO_TRACING, Span, Tracing, error_type
from txbox_spark.loading.ledger import LoadLedger, Run
from txbox_spark.loading.progress_reporter import ProgressReporter
from txbox_spark.loading.staging_table import StagingTables
from txbox_spark.merging.effect_runner import StatementPlan, explain_statements
from txbox_spark.merging.merge_plan import MergePlan
from txbox_spark.options import JDBC, ValidLoadOptions
from txbox_spark.reading.event_rows import PreparedEvents
from txbox_spark.rejects.rejects_table import RejectsTable
from txbox_spark.runtime.executor_watcher import ExecutorsMissing
from txbox_spark.runtime.explanations import (
    describe_spark_error,
    is_about_lost_executors,
    is_out_of_memory,
    text_of,
)
from txbox_spark.runtime.jdbc import is_about_data
from txbox_spark.runtime.jobs import job_group, small_plans
from txbox_spark.runtime.jvm import MORE_MEMORY, cause_of_death
from txbox_spark.runtime.lazy_imports import SparkSession, spark_errors
from txbox_spark.runtime.retries import retry_outages
from txbox_spark.survey import FEW_ROWS


class BulkLoadFailed(TxboxError):
    """A bulk load ended before every chunk was merged. Merged chunks stay; the rest can be resumed.

    Attributes:
        run_id: the run to resume.
        why: the cause.
        done: how many chunks are merged.
        chunks: how many chunks there are.
        resumable: whether the run can be resumed; if not, begin a new one.
    """

    def __init__(self, run_id: str, why: str, *, done: int, chunks: int, resumable: bool = True) -> None:
        self.run_id = run_id
        self.why = why
        self.done = done
        self.chunks = chunks
        self.resumable = resumable
        advice = f"; when the cause is fixed, resume run {run_id}" if resumable else ""
        super().__init__(
            f"{why} ({done} of {chunks} chunks are merged, and of the others nothing is committed{advice})"
        )


class ExecutorsLost(BulkLoadFailed):
    """Executors of a stage died as often as Spark tolerates. Those that are left may do the rest."""


@dataclass
class LoadContext:
    """What the steps of one bulk load share."""

    spark: SparkSession
    engine: Engine  # for this process
    options: ValidLoadOptions
    events: PreparedEvents
    source: str  # what is loaded, for people
    digest: bytes  # of the source; must be the same when a run is resumed
    parallelism: int  # how many chunks are merged at once
    reporter: ProgressReporter
    tracing: Tracing = NO_TRACING
    span: Span = NO_SPAN  # of the current stage
    seconds: dict[str, float] = field(default_factory=dict)  # how long each stage took
    merged: int = 0  # how many chunks were merged when the ledger was last read
    seem_few: bool = False  # by Spark's estimate of the events; if they are few, this process merges them
    rejects: RejectsTable | None = None  # see ``rejects_table``
    sample: tuple[str, ...] = ()  # ids of a new run, until its first attempt; empty for a resumed one

    def __post_init__(self) -> None:
        names = self.options.schema, self.options.prefix
        self.ledger = LoadLedger(self.engine, *names)
        self.staging = StagingTables(self.engine, *names)
        self.options.check_sent_at(self.events.columns)

    def are_few(self, rows: int) -> bool:
        """Return whether this process merges the events itself, instead of Spark's tasks."""
        return self.seem_few and rows <= FEW_ROWS

    def plan(self, run: Run) -> MergePlan:
        return MergePlan.of(
            self.options,
            run_id=run.run_id,
            columns=self.events.columns,
            apply=self.options.statements,
            most_chunks=max(1, self.options.chunk_rows * run.chunks // max(run.rows, 1)),
            rejects=self.rejects_table(run),
            most_rejected=self._most_rejected(run),
        )

    def rejects_table(self, run: Run) -> RejectsTable | None:
        """Return the table for all rejected rows of a run; None if they are not kept."""
        if self.rejects is None and self.options.rejected_to is not None:
            self.rejects = self.staging.create_rejects(run.run_id)
        return self.rejects

    def _most_rejected(self, run: Run) -> int | None:
        """Return how many rows the chunks of a run may reject; None if any number may."""
        most = self.options.most_rejected(run.rows)
        # With writer jdbc, rows that Spark rejects never reach a chunk. The survey has counted them.
        return None if most is None else most - ((run.rejected or 0) if run.writer == JDBC else 0)

    @retry_outages
    def explain(self) -> tuple[StatementPlan, ...]:
        """Return how Postgres would run the effect's statements; empty for a callable.

        Raises:
            ApplyFailed: Postgres refuses a statement.
            InvalidConfiguration: the statements cannot be parsed.
        """
        apply = self.options.apply
        script = apply.script if isinstance(apply, SqlEffect) else apply
        if not isinstance(script, str):
            return ()
        with short_transaction(self.engine) as connection:
            plans = explain_statements(connection, self.events.columns, read_script(script))
            connection.rollback()
        return plans

    def merged_chunks(self, run: Run) -> tuple[int, ...]:
        """Read the merged chunks from the ledger, and keep their number in ``merged``."""
        chunks = self.ledger.merged_chunks(run.run_id)
        self.merged = len(chunks)
        return chunks

    def failure(self, run: Run, why: str, *, resumable: bool = True) -> BulkLoadFailed:
        done = len(self.merged_chunks(run))
        return BulkLoadFailed(run.run_id, why, done=done, chunks=run.chunks, resumable=resumable)

    @contextmanager
    def stage(self, name: str, run: Run | None) -> Iterator[None]:
        """Time a stage, name its jobs in Spark's web UI, and cancel them if the caller is interrupted.

        Raises:
            BulkLoadFailed: Spark failed, its JVM died, or no executor came in time.
            TxboxError: the same, before a run exists.
        """
        started = time.monotonic()
        loaded = f"of {self.source}" if run is None else f"{run.run_id} of {self.source}"
        span = self.span = self.tracing.internal(f"txbox.bulk_load {name}", {})
        try:
            with (
                span.current(),
                small_plans(self.spark),
                job_group(self.spark.sparkContext, f"txbox bulk load {loaded}: {name}") as group,
            ):
                run_id = None if run is None else run.run_id
                merges = name == "merge"  # whose progress is reported by chunks
                reporter = self.reporter
                with reporter.executors.awaiting(group) if merges else reporter.spark_stage(name, run_id, group):
                    yield
        except ExecutorsMissing as error:
            if run is None:
                raise
            raise self.failure(run, str(error)) from error
        except spark_errors(OSError, EOFError) as error:
            died = cause_of_death()
            if died is None and not isinstance(error, spark_errors()):
                raise
            if run is None:
                why = (
                    f"the events cannot be read: {_described(error)}" if died is None else f"{died}; then run it again"
                )
                raise TxboxError(why) from error
            failed = self.failure(run, f"Spark failed: {_described(error)}" if died is None else died)
            if died is None and is_about_lost_executors(str(error)):
                failed = ExecutorsLost(run.run_id, failed.why, done=failed.done, chunks=failed.chunks)
            # The cause may quote values.
            raise failed from (None if died is None and is_about_data(error) else error)
        finally:
            failed_by = sys.exception()
            span.end(None if failed_by is None else error_type(failed_by))
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def _described(error: Exception) -> str:
    if is_out_of_memory(text := text_of(error)):
        return f"Spark's JVM ran out of memory; {MORE_MEMORY}"
    return describe_spark_error(text)
