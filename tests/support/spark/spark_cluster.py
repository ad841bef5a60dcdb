"""A real cluster of Spark's own on this machine's loopback: a master, two workers, and drivers that load events.

The workers are on hosts of their own, 127.0.0.2 and 127.0.0.3: Spark never runs a second attempt at a task on a host
that runs one already. Drivers are processes of their own, as a process has room for one Spark. Run as a program, this
file is such a driver: see ``Driver``.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pyspark
from sqlalchemy import Engine

from support.processes import start_python
from support.spark.short_life import SHORT_LIFE
from support.waiting import wait_until

HOSTS = ("127.0.0.2", "127.0.0.3")
CORES = 2
"""How many tasks an executor runs at once; each host has one."""
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
STARTS_SECONDS = 120.0
"""How long a JVM may take to start on a machine that does other things."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        url: what drivers are given as their master.
        folder: where drivers leave their event logs.
    """

    url: str
    folder: Path

    @contextlib.contextmanager
    def driver(self, *, cwd: Path | None = None, **settings: str) -> "Iterator[Driver]":
        """Start a driver with these settings of Spark, dots as double underscores; end it with the block.

        ``cwd`` is the folder that it works in.
        """
        logs = self.folder / f"events-{len(list(self.folder.glob('events-*')))}"
        logs.mkdir()
        asked = {
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": SHORT_LIFE,
            "spark.driver.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "4",
            "spark.default.parallelism": str(CORES * len(HOSTS)),
            # Tasks must not begin before both hosts are there: otherwise one of them runs them all.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.cores.max": str(CORES * len(HOSTS)),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": logs.as_uri(),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        process = start_python(
            *("-m", "support.spark.spark_cluster", json.dumps({"master": self.url, "settings": asked})),
            env={**_environment("127.0.0.1"), "PYSPARK_PYTHON": sys.executable},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=cwd,
        )
        try:
            driver = Driver(process, logs)
            driver.answer()  # it is up
            yield driver
            driver.stop()
        finally:
            _end([process])


class Driver:
    """A driver, seen from the test: it is asked to load events, and answers when it has."""

    def __init__(self, process: "subprocess.Popen[str]", logs: Path) -> None:
        self._process = process
        self._logs = logs

    def ask(self, **request: Any) -> None:
        """Have events loaded.

        Args:
            request: ``rows`` and ``distinct`` of ``generate``; ``python``, what executors run tasks in from now on; and
                what goes to ``bulk_load``; with ``format``, options of format txbox, to a write by that.
        """
        stdin = self._pipe(self._process.stdin)
        stdin.write(f"{json.dumps(request)}\n")
        stdin.flush()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def answer(self) -> dict[str, Any]:
        """Wait for the report."""
        answer = self._answer()
        assert "error" not in answer, answer["error"]
        return answer

    def _answer(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        assert line, "the driver has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def load(self, **request: Any) -> dict[str, Any]:
        """Load events, and return the report."""
        self.ask(**request)
        return self.answer()

    def refused(self, **request: Any) -> str:
        """Load events, which must fail, and return the error."""
        self.ask(**request)
        return str(self._answer()["error"])

    def stop(self) -> None:
        """Let it end, so that its event log is complete."""
        if self._process.poll() is None:
            self._pipe(self._process.stdin).close()
            self._process.wait(60)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What Spark has logged of one kind, such as "TaskStart"; complete once the driver has ended."""
        lines = [line for log in self._logs.iterdir() if log.is_file() for line in log.read_text().splitlines()]
        logged = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in logged if event["Event"] == f"SparkListener{kind}"]

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@contextlib.contextmanager
def spark_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster; end it, with all that runs on it, with the block.

    Args:
        folder: for its files.
    """
    processes: list[subprocess.Popen[str]] = []

    def start(name: str, host: str, started: str, *arguments: str) -> str:
        log = folder / f"{name}.log"
        program = Path(pyspark.__file__).parent / "bin" / "spark-class"
        with log.open("w") as said:
            processes.append(
                subprocess.Popen(
                    [str(program), *arguments],
                    env={**_environment(host), "SPARK_LOCAL_DIRS": str(folder / f"{name}-local")},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    text=True,
                    start_new_session=True,
                )
            )
        process = processes[-1]

        def found() -> re.Match[str] | None:
            assert process.poll() is None, f"{name} has ended: {log.read_text()[-2000:]}"
            return re.search(started, log.read_text())

        return wait_until(found, f"{name} is up", timeout=STARTS_SECONDS, every=0.1)[0]

    try:
        place = ("--port", "0", "--webui-port", "0")
        url = start("master", "127.0.0.1", r"spark://127\.0\.0\.1:\d+", MASTER, "--host", "127.0.0.1", *place)
        size = ("--cores", str(CORES), "--memory", "768m")
        for host in HOSTS:
            work = ("--work-dir", str(folder / host))
            start(host, host, "Successfully registered", WORKER, "--host", host, *place, *size, *work, url)
        yield Cluster(url, folder)
    finally:
        _end(processes)


def spark_submit(
    cluster: Cluster, *arguments: str, env: dict[str, str], cwd: Path
) -> "subprocess.CompletedProcess[str]":
    """Run spark-submit, and return what it has said."""
    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    confs = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.executor.memory": "512m"}
    given = [part for name, value in confs.items() for part in ("--conf", f"{name}={value}")]
    return subprocess.run(
        [str(program), "--master", cluster.url, *given, *arguments],
        env={**_environment("127.0.0.1"), **env},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )


def client_of(engine: Engine, backend: int) -> psutil.Process:
    """Return the process whose connection a server process of Postgres serves."""
    with engine.connect() as connection:
        port = connection.exec_driver_sql(
            "SELECT client_port FROM pg_stat_activity WHERE pid = %s", (backend,)
        ).scalar_one()
    server = engine.url.port
    for found in psutil.net_connections("tcp"):
        if found.laddr and found.raddr and (found.laddr.port, found.raddr.port) == (port, server) and found.pid:
            return psutil.Process(found.pid)
    raise AssertionError(f"nobody is at port {port}")


def host_of(process: psutil.Process) -> str:
    """Return the host of the executor that a process is, or works for."""
    arguments = executor_of(process).cmdline()
    return arguments[arguments.index("--hostname") + 1]


def processes_of(cluster: Cluster, host: str) -> list[psutil.Process]:
    """Return what runs on a host: its worker, the executors, and their Python."""
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            arguments = one.cmdline()
            if WORKER in arguments and host in arguments and cluster.url in arguments:
                return [one, *one.children(recursive=True)]
    raise AssertionError(f"nothing runs on {host}")


def executor_of(process: psutil.Process) -> psutil.Process:
    """Return the executor's JVM that a process is, or works for."""
    for one in (process, *process.parents()):
        if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in one.cmdline():
            return one
    raise AssertionError(f"{process} does not work for an executor")


