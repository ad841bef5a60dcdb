"""What becomes of the messages of a batch after they were sent, or were not. Pure, no I/O."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from txbox.relay.publisher import OutboxMessage, Refused

__all__ = ["BatchSettlement", "HeldKey", "Row", "settle"]


class HeldKey(NamedTuple):
    """A key of a lane that has a failed message."""

    lane: int
    destination: str
    key: str


@dataclass(slots=True)
class Row:
    """A message with its place in the outbox.

    Attributes:
        lane, position: its place.
        held: whether its key was held when it was read.
        message: the message.
        age: how long ago it was published when it was read, in seconds by the database's clock.
        flaw: why it cannot be sent to any destination; None if it can.
    """

    lane: int
    position: int
    held: bool
    message: OutboxMessage
    age: float = 0.0
    flaw: str | None = None

    @property
    def ordered(self) -> HeldKey | None:
        """Whose order it keeps; None if it has no key."""
        key = self.message.key
        return None if key is None else HeldKey(self.lane, self.message.destination, key)


@dataclass(slots=True)
class BatchSettlement:
    """What is to be done with the rows of a batch.

    Attributes:
        sent: gone.
        again: refused, to be sent again after a while; the key of each is held.
        dead: refused for the last time, to be parked as dead letters.
        behind: not tried because a message of their key before them was refused, or their key was held; to be held.
        moved: keys that were held and of which messages are gone: the next one of each is due.
        left: not tried because the broker could not be reached; they stay as they are.
    """

    sent: list[Row] = field(default_factory=list)
    again: list[tuple[Row, Refused]] = field(default_factory=list)
    dead: list[tuple[Row, Refused]] = field(default_factory=list)
    behind: list[Row] = field(default_factory=list)
    moved: set[HeldKey] = field(default_factory=set)
    left: list[Row] = field(default_factory=list)


def settle(
    rows: Sequence[Row],
    sent: Set[int],
    refused: Mapping[int, Refused],
    *,
    held: Iterable[HeldKey],
    max_attempts: int | None,
) -> BatchSettlement:
    """Decide what becomes of each row.

    Args:
        rows: those that were read, in their order.
        sent: positions of those that the broker has confirmed.
        refused: by position, those that were refused. What is in neither was not tried.
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
