"""Which destination may have another sender, so that those that hang keep none from those that answer. Pure, no I/O.

A sender is a thread and a connection, and a publisher that hangs keeps it until it gives up. So destinations are told
apart by how they answered last:

======  =======================================================  ============================================
quick   it answers within ``SLOW_SECONDS``                       ``senders`` of them together
slow    it answers, later                                        together at most ``most - senders``, and each
new     it has not been tried                                    of these two kinds leaves the other a quarter
away    it could not be sent to                                  (new and away count as one kind)
======  =======================================================  ============================================

A destination that is new or away has one sender at a time. A call that has been under way for longer than
``SLOW_SECONDS`` makes its destination a slow one at once: its sender counts as one of the slow, another is started in
its place, and the destination has no further one until it answers. There are never more senders than ``most``.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from txbox.bounded_memory import Recent

__all__ = ["SLOW_SECONDS", "Shares", "Standing", "Work"]

SLOW_SECONDS = 0.5
"""A publisher's call that takes longer is a slow one."""


class Standing(IntEnum):
    """How a destination has answered last; who comes first, if both may have a sender."""

    QUICK = 0
    SLOW = 1
    NEW = 2
    AWAY = 3


@dataclass(frozen=True, slots=True)
class Work:
    """A claim that is under way.

    Attributes:
        destination: its number.
        standing: of the destination, when the claim was taken.
        hangs: a call of it has taken longer than ``SLOW_SECONDS``, and has not returned.
    """

    destination: int
    standing: Standing
    hangs: bool = False


class Shares:
    """What is left of the senders. Not for several threads at once."""

    def __init__(self, senders: int, most: int) -> None:
        """Know of no destination at first.

        Args:
            senders: for those that answer quickly.
            most: senders in all; no fewer.
        """
        self.senders = senders
        self.most = most
        # Where there are no more than the usual ones, those in doubt may have half of them.
        self._doubtful = max(most - senders, senders // 2, 1)
        self._kept_apart = self._doubtful // 4
        self._standings: Recent[int, Standing] = Recent()
        self._each: Counter[int] = Counter()
        self._hanging: set[int] = set()
        self._quick = self._slow = self._unanswered = 0

    def answered(self, destination: int, seconds: float) -> None:
        """Remember that a destination has answered, and how long its slowest call took."""
        self._standings[destination] = Standing.SLOW if seconds > SLOW_SECONDS else Standing.QUICK

    def away(self, destination: int) -> None:
        """Remember that a destination could not be sent to."""
        self._standings[destination] = Standing.AWAY

    def standing(self, destination: int) -> Standing:
        """Return how a destination has answered last."""
        return self._standings.get(destination, Standing.NEW)

    def count(self, under_way: Iterable[Work]) -> None:
        """Take in what is under way now; what ``rank``, ``free`` and ``wanted`` say is about that."""
        self._each, self._hanging = Counter(), set()
        self._quick = self._slow = self._unanswered = 0
        for work in under_way:
            self._each[work.destination] += 1
            if work.hangs:
                self._hanging.add(work.destination)
            if work.standing >= Standing.NEW:
                self._unanswered += 1
            elif work.hangs or work.standing is Standing.SLOW:
                self._slow += 1
            else:
                self._quick += 1

    def rank(self, destination: int, *, alone: bool) -> int | None:
        """Return whether a destination may have another sender: None if not, else who comes first by the lower number.

        Args:
            destination: its number.
            alone: no other destination has messages waiting.
        """
        standing, has = self.standing(destination), self._each[destination]
        if destination in self._hanging:
            return None
        if standing is Standing.QUICK:
            others = not alone or len(self._each) > (has > 0)
            most = max(self.senders // 2, 1) if others else self.senders
            return standing if self._quick < self.senders and has < most else None
        of_its_kind = self._slow if standing is Standing.SLOW else self._unanswered
        most = max((self._doubtful - self._kept_apart) // 2, 1) if standing is Standing.SLOW else 1
        room = self._slow + self._unanswered < self._doubtful and of_its_kind < self._doubtful - self._kept_apart
        return standing if room and has < most else None

    def free(self, destination: int) -> int:
        """Return among how many senders the messages of a destination may be divided now."""
        return max(self.senders - self._quick, 1) if self.standing(destination) is Standing.QUICK else 1

    @property
    def wanted(self) -> int:
        """How many senders there should be, for those that answer to have theirs."""
        return min(self.senders + self._slow + self._unanswered, self.most)
