"""What a worker does: what it has in hand, what became of what it had, whether it is paused or in an outage."""

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
    """What one worker does, told by its threads and read by its reporter. Thread-safe."""

    def __init__(self, on_last: Callable[[], object]) -> None:
        """Take what is called when a paused worker has nothing in hand any more."""
        self.halted = GreenletEvent()
        """Nothing more is to be begun: it stops, or is paused."""
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
        """How many deliveries came to which outcome."""
        with self._lock:
            return dict(self._counts)

    def begin(self) -> None:
        """It starts: with nothing in hand, and not paused."""
        with self._lock:
            self.halted.clear()
            self._pause, self._drained, self._in_hand = None, False, 0

    def halt(self) -> None:
        """It stops."""
        with self._lock:
            self.halted.set()

    def heed(self, pause: Pause | None, stopping: threading.Event) -> bool:
        """Be paused or not; return whether that is new."""
        with self._lock:
            before, self._pause = self._pause, pause
            if pause is not None:
                self.halted.set()
            elif not stopping.is_set():  # a stop sets the first one before it waits for the lock
                self.halted.clear()
        return (pause is None) != (before is None)

    # --- what is in hand ----------------------------------------------------------------------------------------------

    def enter(self) -> bool:
        """Count one more in hand, and return whether anything may be received; if not, nothing is counted."""
        with self._lock:
            # One step with the look at the pause: a worker that is drained must not be about to receive.
            may = not self.halted.is_set()
            self._in_hand += may
            return may

    def hold(self, count: int) -> None:
        """Count so many more in hand."""
        with self._lock:
            self._in_hand += count

    def leave(self, count: int = 1) -> None:
        """Count so many fewer in hand."""
        with self._lock:
            self._in_hand -= count
            last = self._pause is not None and self._in_hand == 0
        if last:
            self._on_last()

    # --- what has become of it ----------------------------------------------------------------------------------------

    def received(self, deliveries: Sequence[Delivery], at: float) -> None:
        """A batch has come, at a reading of ``time.monotonic``."""
        self._last_batch_at = at
        self._oldest_sent_at = oldest_sent_at(deliveries)

    def settled(self, settlements: Iterable[Settlement]) -> None:
        """Deliveries have outcomes."""
        with self._lock:
            self._counts.update(settlement.outcome for settlement in settlements)

    def retried(self, sqlstate: str) -> None:
        """A transaction was run again."""
        with self._lock:
            self._retries[sqlstate] += 1

    def figures(self) -> tuple[WorkerFigures, bool]:
        """Return how the worker stands, and whether it is drained for the first time since it was paused."""
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
        """How many threads wait until the database can be used again."""
        return self._awaiting_database

    @contextmanager
    def awaiting_database(self) -> Iterator[None]:
        """While entered, a thread waits for that."""
        with self._lock:
            self._awaiting_database += 1
        try:
            yield
        finally:
            with self._lock:
                self._awaiting_database -= 1

    def report_lost(self) -> bool:
        """Return whether to say that a report has met an outage; not where a thread has, which says so itself."""
        with self._lock:
            if self._reported_lost or self._awaiting_database:
                return False
            self._reported_lost = True
            return True

    def report_restored(self) -> bool:
        """Return whether to say that such an outage has ended; not while a thread waits for that."""
        with self._lock:
            was_lost, self._reported_lost = self._reported_lost, False
            return was_lost and not self._awaiting_database


def oldest_sent_at(deliveries: Sequence[Delivery]) -> datetime | None:
    """Return when the oldest message was sent; None: not known."""
    return min((at for delivery in deliveries if (at := delivery.message.sent_at) is not None), default=None)
