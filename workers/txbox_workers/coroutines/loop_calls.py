"""Calls from threads to an event loop: the functions run there in greenlets."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from txbox.postgres.drivers.greenlets import run_in_greenlet

T = TypeVar("T")


class LoopCalls:
    """Has functions run on one event loop, each in a task and a greenlet of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the loop; the coroutine that does must not wait in it for what it has called."""
        self._loop = loop

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Have a function run on the loop, from another thread."""
        assert self._loop is not None  # noqa: S101 - for the type checker: bound when the worker starts
        return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    def call(self, work: Callable[[], T]) -> T:
        """Run a function on the loop, from another thread, and return what it returns."""
        return self.submit(work).result()

    def cancel(self) -> None:
        """Cancel what runs; for the loop itself."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, work: Callable[[], T]) -> T:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker
        self._tasks.add(task)
        try:
            return await run_in_greenlet(work)
        finally:
            self._tasks.discard(task)
