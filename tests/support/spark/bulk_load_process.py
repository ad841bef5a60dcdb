"""A driver of bulk loads in a process of its own, with a JVM and Python workers of its own, which tests may kill.

It starts Spark once, which takes seconds, and then loads whatever it is asked to: a line of JSON on stdin is one load,
a line of JSON on stdout is what became of it.
"""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from support.processes import start_python
from support.waiting import wait_until
from txbox import TxboxError
from txbox_spark import BulkLoadReport, bulk_load, read_events, source_of, spark_session

START_SECONDS = 150
LOAD_SECONDS = 120


class BulkLoadProcess:
    """The process, seen from the test."""

    def __init__(self) -> None:
        self._process = start_python(
            *("-m", "support.spark.bulk_load_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what the test's own terminal signals is not for it
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._family: dict[int, psutil.Process] = {}

    @classmethod
    @contextlib.contextmanager
    def at_hand(cls) -> "Iterator[Callable[[], BulkLoadProcess]]":
        """Give the driver that is alive, or start one: what one test leaves alive is for the next one."""
        started: list[BulkLoadProcess] = []

        def alive() -> BulkLoadProcess:
            if not started or not started[-1].alive():
                started.append(cls())
                started[-1].ready()
            return started[-1]

        try:
            yield alive
        finally:
            for process in started:
                process.kill()

    def ready(self) -> None:
        """Wait until Spark is up."""
        assert self.answer(START_SECONDS) == {"ready": True}

    def begin(self, path: str, **settings: Any) -> None:
        """Ask for a load, and return at once.

        Args:
            path: what to load.
            settings: for ``bulk_load``.
        """
        self._say({"path": path, **settings})

    def active_jobs(self) -> list[int]:
        """Which jobs Spark is at, with no load at work."""
        self._say({"question": "active jobs"})
        return list(self.answer()["active_jobs"])

    def answer(self, timeout: float = LOAD_SECONDS) -> dict[str, Any]:
        """Wait for what became of the load."""
        try:
            return self._answers.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"no answer within {timeout} s; the process: {self._process.poll()}") from None

    def report(self, timeout: float = LOAD_SECONDS) -> BulkLoadReport:
        """Wait for the load's report."""
        answer = self.answer(timeout)
        assert "report" in answer, answer
        return BulkLoadReport(**answer["report"])

    def load(self, path: str, **settings: Any) -> BulkLoadReport:
        """Load, and wait for the report."""
        self.begin(path, **settings)
        return self.report()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the driver's Python alone, as a supervisor or a terminal does."""
        self._look()
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill everything with SIGKILL at one moment: the driver, its JVM, its Python workers."""
        family = self._look()
        for process in family:  # none is to see another one die
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in [*family, *self._look()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait()
        wait_until(lambda: not self.alive(), "the whole family is dead")

    def wait(self, timeout: float = 30) -> int:
        """Wait for the driver's end; its status, negative for a signal."""
        status = self._process.wait(timeout)
        self._reader.join(timeout)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return status

    def alive(self) -> list[str]:
        """Which processes of its family are alive: those that it has, or had when a signal was sent."""
        return [str(process) for process in self._look()]

    def _say(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _look(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self._process.pid)
            for process in [driver, *driver.children(recursive=True)]:
                self._family.setdefault(process.pid, process)
        return [process for process in self._family.values() if _is_alive(process)]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # the JVM has the same stdout
                self._answers.put(json.loads(line))


def _is_alive(process: psutil.Process) -> bool:
    # An orphan that has died stays a zombie where the first process of the machine, or container, reaps nobody.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    """Load what is asked for, until stdin ends."""
    spark = spark_session("txbox-bulk-load-process", master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})
    _say({"ready": True})
    for line in sys.stdin:
        settings = json.loads(line)
        if "question" in settings:
            _say({"active_jobs": list(spark.sparkContext.statusTracker().getActiveJobsIds())})
            continue
        paths = [settings.pop("path")]
        try:
            report = bulk_load(read_events(spark, paths), source=source_of(spark, paths), **settings)
            _say({"report": report.as_dict()})
        except TxboxError as error:
            _say({"error": type(error).__name__, "said": str(error), "run_id": getattr(error, "run_id", None)})
        except KeyboardInterrupt:
            _say({"interrupted": True})
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
            _say({"error": type(error).__name__, "said": str(error)})
    spark.stop()


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201 - how it answers


if __name__ == "__main__":
    main()
