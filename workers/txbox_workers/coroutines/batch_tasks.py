"""Batches as tasks of an event loop: one thread hands them to the loop, which runs them in greenlets."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import TypeVar

from txbox.postgres.drivers.greenlets import cancel, is_cancelled, run_in_greenlet
from txbox.text import log_failure
from txbox_workers.polling.context import PollingContext
from txbox_workers.polling.prefetch_buffer import Waiting
from txbox_workers.polling.prefetching_poller import BatchConsumer, ReceivedBatches

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""How often a thread that waits for work on the loop checks that the loop is still open."""


class LoopCalls:
    """Runs functions on one event loop, each in its own task and greenlet."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batches: set[asyncio.Task[object]] = set()
        self._others: set[asyncio.Task[object]] = set()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the loop. The coroutine that calls this must not wait for calls on the same loop."""
        self._loop = loop

    @property
    def has_ended(self) -> bool:
        return self._loop is not None and self._loop.is_closed()

    def submit(self, batch: Callable[[], object], ended: Callable[[], object]) -> None:
        """Run a batch on the loop, from another thread; then call ``ended`` there.

        Raises ``RuntimeError`` if the loop is closed. If the loop closes before the batch ends, ``ended`` is not
        called.
        """
        self._bound.call_soon_threadsafe(self.begin, batch, ended)

    def begin(self, batch: Callable[[], object], ended: Callable[[], object]) -> None:
        """Run a batch on the loop, like ``submit``, but called on the loop."""
        running = self._run(batch, self._batches)
        try:
            task = self._bound.create_task(running)
        except BaseException:  # the host's task factory may raise
            running.close()
            ended()
            raise
        task.add_done_callback(lambda _: ended())

    def call(self, work: Callable[[], T]) -> T:
        """Run something short on the loop, from another thread, and return its result.

        Raises ``concurrent.futures.CancelledError`` if the loop ends first, and whatever ``work`` raises.
        """
        running = self._call(work)
        while not wait([running], LOOK_SECONDS).done:
            if self.has_ended:  # before it began what was submitted, or in the middle of it
                raise CancelledError
        return running.result()

    def cancel_batches(self) -> None:
        """Cancel the running batches, each only once so that it can roll back undisturbed. Called on the loop."""
        for task in self._batches:
            if not task.cancelling():
                cancel(task)

    def cancel_calls(self) -> None:
        """Cancel what is not a batch: the checks of a start."""
        for task in self._others:
            cancel(task)

    def _call(self, work: Callable[[], T]) -> "Future[T]":
        running = self._run(work, self._others)
        try:
            return asyncio.run_coroutine_threadsafe(running, self._bound)
        except RuntimeError:  # the loop is closed
            running.close()
            raise

    @property
    def _bound(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None  # noqa: S101 - for the type checker: bound when the worker starts
        return self._loop

    async def _run(self, work: Callable[[], T], tasks: "set[asyncio.Task[object]]") -> T:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker
        tasks.add(task)
        try:
            return await run_in_greenlet(work)
        finally:
            tasks.discard(task)


class BatchTasks(BatchConsumer):
    """Waits for batches in one thread and hands them to the loop.

    When a batch ends and another one is ready, that one begins at once on the loop, without waking the thread.

    In an outage of the database, one batch waits for it to end and logs that, and nothing is received. Otherwise each
    of many tasks would check and log for itself, and take its next batch while any of them had not noticed the outage.
    """

    one_waits = True

    def __init__(self, calls: LoopCalls, concurrency: int, on_lost: Callable[[], object]) -> None:
        """``on_lost`` stops the worker; it is called if the loop ends while the worker runs."""
        self.concurrency = concurrency
        self._calls = calls
        self._on_lost = on_lost
        self._free = threading.Semaphore(concurrency)
        self._given: set[_Given] = set()

    def threads(self, context: PollingContext, batches: ReceivedBatches) -> Mapping[str, Callable[[], object]]:
        self._subscriber_id, self._batches = context.subscriber_id, batches
        return {"dispatch": self._dispatch}

    def under_way(self) -> list[str]:
        """Return the ids of the messages whose batches were handed to the loop and have not ended."""
        return [waiting.delivery.message.id for given in tuple(self._given) for waiting in given.batch]

    def _dispatch(self) -> None:
        """Hand batches to the loop while it has a free task; return when the last one has ended."""
        while self._await_free():
            batch = self._batches.take()
            if not batch:
                self._free.release()
                break
            self._give(_Given(batch))
        for _ in range(self.concurrency):
            if not self._await_free():
                break
        self._free = threading.Semaphore(self.concurrency)

    def _await_free(self) -> bool:
        """Wait for a free task; return False if the loop has ended, after which none becomes free."""
        while not self._free.acquire(timeout=LOOK_SECONDS):
            if self._calls.has_ended:
                # The server rolls back batches that had begun, with their connection. All are handed back.
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
            self._batches.run(given.batch)
            given.is_over = not is_cancelled()
        except BaseException:  # noqa: BLE001 - a batch that ends silently is the worst outcome
            log_failure("%s: a batch has raised an unexpected error; others go on", self._subscriber_id)
        finally:
            self._given.discard(given)

    def _done(self, given: "_Given") -> None:
        """Begin the next batch, or leave it to the thread to wait for one. Called on the loop."""
        after: _Given | None = None
        try:
            if not given.has_begun:  # its task was cancelled first: the loop is ending
                self._give_back(given)
            elif given.is_over and (batch := self._batches.take_now()):
                self._given.add(after := _Given(batch))
                self._calls.begin(lambda: self._run_logged(after), lambda: self._done(after))
        finally:
            if after is None:
                self._free.release()

    def _give_back(self, given: "_Given") -> None:
        self._given.discard(given)
        self._batches.give_back(given.batch)

    def _lose(self) -> None:
        _log.error(
            "%s: the event loop has ended, and the worker was not stopped before: it stops now, and what it had "
            "received is handed back; await its stop(), or use it with `async with`",
            self._subscriber_id,
        )
        self._on_lost()


@dataclass(eq=False)
class _Given:
    """A batch that was handed to the loop."""

    batch: Sequence[Waiting]
    has_begun: bool = False
    is_over: bool = False  # normally: it was not cancelled and raised nothing


_log = logging.getLogger("txbox.worker")
