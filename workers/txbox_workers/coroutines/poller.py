"""The poller of a worker with coroutines: as the prefetching one, but batches are tasks of an event loop."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txbox import Outcome
from txbox.error_logging import log_failure
from txbox.postgres.drivers.greenlets import is_cancelled
from txbox_workers.coroutines.loop_calls import LoopCalls
from txbox_workers.delivery import Delivery, Settlement
from txbox_workers.polling.context import PollingContext
from txbox_workers.polling.prefetch_buffer import Waiting
from txbox_workers.polling.prefetching_poller import PrefetchingPoller


class LoopPoller(PrefetchingPoller):
    """Receives and settles in threads, and has one more that waits for batches, and gives them to the loop.

    A batch that is there when another one ends begins at once, on the loop: without a thread to be woken, and back.

    In an outage of the database, one batch waits for its end and says so, and nothing is received. Each of many tasks
    would ask, and log, for itself, and take its next batch as long as one of them has not noticed.
    """

    def __init__(
        self,
        context: PollingContext,
        calls: LoopCalls,
        *,
        concurrency: int,
        on_lost: Callable[[], object],
        **options: Any,
    ) -> None:
        """``on_lost`` is called if the loop has ended under the worker: it calls the worker off."""
        super().__init__(context, threads=concurrency, one_waits=True, **options)
        self._calls = calls
        self._on_lost = on_lost
        self._free = threading.Semaphore(concurrency)
        self._given: set[_Given] = set()
        self._producers -= concurrency - 1

    def threads(self) -> Mapping[str, Callable[[], object]]:
        """Return what gives out batches, what receives and what settles."""
        bodies = dict(super().threads())
        for number in range(1, self._count + 1):
            del bodies[str(number)]
        return {"dispatch": self._producing(self._dispatch), **bodies}

    def under_way(self) -> list[str]:
        """Return the ids of the messages that were given to the loop, and whose batches have not ended."""
        return [waiting.delivery.message.id for given in tuple(self._given) for waiting in given.batch]

    def _dispatch(self) -> None:
        """Give batches to the loop, while there is a task free for them; return when the last one has ended."""
        while self._await_free():
            batch = self._buffer.take()
            if not batch:
                self._free.release()
                break
            self._give(_Given(batch))
        for _ in range(self._count):
            if not self._await_free():
                break
        self._free = threading.Semaphore(self._count)

    def _await_free(self) -> bool:
        """Wait for a task that is free; False: the loop has ended, and nothing will be free any more."""
        while not self._free.acquire(timeout=LOOK_SECONDS):
            if self._calls.has_ended:
                # What had begun is rolled back with its connection; what had not is handed back, too.
                for given in tuple(self._given):
                    self._give_back(given)
                self._lose()
                return False
        return True

    def _give(self, given: "_Given") -> None:
        self._given.add(given)
        try:
            self._calls.submit(lambda: self._run_logged(given), lambda: self._done(given))
        except RuntimeError:
            self._give_back(given)
            self._lose()
            self._free.release()

    def _run_logged(self, given: "_Given") -> None:
        given.has_begun = True
        try:
            self._run(given.batch)
            given.is_over = not is_cancelled()
        except BaseException:  # noqa: BLE001 - a batch that ends silently is the worst outcome
            log_failure("%s: a batch has raised an unexpected error; others go on", self._context.subscriber_id)
        finally:
            self._given.discard(given)

    def _done(self, given: "_Given") -> None:
        """On the loop: begin the batch that is next, or have the thread wait for one."""
        after: _Given | None = None
        try:
            if not given.has_begun:  # its task was cancelled before: the loop is ending
                self._give_back(given)
            elif given.is_over and (batch := self._buffer.take_now()):
                self._given.add(after := _Given(batch))
                self._calls.begin(lambda: self._run_logged(after), lambda: self._done(after))
        finally:
            if after is None:
                self._free.release()

    def _give_back(self, given: "_Given") -> None:
        self._given.discard(given)
        deliveries = [waiting.delivery for waiting in given.batch]
        deliveries += [waiting.delivery for waiting in self._buffer.end(given.batch, self._groups(deliveries))]
        self._settler.settle([Settlement(delivery, Outcome.IN_FLIGHT) for delivery in deliveries])

    def _groups(self, deliveries: Sequence[Delivery]) -> set[str]:
        return {group for one in deliveries if (group := self._context.processor.group(one)) is not None}

    def _lose(self) -> None:
        _log.error(
            "%s: the event loop has ended, and the worker was not stopped before: it stops now, and what it had "
            "received is handed back; await its stop(), or use it with `async with`",
            self._context.subscriber_id,
        )
        self._on_lost()


@dataclass(eq=False)
class _Given:
    """A batch that was given to the loop."""

    batch: Sequence[Waiting]
    has_begun: bool = False
    is_over: bool = False  # as it should be: it was not cancelled, and raised nothing


LOOK_SECONDS = 1.0
"""Between looks at whether the loop is still there, while all of its tasks are at work."""

_log = logging.getLogger("txbox.worker")
