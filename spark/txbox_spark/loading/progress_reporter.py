"""Reports how far a load has come, from its own thread: by Spark's tasks, or by the chunks in the ledger."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError

from txbox_spark.loading.ledger import LoadLedger, Run
from txbox_spark.report import JobProgress, MergePace, OnProgress
from txbox_spark.runtime.executor_watcher import EXECUTOR_SECONDS, ExecutorWatcher
from txbox_spark.runtime.lazy_imports import SparkSession
from txbox_spark.runtime.periodic import every

POLL_SECONDS = 0.5

PACE_SECONDS = 60.0
"""How far back the pace looks at least."""

FIRST_SECONDS = 2.0
"""How long a merge must last before its pace is meaningful."""


@dataclass(frozen=True, slots=True)
class ProgressMark:
    """How many chunks and rows were merged at a moment; ``at`` is in seconds of a monotonic clock."""

    at: float
    chunks: int
    rows: int


def merge_pace(seen: Sequence[ProgressMark], now: float, total_rows: int) -> MergePace | None:
    """Return how fast a merge is; None if that is not known yet.

    It looks back ``PACE_SECONDS``, or further if nothing was merged since. So a merge whose chunks take minutes has a
    pace, and the pace of a merge that stalls goes down.

    Args:
        seen: the state when the attempt began, then each change.
        now: seconds of the same clock.
        total_rows: how many rows the run merges in total.
    """
    last = seen[-1]
    before = [one for one in seen if one.rows < last.rows]
    if not before or now - seen[0].at < FIRST_SECONDS:
        return None
    old = next((one for one in reversed(before) if one.at <= now - PACE_SECONDS), before[0])
    seconds = now - old.at
    rows_per_second = (last.rows - old.rows) / seconds
    return MergePace(
        rows_per_second,
        (last.chunks - old.chunks) * 60 / seconds,
        max(0, total_rows - last.rows) / rows_per_second,
    )


class ProgressReporter:
    """Reports the stages of one load, and ends them if no executor comes."""

    def __init__(
        self, spark: SparkSession, on_progress: OnProgress | None, executor_seconds: float = EXECUTOR_SECONDS
    ) -> None:
        self._spark = spark
        self.executors = ExecutorWatcher(spark, executor_seconds)
        self._on_progress = on_progress

    @contextmanager
    def spark_stage(self, name: str, run_id: str | None, group: str) -> Iterator[None]:
        """Report a stage by the tasks of a Spark job group.

        Raises:
            ExecutorsMissing: no executor came in time.
        """
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

        with self._reporting(poll), self.executors.awaiting(group):
            yield

    @contextmanager
    def merge_stage(self, ledger: LoadLedger, run: Run) -> Iterator[None]:
        """Report the merge by the chunks in the ledger."""

        if self._on_progress is None:
            yield
            return
        # If the survey has counted the rejected rows, no chunk has them; otherwise the chunks count them.
        total_rows = run.rows - (run.rejected or 0)
        seen: list[ProgressMark] = []

        def poll() -> JobProgress:
            totals, now = ledger.totals(run.run_id), time.monotonic()
            if not seen or totals.chunks > seen[-1].chunks:
                seen.append(ProgressMark(now, totals.chunks, totals.read))
            # Without executors, the time left is unknown.
            pace = None if self.executors.missing else merge_pace(seen, now, total_rows)
            return JobProgress(
                run.run_id, "merge", totals.chunks, run.chunks, totals.applied, totals.read, total_rows, pace
            )

        poll()  # mark what earlier attempts have merged, which says nothing about this attempt's pace
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
            except (DBAPIError, Py4JError, OSError) as error:  # then the load itself fails, too
                _log.debug("no progress: %s", getattr(error, "orig", error))

        with every(POLL_SECONDS, report, name="txbox-bulk-load-progress", at_end=True):
            yield


_log = logging.getLogger("txbox.spark")
