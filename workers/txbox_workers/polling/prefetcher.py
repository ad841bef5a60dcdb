"""The prefetcher: receives ahead, in several threads, as long as there is room and the source has more."""

import threading
import time
from collections.abc import Sequence

from txbox import BrokerError, Outcome
from txbox.error_logging import log_failure
from txbox.instrumentation import BrokerLost, BrokerRestored
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.polling.batch_runner import watch_received
from txbox_workers.polling.context import PollingContext, outage_seconds
from txbox_workers.polling.prefetch_buffer import PrefetchBuffer
from txbox_workers.polling.settler import QueuedSettler

RECEIVERS = 8
"""Threads that receive, at most so many at a time."""

RECEIVE_DELIVERIES = 10
"""Room that a receive needs: what SQS gives in one call."""

MANY = 5
"""A receive that brings so many says that there are more: another thread receives, too."""


class Prefetcher:
    """Receives for one worker. One thread receives always; the others when the last receives have brought many."""

    def __init__(self, context: PollingContext, buffer: PrefetchBuffer, settler: QueuedSettler) -> None:
        self._context = context
        self._buffer = buffer
        self._settler = settler
        self._changed = threading.Condition()
        self._receiving = 0
        self._wanted = 1
        self._failures = 0

    def run(self) -> None:
        """Receive until the worker stops: the body of a thread."""
        while self._begin():
            failed = False
            try:
                if self._buffer.reserve(RECEIVE_DELIVERIES):
                    failed = self._receive()
            except BaseException:  # noqa: BLE001 - a thread that ends silently is the worst outcome
                log_failure("%s: receiving raised an unexpected error, and continues", self._context.subscriber_id)
                self._note_failure()
                failed = True
            if failed:
                self._context.stopping.wait(outage_seconds(self._failures))
            with self._changed:
                self._receiving -= 1
                self._changed.notify()

    def wake(self) -> None:
        """Have the threads look whether the worker stops."""
        with self._changed:
            self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait until one more thread is to receive; False: the worker stops."""
        with self._changed:
            while not self._context.stopping.is_set():
                if self._receiving < self._wanted:
                    self._receiving += 1
                    return True
                self._changed.wait()
            return False

    def _receive(self) -> bool:
        """Receive into the room that was reserved; return whether the broker has failed."""
        context, activity, room = self._context, self._context.activity, RECEIVE_DELIVERIES
        if not activity.enter():
            self._buffer.release(room, settled=False)
            return False
        deliveries: Sequence[Delivery] = ()
        try:
            began_ns = time.time_ns()
            deliveries = context.source.receive()
            activity.hold(len(deliveries))
        except BrokerError as error:
            if self._note_failure():
                context.emit(BrokerLost, error=error, pause_seconds=outage_seconds(self._failures))
            return True
        finally:
            self._buffer.release(room - len(deliveries), settled=False)
            activity.leave()
        self._note_success(len(deliveries))
        if deliveries and not self._keep(deliveries, began_ns):
            self._settler.settle([Settlement(delivery, Outcome.IN_FLIGHT) for delivery in deliveries])
        return False

    def _keep(self, deliveries: Sequence[Delivery], began_ns: int) -> bool:
        """Put what was received into the buffer; False: it is to be handed back."""
        try:
            watch_received(self._context, deliveries)
            return self._buffer.put(deliveries, began_ns)
        except BaseException:  # noqa: BLE001 - what was received is not to be forgotten
            log_failure("%s: what was received cannot be kept, and is handed back", self._context.subscriber_id)
            return False

    def _note_failure(self) -> bool:
        """Have one thread alone try again; return whether it is news."""
        with self._changed:
            is_news = self._failures == 0 or self._receiving == 1
            self._failures += 1
            self._wanted = 1
            return is_news

    def _note_success(self, count: int) -> None:
        with self._changed:
            was_lost, self._failures = self._failures > 0, 0
            self._wanted = min(self._wanted + 1, RECEIVERS) if count >= MANY else max(self._wanted - 1, 1)
            self._changed.notify()
        if was_lost:
            self._context.emit(BrokerRestored)
