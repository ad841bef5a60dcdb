"""A relay in a process of its own, which tests may kill. Run it with its settings as JSON in the one argument.

The broker it sends to is a file: each message is a line, appended by one write, so that the file tells what arrived and
in which order, whichever of several processes brought it and whatever became of them.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine

from support.processes import start_python
from txbox.backoff import Backoff
from txbox.instrumentation import Relayed
from txbox.relay import OutboxMessage, Refused, Relay
from txbox.testing import kill_at

MOMENTS = ("before send", "half way through a send", "after send, before settle", "after settle")
"""When a process can be killed."""


def start(url: str, broker: Path, **settings: Any) -> "subprocess.Popen[bytes]":
    """Start a relay process.

    Args:
        url: the database, whose search path holds the tables.
        broker: the file to send to.
        settings: ``kill`` is a moment, ``kill_in`` the number of its batch; ``pause`` is how long a send
            takes, in seconds; ``kind`` is "async" for a publisher whose calls are awaited; the rest goes to Relay.
    """
    settings = {"url": url, "broker": str(broker), **settings}
    return start_python("-m", "support.txbox.relay_process", json.dumps(settings))


def arrived(broker: Path) -> list[OutboxMessage]:
    """Return what the file has received, in order."""
    if not broker.exists():
        return []
    lines = (line.split("\t") for line in broker.read_text().splitlines())
    return [OutboxMessage(message_id, "own:file", body.encode(), key or None) for message_id, key, body in lines]


class _File:
    """A publisher that appends to a file."""

    def __init__(self, path: str, kill: str | None, kill_in: int, pause: float) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        self._kill = kill
        self._calls_left = kill_in
        self._pause = pause

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        time.sleep(self._pause)  # not a wait: a send that takes a while, so that a kill can land in it
        return self._append(messages)

    def _append(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        self._calls_left -= 1
        lines = [f"{message.id}\t{message.key or ''}\t{message.body.decode()}\n" for message in messages]
        self._die("before send")
        for number, line in enumerate(lines):
            if number == len(lines) // 2:
                self._die("half way through a send")
            os.write(self._file, line.encode())
        self._die("after send, before settle")
        return ()

    def _die(self, moment: str) -> None:
        if moment == self._kill and self._calls_left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


class _AsyncFile(_File):
    """The same, and other calls go on while one takes its time."""

    async def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:  # type: ignore[override]
        await asyncio.sleep(self._pause)
        return self._append(messages)


class Counting:
    """A publisher that only counts: that every number arrived, and how often."""

    def __init__(self, numbers: int) -> None:
        self.seen = bytearray(numbers)
        self.count = 0

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        for message in messages:
            self.seen[int(message.body[:12])] = 1
        self.count += len(messages)
        return ()


def main() -> None:
    """Send until SIGTERM."""
    settings = json.loads(sys.argv[1])
    kill, kill_in = settings.pop("kill", None), settings.pop("kill_in", 1)
    hooks = [kill_at(Relayed, after=kill_in)] if kill == "after settle" else []
    file = _AsyncFile if settings.pop("kind", "sync") == "async" else _File
    publisher = file(settings.pop("broker"), kill, kill_in, settings.pop("pause", 0.0))
    engine = create_engine(settings.pop("url"), pool_size=20)
    settings = {"backoff": Backoff(first_seconds=0.05, longest_seconds=0.2), **settings}
    drained = Relay(engine, {"own": publisher}, hooks=hooks, **settings).run()
    sys.exit(0 if drained else 1)


if __name__ == "__main__":
    main()
