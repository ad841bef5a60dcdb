"""The prefetching poller: receives run ahead of processing, and settlements behind it.

::

    prefetcher        receive ─ receive ─ receive ─ …        up to 8 calls at a time
                          ╲ buffer: bounded, groups in order
    batch consumer         batch ─── batch ─── batch ─ …      one transaction each, of up to ``batch_size``
                               ╲ queue: acks wait for others, 50 ms at most
    queued settler              ack ─ ack ─ ack ─ …           up to 8 calls at a time

A stop, a pause and an outage of the database hand back what no batch has begun. The heartbeat watches every delivery
from its receive to its settlement. The poller is given a consumer for the batches: threads, or tasks of an event loop
(``txbox_workers.coroutines``).
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from txbox import BrokerError, Outcome
from txbox.instrumentation import BrokerLost, BrokerRestored
from txbox.text import log_failure
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.polling.batch_runner import BatchRunner, watch_received
from txbox_workers.polling.context import PollingContext, outage_seconds
from txbox_workers.polling.poller import Poller
from txbox_workers.polling.prefetch_buffer import PrefetchBuffer, Waiting
from txbox_workers.polling.settler import SETTLERS, QueuedSettler

RECEIVERS = 8
"""How many threads receive at a time, at most."""

RECEIVE_DELIVERIES = 10
"""The room that a receive needs: what SQS gives in one call."""

MANY = 5
"""A receive that brings this many suggests that there are more: another thread then receives, too."""


class ReceivedBatches:
    """What was received, in batches that are taken and then run or given back. Thread-safe."""

    def __init__(
        self, context: PollingContext, buffer: PrefetchBuffer, settler: QueuedSettler, one_waits: bool
    ) -> None:
        self.take, self.take_now = buffer.take, buffer.take_now
        self._context = context
        self._buffer = buffer
        self._settler = settler
        self._runner = BatchRunner(context, settler, on_outage=self._empty_in_outage, one_waits=one_waits)

    def run(self, batch: Sequence[Waiting]) -> None:
        """Process a batch and settle it."""
        context = self._context
        deliveries = [waiting.delivery for waiting in batch]
        blocked: Mapping[str, float] = {group: 0.0 for one in deliveries if (group := context.processor.group(one))}
        try:
            with context.spans.received(deliveries, batch[0].began_ns):
                settlements = self._runner.run(deliveries)
            blocked = context.processor.blocked_by(settlements)
        finally:
            behind = [waiting.delivery for waiting in self._buffer.end(batch, blocked)]
            self._settler.settle(
                [
                    Settlement(one, Outcome.IN_FLIGHT, delay_seconds=blocked[context.processor.group(one) or ""])
                    for one in behind
                ]
            )

    def give_back(self, batch: Sequence[Waiting]) -> None:
        """Hand back a batch that will not be run, and what waits behind it."""
        deliveries = [waiting.delivery for waiting in batch]
        groups = {group for one in deliveries if (group := self._context.processor.group(one)) is not None}
        deliveries += [waiting.delivery for waiting in self._buffer.end(batch, groups)]
        self._settler.settle([Settlement(delivery, Outcome.IN_FLIGHT) for delivery in deliveries])

    def empty(self) -> None:
        self._settler.settle([Settlement(one.delivery, Outcome.IN_FLIGHT) for one in self._buffer.empty()])

    def _empty_in_outage(self) -> None:
        """Hand back what no batch has begun, delayed until the outage may be over."""
        self._settler.settle(
            [
                Settlement(one, Outcome.IN_FLIGHT, delay_seconds=outage_seconds(one.receive_count))
                for one, *_ in self._buffer.empty()
            ]
        )


class BatchConsumer(ABC):
    """Takes batches and runs them, several at a time.

    Attributes:
        concurrency: how many.
        one_waits: in an outage of the database, one batch waits for it to end; the others return at once.
    """

    concurrency: int
    one_waits = False

    @abstractmethod
    def threads(self, context: PollingContext, batches: ReceivedBatches) -> Mapping[str, Callable[[], object]]:
        """Return what the threads do, by the ends of their names. Each returns when no more batches come."""


class BatchThreads(BatchConsumer):
    """Runs each batch in the thread that has taken it."""

    def __init__(self, count: int) -> None:
        self.concurrency = count

    def threads(self, context: PollingContext, batches: ReceivedBatches) -> Mapping[str, Callable[[], object]]:
        return {str(number): lambda: _consume(context, batches) for number in range(1, self.concurrency + 1)}


def _consume(context: PollingContext, batches: ReceivedBatches) -> None:
    failures = 0
    while batch := batches.take():
        try:
            context.give_way()
            batches.run(batch)
            failures = 0
        except BaseException:  # noqa: BLE001 - a thread that ends silently is the worst outcome
            failures += 1
            log_failure("%s: polling raised an unexpected error, and continues", context.subscriber_id)
            context.stopping.wait(outage_seconds(failures))


class PrefetchingPoller(Poller):
    """Receives and settles in threads of its own; a consumer runs the batches."""

    def __init__(
        self,
        context: PollingContext,
        consumer: BatchConsumer,
        *,
        prefetch: int,
        batch_size: int,
        gather_seconds: float,
    ) -> None:
        self._context = context
        self._consumer = consumer
        activity, most_waiting = context.activity, 1 if consumer.one_waits else consumer.concurrency
        self._buffer = PrefetchBuffer(
            prefetch=prefetch,
            least=max(consumer.concurrency * batch_size, RECEIVE_DELIVERIES) + RECEIVE_DELIVERIES,
            batch_size=batch_size,
            gather_seconds=gather_seconds,
            visibility_seconds=context.source.visibility_seconds,
            group=context.processor.group,
            closed=lambda: activity.halted.is_set() or activity.awaiting_threads >= most_waiting,
            stopping=context.stopping,
            keeps_batches=getattr(context.source, "keeps_batches", False),
        )
        self._settler = QueuedSettler(context, self._settled)
        self._batches = ReceivedBatches(context, self._buffer, self._settler, consumer.one_waits)
        self._prefetcher = Prefetcher(context, self._buffer, self._settler)
        self._lock = threading.Lock()
        self._producers = 0

    def threads(self) -> Mapping[str, Callable[[], object]]:
        producers = dict(self._consumer.threads(self._context, self._batches))
        producers |= {f"receive-{number}": self._prefetcher.run for number in range(1, RECEIVERS + 1)}
        self._producers = len(producers)
        settlers = {f"settle-{number}": self._settler.run for number in range(1, SETTLERS + 1)}
        return {name: self._producing(work) for name, work in producers.items()} | settlers

    def halt(self) -> None:
        self._batches.empty()
        self._prefetcher.wake()

    def _producing(self, work: Callable[[], object]) -> Callable[[], object]:
        """Wrap a thread's work so that the settler ends after the last thread that could still give it something."""

        def run() -> None:
            work()
            with self._lock:
                self._producers -= 1
                is_last = not self._producers
            if is_last:
                self._settler.end()

        return run

    def _settled(self, count: int) -> None:
        self._buffer.release(count)
        self._context.activity.leave(count)


