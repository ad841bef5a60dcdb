"""Calls from an event loop to threads: what blocks, as a ledger or an engine for functions, leaves the loop alone."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from txbox.postgres.drivers.greenlets import in_greenlet, raise_if_cancelled, wait_for

MOST_THREADS = 32

LOOK_SECONDS = 0.5
"""Between looks of what waits for another thread."""

P = ParamSpec("P")
T = TypeVar("T")


class ThreadCalls:
    """Has what is called in a greenlet run in threads; what is called elsewhere runs there."""

    def __init__(self, threads: int) -> None:
        """Say how many calls are made at once, at most 32."""
        self._count = min(threads, MOST_THREADS)
        self._threads: ThreadPoolExecutor | None = None

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in a thread; a cancellation is raised when the call has ended."""
        result = self.call_through(function, *args, **kwargs)
        raise_if_cancelled()
        return result

    def call_through(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in a thread, and return its result also if cancelled: the caller sees to it that no work is begun."""
        if not in_greenlet():
            return function(*args, **kwargs)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="txbox-calls")
        return wait_for(_finished(self._threads, partial(function, *args, **kwargs)))

    def close(self) -> None:
        """End the threads, which begin again with the next call."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None


async def _finished(threads: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    call = asyncio.get_running_loop().run_in_executor(threads, function)
    await until_done(call)
    return call.result()


async def until_done(
    call: "asyncio.Future[Any]", seconds: float = math.inf, look: Callable[[], object] = lambda: None
) -> None:
    """Wait for the end of a call, for so long, however often this is cancelled: anyio does that again and again.

    ``look`` is called before it waits, and every half second.
    """
    ends_at = time.monotonic() + seconds
    while not call.done() and time.monotonic() < ends_at:
        look()
        with suppress(asyncio.CancelledError):
            await asyncio.wait([call], timeout=LOOK_SECONDS)
