"""The port through which events reach Postgres, and the choice between its two writers, copy and jdbc."""

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
    """The staging table is no longer complete: Postgres recovered from a crash, or the table was dropped."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The row counts of a run whose chunks are all merged."""

    expected: int  # rows that the survey counted, and that chunks can count again
    found: int  # the same rows, counted by the chunks
    rejected: int  # rows that cannot be loaded


class Writer(Protocol):
    """Writes and merges the chunks of a run."""

    max_chunks: ClassVar[int]  # how many chunks a run may have
    survey_counts_rejected: ClassVar[bool]  # whether the survey must count rejected rows, because no chunk has them

    def write(self, run: Run) -> list[FailedChunk]:
        """Merge every chunk that is not merged yet; return those that failed.

        Raises:
            BulkLoadFailed: no other attempt would help.
            StagingLost: the next attempt must begin with a new staging table.
        """

    def row_counts(self, run: Run, totals: Totals) -> RowCounts:
        """Return the row counts of a run whose chunks are all merged."""

    def remarks(self, run: Run) -> Remarks:
        """Return the remarks of such a run."""

    def clean_up(self, run: Run) -> None:
        """Remove what a finished run left in the database."""


@dataclass(frozen=True, slots=True)
class WriterChoice:
    writer: str
    reason: str


FEW = WriterChoice(COPY, "few events are merged without the executors")
"""The choice when ``survey_few`` finds few events; it says nothing about the executors."""


def choose_writer(spark: SparkSession, url: URL, connections: int, executors: ExecutorWatcher) -> WriterChoice:
    """Return copy if the executors have its packages and reach Postgres, otherwise jdbc.

    ``connections`` is how many connections the executors may open at once to find out.

    Raises:
        ExecutorsMissing: no executor came in time.
    """
    trouble = _trouble(spark, url.render_as_string(hide_password=False), connections, executors)
    return WriterChoice(COPY, "the executors have psycopg and reach Postgres") if trouble is None else trouble.choice


def require_packages(spark: SparkSession, executors: ExecutorWatcher) -> None:
    """Raise, before the first task of writer copy, unless the executors can import what it needs.

    Without this check, each task would fail as often as Spark tries it, and the error would be a page of Java. It does
    not check whether they reach Postgres, because an outage may be over when the tasks begin.

    Raises:
        SparkSetupError: a package is missing; the message says which one, and how to provide it.
        ExecutorsMissing: no executor came in time.
    """
    context = spark.sparkContext
    if is_local(context):  # tasks run in this process's Python, unless configured otherwise
        return
    asked = f"{context.applicationId} {context.pythonExec}"
    if asked in _have_packages:  # a stream calls this for each batch
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
    """Return what is wrong with the executors, if anything.

    As many tasks as run at once look for the packages, and the first ``connections`` of them connect to ``address``.
    """

    # Nested, so that it is pickled by value: an executor without txbox could not import it.
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
        except Exception as error:  # noqa: BLE001 - whatever the cause, this executor cannot connect
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
"""Applications, each with the Python of its executors, that were found to have the packages."""

_OURS = ("txbox", "txbox_spark")
_OTHER_PYTHON = (
    "give the executors a Python that has txbox[spark]: --archives environment.tar.gz#environment and "
    "spark.pyspark.python=./environment/bin/python"
)
_SHIP_TXBOX = "send them the wheel, named .zip, for Spark ignores a .whl: --py-files txbox.zip"
