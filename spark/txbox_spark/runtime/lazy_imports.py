"""Imports pyspark and pyarrow at their first use, so that the package can be imported without them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from txbox.extras import needs

__all__ = [
    "Column",
    "DataFrame",
    "DataType",
    "SparkContext",
    "SparkSession",
    "StructType",
    "compute",
    "csv",
    "pyarrow",
    "spark_errors",
    "sql",
    "types",
]


def spark_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the exceptions that pyspark raises for Spark and its JVM, and ``others``, for ``except``."""
    from pyspark.errors import PySparkException

    try:
        from py4j.protocol import Py4JError
    except ModuleNotFoundError:  # pyspark-client has no JVM of its own
        return PySparkException, *others
    return PySparkException, Py4JError, *others


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[type["_Module"], tuple[str]]:
        # Pickle by name, because what cloudpickle sends to executors may hold a module.
        return _Module, (self._name,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look these up before the object has a name
            raise AttributeError(name)
        with needs("spark"):
            module = import_module(self._name)
        value = getattr(module, name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import pyarrow
    from pyarrow import compute, csv
    from pyspark import SparkContext
    from pyspark.sql import Column, DataFrame, SparkSession, types
    from pyspark.sql import functions as sql
    from pyspark.sql.types import DataType, StructType
else:
    pyarrow, compute, csv = _Module("pyarrow"), _Module("pyarrow.compute"), _Module("pyarrow.csv")
    sql, types = _Module("pyspark.sql.functions"), _Module("pyspark.sql.types")
    Column = DataFrame = DataType = SparkContext = SparkSession = StructType = Any  # only for annotations
