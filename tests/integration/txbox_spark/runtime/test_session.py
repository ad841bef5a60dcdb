"""A real Spark reads the inbox over JDBC, starts without a network, and says what is missing."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyspark
import pytest
from pyspark.errors import AnalysisException
from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession

from txbox_spark.runtime.session import CONTEXT_LOGGERS, NICENESS, quiet_pyspark, require_jdbc_driver

BEGIN = "from txbox_spark.runtime.session import require_jdbc_driver, spark_session\n"
STARTS_WITHOUT_A_NETWORK = f"""{BEGIN}
session = spark_session(master="local[1]")
require_jdbc_driver(session)
print(session.conf.get("spark.jars"))
print(session.range(10).count(), flush=True)
"""
FINDS_NO_DRIVER = f"""{BEGIN}
spark_session(master="local[1]")
"""
IS_INTERRUPTED = f"""{BEGIN}
import signal
from pathlib import Path
from pyspark.sql import SparkSession
make = SparkSession.Builder.getOrCreate
def interrupted(builder):
    signal.raise_signal(signal.SIGINT)
    return make(builder)
SparkSession.Builder.getOrCreate = interrupted
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
spark_session(master="local[1]", jdbc_jar=Path("JAR"))
print(told, signal.getsignal(signal.SIGINT).__module__, flush=True)
"""
IS_SUBMITTED = f"""{BEGIN}
session = spark_session(settings={{"spark.sql.shuffle.partitions": "3"}})
print(session.sparkContext.master, session.conf.get("spark.sql.shuffle.partitions"))
require_jdbc_driver(session)
print("on board", flush=True)
"""


@pytest.fixture(scope="module")
def driver_jar(spark: SparkSession) -> Path:
    """The JDBC driver, from wherever the session of the tests has it."""
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    driver = loader.loadClass("org.postgresql.Driver")
    return Path(driver.getProtectionDomain().getCodeSource().getLocation().getPath())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with nothing in it: no Maven repository, no cache of Ivy's."""
    home = tmp_path / "home"
    home.mkdir()
    return home


