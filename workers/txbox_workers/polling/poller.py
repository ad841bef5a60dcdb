"""Pollers: how a worker's threads receive, process and settle. The one here does these in turn."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from txbox import BrokerError
from txbox.instrumentation import BrokerLost, BrokerRestored
from txbox.text import log_failure
from txbox_workers.polling.batch_runner import BatchRunner
from txbox_workers.polling.context import PollingContext, outage_seconds
from txbox_workers.polling.settler import Settler

RESUME_CHECK_SECONDS = 0.1
"""How often a paused thread checks whether it may go on."""


class Poller(ABC):
    @abstractmethod
    def threads(self) -> Mapping[str, Callable[[], object]]:
        """Return what the threads do, by the ends of their names. Each returns when the worker stops."""

    def halt(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what was not begun: the worker is paused or stops."""


class SequentialPoller(Poller):
    """Receives, processes and settles in each thread, one after the other."""

    def __init__(self, context: PollingContext, threads: int) -> None:
        self._context = context
        self._count = threads
        self._runner = BatchRunner(context, Settler(context))

    def threads(self) -> Mapping[str, Callable[[], object]]:
        return {str(number): self._poll for number in range(1, self._count + 1)}

    def _poll(self) -> None:
        context, activity = self._context, self._context.activity
        failures = 0
        while not context.stopping.is_set():
            try:
                context.give_way()
                if not activity.enter():
                    context.stopping.wait(RESUME_CHECK_SECONDS)
                    continue
                try:
                    failures = self._poll_once(failures)
                finally:
                    activity.leave()
            except BaseException:  # noqa: BLE001 - a polling thread that ends silently is the worst outcome
                failures += 1
                log_failure("%s: polling raised an unexpected error, and continues", context.subscriber_id)
                context.stopping.wait(outage_seconds(failures))

    def _poll_once(self, failures: int) -> int:
        """Receive, and process what there is; return how often in a row the broker has failed."""
        context = self._context
        began_ns = time.time_ns()
        try:
            deliveries = context.source.receive()
        except BrokerError as error:
            failures += 1
            pause = outage_seconds(failures)
            context.emit(BrokerLost, error=error, pause_seconds=pause)
            context.stopping.wait(pause)
            return failures
        if failures:
            context.emit(BrokerRestored)
        if deliveries:
            with context.spans.received(deliveries, began_ns):
                self._runner.run(deliveries, watch=True)
        return 0