class Prefetcher:
    """Receives for one worker. One thread always receives; the others do while receives bring many."""

    def __init__(self, context: PollingContext, buffer: PrefetchBuffer, settler: QueuedSettler) -> None:
        self._context = context
        self._buffer = buffer
        self._settler = settler
        self._changed = threading.Condition()
        self._receiving = 0
        self._wanted = 1
        self._failures = 0

    def run(self) -> None:
        """Receive until the worker stops. This is the body of a thread."""
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
        """Make the threads check whether the worker stops."""
        with self._changed:
            self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait until one more thread should receive; return False if the worker stops."""
        with self._changed:
            while not self._context.stopping.is_set():
                if self._receiving < self._wanted:
                    self._receiving += 1
                    return True
                self._changed.wait()
            return False

    def _receive(self) -> bool:
        """Receive into the reserved room; return whether the broker has failed."""
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
        """Put what was received into the buffer; return False if it must be handed back."""
        try:
            watch_received(self._context, deliveries)
            return self._buffer.put(deliveries, began_ns)
        except BaseException:  # noqa: BLE001 - what was received must not be forgotten
            log_failure("%s: what was received cannot be kept, and is handed back", self._context.subscriber_id)
            return False

    def _note_failure(self) -> bool:
        """Let only one thread try again; return whether the failure is worth an event."""
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
