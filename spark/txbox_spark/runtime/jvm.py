"""The JVM that this process has started for Spark: whether it lives, and that it ends after this process.

A JVM that Spark starts reads its stdin, and ends at its end. One whose heap is full, or that plans without end, does
not get that far. So another process waits for the end of this one, and kills the JVM if that has not ended soon after.
"""

import os
import signal
import sys
from contextlib import suppress
from subprocess import Popen
from typing import Any

GRACE_SECONDS = 3.0
"""How long a JVM may take to end by itself after the process that has started it."""

OUT_OF_MEMORY = "-XX:+ExitOnOutOfMemoryError"
"""Has a JVM end that runs out of memory; otherwise only the thread that found none ends, and the JVM runs on."""

MORE_MEMORY = "give it more: spark.driver.memory=4g (--conf, or settings of spark_session), or load fewer files at once"


def kill_after_exit(jvm: "Popen[Any]") -> None:
    """Have a JVM killed that is still there ``GRACE_SECONDS`` after this process has ended, however that ended.

    Without descriptors of processes (not Linux, or older than 5.3), nothing is done.
    """
    if not hasattr(os, "pidfd_open"):
        return
    try:
        held = os.pidfd_open(jvm.pid)
    except OSError:
        return
    reading, _writing = os.pipe()  # the other end stays open as long as this process is there
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
    """Return why Spark's JVM has ended, in words; None: it has not, or was not started from here."""
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
    """Kill the JVM, if this process has started it."""
    process = _process()
    if process is not None:
        process.kill()


def _process() -> "Popen[Any] | None":
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 pyspark has no other way to ask for its JVM


_DYING_SECONDS = 0.5
_OUT_OF_MEMORY_STATUSES = (3, 52)
"""Of a JVM that ``OUT_OF_MEMORY`` ends, and of one that Spark ends itself: without that option, or where there is heap
left, but none of the memory beside it that Arrow takes.
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
"""Its stdin ends with the process that has the other end; its stdout is the JVM, readable when that has ended."""
