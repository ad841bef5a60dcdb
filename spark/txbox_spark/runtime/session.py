"""Starts Spark sessions that can reach Postgres over JDBC, and that keep a terminal readable."""

import contextlib
import importlib.util
import logging
import os
import signal
import socketserver
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from txbox import InvalidConfiguration
from txbox.errors import install_command
from txbox_spark.runtime.explanations import describe_spark_error
from txbox_spark.runtime.java import SparkSetupError, java_found
from txbox_spark.runtime.jdbc import JDBC_DRIVER_CLASS
from txbox_spark.runtime.jvm import MORE_MEMORY, OUT_OF_MEMORY, kill_after_exit
from txbox_spark.runtime.lazy_imports import DataFrame, SparkSession

JDBC_DRIVER = "org.postgresql:postgresql:42.7.8"
"""Maven coordinates of the JDBC driver."""

ONLY_TO_COMPILE = "org.checkerframework:checker-qual"
"""A dependency of the driver that it does not need at run time."""

MAVEN_REPOSITORY = Path("~/.m2/repository").expanduser()

NICENESS = 10
"""Added to that of a JVM with executors."""

CONTEXT_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""Loggers to which pyspark writes pages about every wrong expression."""


def require_pyspark() -> None:
    if importlib.util.find_spec("pyspark") is None:
        raise SparkSetupError(f"pyspark is missing; install it: {install_command('spark')}")
    if importlib.util.find_spec("py4j") is None:  # pyspark-client is a pyspark without it
        raise SparkSetupError(f"pyspark-client cannot start Spark; install pyspark instead: {install_command('spark')}")


def spark_session(
    name: str = "txbox",
    *,
    master: str | None = None,
    jdbc_jar: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start a Spark session that can reach Postgres, or return the running one.

    If Python starts Spark, the JVM's stderr is held back until Spark is up; if Spark does not start, that output is a
    note of the error. After that, only errors are logged, and no progress is shown. With a local master, Spark has no
    web UI, and tasks run in the Python that calls this, unless ``PYSPARK_PYTHON`` names another.

    Under spark-submit, or if a session is already running, it is too late to add the JDBC driver: see
    ``require_jdbc_driver``.

    Args:
        name: the application's name.
        master: such as ``local[2]`` or ``spark://host:7077``; None leaves it to spark-submit, or to Spark's default.
        jdbc_jar: the file of the JDBC driver. None means the local Maven repository (``~/.m2``), or else Maven Central.
        settings: more Spark settings, which win over ours. Jars and packages are added to ours.

    Raises:
        SparkSetupError: pyspark or a JDK is missing, the JDBC driver cannot be found, or Spark does not start.
    """
    require_pyspark()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    asked = _settings(name, master, _driver_settings(jdbc_jar, MAVEN_REPOSITORY), settings or {})
    # spark-submit sets this; pyspark then joins the JVM that started this Python.
    pysparks: _Handler = None
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted and SparkContext._gateway is None:  # noqa: SLF001 pyspark has no other way to ask for its JVM
        with java_found():
            pysparks = _start(asked)
    builder = SparkSession.builder
    for key, value in asked.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    if pysparks is not None:
        signal.signal(signal.SIGINT, pysparks)
    return session


def require_jdbc_driver(spark: SparkSession) -> None:
    """Raise, before the first use of JDBC, unless the session can load the Postgres driver.

    Raises:
        SparkSetupError: the driver is missing; the message says what to pass to spark-submit.
    """
    from py4j.protocol import Py4JJavaError

    jvm: Any = spark._jvm  # noqa: SLF001 pyspark has no other way to ask for its JVM
    # Spark itself looks the driver up in the thread's class loader.
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        loader.loadClass(JDBC_DRIVER_CLASS)
    except Py4JJavaError as error:
        if error.java_exception.getClass().getSimpleName() != "ClassNotFoundException":
            raise
        raise SparkSetupError(
            f"Spark runs without {JDBC_DRIVER_CLASS}, and it is too late to add it; start it with the driver: "
            f"spark-submit --packages {JDBC_DRIVER}, or --jars and the driver's jar"
        ) from error


