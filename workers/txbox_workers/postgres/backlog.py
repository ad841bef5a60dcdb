"""The backlog: what one process knows of the messages in its lanes. No I/O, no clock, not thread-safe.

It remembers from which position on each lane is to be read, and every message that was read and is not settled yet::

    fresh lanes ── read ──> ready ── take ──> in hand ── settle ──> forgotten
                     │        ^                  │
                     v        └─── fetched ──────┤
                  waiting  <──── hand back ──────┘      for a time, or behind an earlier message of its key

Where the order of keys is kept, at most ``ahead`` messages of a key are ready, and only those of one ``take`` are in
hand: if one of them fails, none of those behind it is on its way elsewhere. Of the rest only the positions are kept, so
a slow key takes no room from the others. The database has all of it: what is lost here is found again.
"""

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_BEHIND = 100_000
"""How many positions of one lane wait behind others of their keys before the lane is read no further."""


MAX_PASSED_OVER = 100
"""How many messages a take passes over to find more that may go together."""


class WaitingMessage(NamedTuple):
    """A message as it was read."""

    lane: int
    position: int
    place: str  # of the row, for a statement whose plan does not depend on statistics
    transaction_id: int
    message_id: str
    body: bytes
    key: str | None
    headers: str
    attempts: int
    published_at: int | None  # microseconds
    due_in: float | None  # seconds, if it has failed and holds its place; None: it may be processed


@dataclass(frozen=True, slots=True)
class LaneOrigin:
    """How far a lane had been worked on when it was claimed."""

    begun_to: int = 0  # messages up to this position may have been begun by a process that has crashed
    before: int = 0  # if transactions before this one have published them


@dataclass(slots=True)
class _KeyQueue:
    lane: int
    active: int = 0  # messages that are ready, in hand, or being fetched
    in_hand: int = 0
    behind: list[int] = field(default_factory=list)  # positions, sorted
    not_before: float = 0.0


