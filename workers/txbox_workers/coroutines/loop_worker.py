"""What does the work of an ``AsyncWorker``: a worker for functions, with an event loop for what uses the engine."""

from collections.abc import Callable
from typing import Any, TypeVar

from txbox_workers.coroutines.batch_tasks import BatchTasks, LoopCalls
from txbox_workers.coroutines.threaded_ledger import ThreadedLedger
from txbox_workers.delivery import Source
from txbox_workers.polling.prefetching_poller import BatchConsumer
from txbox_workers.worker import Worker

T = TypeVar("T")


class LoopWorker(Worker):
    """Runs its processor on an event loop. Its own methods are called from other threads than the loop's."""

    _on_loop = True

    def __init__(self, source: Source, calls: LoopCalls, *, of: str, **options: Any) -> None:
        """Take the calls to the loop, and what the class is called in errors."""
        self._of = of
        self._calls = calls
        self._tasks: BatchTasks | None = None
        super().__init__(source, **options)

    def refuse_running(self) -> None:
        """Raise ``InvalidConfiguration`` if it runs already."""
        self._refuse_running("make another one")

    def start_within(self, timeout: float) -> bool:
        """Start; return False if it was told to stop meanwhile, and is still starting ``timeout`` seconds later."""
        with self._starting:
            self._make_ready()
            return self._has_started(timeout)

    def end_start(self) -> None:
        """Tell it to stop while it starts; it hears that once it has begun to."""
        self._wake.put(None)

    def under_way(self) -> list[str]:
        """Return the ids of the messages in batches that have not ended."""
        return [] if self._tasks is None else self._tasks.under_way()

    def call_off(self) -> None:
        """Begin nothing more; ``stop`` waits for what was begun."""
        self._call_off()

    def _stopped(self, finished: bool) -> None:
        super()._stopped(finished)
        if finished and isinstance(ledger := self._options.ledger, ThreadedLedger):
            ledger.close()

    def _with_database(self, work: Callable[[], T]) -> T:
        # With a ledger alone, dead letters and reports have an engine for functions, which would block the loop.
        letters = self._options.dead_letters
        engine = self._options.engine or (None if letters is None else letters.engine)
        return self._calls.call(work) if engine is not None and engine.dialect.is_async else work()

    def _batch_consumer(self) -> BatchConsumer:
        self._tasks = BatchTasks(self._calls, self._options.threads, self._call_off)
        return self._tasks

    def _give_way(self) -> None:
        """Nothing: the pool of an event loop gives its connections in the order in which they are asked for."""