def quiet_pyspark() -> None:
    """Stop pyspark from logging pages about errors that it also raises."""
    from pyspark import accumulators
    from pyspark.logger import PySparkLogger

    for name in CONTEXT_LOGGERS:
        PySparkLogger.getLogger(name).setLevel("CRITICAL")
    # Its accumulator server prints a traceback when the JVM has died.
    for server in vars(accumulators).values():
        if isinstance(server, type) and issubclass(server, socketserver.BaseServer):
            server.handle_error = lambda *_: None  # type: ignore[method-assign]
    # py4j logs a traceback for every Ctrl-C, and for a dead JVM, sometimes through the root logger.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: not str(record.msg).endswith(" while sending command."))
    warnings.filterwarnings("ignore", "Unable to cleanly shutdown Spark JVM process")


def mute_jvm() -> None:
    """Drop the further output of the JVM and its tasks: when asked to end, they complain about interrupted work.

    It takes no lock, so a signal handler may call it.
    """
    _HeldStderr.muted = True


def _driver_settings(jdbc_jar: Path | None, maven_repository: Path) -> dict[str, str]:
    """Return the settings by which Spark finds the driver.

    A jar in the local Maven repository is passed as a file instead of through spark.jars.packages: if the pom is
    missing beside the jar, Ivy asks Maven Central first, and hangs for minutes behind a firewall that drops packets.
    """
    if jdbc_jar is None:
        group, artifact, version = JDBC_DRIVER.split(":")
        local = maven_repository.joinpath(*group.split("."), artifact, version, f"{artifact}-{version}.jar")
        if not local.is_file():
            return {"spark.jars.packages": JDBC_DRIVER, "spark.jars.excludes": ONLY_TO_COMPILE}
        jdbc_jar = local
    if not jdbc_jar.is_file():
        raise SparkSetupError(f"there is no JDBC driver at {jdbc_jar}")
    return {"spark.jars": str(jdbc_jar)}


