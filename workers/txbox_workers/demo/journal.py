"""Journals: what each worker process saw, written so that SIGKILL cannot take it back.

A worker's own counters die with it. So every process appends one line when it receives a delivery and one when the
outcome stands, straight to a file: what ``os.write`` was given, the kernel keeps. What was received and has no
outcome was in a process's hands when it was killed.

The last line of a journal may be torn: a kernel copies a write page by page and looks for a deadly signal in between,
so a process killed inside ``os.write`` leaves a part of it. A line without its end is left out, and nothing is lost
with it. A torn "received": the worker had not begun to process, and the delivery comes again. A torn outcome: the
delivery counts as one in the hands of a killed worker, which it was.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from txbox import Outcome
from txbox.instrumentation import Event, Received, Settled

__all__ = ["Journal", "Sightings", "read_journals"]

_RECEIVED = "received"


class Journal:
    """Writes one process's journal; an instance is a hook."""

    def __init__(self, path: Path) -> None:
        """Open the journal.

        Args:
            path: the file, appended to.
        """
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def __call__(self, event: Event) -> None:
        """Write down what was received, and what became of it."""
        match event:
            case Received():
                pairs = zip(event.delivery_ids, event.message_ids, strict=True)
                self._write((_RECEIVED, delivery, message) for delivery, message in pairs)
            case Settled():
                self._write([(event.outcome.value, event.delivery_id, event.message_id)])
            case _:
                pass

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, lines: Iterable[tuple[str, str, str]]) -> None:
        text = "".join(f"{what} {_short(delivery)} {message}\n" for what, delivery, message in lines)
        rest = text.encode()
        while rest:
            rest = rest[os.write(self._file, rest) :]


@dataclass(slots=True)
class Sightings:
    """What all worker processes saw together.

    Attributes:
        received: the message id of every delivery.
        outcomes: what became of each delivery of which that is known.
    """

    received: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def read_journals(directory: Path) -> Sightings:
    """Read the journals of every process."""
    sightings = Sightings()
    for path in sorted(directory.glob("*.journal")):
        whole, _, _torn = path.read_text().rpartition("\n")
        for line in whole.splitlines():
            what, delivery, message = line.split(" ", 2)
            if what == _RECEIVED:
                sightings.received[delivery] = message
            else:
                sightings.outcomes[delivery] = Outcome(what)
    return sightings


def _short(delivery_id: str) -> str:
    """Return a receipt handle in short: real ones have hundreds of characters."""
    return hashlib.blake2s(delivery_id.encode(), digest_size=12).hexdigest()
