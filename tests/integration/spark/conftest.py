"""One Spark for all tests of Spark: a JVM takes seconds to start, and a process has room for one."""

from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from txbox_spark import spark_session

HERE = Path(__file__).parent
# pyspark may leave it to the garbage collector to close a socket that it has read rows from: seen with 4.0.
UNCLOSED = r"ignore:unclosed <socket\.socket .*127\.0\.0\.1:ResourceWarning"

_used: list[str] = []


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with two threads and the JDBC driver on board."""
    session = spark_session("txbox-tests", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})
    _used.append(f"Spark used: {session.version} (pyspark {pyspark.__version__})")
    yield session
    session.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pass over pyspark's own leaks, in the tests of this folder alone."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings(UNCLOSED))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say on the last lines which Spark was used."""
    for line in _used:
        terminalreporter.write_line(line)
