"""Spark Connect: DataFrames whose Spark is in another process, without a JVM to talk to."""

from txbox import InvalidConfiguration
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession


def refuse_connect(frame: DataFrame | SparkSession, of: str, instead: str) -> None:
    """Raise ``InvalidConfiguration`` if a DataFrame, or a session, is one of Spark Connect.

    Args:
        frame: the DataFrame, or the session.
        of: the function that was given it.
        instead: what does the same over Spark Connect.
    """
    if type(frame).__module__.startswith("pyspark.sql.connect."):
        raise InvalidConfiguration(
            f"{of}: this is Spark Connect, and {of} needs a Spark in this process; over Spark Connect, {instead}"
        )