class LaneBacklog:
    def __init__(self, *, ordered: bool, ahead: int) -> None:
        """``ordered`` keeps the order of keys; ``ahead`` is how many messages of a key are taken at once."""
        self._ordered = ordered
        self._ahead = ahead
        self._lanes: dict[int, LaneOrigin] = {}
        self._draining: dict[int, int] = {}  # lanes, each with what its mark must stay at; see ``drained``
        self._fresh: dict[int, int] = {}
        self._ready: deque[WaitingMessage] = deque()
        self._in_hand: dict[int, tuple[int, str | None]] = {}  # by position: lane and key
        self._known: dict[int, int] = {}  # the lane of each position that is ready, in hand, waiting or being fetched
        self._returns: dict[int, int] = {}  # by position, how often it was handed back and is not counted in its row
        self._settled: set[int] | None = None  # positions settled since the read in progress began
        self._later: list[tuple[float, int]] = []  # a heap: when, position
        self._keys: dict[str, _KeyQueue] = {}
        self._due_keys: list[tuple[float, str]] = []  # a heap; what is out of date is skipped
        self._behind: Counter[int] = Counter()  # by lane

    # --- lanes --------------------------------------------------------------------------------------------------------

    @property
    def lanes(self) -> Collection[int]:
        return self._lanes.keys()

    def add(self, lanes: Mapping[int, LaneOrigin]) -> None:
        """Begin to work on lanes."""
        for lane, origin in lanes.items():
            self._lanes[lane] = origin
            self._fresh[lane] = 0

    def drain(self, count: int) -> None:
        """Take nothing more from ``count`` lanes in all."""
        if (more := count - len(self._draining)) > 0:
            idle = sorted(self._lanes.keys() - self._draining.keys(), key=self._busy_lanes().__getitem__)[:more]
            suspects = self._suspects()
            for lane in idle:
                self._draining[lane] = self._lanes[lane].begun_to if lane in suspects else 0
                self._fresh.pop(lane, None)
            self._forget(self._draining)

    def drained(self) -> dict[int, int]:
        """Return the lanes that are drained and of which nothing is in hand, and forget them.

        The values are the positions up to which a process that has crashed may have begun what is left; 0: none is.
        """
        busy = self._busy_lanes()
        done = {lane: mark for lane, mark in self._draining.items() if not busy[lane]}
        self.lose(done)
        return done

    def lose(self, lanes: Collection[int]) -> None:
        """Forget lanes. What is in hand of them may still be settled."""
        lanes = set(lanes)
        for lane in lanes:
            self._lanes.pop(lane, None)
            self._fresh.pop(lane, None)
            self._draining.pop(lane, None)
        self._forget(lanes)

    def _suspects(self) -> set[int]:
        """Return the lanes that may have messages which a process that has crashed may have begun."""
        unread = {lane for lane, at in self._fresh.items() if at <= self._lanes[lane].begun_to}
        known = self._known.items()
        return unread | {lane for at, lane in known if lane in self._lanes and at <= self._lanes[lane].begun_to}

    def _busy_lanes(self) -> Counter[int]:
        return Counter(lane for lane, _ in self._in_hand.values())

    def _forget(self, lanes: Collection[int]) -> None:
        """Forget what is not in hand of some lanes."""
        self._ready = deque(row for row in self._ready if row.lane not in lanes)
        self._known = {at: lane for at, lane in self._known.items() if lane not in lanes or at in self._in_hand}
        self._returns = {at: count for at, count in self._returns.items() if at in self._known}
        self._later = [one for one in self._later if one[1] in self._known]
        heapq.heapify(self._later)
        for name, key in list(self._keys.items()):
            if key.lane in lanes:
                key.behind.clear()
                key.active = key.in_hand
                if not key.active:
                    del self._keys[name]
        for lane in lanes:
            self._behind.pop(lane, None)

    # --- reading ------------------------------------------------------------------------------------------------------

    def found(self, fresh: Mapping[int, int]) -> bool:
        """Note from which positions on lanes have something new; return whether any is ours."""
        ours = {lane: at for lane, at in fresh.items() if lane in self._lanes and lane not in self._draining}
        for lane, position in ours.items():
            self._fresh[lane] = min(position, self._fresh.get(lane, position))
        return bool(ours)

    def to_read(self) -> dict[int, int]:
        """Return the lanes to read, and from which positions on; ``read`` must follow, or ``lose``."""
        wanted = {lane: at for lane, at in self._fresh.items() if self._behind[lane] < MAX_BEHIND}
        for lane in wanted:
            del self._fresh[lane]
        if wanted:
            self._settled = set()
        return wanted

    def read(
        self, wanted: Mapping[int, int], rows: Sequence[WaitingMessage], *, each_limit: int, cut: bool, now: float
    ) -> None:
        """Take what was read. ``cut`` says that there was more than was returned."""
        settled, self._settled = self._settled or set(), None
        counts, ends = Counter(row.lane for row in rows), {row.lane: row.position + 1 for row in rows}
        self.found({lane: ends.get(lane, at) for lane, at in wanted.items() if cut or counts[lane] >= each_limit})
        for row in rows:
            if row.lane not in self._lanes or row.lane in self._draining:
                continue
            if row.position in self._known or row.position in settled:
                continue
            self._known[row.position] = row.lane
            if row.due_in is not None:
                self._wait(row.position, row.lane, row.key, now + row.due_in)
                continue
            if self._ordered and row.key is not None:
                key = self._keys.get(row.key)
                if key is None:
                    key = self._keys[row.key] = _KeyQueue(row.lane)
                elif key.behind or key.active >= self._ahead or key.not_before > now:
                    self._put_behind(key, row.position)
                    continue
                key.active += 1
            self._ready.append(row)

    def due(self, now: float, most: int) -> dict[int, int]:
        """Return the lane of each position to fetch again; ``fetched`` must follow, or ``lose``."""
        wanted: dict[int, int] = {}
        while self._later and self._later[0][0] <= now and len(wanted) < most:
            position = heapq.heappop(self._later)[1]
            wanted[position] = self._known[position]
        while self._due_keys and self._due_keys[0][0] <= now and len(wanted) < most:
            key = self._keys.get(heapq.heappop(self._due_keys)[1])
            if key is None or key.active or not key.behind or key.not_before > now:
                continue
            taken, key.behind = key.behind[: self._ahead], key.behind[self._ahead :]
            key.active = len(taken)
            self._behind[key.lane] -= len(taken)
            wanted |= dict.fromkeys(taken, key.lane)
        return wanted

    def fetched(self, wanted: Mapping[int, int], rows: Sequence[WaitingMessage], now: float) -> None:
        """Take what was fetched. What is missing is gone: somebody else has settled it."""
        there = {row.position for row in rows}
        self._ready.extend(row for row in rows if row.position in self._known)
        gone = wanted.keys() - there
        if not gone:
            return
        for position in gone:
            self._known.pop(position, None)
            self._returns.pop(position, None)
        if self._ordered:  # whose they were is not known any more: count anew
            ready = Counter(row.key for row in self._ready)
            for name, key in list(self._keys.items()):
                key.active = key.in_hand + ready[name]
                self._next_of(name, key, now)

    # --- processing ---------------------------------------------------------------------------------------------------

    def take(self, most: int) -> list[WaitingMessage]:
        """Take up to ``most`` messages in hand: those of one key that has several, or of keys that have one.

        They are handled one after the other, so a slow key must not be among others.
        """
        rows: list[WaitingMessage] = []
        passed_over: list[WaitingMessage] = []
        taken: Counter[str] = Counter()
        alone: str | None = None
        while self._ready and len(rows) < most and len(passed_over) < MAX_PASSED_OVER:
            row = self._ready.popleft()
            name = row.key if self._ordered else None
            if name is not None:
                key = self._keys.setdefault(name, _KeyQueue(row.lane, active=1))
                is_crowded = key.active > 1 or bool(key.behind)
                if key.in_hand or (key.behind and key.behind[0] < row.position):  # those before it come first
                    key.active -= 1
                    self._put_behind(key, row.position)
                    if not key.active:
                        heapq.heappush(self._due_keys, (key.not_before, name))
                    continue
                if rows and name != alone and (alone or is_crowded):
                    passed_over.append(row)
                    continue
                if is_crowded:
                    alone = name
                taken[name] += 1
            elif alone:
                passed_over.append(row)
                continue
            self._in_hand[row.position] = row.lane, name
            rows.append(row)
        self._ready.extendleft(reversed(passed_over))
        for name, count in taken.items():
            self._keys[name].in_hand = count
        return rows

    def is_suspect(self, row: WaitingMessage) -> bool:
        """Whether a process that has crashed may have been working on a message."""
        origin = self._lanes.get(row.lane)
        return origin is not None and row.position <= origin.begun_to and row.transaction_id < origin.before

    def settle(self, position: int, now: float) -> None:
        """Forget a message in hand: it is settled, or the database has it among those that wait."""
        _, name = self._in_hand.pop(position, (0, None))
        self._known.pop(position, None)
        self._returns.pop(position, None)
        if self._settled is not None:
            self._settled.add(position)
        self._let_go(name, now)

    def returns(self, position: int) -> int:
        """Return how often a message was handed back here, apart from what its row counts."""
        return self._returns.get(position, 0)

    def hand_back(self, position: int, not_before: float, now: float, *, counts: bool = False) -> None:
        """Let a message in hand wait, and with it what is behind it. ``counts`` counts it among ``returns``."""
        if position not in self._in_hand:
            return
        lane, name = self._in_hand.pop(position)
        if lane in self._lanes and lane not in self._draining:
            if counts:
                self._returns[position] = self._returns.get(position, 0) + 1
            self._wait(position, lane, name, not_before)
        else:
            self._known.pop(position, None)
            self._returns.pop(position, None)
        self._let_go(name, now)

    def next_due(self) -> float:
        """Return when the next message is due, at the earliest; infinity if none waits."""
        return min([heap[0][0] for heap in (self._later, self._due_keys) if heap], default=float("inf"))

    def wake(self, heads: Iterable[tuple[int, int, str]], now: float) -> None:
        """Make messages due that hold their keys: somebody wants them tried again now, or nobody here knows of them.

        ``heads`` has lane, position and key. A head is unknown if a process that had lost its claims postponed it.
        """
        wanted = set()
        for lane, position, key in heads:
            wanted.add(position)
            if position not in self._known and lane in self._lanes and lane not in self._draining:
                self._known[position] = lane
                self._wait(position, lane, key, now)
        for name, queue in self._keys.items():
            if queue.behind and queue.behind[0] in wanted and queue.not_before > now:
                queue.not_before = now
                heapq.heappush(self._due_keys, (now, name))

    def _wait(self, position: int, lane: int, name: str | None, not_before: float) -> None:
        if name is None or not self._ordered:
            heapq.heappush(self._later, (not_before, position))
            return
        key = self._keys.setdefault(name, _KeyQueue(lane))
        self._put_behind(key, position)
        key.not_before = max(key.not_before, not_before)
        if key.active > key.in_hand:  # what is ready of it must wait, too
            for row in [row for row in self._ready if row.key == name]:
                self._ready.remove(row)
                self._put_behind(key, row.position)
            key.active = key.in_hand
        if not key.active:
            heapq.heappush(self._due_keys, (key.not_before, name))

    def _put_behind(self, key: _KeyQueue, position: int) -> None:
        insort(key.behind, position)
        self._behind[key.lane] += 1

    def _let_go(self, name: str | None, now: float) -> None:
        """Count one message of a key less in hand."""
        if name is not None and (key := self._keys.get(name)) is not None:
            key.in_hand -= 1
            key.active -= 1
            self._next_of(name, key, now)

    def _next_of(self, name: str, key: _KeyQueue, now: float) -> None:
        """Let the next messages of a key come, once those before them are settled."""
        if key.active > 0:
            return
        if key.behind:
            heapq.heappush(self._due_keys, (max(key.not_before, now), name))
        else:
            del self._keys[name]
