"""How a load's events reach Postgres: the port that ``copy_writer`` and ``jdbc_writer`` implement, and the choice."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from sqlalchemy import URL

from txbox import TxboxError
from txbox_spark.loading.ledger import Run, Totals
from txbox_spark.merging.merge_plan import FailedChunk
from txbox_spark.options import COPY, JDBC
from txbox_spark.rejects.remarks import Remarks
from txbox_spark.runtime.executor_watcher import ExecutorsMissing, ExecutorWatcher
from txbox_spark.runtime.explanations import describe_spark_error
from txbox_spark.runtime.java import SparkSetupError
from txbox_spark.runtime.jobs import is_local, job_group
from txbox_spark.runtime.lazy_imports import SparkSession

CONNECT_SECONDS = 5
"""How long an executor waits for Postgres to answer."""


class StagingLost(TxboxError):
    """The staging table is no longer complete: Postgres has recovered from a crash, or the table was dropped."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The rows of a run whose chunks are all merged."""

    expected: int  # rows that the survey has counted, as far as chunks can count them again
    found: int  # the same rows, as the chunks have counted them
    rejected: int  # rows that cannot be loaded


class Writer(Protocol):
    """Writes the chunks of a run that are not merged yet, and merges them."""

    max_chunks: ClassVar[int]  # how many chunks a run may have
    survey_counts_rejected: ClassVar[bool]  # the survey counts the rejected rows, since no chunk has them

    def write(self, run: Run) -> list[FailedChunk]:
        """Merge every chunk that is not merged yet; return those that failed.

        Raises:
            BulkLoadFailed: no other attempt would help.
            StagingLost: the next attempt has to begin with a new staging table.
        """

    def row_counts(self, run: Run, totals: Totals) -> RowCounts:
        """Return the rows of a run whose chunks are all merged."""

    def remarks(self, run: Run) -> Remarks:
        """Return what is remarked of the rows of such a run."""

    def clean_up(self, run: Run) -> None:
        """Remove what a finished run has left in the database."""


@dataclass(frozen=True, slots=True)
class WriterChoice:
    """A writer, and why that one."""

    writer: str
    reason: str


FEW = WriterChoice(COPY, "few events are merged without the executors")
"""The choice for events that ``survey_few`` has found to be few; it says nothing of the executors."""


def choose_writer(spark: SparkSession, url: URL, connections: int, executors: ExecutorWatcher) -> WriterChoice:
    """Choose copy where the executors have the packages and reach Postgres, otherwise jdbc.

    ``connections`` is how many the executors may open for it at once.

    Raises:
        ExecutorsMissing: no executor has come in time.
    """
    trouble = _trouble(spark, url.render_as_string(hide_password=False), connections, executors)
    return WriterChoice(COPY, "the executors have psycopg and reach Postgres") if trouble is None else trouble.choice


def require_packages(spark: SparkSession, executors: ExecutorWatcher) -> None:
    """Check, before the first task of writer copy, that the executors can import what it needs.

    Without it, each task fails as often as Spark tries it, and the error is a page of Java. Whether they reach Postgres
    is not asked: an outage may be over when the tasks begin.

    Raises:
        SparkSetupError: they cannot; the message says what is missing, and how to bring it.
        ExecutorsMissing: no executor has come in time.
    """
    context = spark.sparkContext
    if is_local(context):  # tasks run in the Python that calls this, unless told otherwise
        return
    asked = f"{context.applicationId} {context.pythonExec}"
    if asked in _have_packages:  # a stream asks for each batch
        return
    if (trouble := _trouble(spark, "", 0, executors)) is not None:
        raise SparkSetupError(f"writer copy cannot run: {trouble.choice.reason}; {trouble.remedy}, or take writer jdbc")
    _have_packages.add(asked)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why executors cannot run writer copy."""

    reason: str
    remedy: str

    @property
    def choice(self) -> WriterChoice:
        return WriterChoice(JDBC, self.reason)


def _trouble(spark: SparkSession, address: str, connections: int, executors: ExecutorWatcher) -> _Trouble | None:
    """Ask as many tasks as run at once for the packages, and as many of them as may connect, for a connection."""

    # Nested, so that it is sent whole: an executor without txbox could not import it.
    def look(number: int) -> tuple[str, str | None, str | None]:
        import socket

        host = socket.gethostname()
        try:
            import pyarrow  # noqa: F401
            import sqlalchemy

            import txbox.postgres.engines
            import txbox_spark.loading.copy_writer  # noqa: F401
        except ImportError as error:
            return host, error.name, f"has no {error.name}"
        if number >= connections:
            return host, None, None
        try:
            engine = txbox.postgres.engines.open_engine(
                address, poolclass=sqlalchemy.pool.NullPool, connect_args={"connect_timeout": seconds}
            )
            with engine.connect():
                return host, None, None
        except Exception as error:  # noqa: BLE001 - whatever it is, this executor cannot
            return host, None, f"does not reach Postgres: {' '.join(str(getattr(error, 'orig', error)).split())}"

    seconds = CONNECT_SECONDS
    context = spark.sparkContext
    tasks = max(1, context.defaultParallelism)
    try:
        with job_group(context, "txbox: what the executors have") as group, executors.awaiting(group):
            answers = context.parallelize(range(tasks), tasks).map(look).collect()
    except ExecutorsMissing:
        raise
    except Exception as error:  # noqa: BLE001 - executors may have no Python at all
        return _Trouble(f"the executors run no Python: {describe_spark_error(str(error))}", _OTHER_PYTHON)
    for host, module, trouble in answers:
        if trouble is not None:
            remedy = _SHIP_TXBOX if (module or "").split(".")[0] in _OURS else _OTHER_PYTHON
            return _Trouble(f"executor {host} {trouble}", remedy)
    return None


_have_packages: set[str] = set()
"""Applications, and the Python of their executors, that were found to have the packages."""

_OURS = ("txbox", "txbox_spark")
_OTHER_PYTHON = (
    "give the executors a Python that has txbox[spark]: --archives environment.tar.gz#environment and "
    "spark.pyspark.python=./environment/bin/python"
)
_SHIP_TXBOX = "send them the wheel, named .zip, for Spark ignores a .whl: --py-files txbox.zip"