def _environment(host: str) -> dict[str, str]:
    left_out = {"SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT", "PYTHONPATH"}
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return {
        **inherited,
        "SPARK_LOCAL_IP": host,
        "SPARK_DAEMON_JAVA_OPTS": SHORT_LIFE,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_NO_DAEMONIZE": "1",
    }


def _end(processes: "list[subprocess.Popen[str]]") -> None:
    """Kill processes, and all that they have started."""
    family: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()  # psutil sees to it that it is still the same process
    for process in processes:
        process.wait(20)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


# --- the driver's side -----------------------------------------------------------------------------------------------


def main() -> None:
    """Answer requests until there are no more."""
    from txbox_spark import bulk_load, spark_session

    given = json.loads(sys.argv[1])
    spark = spark_session("txbox-cluster", master=given["master"], settings=given["settings"])
    _say({"up": spark.version})
    for line in sys.stdin:
        request = json.loads(line)
        if python := request.pop("python", None):
            spark.sparkContext.pythonExec = python
        rows, distinct = request.pop("rows"), request.pop("distinct")
        events = spark.range(0, rows, 1, CORES * len(HOSTS)).selectExpr(
            f"CASE WHEN id % 97 < 96 THEN printf('e%07d', id % {distinct}) END AS event_id",
            f"CAST(id % {distinct} % 7 AS int) AS account",
            f"CAST(id % {distinct} % 11 - 5 AS int) AS amount",
            "repeat('x', 500) AS payload",
        )
        try:
            if options := request.pop("format", None):
                given = {"subscriber": "billing", "message_id": "event_id", **options}
                events.write.format("txbox").mode("append").options(**given).save()
                _say({})
                continue
            report = bulk_load(events, subscriber_id="billing", message_id="event_id", **request)
            _say(report.as_dict())
        except Exception as error:  # noqa: BLE001 - the test is told
            _say({"error": f"{type(error).__name__}: {error}"})
    spark.stop()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
