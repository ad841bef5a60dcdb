"""Calls from threads to an event loop: the functions run there in greenlets."""

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from typing import TypeVar

from txbox.postgres.drivers.greenlets import cancel, run_in_greenlet

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""Between looks at whether the loop is still there."""


class LoopCalls:
    """Has functions run on one event loop, each in a task and a greenlet of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batches: set[asyncio.Task[object]] = set()
        self._others: set[asyncio.Task[object]] = set()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the loop; the coroutine that does must not wait in it for what it has called."""
        self._loop = loop

    @property
    def has_ended(self) -> bool:
        """Whether the loop is closed."""
        return self._loop is not None and self._loop.is_closed()

    def submit(self, batch: Callable[[], object], ended: Callable[[], object]) -> None:
        """Have a batch run on the loop, from another thread, and ``ended`` be called there after it.

        Raises ``RuntimeError`` if the loop is closed; if it is closed before the batch ends, nothing is called.
        """
        self._bound.call_soon_threadsafe(self.begin, batch, ended)

    def begin(self, batch: Callable[[], object], ended: Callable[[], object]) -> None:
        """Have a batch run on the loop, from there: as ``submit``."""
        running = self._run(batch, self._batches)
        try:
            task = self._bound.create_task(running)
        except BaseException:  # a task factory of the host's may raise
            running.close()
            ended()
            raise
        task.add_done_callback(lambda _: ended())

    def call(self, work: Callable[[], T]) -> T:
        """Run something short on the loop, from another thread, and return what it returns.

        Raises ``concurrent.futures.CancelledError`` if the loop ends before; and what the work raises.
        """
        running = self._call(work)
        while not wait([running], LOOK_SECONDS).done:
            if self.has_ended:  # without having looked at what was submitted, or in the middle of it
                raise CancelledError
        return running.result()

    def cancel_batches(self) -> None:
        """Cancel the batches that run, for the loop itself; each once, as it has to roll back in peace."""
        for task in self._batches:
            if not task.cancelling():
                cancel(task)

    def cancel_calls(self) -> None:
        """Cancel what is no batch: the checks of a start."""
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
