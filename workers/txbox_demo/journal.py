"""Journals: what each process saw, written so that SIGKILL cannot take it back.

A process's own counters die with it. So every worker appends one line when it receives a delivery and one when the
outcome stands, straight to a file: what ``os.write`` was given, the kernel keeps. What was received and has no
outcome was in a process's hands when it was killed. What else processes have done, they note in the same way.

The last line of a journal may be torn: a kernel copies a write page by page and looks for a deadly signal in between,
so a process killed inside ``os.write`` leaves a part of it. A line without its end is left out, and nothing is lost
with it. A torn "received": the worker had not begun to process, and the delivery comes again. A torn outcome: the
delivery counts as one in the hands of a killed worker, which it was.
"""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from txbox import Outcome
from txbox.instrumentation import Event, Received, Settled

__all__ = ["Diary", "Journal", "Sightings", "read_diaries", "read_journals", "read_notes"]

_RECEIVED = "received"
_OF_DELIVERIES = frozenset({_RECEIVED, *(outcome.value for outcome in Outcome)})
"""No note begins with one of these."""


class Journal:
    """Writes one process's journal; an instance is a hook of workers."""

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

    def note(self, what: str, names: Iterable[str]) -> None:
        """Write down that something has happened to each of these, a line for each."""
        self._append("".join(f"{what} {name}\n" for name in names))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, lines: Iterable[tuple[str, str, str]]) -> None:
        self._append("".join(f"{what} {_short(delivery)} {message}\n" for what, delivery, message in lines))

    def _append(self, text: str) -> None:
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


@dataclass(slots=True)
class Diary:
    """What one process has noted.

    Attributes:
        notes: by what has happened, which names, how often each.
        outcomes: of each message, the outcomes of its deliveries.
    """

    notes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    outcomes: defaultdict[str, Counter[Outcome]] = field(default_factory=lambda: defaultdict(Counter))


def read_journals(directory: Path, role: str) -> Sightings:
    """Read the journals of every worker process of one role."""
    sightings = Sightings()
    for _, what, delivery, message in _lines(directory, role):
        if what == _RECEIVED:
            sightings.received[delivery] = message
        elif delivery:
            sightings.outcomes[delivery] = Outcome(what)
    return sightings


def read_notes(directory: Path, role: str) -> Mapping[str, Counter[str]]:
    """Read what the processes of one role have noted: by what has happened, which names, how often each."""
    notes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for diary in read_diaries(directory, role).values():
        for what, names in diary.notes.items():
            notes[what].update(names)
    return notes


def read_diaries(directory: Path, role: str) -> Mapping[str, Diary]:
    """Read what each process of one role has noted, by its name (``Orders.process``)."""
    diaries: defaultdict[str, Diary] = defaultdict(Diary)
    for process, what, delivery, name in _lines(directory, role):
        if not delivery:
            diaries[process].notes[what][name] += 1
        elif what != _RECEIVED:
            diaries[process].outcomes[name][Outcome(what)] += 1
    return diaries


def _lines(directory: Path, role: str) -> Iterator[tuple[str, str, str, str]]:
    """Read every line: whose, what happened, to which delivery (of a note: none), and to which message or name."""
    for path in sorted(directory.glob(f"{role}-*.journal")):
        whole, _, _torn = path.read_text().rpartition("\n")
        for line in whole.splitlines():
            what, name = line.split(" ", 1)
            delivery = ""
            if what in _OF_DELIVERIES:
                delivery, name = name.split(" ", 1)
            yield path.stem, what, delivery, name


def _short(delivery_id: str) -> str:
    """Return a receipt handle in short: real ones have hundreds of characters."""
    return hashlib.blake2s(delivery_id.encode(), digest_size=12).hexdigest()
