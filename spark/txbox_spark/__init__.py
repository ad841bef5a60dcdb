"""Uses the inbox from Spark: bulk loads and streams through it, archives, and comparisons with it.

::

    spark = spark_session()
    events = read_events(spark, ["purchases.parquet"])
    report = bulk_load(
        events, url="postgresql://…", subscriber_id="billing", message_id="event_id",
        apply="UPDATE account SET … FROM fresh_event …",
    )
"""

from txbox.effects import Upsert
from txbox_spark.archive.archive_folder import Archive, read_archive
from txbox_spark.archive.archiver import ArchiveReport, archive
from txbox_spark.bulk_load import bulk_load
from txbox_spark.load_plan import LoadPlan, plan_load
from txbox_spark.loading.context import BulkLoadFailed
from txbox_spark.loading.ledger import RunNotFound
from txbox_spark.merging.effect_runner import ApplyFailed, StatementPlan
from txbox_spark.reading.errors import SourceError
from txbox_spark.reading.sources import EventSource, read_events, source_of
from txbox_spark.reading.tables import read_source
from txbox_spark.reconcile import Reconciliation, reconcile
from txbox_spark.rejects.remarks import RejectedCause, TooManyRejected
from txbox_spark.report import BulkLoadReport, JobProgress
from txbox_spark.runtime.executor_watcher import ExecutorsMissing
from txbox_spark.runtime.java import SparkSetupError, require_jdk
from txbox_spark.runtime.session import JDBC_DRIVER, require_jdbc_driver, spark_session
from txbox_spark.sink import BatchFailed, inbox_sink

__all__ = [
    "JDBC_DRIVER",
    "ApplyFailed",
    "Archive",
    "ArchiveReport",
    "BatchFailed",
    "BulkLoadFailed",
    "BulkLoadReport",
    "EventSource",
    "ExecutorsMissing",
    "JobProgress",
    "LoadPlan",
    "Reconciliation",
    "RejectedCause",
    "RunNotFound",
    "SourceError",
    "SparkSetupError",
    "StatementPlan",
    "TooManyRejected",
    "Upsert",
    "archive",
    "bulk_load",
    "inbox_sink",
    "plan_load",
    "read_archive",
    "read_events",
    "read_source",
    "reconcile",
    "require_jdbc_driver",
    "require_jdk",
    "source_of",
    "spark_session",
]