def run(home: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    # The JVM does not ask HOME where its user is at home.
    environment = {**os.environ, "HOME": str(home), "JDK_JAVA_OPTIONS": f"-Duser.home={home}"}
    environment.pop("PYSPARK_PYTHON", None)
    return subprocess.run(
        [str(word) for word in command],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture
def no_network() -> Iterator[tuple[str, ...]]:
    """What to put before a command that shall find no network but the loopback."""
    alone = ("unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip(
            "the network is not ours to take away: install util-linux and iproute2; in a container, run it privileged"
        )
    return alone


def test_the_session_has_the_driver_and_what_was_asked_for(spark: SparkSession) -> None:
    require_jdbc_driver(spark)
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.sparkContext.uiWebUrl is None


def test_a_local_spark_and_its_tasks_yield_to_workers(spark: SparkSession) -> None:
    def niceness_of_task(_: object) -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    ours = os.getpriority(os.PRIO_PROCESS, 0)
    expected = min(19, ours + NICENESS) if sys.platform == "linux" else ours
    assert spark.sparkContext.range(1).map(niceness_of_task).collect() == [expected]


def test_tasks_run_in_the_python_that_started_spark_and_can_use_arrow(spark: SparkSession) -> None:
    def executable(batches):  # type: ignore[no-untyped-def] # shipped to the tasks as it stands
        import sys

        import pyarrow

        for batch in batches:
            yield pyarrow.RecordBatch.from_pydict({"rows": [batch.num_rows], "python": [sys.executable]})

    rows = spark.range(10, numPartitions=2).mapInArrow(executable, "rows long, python string").collect()
    assert sorted(tuple(row) for row in rows) == [(5, sys.executable)] * 2


@pytest.mark.slow
def test_it_starts_without_a_network_from_the_local_maven_repository_and_says_nothing(
    home: Path, driver_jar: Path, no_network: tuple[str, ...]
) -> None:
    # The jar alone, without its pom: for Ivy that is a reason to ask Maven Central.
    jar = home / ".m2/repository/org/postgresql/postgresql/42.7.8/postgresql-42.7.8.jar"
    jar.parent.mkdir(parents=True)
    shutil.copy(driver_jar, jar)
    ended = run(home, *no_network, sys.executable, "-c", STARTS_WITHOUT_A_NETWORK)
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (0, [str(jar), "10"], "")


@pytest.mark.slow
def test_ctrl_c_is_the_callers_until_the_session_is_there(home: Path, driver_jar: Path) -> None:
    """From then on it is pyspark's, which cancels jobs; that would talk with the JVM in the middle of a call."""
    ended = run(home, sys.executable, "-c", IS_INTERRUPTED.replace("JAR", str(driver_jar)))
    assert (ended.stdout.strip(), ended.stderr) == ("[1] pyspark.core.context", "")


@pytest.mark.slow
def test_a_driver_that_cannot_be_fetched_is_named_with_the_remedy(home: Path, no_network: tuple[str, ...]) -> None:
    ended = run(home, *no_network, sys.executable, "-c", FINDS_NO_DRIVER)
    assert ended.returncode == 1
    assert "SparkSetupError: Spark does not start: org.postgresql:postgresql:42.7.8 or another package" in ended.stderr
    # What Spark said itself follows, for whoever needs more.
    assert "UNRESOLVED DEPENDENCIES" in ended.stderr.partition("SparkSetupError")[2]


@pytest.mark.slow
@pytest.mark.parametrize("with_driver", [True, False])
def test_under_spark_submit_a_missing_driver_is_named_with_the_remedy(
    home: Path, driver_jar: Path, with_driver: bool
) -> None:
    (home / "job.py").write_text(IS_SUBMITTED)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    jars = ["--jars", driver_jar] if with_driver else []
    python = f"spark.pyspark.python={sys.executable}"
    ended = run(home, submit, "--master", "local[1]", "--conf", python, *jars, home / "job.py")
    # spark-submit writes both streams of its Python to stdout.
    lines = ended.stdout.splitlines()
    assert lines[0] == "local[1] 3", ended.stderr
    if with_driver:
        assert (ended.returncode, lines[1:]) == (0, ["on board"])
    else:
        assert ended.returncode == 1
        assert (
            "SparkSetupError: Spark runs without org.postgresql.Driver, and it is too late to add it; start it with "
            "the driver: spark-submit --packages org.postgresql:postgresql:42.7.8, or --jars"
        ) in lines[-1]


@pytest.mark.parametrize(
    ("logger", "wrong"),
    [
        ("DataFrameQueryContextLogger", lambda spark: spark.range(1).select("no_such_column")),
        ("SQLQueryContextLogger", lambda spark: spark.range(1).selectExpr("no_such_column + 1")),
    ],
)
def test_a_terminal_shows_an_error_once(
    spark: SparkSession, logger: str, wrong: Callable[[SparkSession], DataFrame]
) -> None:
    """And not the pages that pyspark logs of it beside."""
    loggers = [*map(PySparkLogger.getLogger, CONTEXT_LOGGERS), logging.getLogger("py4j")]
    levels, root = [each.level for each in loggers], logging.getLogger()
    filters = root.filters[:]
    # Listened to here: pyspark's own handler writes to what was stderr when the first error of the process came.
    heard = Heard()
    PySparkLogger.getLogger(logger).addHandler(heard)
    for each in loggers:  # a command that ran in this process may have quieted them
        each.setLevel(logging.ERROR)
    try:
        with pytest.raises(AnalysisException):
            wrong(spark).collect()
        assert heard.records, "otherwise there is nothing to silence any more"
        heard.records.clear()
        quiet_pyspark()
        with pytest.raises(AnalysisException):
            wrong(spark).collect()
        assert not heard.records
    finally:
        PySparkLogger.getLogger(logger).removeHandler(heard)
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
        root.filters = filters


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
