"""Workers of the application, in processes of their own, and what their queue holds."""

import os
import subprocess
import time
from pathlib import Path

import psutil
from celery import Celery

from support.processes import start_python
from support.waiting import wait_until


class Workers:
    """Workers with a pool of two processes, each in a group of its own, which may be killed."""

    def __init__(self, log: Path, *, app: str = "app") -> None:
        """Let them write to this log; ``app``: the module here that has the tasks."""
        self._log = log
        self._app = app
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, **variables: str) -> "subprocess.Popen[bytes]":
        """Start a worker; these variables are added to its environment."""
        options = ["--pool=prefork", "--concurrency=2", "--without-gossip", "--without-mingle", "--loglevel=INFO"]
        with self._log.open("ab") as log:
            worker = start_python(
                *("-m", "celery", "-A", f"support.celery_shop.{self._app}", "worker", *options),
                stdout=log,
                stderr=log,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        self._started.append(worker)
        return worker

    def running(self) -> bool:
        """Whether one is there."""
        return any(worker.poll() is None for worker in self._started)

    def kill(self) -> None:
        """Kill all that are there, and wait for the end of their pools.

        A process that was added to a pool has the worker's connections to the broker. While it lives, the broker may
        give a message to a worker that is dead.
        """
        for worker in self._started:
            if worker.poll() is None:
                pool = psutil.Process(worker.pid).children(recursive=True)
                os.killpg(worker.pid, 9)
                worker.wait()
                wait_until(lambda: not any(map(_lives, pool)), "the end of a worker's pool")  # noqa: B023 - called at once
        self._started.clear()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_empty(app: Celery) -> bool:
    """Whether nothing waits, and nothing is in the hands of a worker."""
    with app.connection_for_read() as connection:
        client = connection.default_channel.client
        return not client.llen(app.conf.task_default_queue) and not client.hlen("unacked")


def has_timed_out(app: Celery) -> bool:
    """Whether a worker may take again what one has in its hands."""
    with app.connection_for_read() as connection:
        taken = connection.default_channel.client.zrange("unacked_index", 0, -1, withscores=True)
    seconds = app.conf.broker_transport_options["visibility_timeout"]
    return bool(taken) and time.time() > max(at for _, at in taken) + seconds
