"""The record of an operation: what is done with many letters, and the outcome of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import RowMapping

from txbox.dead_letters.letter import Reason
from txbox.postgres.sql import with_moments

PENDING = "pending"
"""The key in an operation's outcomes that counts the letters left."""


class OperationKind(StrEnum):
    """What an operation does with its letters."""

    REDRIVE = "redrive"
    """Send them through again."""
    DISCARD = "discard"
    """Give them up."""


class LetterOutcome(StrEnum):
    """What became of one letter of an operation."""

    REDRIVEN = "redriven"
    """It was sent to its source, or put into the outbox again."""
    DISCARDED = "discarded"
    """It was given up."""
    GONE = "gone"
    """Another process redrove or discarded it, or it was deleted."""
    PROCESSED = "processed"
    """Its message was processed since it was parked; nothing was sent."""
    FAILED = "failed"
    """It could not be sent, and still waits. Carrying the operation out again retries it."""


@dataclass(frozen=True, slots=True)
class LetterCount:
    """How many letters of a subscriber and a reason a filter matches, and when the oldest of them was parked.

    ``behind``: how many of them a redrive refuses, because an earlier letter of their key waits and is not redriven.
    """

    subscriber_id: str
    reason: Reason
    letters: int
    oldest_at: datetime | None
    behind: int = 0


@dataclass(frozen=True, slots=True)
class LetterResult:
    """What became of one letter; ``error`` says why it was neither redriven nor discarded.

    ``to_outbox``: it was a relay's letter, and went back into the outbox.
    """

    dead_letter_id: int
    outcome: LetterOutcome
    error: str | None = None
    to_outbox: bool = False


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A held key of an operation's letters.

    Attributes:
        subscriber_id: whose letters.
        order_key: the FIFO group, or the key.
        dead_letter_id: the first letter that waits, or else the first one whose copy is on its way.
        waits: whether that letter still waits, rather than its copy being on its way.
        stuck: whether it needs a person, rather than only its turn.
    """

    subscriber_id: str
    order_key: str
    dead_letter_id: int
    waits: bool
    stuck: bool


@dataclass(frozen=True, slots=True)
class LetterOperation:
    """A redrive or a discard on record.

    Attributes:
        operation_id: its number.
        kind: redrive or discard.
        filter: the filter that selected its letters, as plain values.
        options: how it is carried out, as given to ``LetterOperations.select``.
        note: why.
        requested_by: who asked for it.
        requested_at: when its letters were selected, by the database's clock.
        finished_at: when the last letter was done; None: letters are left or have failed, or keys are still held.
        outcomes: how many of its letters have each outcome; ``pending`` counts those that are left.
    """

    operation_id: int
    kind: OperationKind
    filter: Mapping[str, Any]
    options: Mapping[str, Any]
    note: str | None
    requested_by: str
    requested_at: datetime
    finished_at: datetime | None
    outcomes: Mapping[str, int] = field(default_factory=dict)

    @property
    def letters(self) -> int:
        """How many letters were selected."""
        return sum(self.outcomes.values())

    @property
    def pending(self) -> int:
        """How many letters are left."""
        return self.outcomes.get(PENDING, 0)


def operation_from(row: RowMapping) -> LetterOperation:
    """Return the operation of a row of the statement ``operations``."""
    return LetterOperation(**{**with_moments(row, "requested_at", "finished_at"), "kind": OperationKind(row["kind"])})
