"""The prefetching poller: receives run ahead of processing, and settlements behind it.

::

    prefetcher        receive ─ receive ─ receive ─ …        up to 8 calls at a time
                          ╲ buffer: bounded, groups in order
    threads                batch ─── batch ─── batch ─ …      one transaction each, of up to ``batch_size``
                               ╲ queue: acks wait for others, 50 ms at most
    queued settler              ack ─ ack ─ ack ─ …           up to 8 calls at a time

A stop, a pause and an outage of the database hand back what no batch has begun. The heartbeat watches all from its
receive to its settlement.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from txbox import Outcome
from txbox.error_logging import log_failure
from txbox_workers.delivery import Settlement
from txbox_workers.polling.batch_runner import BatchRunner
from txbox_workers.polling.context import PollingContext, outage_seconds
from txbox_workers.polling.poller import Poller
from txbox_workers.polling.prefetch_buffer import PrefetchBuffer, Waiting
from txbox_workers.polling.prefetcher import RECEIVE_DELIVERIES, RECEIVERS, Prefetcher
from txbox_workers.polling.settler import SETTLERS, QueuedSettler


class PrefetchingPoller(Poller):
    """Receives, processes and settles in threads of their own."""

    def __init__(
        self,
        context: PollingContext,
        *,
        threads: int,
        prefetch: int,
        batch_size: int,
        gather_seconds: float,
        one_waits: bool = False,
    ) -> None:
        self._context = context
        self._count = threads
        activity = context.activity
        self._buffer = PrefetchBuffer(
            prefetch=prefetch,
            least=max(threads * batch_size, RECEIVE_DELIVERIES) + RECEIVE_DELIVERIES,
            batch_size=batch_size,
            gather_seconds=gather_seconds,
            visibility_seconds=context.source.visibility_seconds,
            group=context.processor.group,
            closed=lambda: activity.halted.is_set() or activity.awaiting_threads >= (1 if one_waits else threads),
            stopping=context.stopping,
        )
        self._settler = QueuedSettler(context, self._settled)
        self._runner = BatchRunner(context, self._settler, on_outage=self._empty_in_outage, one_waits=one_waits)
        self._prefetcher = Prefetcher(context, self._buffer, self._settler)
        self._lock = threading.Lock()
        self._producers = threads + RECEIVERS

    def threads(self) -> Mapping[str, Callable[[], object]]:
        """Return what processes, what receives and what settles."""
        bodies: dict[str, Callable[[], object]] = {}
        bodies |= {str(number): self._producing(self._process) for number in range(1, self._count + 1)}
        bodies |= {f"receive-{number}": self._producing(self._prefetcher.run) for number in range(1, RECEIVERS + 1)}
        bodies |= {f"settle-{number}": self._settler.run for number in range(1, SETTLERS + 1)}
        return bodies

    def halt(self) -> None:
        """Hand back what no batch has begun."""
        self._settler.settle([Settlement(one.delivery, Outcome.IN_FLIGHT) for one in self._buffer.empty()])
        self._prefetcher.wake()

    def _empty_in_outage(self) -> None:
        """Hand back the same, to come when the outage may be over."""
        self._settler.settle(
            [
                Settlement(one, Outcome.IN_FLIGHT, delay_seconds=outage_seconds(one.receive_count))
                for one, *_ in self._buffer.empty()
            ]
        )

    def _producing(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return work after which the settler ends, if it was the last that could give it anything."""

        def run() -> None:
            work()
            with self._lock:
                self._producers -= 1
                is_last = not self._producers
            if is_last:
                self._settler.end()

        return run

    def _process(self) -> None:
        context = self._context
        failures = 0
        while batch := self._buffer.take():
            try:
                context.give_way()
                self._run(batch)
                failures = 0
            except BaseException:  # noqa: BLE001 - a thread that ends silently is the worst outcome
                failures += 1
                log_failure("%s: polling raised an unexpected error, and continues", context.subscriber_id)
                context.stopping.wait(outage_seconds(failures))

    def _run(self, batch: Sequence[Waiting]) -> None:
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

    def _settled(self, count: int) -> None:
        self._buffer.release(count)
        self._context.activity.leave(count)
