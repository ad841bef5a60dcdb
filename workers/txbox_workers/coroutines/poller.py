"""The poller of a worker with coroutines: as the prefetching one, but batches are tasks of an event loop."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from txbox.error_logging import log_failure
from txbox_workers.coroutines.loop_calls import LoopCalls
from txbox_workers.polling.context import PollingContext
from txbox_workers.polling.prefetch_buffer import Waiting
from txbox_workers.polling.prefetching_poller import PrefetchingPoller


class LoopPoller(PrefetchingPoller):
    """Receives and settles in threads, and has one more that gives batches to the loop."""

    def __init__(self, context: PollingContext, calls: LoopCalls, *, concurrency: int, **options: Any) -> None:
        super().__init__(context, threads=concurrency, **options)
        self._calls = calls
        self._free = threading.Semaphore(concurrency)
        self._producers -= concurrency - 1

    def threads(self) -> Mapping[str, Callable[[], object]]:
        """Return what gives out batches, what receives and what settles."""
        bodies = dict(super().threads())
        for number in range(1, self._count + 1):
            del bodies[str(number)]
        return {"dispatch": self._producing(self._dispatch), **bodies}

    def _dispatch(self) -> None:
        """Give batches to the loop, while there is a task free for them; return when the last one has ended."""
        while True:
            self._free.acquire()
            batch = self._buffer.take()
            if not batch:
                break
            self._calls.submit(lambda batch=batch: self._run_logged(batch)).add_done_callback(self._done)  # type: ignore[misc]
        for _ in range(self._count - 1):
            self._free.acquire()
        self._free.release(self._count)

    def _run_logged(self, batch: Sequence[Waiting]) -> None:
        try:
            self._run(batch)
        except BaseException:  # noqa: BLE001 - a batch that ends silently is the worst outcome
            log_failure("%s: a batch has raised an unexpected error; others go on", self._context.subscriber_id)

    def _done(self, _: "Future[None]") -> None:
        self._free.release()
