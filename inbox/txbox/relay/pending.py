"""Which lanes have messages to send, and from which position on, as one relay remembers it.

This memory only says where to look. The database decides what is sent, and who may send it. A relay that dies loses
this memory and nothing else; the next one begins by reading the whole outbox.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from txbox.bounded_memory import MOST_DESTINATIONS, Recent
from txbox.outbox.lanes import LANES_PER_DESTINATION, destination_of

LOCKED_SECONDS = 0.02
"""How long a lane that another relay has locked is left alone, the first time."""

MAX_LOCKED_SECONDS = 0.5
"""The longest such pause."""

FEW_LANES = 16
"""A claim takes this many lanes even if other threads are idle: that is less work than a transaction for each."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Some lanes of one destination, for one thread."""

    # Lanes that have new messages, each with the position from which to read.
    fresh: Mapping[int, int] = field(default_factory=dict)
    due: frozenset[int] = frozenset()  # lanes with a held key that is due
    server: str = ""  # which run of which server answered
    generation: int = 0  # generation of the scheduler's memory; see ``Scheduler``
    answered: bool = True  # whether the destination answered last time; False for a new one

    @property
    def lanes(self) -> frozenset[int]:
        return self.due | self.fresh.keys()

    @property
    def destination(self) -> int:
        return destination_of(min(self.lanes))


class PendingLanes:
    """The lanes that have messages to send. Not thread-safe.

    A lane is in at most one claim; what is added to it meanwhile waits for the next one.
    """

    def __init__(self, most_lanes: int = 1_000) -> None:
        """Start empty; a claim has at most ``most_lanes``."""
        self._most_lanes = most_lanes
        self._fresh: dict[int, int] = {}
        self._due: set[int] = set()
        self._claimed: set[int] = set()
        # Lanes that wait and are in no claim, by destination; destinations in the order of their turns.
        self._waiting: dict[int, set[int]] = {}
        self._paused: Recent[int, float] = Recent()
        self._held_back: frozenset[int] = frozenset()
        self._locked: Recent[int, tuple[float, float]] = Recent(MOST_DESTINATIONS * LANES_PER_DESTINATION)

    def __bool__(self) -> bool:
        return bool(self._fresh or self._due)

    def add(self, fresh: Mapping[int, int], due: Iterable[int] = ()) -> None:
        """Add lanes with new messages from these positions on, and lanes with held keys that are due."""
        for lane, position in fresh.items():
            self._fresh[lane] = min(position, self._fresh.get(lane, position))
            self._wait(lane)
        for lane in due:
            self._due.add(lane)
            self._wait(lane)

    def forget(self) -> None:
        """Remove all lanes that wait. Claims, pauses and locks stay."""
        self._fresh.clear()
        self._due.clear()
        self._waiting.clear()

    def take(
        self,
        now: float,
        *,
        rank: Callable[[int], int | None] = lambda _: 0,
        parts: Callable[[int], int] = lambda _: 1,
        most_lanes: float = math.inf,
    ) -> Claim | None:
        """Take lanes of one destination, each destination in turn; return None if there are none.

        Args:
            now: by the clock of ``pause``.
            rank: returns a destination's rank, or None if it may not be taken now. 0 is the lowest, and comes first.
            parts: returns among how many threads a destination's lanes are divided.
            most_lanes: the limit for this claim, if lower than the general one.
        """
        best: tuple[int, int, list[int]] | None = None
        for destination, waiting in self._waiting.items():
            if destination in self._held_back or self._paused.get(destination, -math.inf) > now:
                continue
            if (of := rank(destination)) is None:
                continue
            if best is not None and best[0] <= of:
                continue
            if lanes := sorted(lane for lane in waiting if self._locked_until(lane) <= now):
                best = of, destination, lanes
                if of == 0:
                    break
        if best is None:
            return None
        _, destination, lanes = best
        each = max(FEW_LANES, -(-len(lanes) // parts(destination)))
        return self._claim(destination, lanes[: int(min(each, most_lanes, self._most_lanes))])

    @property
    def destinations(self) -> int:
        """How many destinations have lanes that wait and are not held back."""
        return len(self._waiting) if not self._held_back else len(self._waiting.keys() - self._held_back)

    def release(self, claim: Claim) -> None:
        """Give lanes back; call ``add`` for what is left to do in them."""
        for lane in claim.lanes:
            self._claimed.discard(lane)
            if lane in self._fresh or lane in self._due:
                self._wait(lane)

    def pause(self, claim: Claim, until: float) -> None:
        """Take no lanes of this claim's destination until ``until``."""
        self._paused[claim.destination] = until

    def hold_back(self, destinations: frozenset[int]) -> None:
        """Take no lanes of these destinations, and only of these, until the next call."""
        self._held_back = destinations

    def mark_unlocked(self, lanes: Iterable[int]) -> None:
        """Record that this relay could lock these lanes."""
        for lane in lanes:
            self._locked.pop(lane, None)

    def mark_locked(self, lanes: Iterable[int], now: float) -> None:
        """Leave these lanes alone for a while because another relay has locked them; longer each time."""
        for lane in lanes:
            _, pause = self._locked.get(lane, (now, LOCKED_SECONDS / 2))
            pause = min(2 * pause, MAX_LOCKED_SECONDS)
            self._locked[lane] = now + pause, pause

    def next_change(self, after: float = -math.inf) -> float:
        """Return the first time after ``after`` at which a waiting lane may be taken; infinity if there is none."""
        changes = (
            max(self._paused.get(destination, -math.inf), min(map(self._locked_until, waiting)))
            for destination, waiting in self._waiting.items()
            if destination not in self._held_back
        )
        return min((change for change in changes if change > after or after == -math.inf), default=math.inf)

    def _wait(self, lane: int) -> None:
        if lane not in self._claimed:
            self._waiting.setdefault(destination_of(lane), set()).add(lane)

    def _claim(self, destination: int, lanes: list[int]) -> Claim:
        left = self._waiting.pop(destination).difference(lanes)
        if left:
            self._waiting[destination] = left  # behind all others
        self._claimed.update(lanes)
        due = self._due.intersection(lanes)
        self._due -= due
        return Claim({lane: self._fresh.pop(lane) for lane in lanes if lane in self._fresh}, frozenset(due))

    def _locked_until(self, lane: int) -> float:
        return self._locked.get(lane, _NOT_LOCKED)[0]


_NOT_LOCKED = (-math.inf, 0.0)
