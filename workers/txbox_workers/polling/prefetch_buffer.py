"""The prefetch buffer: deliveries received ahead that wait for a batch, and the room for more of them.

A delivery is held from its receive until it is settled. Three limits bound how many are held: ``prefetch``, the bytes
that wait, and the number that was settled in a quarter of the visibility, which bounds how long a delivery waits. So
slow handlers do not hoard what other workers could process, and a kill delays little.

Deliveries of one group (a FIFO group, or the key whose order is kept) are in one batch at a time, and in order: later
ones wait until that batch has ended. If one of them was not acked, those behind it are handed back::

    received   a1 a2 b1 a3 a4
    batch      a1 a2 b1            a is busy: a3 and a4 wait, even if a thread is free
    a2 fails   a3 a4 are handed back after it; the broker delivers a2 first again
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from txbox_workers.delivery import Delivery

WAITING_BYTES = 64 * 1024 * 1024
"""The limit for the bodies that wait. A receive already in progress may exceed it."""

VISIBILITY_SHARE = 0.25
"""The share of the visibility for which a delivery may wait."""

RATE_SECONDS = 0.5
"""The shortest time over which the rate of settlements is measured."""

CHECK_SECONDS = 0.1
"""How often a closed buffer is checked for being open again."""


class Waiting(NamedTuple):
    delivery: Delivery
    since: float  # by time.monotonic
    began_ns: int  # when its receive began, by time.time_ns


class PrefetchBuffer:
    """What one worker has received ahead. Thread-safe."""

    def __init__(
        self,
        *,
        prefetch: int,
        least: int,
        batch_size: int,
        gather_seconds: float,
        visibility_seconds: float | None,
        group: Callable[[Delivery], str | None],
        closed: Callable[[], bool],
        stopping: threading.Event,
        keeps_batches: bool = False,
    ) -> None:
        """Make an empty buffer.

        Args:
            prefetch: how many are held, at most.
            least: how many may be held, however slowly they are settled.
            batch_size: how many a batch takes, at most.
            gather_seconds: how long a smaller batch waits for more.
            visibility_seconds: how long a delivery is ours without a heartbeat; None means for ever.
            group: returns the group that keeps a delivery's order; None if there is no order.
            closed: whether nothing may be received or begun now: the worker is paused, or waits for the database.
            keeps_batches: a batch has only what was received together.
            stopping: set when the worker stops. ``empty`` is called after that.
        """
        self._prefetch = prefetch
        self._least = least
        self._batch_size = batch_size
        self._gather_seconds = gather_seconds
        self._wait_seconds = None if visibility_seconds is None else visibility_seconds * VISIBILITY_SHARE
        self._group = group
        self._closed = closed
        self._stopping = stopping
        self._keeps_batches = keeps_batches
        # One thread is woken, and it wakes the next if there is more. Waking them all, for one to find something, takes
        # an eighth of the interpreter's time.
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # threads that receive wait on it
        self._arrivals = threading.Condition(self._lock)  # threads that process wait on it
        self._ready: deque[Waiting] = deque()
        self._behind: dict[str, deque[Waiting]] = {}  # what waits for a busy group, by group
        self._bytes = 0
        self._held = 0
        self._wanted = 0  # the room that threads wait for
        self._measured_since = time.monotonic()
        self._settled = 0
        self._allowed = least if self._wait_seconds is not None else prefetch

    # --- receiving ----------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> bool:
        """Wait until ``count`` more may be held, and count them as held; return False if the worker stops."""
        with self._lock:
            while not self._stopping.is_set():
                if self._closed():
                    self._room.wait(CHECK_SECONDS)
                elif self._has_room(count):
                    self._held += count
                    self._note_room()
                    return True
                else:
                    self._wanted = count
                    self._room.wait()
            return False

    def _note_room(self) -> None:
        """Wake a thread that receives, if it would find what it waits for."""
        if self._has_room(self._wanted):
            self._room.notify()

    def _has_room(self, count: int) -> bool:
        fits = self._held + count <= min(self._allowed, self._prefetch)
        return self._bytes < WAITING_BYTES and (fits or not self._held)

    def put(self, deliveries: Sequence[Delivery], began_ns: int) -> bool:
        """Add what was received, in order; return False if it is no longer wanted and must be handed back."""
        with self._lock:
            if self._stopping.is_set() or self._closed():
                return False
            now = time.monotonic()
            for delivery in deliveries:
                self._ready.append(Waiting(delivery, now, began_ns))
                self._bytes += len(delivery.body)
            self._arrivals.notify()
            return True

    def release(self, count: int, *, settled: bool = True) -> None:
        """Hold ``count`` fewer: they were settled, or were reserved and did not come."""
        with self._lock:
            self._held -= count
            if settled and self._wait_seconds is not None:
                self._settled += count
                self._measure(self._wait_seconds)
            self._note_room()

    def _measure(self, wait_seconds: float) -> None:
        elapsed = time.monotonic() - self._measured_since
        if elapsed >= RATE_SECONDS:
            self._allowed = max(self._least, int(self._settled / elapsed * wait_seconds))
            self._settled, self._measured_since = 0, time.monotonic()

    # --- processing ---------------------------------------------------------------------------------------------------

    def take(self) -> list[Waiting]:
        """Wait for a batch and return it; its groups are busy from now on. Return nothing if the worker stops."""
        with self._lock:
            while not self._stopping.is_set():
                if self._closed():
                    self._arrivals.wait(CHECK_SECONDS)
                elif not self._ready:
                    self._arrivals.wait()
                elif (seconds := self._seconds_to_gather()) > 0:
                    self._arrivals.wait(seconds)
                elif batch := self._pop():
                    return batch
            return []

    def take_now(self) -> list[Waiting]:
        """Return what ``take`` would return without waiting; return nothing if it would wait."""
        with self._lock:
            may = self._ready and not self._stopping.is_set() and not self._closed() and self._seconds_to_gather() <= 0
            return self._pop() if may else []

    def _seconds_to_gather(self) -> float:
        """Return how long to wait before the next batch begins."""
        if len(self._ready) >= self._batch_size or self._gather_seconds == 0:
            return 0.0
        return self._ready[0].since + self._gather_seconds - time.monotonic()

    def _pop(self) -> list[Waiting]:
        batch: list[Waiting] = []
        mine: set[str] = set()
        while self._ready and len(batch) < self._batch_size:
            if self._keeps_batches and batch and self._ready[0].began_ns != batch[0].began_ns:
                break
            waiting = self._ready.popleft()
            group = self._group(waiting.delivery)
            if group is not None and group not in mine:
                if group in self._behind:
                    self._behind[group].append(waiting)
                    continue
                mine.add(group)
                self._behind[group] = deque()
            batch.append(waiting)
            self._bytes -= len(waiting.delivery.body)
        if batch:
            self._note_room()  # there may have been too many bytes
            if self._ready:
                self._arrivals.notify()
        return batch

    def end(self, batch: Sequence[Waiting], blocked: Collection[str]) -> list[Waiting]:
        """End a batch: its groups are no longer busy.

        Return, in order, what waits in the groups in which something was not acked. It must be handed back.
        """
        back: list[Waiting] = []
        with self._lock:
            groups = dict.fromkeys(group for one in batch if (group := self._group(one.delivery)) is not None)
            for group in reversed(groups):
                behind = self._behind.pop(group)
                if group in blocked:
                    back.extend(behind)
                else:
                    self._ready.extendleft(reversed(behind))
            if blocked:
                back.extend(one for one in self._ready if self._group(one.delivery) in blocked)
                self._ready = deque(one for one in self._ready if self._group(one.delivery) not in blocked)
            self._bytes -= sum(len(waiting.delivery.body) for waiting in back)
            self._note_room()
            if self._ready:
                self._arrivals.notify()
        return back

    # --- pauses, stops and outages ------------------------------------------------------------------------------------

    def empty(self) -> list[Waiting]:
        """Remove and return everything that no batch has taken."""
        with self._lock:
            waiting = [*self._ready]
            self._ready.clear()
            for behind in self._behind.values():
                waiting.extend(behind)
                behind.clear()
            self._bytes = 0
            self._room.notify_all()
            self._arrivals.notify_all()
            return waiting
