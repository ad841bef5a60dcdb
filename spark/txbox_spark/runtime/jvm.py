"""Watches the JVM that this process started for Spark, and makes sure that it ends after this process.

A JVM that Spark starts reads its stdin, and ends when that ends. But a JVM whose heap is full, or that plans without
end, never gets that far. So a watching process waits until this process ends, and kills the JVM if it does not end soon
after.
"""

import os
import signal
import sys
from contextlib import suppress
from subprocess import Popen
from typing import Any

GRACE_SECONDS = 3.0
"""How long a JVM may take to end by itself after the process that started it."""

OUT_OF_MEMORY = "-XX:+ExitOnOutOfMemoryError"
"""Ends a JVM that runs out of memory. Without it, only the thread that found none ends, and the JVM continues."""

MORE_MEMORY = "give it more: spark.driver.memory=4g (--conf, or settings of spark_session), or load fewer files at once"


def kill_after_exit(jvm: "Popen[Any]") -> None:
    """Start a process that kills the JVM if it still runs ``GRACE_SECONDS`` after this process ends, for any reason.

    It does nothing where processes have no file descriptors: on systems other than Linux, and on Linux before 5.3.
    """
    if not hasattr(os, "pidfd_open"):
        return
    try:
        held = os.pidfd_open(jvm.pid)
    except OSError:
        return
    reading, _writing = os.pipe()  # the writing end stays open as long as this process runs
    descriptors = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in ((reading, 0), (held, 1), (held, 2))]
    command = [sys.executable, "-I", "-S", "-c", _WATCH, str(GRACE_SECONDS)]
    try:
        first = os.posix_spawn(sys.executable, command, {}, file_actions=descriptors)
        os.waitpid(first, 0)
    except OSError:
        os.close(_writing)
    finally:
        os.close(reading)
        os.close(held)


def cause_of_death() -> str | None:
    """Return in words why Spark's JVM ended; None if it has not ended, or was not started by this process."""
    process = _process()
    if process is None:
        return None
    with suppress(Exception):
        process.wait(_DYING_SECONDS)
    status = process.poll()
    if status is None:
        return None
    if status in _OUT_OF_MEMORY_STATUSES:
        return f"Spark's JVM ran out of memory; {MORE_MEMORY}"
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    hint = "; was the machine out of memory?" if status == -signal.SIGKILL else ""
    return f"Spark has died: its JVM {how}{hint}"


def kill_jvm() -> None:
    """Kill the JVM, if this process started it."""
    process = _process()
    if process is not None:
        process.kill()


def _process() -> "Popen[Any] | None":
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 pyspark has no other way to ask for its JVM


_DYING_SECONDS = 0.5
_OUT_OF_MEMORY_STATUSES = (3, 52)
"""The status of a JVM that ``OUT_OF_MEMORY`` ends, and of one that Spark ends: without that option, or if there is heap
left, but none of the off-heap memory that Arrow takes.
"""

_WATCH = """
import os, select, signal, sys
if os.fork():
    os._exit(0)
os.setsid()
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(one, signal.SIG_IGN)
ready = select.select([0, 1], [], [])[0]
if 1 not in ready and not select.select([1], [], [], float(sys.argv[1]))[0]:
    signal.pidfd_send_signal(1, signal.SIGKILL)
"""
"""Its stdin ends when the process with the other end does; its stdout is the JVM, readable once the JVM has ended."""
