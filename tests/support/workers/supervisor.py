"""Worker processes that are killed and started again, and what their handlers have begun."""

import contextlib
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.processes import killed_at_the_end
from support.waiting import wait_until
from support.workers import worker_process
from support.workers.business import Business

KILLED = -signal.SIGKILL

BOTH_KINDS = pytest.mark.parametrize("start", ["threads", "coroutines"], indirect=True)
"""The workers that ``start`` starts have threads, and then coroutines."""

Start = Callable[..., "subprocess.Popen[bytes]"]


def ids(count: int) -> list[str]:
    """Return the ids of the messages of a test, in order."""
    return [f"m{number:04}" for number in range(count)]


def runs(business: Business) -> Counter[str]:
    """How often the handler was run for each message, committed or not."""
    return Counter(business.rows("SELECT message_id FROM run"))


@contextlib.contextmanager
def worker_processes(url: str, of: str, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start worker processes of a queue, and see that none outlives the test."""
    kind = {"coroutines": True} if getattr(request, "param", "threads") == "coroutines" else {}

    with killed_at_the_end() as processes:

        def start(*, queue: str = of, **settings: Any) -> "subprocess.Popen[bytes]":
            processes.append(worker_process.start(url, queue, **kind, **settings))
            return processes[-1]

        yield start


def supervise(
    processes: list["subprocess.Popen[bytes]"], start: Start, done: Callable[[], bool], **settings: Any
) -> None:
    """Start a new worker for each that has died, until it is done; then let them finish."""

    def look() -> bool:
        for index, process in enumerate(processes):
            if process.poll() is not None:
                assert process.returncode == KILLED, "a worker ends only when it is killed"
                processes[index] = start(**settings)
        return done()

    wait_until(look, "all messages are settled", timeout=600, every=0.05)  # its test ends sooner
    for process in processes:
        process.terminate()
    # One that was started a moment ago may not have got as far as to handle the signal.
    assert {process.wait(20) for process in processes} <= {0, -signal.SIGTERM}
