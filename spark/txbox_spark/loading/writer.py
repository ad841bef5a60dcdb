"""How a load's events reach Postgres: the port that ``copy_writer`` and ``jdbc_writer`` implement, and the choice."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from sqlalchemy import URL

from txbox import TxboxError
from txbox_spark.loading.ledger import Run, Totals
from txbox_spark.merging.failed_chunk import FailedChunk
from txbox_spark.options import COPY, JDBC
from txbox_spark.rejects.remarks import Remarks
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


def choose_writer(spark: SparkSession, url: URL) -> WriterChoice:
    """Choose copy where the executors have the packages and reach Postgres, otherwise jdbc."""
    address = url.render_as_string(hide_password=False)

    # Nested, so that it is sent whole: an executor without txbox could not import it.
    def look(_: int) -> tuple[str, str | None]:
        import socket

        host = socket.gethostname()
        try:
            import pyarrow  # noqa: F401
            import sqlalchemy

            import txbox.postgres.engines
            import txbox_spark.loading.copy_writer  # noqa: F401

            engine = txbox.postgres.engines.open_engine(
                address, poolclass=sqlalchemy.pool.NullPool, connect_args={"connect_timeout": seconds}
            )
            with engine.connect():
                return host, None
        except ImportError as error:
            return host, f"has no {error.name}"
        except Exception as error:  # noqa: BLE001 - whatever it is, this executor cannot
            return host, f"does not reach Postgres: {' '.join(str(getattr(error, 'orig', error)).split())}"

    seconds = CONNECT_SECONDS
    context = spark.sparkContext
    tasks = max(1, context.defaultParallelism)
    try:
        answers = context.parallelize(range(tasks), tasks).map(look).collect()
    except Exception as error:  # noqa: BLE001 - executors may have no Python at all
        return WriterChoice(JDBC, f"the executors run no Python: {str(error).splitlines()[0]}")
    for host, trouble in answers:
        if trouble is not None:
            return WriterChoice(JDBC, f"executor {host} {trouble}")
    return WriterChoice(COPY, "the executors have psycopg and reach Postgres")
