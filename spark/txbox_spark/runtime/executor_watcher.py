"""Checks that the jobs of a load have executors: without one, Spark waits for ever and says nothing.

::

    a job runs, no executor ──NOTICE_SECONDS──▶ a warning: what is missing ──bound──▶ its jobs are cancelled

If an executor comes, or a job ends, the wait starts again. Tasks of a local master need no executors.
"""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from txbox import TxboxError
from txbox_spark.runtime.jobs import is_local
from txbox_spark.runtime.lazy_imports import SparkSession
from txbox_spark.runtime.periodic import every

EXECUTOR_SECONDS = 600.0
"""How long a job waits for an executor by default."""

NOTICE_SECONDS = 15.0
"""How long a job must lack an executor before that is logged; a cluster takes some seconds to start one."""

NOTICE_AGAIN_SECONDS = 60.0
"""How long until it is logged again."""

POLL_SECONDS = 1.0

MASTER_SECONDS = 5
"""How long the master may take to answer."""


WORKER_SECONDS = 0.5
"""How long a worker may take to answer."""

MOST_WORKERS = 20


class ExecutorsMissing(TxboxError):
    """No executor came in time; the message says what was asked for, and what the cluster offers."""


class ExecutorWatcher:
    """Watches the jobs of one load.

    Attributes:
        missing: whether a job waits for an executor now.
    """

    def __init__(self, spark: SparkSession, seconds: float = EXECUTOR_SECONDS) -> None:
        """Set the session, and how many seconds its jobs may lack an executor."""
        self._context = spark.sparkContext
        self._seconds = seconds
        self.missing = False

    @contextmanager
    def awaiting(self, group: str) -> Iterator[None]:
        """Watch the jobs of a group until the block ends.

        Raises:
            ExecutorsMissing: no executor came in time; the group's jobs are cancelled.
        """
        if is_local(self._context):
            yield
            return
        wait = _ExecutorWait(self._context, group, self._seconds)

        def look() -> None:
            from py4j.protocol import Py4JError

            try:
                self.missing = wait.look(time.monotonic())
            except (Py4JError, OSError) as error:  # then the job itself fails, too
                _log.debug("executors cannot be counted: %s", error)

        try:
            with every(POLL_SECONDS, look, name="txbox-executors"):
                yield
        except Exception as error:
            if wait.ended is None:
                raise
            raise ExecutorsMissing(wait.ended) from error
        finally:
            self.missing = False


class _ExecutorWait:
    """Measures how long the jobs of a group have had no executor."""

    def __init__(self, context: Any, group: str, seconds: float) -> None:
        self._context = context
        self._group = group
        self._seconds = seconds
        self._since: float | None = None
        self._notice_at = 0.0
        self.ended: str | None = None  # why the group's jobs were cancelled

    def look(self, now: float) -> bool:
        """Return whether a job waits for an executor; log the wait, and cancel the jobs, when it is time."""
        if not self._lacks_executors():
            if self._since is not None and now >= self._since + NOTICE_SECONDS:
                _log.warning("Spark goes on: it had no executor for %.0f s", now - self._since)
            self._since = None
            return False
        if self._since is None:
            self._since = now
            self._notice_at = now + NOTICE_SECONDS
        waited = now - self._since
        if waited >= self._seconds:
            if self.ended is None:
                self.ended = f"Spark has had no executor for {waited:.0f} s: {missing_executors(self._context)}"
            self._context.cancelJobGroup(self._group)
        elif now >= self._notice_at:
            self._notice_at = now + NOTICE_AGAIN_SECONDS
            _log.warning(
                "Spark has no executor since %.0f s, so nothing goes on: %s; the job ends after %.0f s without one "
                "(executor_seconds; on the command line --executor-seconds)",
                waited,
                missing_executors(self._context),
                self._seconds,
            )
        return True

    def _lacks_executors(self) -> bool:
        tracker = self._context.statusTracker()
        jobs = (tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group))
        if not any(job is not None and job.status == "RUNNING" for job in jobs):
            return False
        # The driver has a memory status, too.
        return int(self._context._jsc.sc().getExecutorMemoryStatus().size()) <= 1  # noqa: SLF001 pyspark has no other way


