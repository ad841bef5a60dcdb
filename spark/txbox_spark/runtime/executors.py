"""Which writer the executors can serve."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import URL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["COPY", "JDBC", "WriterChoice", "choose_writer"]

COPY = "copy"
JDBC = "jdbc"

CONNECT_SECONDS = 5
"""How long an executor waits for Postgres to answer."""


@dataclass(frozen=True, slots=True)
class WriterChoice:
    """A writer, and why that one."""

    writer: str
    reason: str


def choose_writer(spark: "SparkSession", url: URL) -> WriterChoice:
    """Choose copy where every executor asked has what it takes and reaches Postgres, otherwise jdbc.

    Args:
        spark: the session.
        url: the database.
    """
    address = url.render_as_string(hide_password=False)

    # Nested, so that it is sent whole: by its name alone, an executor without txbox could not even say so.
    def look(_: int) -> tuple[str, str | None]:
        import socket

        host = socket.gethostname()
        try:
            import pyarrow  # noqa: F401
            import sqlalchemy

            import txbox.postgres.engines
            import txbox_spark.loading.copy_writer  # noqa: F401

            arguments = {"connect_timeout": seconds}
            engine = txbox.postgres.engines.open_engine(
                address, poolclass=sqlalchemy.pool.NullPool, connect_args=arguments
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
