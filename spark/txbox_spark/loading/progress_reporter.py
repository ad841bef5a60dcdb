"""Reports how far a load is, from a thread of its own: by Spark's tasks, or by the chunks in the ledger."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError

from txbox_spark.loading.ledger import LoadLedger, Run
from txbox_spark.report import JobProgress, OnProgress
from txbox_spark.runtime.lazy_imports import SparkSession
from txbox_spark.runtime.periodic import every

POLL_SECONDS = 0.5
"""How often ``on_progress`` is called."""


class ProgressReporter:
    """Reports the stages of one load."""

    def __init__(self, spark: SparkSession, on_progress: OnProgress | None) -> None:
        self._spark = spark
        self._on_progress = on_progress

    @contextmanager
    def spark_stage(self, name: str, run_id: str | None, group: str) -> Iterator[None]:
        """Report a stage by the tasks of a job group of Spark."""
        tracker = self._spark.sparkContext.statusTracker()

        def poll() -> JobProgress:
            stages = [
                stage
                for job in tracker.getJobIdsForGroup(group)
                if (info := tracker.getJobInfo(job)) is not None
                for number in info.stageIds
                if (stage := tracker.getStageInfo(number)) is not None
            ]
            done = sum(stage.numCompletedTasks for stage in stages)
            return JobProgress(run_id, name, done, sum(stage.numTasks for stage in stages))

        with self._reporting(poll):
            yield

    @contextmanager
    def merge_stage(self, ledger: LoadLedger, run: Run) -> Iterator[None]:
        """Report the merge by the chunks in the ledger."""

        def poll() -> JobProgress:
            totals = ledger.totals(run.run_id)
            return JobProgress(run.run_id, "merge", totals.chunks, run.chunks, totals.applied)

        with self._reporting(poll):
            yield

    @contextmanager
    def _reporting(self, poll: Callable[[], JobProgress]) -> Iterator[None]:
        from py4j.protocol import Py4JError

        on_progress = self._on_progress
        if on_progress is None:
            yield
            return

        def report() -> None:
            try:
                on_progress(poll())
            except (DBAPIError, Py4JError, OSError) as error:  # the load itself fails, too
                _log.debug("no progress: %s", getattr(error, "orig", error))

        with every(POLL_SECONDS, report, name="txbox-bulk-load-progress", at_end=True):
            yield


_log = logging.getLogger("txbox.spark")