def missing_executors(context: Any) -> str:
    """Return in one line what executors were asked for, and what the cluster offers, if that is known.

    ``context`` is a SparkContext.
    """
    conf = context.getConf()
    memory = int(context._jsc.sc().executorMemory())  # noqa: SLF001 in MiB, wherever it is set
    cores = conf.get("spark.executor.cores")
    number = conf.get("spark.executor.instances")
    executors = "executors" if number is None else f"{number} executors"
    master = str(context.master)
    has_workers = master.startswith("spark://")
    unsaid = "all cores of a worker" if has_workers else "1 core"
    asked = f"asked for {executors} of {memory} MiB of memory and {unsaid if cores is None else f'{cores} cores'} each"
    if not has_workers:
        return f"{asked}; look at {master} for why it starts none, what it offers is unknown here"
    return f"{asked}; {_offer(context, master, memory, int(cores or 1))}"


def _offer(context: Any, master: str, memory: int, cores: int) -> str:
    workers = _workers(context, master)
    if workers is None:
        return f"the master {master} does not say what it offers; is it alive?"
    alive = [one for one in workers if one.answers()]
    if not alive:
        return f"the master {master} has no worker that is alive; start one"
    most_memory, most_cores = max(one.memory for one in alive), max(one.cores for one in alive)
    count = f"{len(alive)} worker{'s' if len(alive) > 1 else ''}"
    offer = f"the master {master} has {count} of at most {most_memory} MiB and {most_cores} cores each"
    if memory > most_memory:
        return f"{offer}; ask for less memory (spark.executor.memory), or start workers that have more"
    if cores > most_cores:
        return f"{offer}; ask for fewer cores (spark.executor.cores), or start workers that have more"
    return f"{offer}; if no other application has them, the logs of the workers say why executors do not start"


class _Worker(NamedTuple):
    """A worker that a master knows. The master does not say how much of it is free, or whether it is dead."""

    host: str
    port: int
    memory: int  # in MiB
    cores: int

    def answers(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), WORKER_SECONDS).close()
        except OSError:
            return False
        return True


def _workers(context: Any, master: str) -> list[_Worker] | None:
    """Return up to ``MOST_WORKERS`` workers of a master, dead ones included; None if no master answers.

    The driver does not know the address of the master's web UI, so it asks the master as that UI does.
    """
    from py4j.protocol import Py4JError

    jvm = context._jvm  # noqa: SLF001 pyspark has no other way
    spark = jvm.org.apache.spark
    try:
        rpc = context._jsc.sc().schedulerBackend().rpcEnv()  # noqa: SLF001 py4j cannot look into a SparkEnv
        request = getattr(getattr(spark.deploy, "DeployMessages$RequestMasterState$"), "MODULE$")
        limit = spark.rpc.RpcTimeout(jvm.scala.concurrent.duration.Duration.create(f"{MASTER_SECONDS} s"), "txbox")
        answer = jvm.scala.reflect.ClassTag.Any()
    except (Py4JError, TypeError):
        return None
    for address in master.removeprefix("spark://").split(","):  # standby masters answer, too
        host, _, port = address.rpartition(":")
        try:
            state = rpc.setupEndpointRef(spark.rpc.RpcAddress(host, int(port)), "Master").askSync(
                request, limit, answer
            )
            if str(state.status()) == "ALIVE":
                return [
                    _Worker(str(one.host()), int(one.port()), int(one.memory()), int(one.cores()))
                    for one in list(state.workers())[:MOST_WORKERS]
                ]
        except (Py4JError, TypeError, ValueError):
            continue
    return None


_log = logging.getLogger("txbox.spark")
