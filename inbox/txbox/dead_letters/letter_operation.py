"""An operation as it is on record: what is done with many letters, and what became of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import RowMapping

from txbox.dead_letters.letter import Reason
from txbox.postgres.sql import with_moments

PENDING = "pending"
"""Among the outcomes of an operation: letters that are left."""


class OperationKind(StrEnum):
    """What is done with the letters of an operation."""

    REDRIVE = "redrive"
    """They are sent through again."""
    DISCARD = "discard"
    """They are given up."""


class LetterOutcome(StrEnum):
    """What became of a letter of an operation."""

    REDRIVEN = "redriven"
    """It was sent to its source, or put into the outbox again."""
    DISCARDED = "discarded"
    """It was given up."""
    GONE = "gone"
    """It was redriven or discarded by another process meanwhile, or before; or it was deleted."""
    PROCESSED = "processed"
    """Its message was processed since; nothing was sent."""
    FAILED = "failed"
    """It could not be sent, and waits; carrying the operation out once more tries it again."""


@dataclass(frozen=True, slots=True)
class LetterCount:
    """How many letters of a subscriber and a reason a filter means, and since when the oldest has been parked.

    ``behind``: how many of them a redrive refuses, as a letter before them in their key waits that it does not send.
    """

    subscriber_id: str
    reason: Reason
    letters: int
    oldest_at: datetime | None
    behind: int = 0


@dataclass(frozen=True, slots=True)
class LetterResult:
    """What became of one letter; ``error`` says why, if it was neither redriven nor discarded.

    ``to_outbox``: a relay's letter, which was put into the outbox again.
    """

    dead_letter_id: int
    outcome: LetterOutcome
    error: str | None = None
    to_outbox: bool = False


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key that letters of an operation have, and that is held.

    Attributes:
        subscriber_id: whose letters.
        order_key: the FIFO group, or the key.
        dead_letter_id: the first letter that waits, or else the first one whose copy is on its way.
        waits: it is not on its way.
        stuck: it does not only wait for its turn: it takes a person.
    """

    subscriber_id: str
    order_key: str
    dead_letter_id: int
    waits: bool
    stuck: bool


@dataclass(frozen=True, slots=True)
class LetterOperation:
    """A redrive or a discard, as it is on record.

    Attributes:
        operation_id: its number.
        kind: redrive or discard.
        filter: by which its letters were selected; plain values.
        options: how it is carried out; those of ``LetterOperations.select``.
        note: why.
        requested_by: who asked for it.
        requested_at: when its letters were selected, by the database's clock.
        finished_at: when the last of them was done; None: some are left, or have failed, or keys are to be freed.
        outcomes: how many of its letters have each outcome; ``pending`` are those that are left.
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
    """Return an operation from a row of the statement ``operations``."""
    return LetterOperation(**{**with_moments(row, "requested_at", "finished_at"), "kind": OperationKind(row["kind"])})
