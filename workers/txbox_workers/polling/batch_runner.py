"""Process one batch of deliveries to the end, and settle each of them."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from txbox import Outcome
from txbox.instrumentation import DatabaseLost, DatabaseRestored, Received
from txbox.text import log_failure
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.polling.activity import oldest_sent_at
from txbox_workers.polling.context import PollingContext, outage_seconds
from txbox_workers.polling.settler import Settler
from txbox_workers.processing import DatabaseUnavailable, is_cancellation

KEEP_SECONDS = 900.0
"""How long a delivery is kept whose attempt was counted, while the end of that attempt cannot be recorded. A worker
that is cut off for longer hands it back anyway, for other workers to process."""

ACK_AFTER_SECONDS = 1.0
"""A batch that is processed one by one is settled with the broker at least this often."""


class BatchRunner:
    """Runs the batches of one worker. Thread-safe."""

    def __init__(
        self,
        context: PollingContext,
        settler: Settler,
        on_outage: Callable[[], object] = lambda: None,
        *,
        one_waits: bool = False,
    ) -> None:
        """``on_outage`` is called before a batch waits for the database.

        With ``one_waits``, one batch alone waits and checks, for all of them; the others return at once.
        """
        self._context = context
        self._settler = settler
        self._on_outage = on_outage
        self._one_waits = one_waits
        self._lock = threading.Lock()
        self._waits = False
        self._joined: list[Settlement] = []  # what the other batches have kept

    def run(self, deliveries: Sequence[Delivery], *, watch: bool = False) -> list[Settlement]:
        """Process deliveries, settle them, and return their settlements.

        After an outage of the database, return once it is over or the worker stops. ``watch`` says that the deliveries
        have just been received and nothing extends their visibility yet.
        """
        context = self._context
        unsettled = {delivery.receipt: delivery for delivery in deliveries}
        settled: list[Settlement] = []
        waiting: list[Settlement] = []
        settled_at = time.monotonic()
        trouble: BaseException | None = None
        cancelled = False
        try:  # after any error in here, watched deliveries are handed back
            if watch:
                watch_received(context, deliveries)
            for settlements in context.processor.process(deliveries):
                settled.extend(settlements)
                waiting.extend(settlements)
                for settlement in settlements:
                    unsettled.pop(settlement.delivery.receipt, None)
                if unsettled and time.monotonic() - settled_at > ACK_AFTER_SECONDS:
                    self._settler.settle(waiting)
                    waiting, settled_at = [], time.monotonic()
                context.give_way()
        except DatabaseUnavailable as error:
            trouble = error
        except BaseException as error:  # noqa: BLE001 - hand back, log it, and continue
            cancelled = is_cancellation(error)
            if not cancelled:
                log_failure(
                    "%s: processing raised an unexpected error; its deliveries are handed back", context.subscriber_id
                )
                trouble = error
        rest = [
            Settlement(
                delivery, Outcome.IN_FLIGHT, trouble, 0.0 if cancelled else outage_seconds(delivery.receive_count)
            )
            for delivery in unsettled.values()
        ]
        kept = self._hand_back(rest, after=waiting)
        if cancelled:
            self._end_keeping(kept)
        if trouble is not None and not self._join(kept):
            with context.activity.awaiting_database():
                self._await_database(trouble, kept)
        return settled + rest

    def _join(self, kept: Sequence[Settlement]) -> bool:
        """Leave the waiting, and what was kept, to another batch; return False if this one must wait itself."""
        with self._lock:
            if self._waits and self._one_waits:
                self._joined += kept
                return True
            self._waits = True
            return False

    def _take_joined(self, *, ends: bool = False) -> list[Settlement]:
        with self._lock:
            joined, self._joined = self._joined, []
            if ends:
                self._waits = False
            return joined

    def _ends_waiting(self) -> bool:
        """End the waiting, unless other batches have left something to it."""
        with self._lock:
            self._waits = bool(self._joined)
            return not self._waits

    def _hand_back(self, settlements: Sequence[Settlement], after: Sequence[Settlement] = ()) -> list[Settlement]:
        """Hand back, except deliveries with an attempt whose end is not recorded yet: keep and return those."""
        kept: list[Settlement] = []
        free: list[Settlement] = []
        for settlement in settlements:
            (kept if self._context.processor.has_unsaved(settlement.delivery) else free).append(settlement)
        self._settler.settle([*after, *free])
        return kept

    def _await_database(self, trouble: BaseException, kept: Sequence[Settlement]) -> None:
        """Take nothing more from the broker until the database is usable again; then hand back what was kept."""
        context = self._context
        attempt, began = 1, time.monotonic()
        over = False
        try:
            self._on_outage()
            while not context.stopping.is_set():
                pause = outage_seconds(attempt)
                context.emit(DatabaseLost, error=trouble, pause_seconds=pause)
                recovered = False
                try:
                    if context.stopping.wait(pause):
                        break
                    context.processor.check_recording()
                    recovered = True
                except Exception as error:  # noqa: BLE001 - whatever it is, it has not recovered
                    trouble = error
                except BaseException as error:
                    if not is_cancellation(error):
                        raise
                    break
                kept = self._hand_back([*kept, *self._take_joined()])
                # Batches that joined after the check may have left something unsaved: then the outage goes on.
                over = recovered and not kept and self._ends_waiting()
                if over:
                    context.emit(DatabaseRestored)
                    return
                attempt += 1
                if time.monotonic() - began > KEEP_SECONDS:
                    self._settler.settle(kept)
                    kept = []
        finally:
            if not over:
                self._end_keeping([*kept, *self._take_joined(ends=True)])

    def _end_keeping(self, kept: Sequence[Settlement]) -> None:
        """Hand back what was kept, if the ends of its attempts can be recorded now."""
        if kept:
            with suppress(Exception):
                self._context.processor.save_unsaved()
            # The rest comes again when its visibility ends.
            self._context.heartbeat.forget(each.delivery for each in self._hand_back(kept))


def watch_received(context: PollingContext, deliveries: Sequence[Delivery]) -> None:
    """Start extending the visibility of what has just been received, and emit that it was received."""
    now = time.monotonic()
    context.activity.received(deliveries, now)
    context.heartbeat.watch(deliveries, now)
    if context.wants_details():
        context.emit(
            Received,
            message_ids=tuple(delivery.message.id for delivery in deliveries),
            delivery_ids=tuple(delivery.receipt for delivery in deliveries),
            oldest_seconds=_oldest_seconds(deliveries),
        )


def _oldest_seconds(deliveries: Sequence[Delivery]) -> float | None:
    """Return how long ago the oldest message was sent, by this machine's clock; None if unknown."""
    oldest = oldest_sent_at(deliveries)
    return None if oldest is None else max(time.time() - oldest.timestamp(), 0.0)
