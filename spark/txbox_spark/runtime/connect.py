"""Spark Connect: DataFrames whose Spark is in another process, without a JVM to talk to."""

from txbox import InvalidConfiguration
from txbox_spark.runtime.lazy_imports import DataFrame


def refuse_connect(frame: DataFrame, of: str, instead: str) -> None:
    """Raise ``InvalidConfiguration`` if a DataFrame is one of Spark Connect.

    Args:
        frame: the DataFrame.
        of: the function that was given it.
        instead: what does the same over Spark Connect.
    """
    if type(frame).__module__.startswith("pyspark.sql.connect."):
        raise InvalidConfiguration(
            f"{of}: the DataFrame is of Spark Connect, and {of} needs a Spark in this process; over Spark Connect, "
            f"{instead}"
        )
