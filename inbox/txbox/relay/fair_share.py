"""Divide senders among destinations, so that those that hang take none from those that answer. Pure, no I/O.

A sender is a thread and a connection. A publisher that hangs keeps its sender until it gives up. So destinations are
ranked by their health, which is how they answered last:

===========  ==================================================  ============================================
quick        it answers within ``SLOW_SECONDS``                  ``senders`` of them together
slow         it answers, later                                   together at most ``most - senders``, and each
new          it has not been tried                               of these two kinds leaves the other a quarter
unreachable  it could not be sent to                             (new and unreachable count as one kind)
===========  ==================================================  ============================================

A new or unreachable destination has one sender at a time. A call that takes longer than ``SLOW_SECONDS`` makes its
destination slow at once: its sender counts as a slow one, another is started in its place, and the destination gets no
further one until it answers. There are never more senders than ``most``.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from txbox.bounded_memory import Recent

SLOW_SECONDS = 0.5
"""A publisher's call that takes longer is slow."""


class DestinationHealth(IntEnum):
    """How a destination answered last; if two may have a sender, the lower number comes first."""

    QUICK = 0
    SLOW = 1
    NEW = 2
    UNREACHABLE = 3


@dataclass(frozen=True, slots=True)
class ClaimInProgress:
    destination: int  # number of the destination
    health: DestinationHealth  # of the destination when the claim was taken
    hangs: bool = False  # a publisher's call has taken longer than ``SLOW_SECONDS`` and has not returned


class FairShare:
    """Divides the senders among destinations. Not thread-safe."""

    def __init__(self, senders: int, most: int) -> None:
        """Start without destinations: ``senders`` for those that answer quickly, ``most`` in all."""
        self.senders = senders
        self.most = most
        # If there are only the usual senders, slow, new and unreachable destinations may have half of them.
        self._max_others = max(most - senders, senders // 2, 1)
        self._reserved = self._max_others // 4
        self._health: Recent[int, DestinationHealth] = Recent()
        self._claims: Counter[int] = Counter()
        self._hanging: set[int] = set()
        self._quick = self._slow = self._unanswered = 0

    def answered(self, destination: int, seconds: float) -> None:
        """Record that a destination answered, and how long its slowest call took."""
        self._health[destination] = DestinationHealth.SLOW if seconds > SLOW_SECONDS else DestinationHealth.QUICK

    def mark_unreachable(self, destination: int) -> None:
        """Record that a destination could not be sent to."""
        self._health[destination] = DestinationHealth.UNREACHABLE

    def health(self, destination: int) -> DestinationHealth:
        """Return how a destination answered last."""
        return self._health.get(destination, DestinationHealth.NEW)

    def count(self, in_progress: Iterable[ClaimInProgress]) -> None:
        """Count the claims in progress, for ``rank``, ``free_senders`` and ``wanted_senders``."""
        self._claims, self._hanging = Counter(), set()
        self._quick = self._slow = self._unanswered = 0
        for claim in in_progress:
            self.add(claim)

    def add(self, claim: ClaimInProgress) -> None:
        self._claims[claim.destination] += 1
        if claim.hangs:
            self._hanging.add(claim.destination)
        if claim.health >= DestinationHealth.NEW:
            self._unanswered += 1
        elif claim.hangs or claim.health is DestinationHealth.SLOW:
            self._slow += 1
        else:
            self._quick += 1

    def rank(self, destination: int, *, alone: bool) -> int | None:
        """Return a destination's rank for another sender, lowest first; None if it may not have one.

        ``alone``: no other destination has messages waiting.
        """
        health, has = self.health(destination), self._claims[destination]
        if destination in self._hanging:
            return None
        if health is DestinationHealth.QUICK:
            others = not alone or len(self._claims) > (has > 0)
            most = max(self.senders // 2, 1) if others else self.senders
            return health if self._quick < self.senders and has < most else None
        of_its_kind = self._slow if health is DestinationHealth.SLOW else self._unanswered
        most = max((self._max_others - self._reserved) // 2, 1) if health is DestinationHealth.SLOW else 1
        room = self._slow + self._unanswered < self._max_others and of_its_kind < self._max_others - self._reserved
        return health if room and has < most else None

    def free_senders(self, destination: int) -> int:
        """Return among how many senders a destination's messages may be divided now."""
        return max(self.senders - self._quick, 1) if self.health(destination) is DestinationHealth.QUICK else 1

    @property
    def wanted_senders(self) -> int:
        """How many senders there should be, so that destinations that answer keep theirs."""
        return min(self.senders + self._slow + self._unanswered, self.most)


CLAIMS_EACH = 4
"""Most claims of an async sender for one destination at once."""


class AsyncShare(FairShare):
    """Divides the calls of an async sender, which cost neither a thread nor a connection. Not thread-safe.

    ===================  ==========================================================================================
    quick                one claim each; up to ``CLAIMS_EACH`` while half of all are free, and none of them is slow now
    slow                 the same, while the slow, new and unreachable have less than three quarters
    new and unreachable  one claim each, and half of all together

    A quick destination that begins to hang keeps its claims until their calls end. If enough of them do so at once,
    they have all calls until then.
    """

    def __init__(self, most: int) -> None:
        """Start without destinations: ``most`` calls in all."""
        super().__init__(most, most)

    @property
    def free(self) -> int:
        """How many more claims there may be."""
        return self.most - self._quick - self._slow - self._unanswered

    def rank(self, destination: int, *, alone: bool = False) -> int | None:
        """Return a destination's rank for another claim, as in ``FairShare``."""
        del alone
        health, has = self.health(destination), self._claims[destination]
        if self.free <= 0:
            return None
        if health >= DestinationHealth.NEW:
            return health if not has and self._unanswered < max(self.most // 2, 1) else None
        if health is DestinationHealth.SLOW and 4 * (self._slow + self._unanswered) >= 3 * self.most:
            return None
        if not has:
            return DestinationHealth.QUICK  # the first one found, because there may be hundreds
        if destination in self._hanging and health is DestinationHealth.QUICK:
            return None
        return DestinationHealth.SLOW if has < CLAIMS_EACH and 2 * self.free > self.most else None
