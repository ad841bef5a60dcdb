"""One Spark for all tests that need one in their own process: a JVM takes seconds to start. A plugin of pytest."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.spark.short_life import SHORT_LIFE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# pyspark may leave it to the garbage collector to close a socket that it has read rows from: seen with 4.0.
UNCLOSED = r"ignore:unclosed <socket\.socket .*127\.0\.0\.1:ResourceWarning"

PYTHON_OF_WORKERS = Path(__file__).with_name("workers_python")
"""Where a ``sitecustomize.py`` is that spares workers their imports."""

OLDEST = "4.0."
"""The versions of Spark that keep their defaults here, see ``SHORT_QUERIES``."""

SHORT_QUERIES = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Workers of the two kinds of tasks are the same then, and used for both.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}
"""Settings for queries of a few rows: Spark would compile Java for each of them, and plan each in several stages.

With them Spark interprets expressions that it compiles for people. It has its defaults in `make test-oldest`, which
runs most of these tests, and in each process of a driver that a test, a page or an example starts.
"""


@pytest.fixture(scope="session")
def spark(note_server: Callable[[str], None]) -> Iterator[SparkSession]:
    """A session with two threads and the JDBC driver on board."""
    import pyspark

    from txbox_spark import spark_session

    settings = {"spark.sql.shuffle.partitions": "2"}
    with pytest.MonkeyPatch.context() as patch:
        if not metadata.version("pyspark").startswith(OLDEST):
            settings |= SHORT_QUERIES
            patch.setenv("PYTHONPATH", str(PYTHON_OF_WORKERS), prepend=os.pathsep)  # the JVM keeps it
        session = spark_session("txbox-tests", master="local[2]", settings=settings)
    note_server(f"Spark used: {session.version} (pyspark {pyspark.__version__})")
    yield session
    session.stop()


def pytest_configure(config: pytest.Config) -> None:
    """Have every Spark compile for a short life, and find the Java of txbox[embedded] on a machine without one.

    A JVM that is killed leaves its temporary files, so these are in a folder that is removed at the end, with the
    warehouse that Spark would make here.
    """
    if "SPARK_SUBMIT_OPTS" not in os.environ:  # in a process of pytest-xdist it is there
        folder = Path(tempfile.mkdtemp(prefix="txbox-spark-"))
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))
        places = f"-Djava.io.tmpdir={folder} -Dspark.sql.warehouse.dir={folder / 'warehouse'}"
        os.environ["SPARK_SUBMIT_OPTS"] = f"{SHORT_LIFE} {places}"
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        from txbox_spark.runtime.java import java_environment

        os.environ.update({name: value for name, value in java_environment().items() if value is not None})


def pytest_collection_finish() -> None:
    """Keep the form of what pytest captures: a logger of pyspark gives each handler that it gets pyspark's own."""
    if "pyspark.logger" in sys.modules:
        from pyspark.logger import PySparkLogger

        add = PySparkLogger.addHandler

        def add_as_it_is(logger: PySparkLogger, handler: logging.Handler) -> None:
            form = handler.formatter
            add(logger, handler)
            if form is not None:
                handler.setFormatter(form)

        PySparkLogger.addHandler = add_as_it_is  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pass over pyspark's own leaks, in the tests that use it alone."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings(UNCLOSED))
