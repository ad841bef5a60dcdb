"""What each peer's program is given, and how it talks to the benchmark that has started it.

It is started with a JSON object: the database's ``url``, the ``variant`` of the program, the number of ``connections``.
It reads the table ``feed``, fills its queue, prints a line about itself, waits for a line, works, and prints how many
deliveries are done. Then it is ended from outside.
"""

import json
import sys
import threading
import time
from importlib import metadata
from typing import Any

import psycopg

SCHEMA = "txbox_benchmark"
AMOUNT = 3
UPDATE = f"UPDATE {SCHEMA}.account SET balance = balance + {AMOUNT} WHERE account_id = %s"
INBOX = f"{SCHEMA}.processed_message"
RECORD = f"INSERT INTO {INBOX} (subscriber_id, message_id) VALUES ('benchmark', %s) ON CONFLICT DO NOTHING"


class Feed:
    """The deliveries of one measurement, and the talk with the benchmark. Threads may count at once."""

    def __init__(self) -> None:
        """Read what the command line says, and the deliveries."""
        given = json.loads(sys.argv[1])
        self.url: str = given["url"]
        self.variant: str = given["variant"]
        self.connections: int = given["connections"]
        with psycopg.connect(self.url) as connection:
            rows = connection.execute(f"SELECT message_id, account FROM {SCHEMA}.feed ORDER BY number").fetchall()
        self.deliveries: list[tuple[str, int]] = rows
        self.finished = threading.Event()
        self._done, self._lock = 0, threading.Lock()

    def begin(self, package: str, settings: str) -> None:
        """Say what is measured, and wait for the word."""
        _say(version=f"{package} {metadata.version(package)}", settings=settings)
        sys.stdin.readline()

    def count(self, deliveries: int = 1) -> None:
        """Count deliveries whose effect has committed; say so when these are all."""
        with self._lock:
            self._done += deliveries
            if self._done < len(self.deliveries) or self.finished.is_set():
                return
            self.finished.set()
        self.end()

    def end(self) -> None:
        """Say that all are done."""
        _say(deliveries=len(self.deliveries))

    def wait_for(self, worker: Any) -> None:
        """Wait until a worker of txbox has an outcome for each delivery. A hook would cost each one."""
        while sum(worker.counts.values()) < len(self.deliveries):
            time.sleep(0.005)
        self.end()


def _say(**parts: Any) -> None:
    print(json.dumps(parts), flush=True)


def wait_for_the_end() -> None:
    """Wait to be ended from outside."""
    threading.Event().wait()