def _settings(name: str, master: str | None, driver: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    ours = {
        "spark.app.name": name,
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"{OUT_OF_MEMORY} -XX:+DisplayVMOutputToStderr",
        **driver,
    }
    if master is not None:
        ours["spark.master"] = master
        if master.startswith("local"):
            ours["spark.ui.enabled"] = "false"
    # Join lists, so that a jar of theirs does not replace the driver.
    joined = {key: f"{ours[key]}{by}{theirs[key]}" for key, by in _LISTS.items() if key in ours and key in theirs}
    return {**ours, **theirs, **joined}


def _start(settings: Mapping[str, str]) -> "_Handler":
    """Start the JVM and Spark in it, so that pyspark's builder finds both running.

    Returns:
        pyspark's handler for Ctrl-C, if it installed one. Set it once everything is set up, because it asks the JVM to
        cancel jobs, in the middle of whatever Python is asking the JVM at that moment.
    """
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    callers = signal.getsignal(signal.SIGINT)
    conf = SparkConf().setAll(list(settings.items()))
    _HeldStderr.muted = False
    stderr = _HeldStderr()
    launched: Future[Any] | None = None
    try:
        # Not through the builder: it gives the JVM our stderr, where Ivy, the JVM and log4j write some 50 lines that
        # no setting turns off. In another thread, because an interruption halfway would leave a JVM running.
        with _our_python(settings), ThreadPoolExecutor(1, initializer=_yield_to_others, initargs=(settings,)) as pool:
            launched = pool.submit(launch_gateway, conf, popen_kwargs={"stderr": stderr.writing})
            gateway = launched.result()
        kill_after_exit(gateway.proc)
        context = SparkContext(conf=conf, gateway=gateway)
        pysparks = signal.getsignal(signal.SIGINT)
        if pysparks is callers or callers is None:  # outside the main thread, pyspark installs no handler
            pysparks = None
        else:
            signal.signal(signal.SIGINT, callers)
    except KeyboardInterrupt:
        if launched is not None and launched.done() and launched.exception() is None:
            _kill(launched.result())
        raise
    except PySparkRuntimeError as error:
        text = stderr.read_all()
        raise _not_started(_reason(text), text) from error
    except Py4JError as error:
        text = str(error)  # this asks the JVM, so it must come before the kill
        _kill(gateway)
        remedy = f"; {MORE_MEMORY}" if "INVALID_DRIVER_MEMORY" in text else ""
        raise _not_started(f"{describe_spark_error(text).removesuffix('.')}{remedy}", text) from None
    finally:
        stderr.release()
    if not str(context.master).startswith("local"):
        return pysparks
    if "PYSPARK_PYTHON" not in os.environ:
        # Otherwise tasks run in the first python3 on the PATH, which may lack our packages.
        context.pythonExec = sys.executable
    # Spark would log pages of Java about a failed task, with the data in it. The caller gets an error anyway.
    log4j = gateway.jvm.org.apache.logging.log4j
    for name in _LOG_TASKS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    return pysparks


def _yield_to_others(settings: Mapping[str, str]) -> None:
    """Lower the priority of a JVM that this thread launches and that has executors, so that live workers come first."""
    if sys.platform == "linux" and settings.get("spark.master", "").startswith("local"):
        os.nice(NICENESS)  # on Linux, of this thread alone


@contextlib.contextmanager
def _our_python(settings: Mapping[str, str]) -> Iterator[None]:
    """Set ``PYSPARK_PYTHON`` so that a JVM launched in the block runs data sources in this Python.

    On a cluster it is not set, because it would also apply to the executors, whose paths differ.
    """
    local = settings.get("spark.master", "").startswith("local")
    if not local or os.environ.keys() & {"PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"}:
        yield
        return
    os.environ["PYSPARK_PYTHON"] = sys.executable
    try:
        yield
    finally:
        del os.environ["PYSPARK_PYTHON"]


def _kill(gateway: Any) -> None:
    from pyspark import SparkContext

    gateway.proc.kill()
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 pyspark would go on to use them


def _not_started(why: str, text: str) -> SparkSetupError:
    failure = SparkSetupError(f"Spark does not start: {why}")
    failure.add_note(text)
    return failure


class _HeldStderr:
    """Holds the JVM's stderr back, and writes further output to our stderr after ``release``."""

    muted = False  # on the class, because a process has one JVM

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        self._held = bytearray()
        self._holding = self._open = True
        self._reader = threading.Thread(target=self._read, name="txbox-spark-stderr", daemon=True)
        self._reader.start()

    def release(self) -> None:
        """Write what follows to our stderr."""
        self._close()
        self._holding = False

    def read_all(self) -> str:
        """Return the output of a JVM that has ended, or is about to end."""
        self._close()
        self._reader.join(timeout=10)
        return self._held.decode(errors="replace")

    def _close(self) -> None:
        # The JVM has a copy of this end. The reader sees the end when the last copy is closed.
        if self._open:
            os.close(self.writing)
            self._open = False

    def _read(self) -> None:
        while chunk := os.read(self._reading, 65536):
            if self._holding:
                self._held += chunk
            else:
                if self.muted or _OUT_OF_MEMORY_LINE in chunk:  # Python raises this as an error
                    continue
                # Keep reading even if our stderr is closed, so that the JVM does not block.
                with contextlib.suppress(OSError):
                    os.write(2, chunk)
        os.close(self._reading)


def _reason(text: str) -> str:
    """Return why Spark did not start, from the JVM's output."""
    if "unresolved dependency" in text:
        return (
            f"{JDBC_DRIVER} or another package is neither on this machine nor can it be fetched; "
            "download the driver, and name its jar: jdbc_jar"
        )
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("Exception in thread", "Error"))]
    return (errors or lines[-1:] or ["its JVM ended without output"])[0]


_Handler = Callable[[int, FrameType | None], Any] | int | None  # as signal.getsignal returns it
_LOG_TASKS = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.util.SparkUncaughtExceptionHandler",
)
_LISTS = {
    "spark.jars": ",",
    "spark.jars.packages": ",",
    "spark.jars.excludes": ",",
    "spark.driver.extraJavaOptions": " ",
}
"""Settings that are lists, and the separators of their elements."""
_OUT_OF_MEMORY_LINE = b"Terminating due to java.lang.OutOfMemoryError"


def refuse_connect(frame: DataFrame | SparkSession, of: str, instead: str) -> None:
    """Raise ``InvalidConfiguration`` if a DataFrame or a session belongs to Spark Connect.

    Args:
        frame: the DataFrame or the session.
        of: the function that it was passed to.
        instead: how to do the same over Spark Connect.
    """
    if type(frame).__module__.startswith("pyspark.sql.connect."):
        raise InvalidConfiguration(
            f"{of}: this is Spark Connect, and {of} needs a Spark in this process; over Spark Connect, {instead}"
        )
