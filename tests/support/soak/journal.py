"""Journals: what each process of the soak has seen, a file for each, written so that SIGKILL cannot take it back.

The last line may be torn: a kernel copies a write page by page, and looks for a deadly signal in between. A line
without its end is left out, and nothing is lost with it. If it is RECEIVED, processing had not begun, and the message
comes again; if it is an outcome, its delivery counts as one in the hands of a killed process, which it was.
"""

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from txbox.instrumentation import Event, Received, Settled

RECEIVED, BEGUN, COMPLETED, ENDED = "received", "begun", "completed", "ended"


class Note(NamedTuple):
    """A line of a journal.

    Attributes:
        process: whose.
        role: of that process.
        what: RECEIVED, or the outcome of a delivery; BEGUN, a run of a handler; COMPLETED, a lease; ENDED, the process
            itself, in order.
        message: of which message.
        detail: the receipt of the delivery, or the fence of the lease.
    """

    process: str
    role: str
    what: str
    message: str = ""
    detail: str = ""


class Journal:
    """Writes the journal of this process; a hook of workers."""

    def __init__(self, directory: str, role: str) -> None:
        process = f"{role}-{os.getpid()}-{time.monotonic_ns()}"  # pids come again
        self._whose = (process, role)
        self._file = os.open(Path(directory) / f"{process}.journal", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def __call__(self, event: Event) -> None:
        match event:
            case Received():
                for delivery, message in zip(event.delivery_ids, event.message_ids, strict=True):
                    self.note(RECEIVED, message, delivery)
            case Settled():
                self.note(event.outcome, event.message_id, event.delivery_id)

    def note(self, what: str, message: str = "", detail: str = "") -> None:
        """Write a line, in one call."""
        os.write(self._file, f"{json.dumps([*self._whose, what, message, detail])}\n".encode())


def read_journals(directory: str) -> list[Note]:
    """Read what all processes have noted; each process's notes are in its order."""
    return [
        Note(*json.loads(line))
        for path in Path(directory).glob("*.journal")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
