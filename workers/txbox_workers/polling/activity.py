"""Track what a worker does: what it has in hand, outcomes so far, and whether it is paused or in an outage."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime

from txbox import Outcome
from txbox.operations.pauses import Pause
from txbox.postgres.drivers.greenlets import GreenletEvent
from txbox.postgres.sqlstates import DEADLOCK_DETECTED
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.reporter import WorkerFigures


class Activity:
    """What one worker does. Its threads write this, and its reporter reads it. Thread-safe."""

    def __init__(self, on_last: Callable[[], object]) -> None:
        """``on_last`` is called when a paused worker has nothing in hand any more."""
        self.halted = GreenletEvent()
        """Set while nothing more may begin: the worker stops or is paused."""
        self._on_last = on_last
        self._lock = threading.Lock()
        self._pause: Pause | None = None
        self._drained = False
        self._in_hand = 0
        self._last_batch_at: float | None = None
        self._oldest_sent_at: datetime | None = None
        self._retries: Counter[str] = Counter()
        self._counts: Counter[Outcome] = Counter()
        self._awaiting_database = 0
        self._reported_lost = False

    @property
    def counts(self) -> Mapping[Outcome, int]:
        with self._lock:
            return dict(self._counts)

    def begin(self) -> None:
        """Record that the worker starts: nothing in hand, not paused."""
        with self._lock:
            self.halted.clear()
            self._pause, self._drained, self._in_hand = None, False, 0

    def halt(self) -> None:
        """Record that the worker stops."""
        with self._lock:
            self.halted.set()

    def heed(self, pause: Pause | None, stopping: threading.Event) -> bool:
        """Set or clear the pause; return whether the worker has just been paused or resumed."""
        with self._lock:
            before, self._pause = self._pause, pause
            if pause is not None:
                self.halted.set()
            elif not stopping.is_set():  # a stop sets ``stopping`` before it waits for the lock
                self.halted.clear()
        return (pause is None) != (before is None)

    # --- what is in hand ----------------------------------------------------------------------------------------------

    def enter(self) -> bool:
        """Count one more in hand and return True if receiving is allowed; otherwise count nothing."""
        with self._lock:
            # In one step with the check for a pause: a drained worker must not be about to receive.
            may = not self.halted.is_set()
            self._in_hand += may
            return may

    def hold(self, count: int) -> None:
        with self._lock:
            self._in_hand += count

    def leave(self, count: int = 1) -> None:
        with self._lock:
            self._in_hand -= count
            last = self._pause is not None and self._in_hand == 0
        if last:
            self._on_last()

    # --- what has become of it ----------------------------------------------------------------------------------------

    def received(self, deliveries: Sequence[Delivery], at: float) -> None:
        """Record that a batch has come, at ``at`` by ``time.monotonic``."""
        self._last_batch_at = at
        self._oldest_sent_at = oldest_sent_at(deliveries)

    def settled(self, settlements: Iterable[Settlement]) -> None:
        """Count the outcomes of deliveries."""
        with self._lock:
            self._counts.update(settlement.outcome for settlement in settlements)

    def retried(self, sqlstate: str) -> None:
        """Count a transaction that was run again."""
        with self._lock:
            self._retries[sqlstate] += 1

    def figures(self) -> tuple[WorkerFigures, bool]:
        """Return the worker's figures, and whether this is the first time since the pause that it is drained."""
        with self._lock:
            drained = self._pause is not None and self._in_hand == 0
            just_drained, self._drained = drained and not self._drained, drained
            figures = WorkerFigures(
                state="drained" if drained else "working" if self._pause is None else "paused",
                outcomes={outcome.value: count for outcome, count in self._counts.items()},
                deadlocks=self._retries[DEADLOCK_DETECTED],
                retries=self._retries.total(),
                last_batch_at=self._last_batch_at,
                oldest_sent_at=self._oldest_sent_at,
            )
        return figures, just_drained

    # --- outages of the database --------------------------------------------------------------------------------------

    @property
    def awaiting_threads(self) -> int:
        """How many threads wait until the database is usable again."""
        return self._awaiting_database

    @contextmanager
    def awaiting_database(self) -> Iterator[None]:
        """Count this thread as waiting for the database."""
        with self._lock:
            self._awaiting_database += 1
        try:
            yield
        finally:
            with self._lock:
                self._awaiting_database -= 1

    def report_lost(self) -> bool:
        """Return whether to log that a report met an outage. Not while a thread waits: that one logs it itself."""
        with self._lock:
            if self._reported_lost or self._awaiting_database:
                return False
            self._reported_lost = True
            return True

    def report_restored(self) -> bool:
        """Return whether to log that such an outage has ended. Not while a thread still waits for that."""
        with self._lock:
            was_lost, self._reported_lost = self._reported_lost, False
            return was_lost and not self._awaiting_database


def oldest_sent_at(deliveries: Sequence[Delivery]) -> datetime | None:
    """Return when the oldest message was sent; None if unknown."""
    return min((at for delivery in deliveries if (at := delivery.message.sent_at) is not None), default=None)
