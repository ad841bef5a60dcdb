"""Decide how the messages of a batch are settled after an attempt to send them. Pure, no I/O."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from txbox.relay.publisher import OutboxMessage, Refused


class FailedKey(NamedTuple):
    """A key of a lane that has a failed message."""

    lane: int
    destination: str
    key: str


@dataclass(slots=True)
class Row:
    """A message with its lane and position in the outbox."""

    lane: int
    position: int
    held: bool  # whether its key was held when the row was read
    message: OutboxMessage
    age: float = 0.0  # seconds since it was published, when it was read, by the database's clock
    flaw: str | None = None  # why it cannot be sent to any destination; None if it can

    @property
    def ordered(self) -> FailedKey | None:
        """The key whose order this message keeps; None if it has no key."""
        key = self.message.key
        return None if key is None else FailedKey(self.lane, self.message.destination, key)


@dataclass(slots=True)
class BatchSettlement:
    """What to do with the rows of a batch."""

    sent: list[Row] = field(default_factory=list)  # to be deleted
    # Refused, and to be sent again after a while; the key of each is held.
    again: list[tuple[Row, Refused]] = field(default_factory=list)
    # Refused for the last time, and to be parked as dead letters.
    dead: list[tuple[Row, Refused]] = field(default_factory=list)
    # Not tried, because an earlier message of their key was refused or their key was held; to be held.
    behind: list[Row] = field(default_factory=list)
    # Keys that were held and have had messages settled: the next message of each is due.
    moved: set[FailedKey] = field(default_factory=set)
    # Not tried, because the broker could not be reached; they stay as they are.
    left: list[Row] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Whether this changes anything in the outbox."""
        return bool(self.sent or self.again or self.dead or self.behind or self.moved)

    @classmethod
    def merged(cls, settlements: "Iterable[BatchSettlement]") -> "BatchSettlement":
        """Return several settlements of different rows as one."""
        every = cls()
        for one in settlements:
            every.sent += one.sent
            every.again += one.again
            every.dead += one.dead
            every.behind += one.behind
            every.moved |= one.moved
            every.left += one.left
        return every


def settle(
    rows: Sequence[Row],
    sent: Set[int],
    refused: Mapping[int, Refused],
    *,
    held: Iterable[FailedKey],
    max_attempts: int | None,
) -> BatchSettlement:
    """Decide what becomes of each row, in the order in which they were read.

    Args:
        rows: the rows of the batch.
        sent: positions of the messages that were sent.
        refused: the refusals, by position. Positions in neither ``sent`` nor ``refused`` were not tried.
        held: keys that were held before.
        max_attempts: refusals after which a message is dead; None: never.
    """
    settlement = BatchSettlement()
    holding = set(held)
    for row in rows:
        owner = row.ordered
        refusal = refused.get(row.position)
        if row.position in sent:
            settlement.sent.append(row)
        elif refusal is not None and _is_last(row, refusal, max_attempts):
            settlement.dead.append((row, refusal))
        elif refusal is not None:
            settlement.again.append((row, refusal))
            if owner is not None:
                holding.add(owner)
            continue
        elif owner is not None and owner in holding:
            if not row.held:
                settlement.behind.append(row)
            continue
        else:
            settlement.left.append(row)
            continue
        if owner is not None and row.held:
            settlement.moved.add(owner)
    return settlement


def _is_last(row: Row, refusal: Refused, max_attempts: int | None) -> bool:
    if refusal.final or max_attempts is None:
        return refusal.final
    return refusal.counted and row.message.attempts + 1 >= max_attempts
