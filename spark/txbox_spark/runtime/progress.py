"""Telling how far a load is: asked of Spark and of the ledger, from a thread of its own."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from txbox_spark.loading.ledger import Ledger, Run
from txbox_spark.report import OnProgress, Progress
from txbox_spark.runtime.periodic import every

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["LOOK_SECONDS", "Reporter"]

LOOK_SECONDS = 0.5
"""How often the caller is told."""


class Reporter:
    """Reports the stages of one load."""

    def __init__(self, spark: "SparkSession", on_progress: OnProgress | None) -> None:
        self._spark = spark
        self._on_progress = on_progress

    @contextmanager
    def spark_stage(self, name: str, run_id: str | None, group: str) -> Iterator[None]:
        """Report a stage by the tasks of a job group of Spark."""
        tracker = self._spark.sparkContext.statusTracker()

        def look() -> Progress:
            stages = [
                stage
                for job in tracker.getJobIdsForGroup(group)
                if (info := tracker.getJobInfo(job)) is not None
                for number in info.stageIds
                if (stage := tracker.getStageInfo(number)) is not None
            ]
            done = sum(stage.numCompletedTasks for stage in stages)
            return Progress(run_id, name, done, sum(stage.numTasks for stage in stages))

        with self._reporting(look):
            yield

    @contextmanager
    def merge_stage(self, ledger: Ledger, run: Run) -> Iterator[None]:
        """Report the merge by the chunks in the ledger."""

        def look() -> Progress:
            totals = ledger.totals(run.run_id)
            return Progress(run.run_id, "merge", totals.chunks, run.chunks, totals.applied)

        with self._reporting(look):
            yield

    @contextmanager
    def _reporting(self, look: Callable[[], Progress]) -> Iterator[None]:
        from py4j.protocol import Py4JError

        tell = self._on_progress
        if tell is None:
            yield
            return

        def report() -> None:
            try:
                tell(look())
            except (DBAPIError, Py4JError, OSError) as error:  # the load itself will notice what is wrong
                _log.debug("no progress: %s", getattr(error, "orig", error))

        with every(LOOK_SECONDS, report, name="txbox-bulk-load-progress", at_end=True):
            yield


_log = logging.getLogger("txbox")
