"""Greenlets: how code that waits as a function does is run on an event loop. SQLAlchemy's own way, and in one place.

All of txbox is written once, with functions. On an event loop such a function runs in a greenlet of SQLAlchemy's,
beside the coroutine that has called it, and gives the loop back whenever it waits::

    coroutine   await run_in_greenlet(function) ┐                ┌─ await … ─┐               ┌─ the result
    greenlet                                    └─ function … ── wait_for(…) └─ … goes on … ─┘

So a statement of an async driver, which SQLAlchemy waits for in the same way, needs no second version of the code
around it. What waits by itself here has to ask ``in_greenlet``, or it would stop the loop, as ``sleep`` and
``GreenletEvent`` do.

https://docs.sqlalchemy.org/en/20/orm/extensions/asyncio.html#synopsis-orm
"""

import asyncio
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from txbox.errors import InvalidConfiguration

CHECK_SECONDS = 0.05
"""Between looks at an event that a greenlet waits for."""

P = ParamSpec("P")
T = TypeVar("T")


def in_greenlet() -> bool:
    """Whether this code runs in a greenlet on an event loop, so that it may, and has to, wait with ``wait_for``."""
    if "greenlet" not in sys.modules:
        return False
    from sqlalchemy.util.concurrency import in_greenlet

    return bool(in_greenlet())


def wait_for(awaitable: Awaitable[T]) -> T:
    """Wait for something in a greenlet, and return its result; the loop goes on meanwhile."""
    from sqlalchemy.util import await_only

    return await_only(awaitable)


async def run_in_greenlet(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a greenlet, and return its result.

    Raises:
        InvalidConfiguration: there is no package greenlet.
    """
    if "greenlet" not in sys.modules and find_spec("greenlet") is None:
        raise InvalidConfiguration("coroutines need greenlet, which is not installed: pip install 'txbox[asyncio]'")
    from sqlalchemy.util import greenlet_spawn

    return await greenlet_spawn(partial(function, *args, **kwargs))


def cancel(task: "asyncio.Task[Any]") -> None:
    """Cancel a task whose cancellations are not to be forgotten; see ``without_own_cancellations``."""
    _cancelled.add(task)
    task.cancel()


def cancel_later() -> None:
    """Have a cancellation that was caught in a greenlet raised again at the task's next wait."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
        task.cancel()


def without_own_cancellations(call: Callable[[], T]) -> T:
    """Call host's code in a greenlet, and forget the cancellations of its task that it has asked for itself.

    A time-out that is made of ``task.cancel()`` without ``uncancel()``, as some libraries have it, would leave a task
    that looks as if it was cancelled for good.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        result = call()
    except asyncio.CancelledError:
        raise
    except BaseException:
        _forget(task, before)
        raise
    _forget(task, before)
    return result


def _forget(task: "asyncio.Task[Any] | None", before: int) -> None:
    while task is not None and task not in _cancelled and task.cancelling() > before:
        task.uncancel()


def is_cancelled() -> bool:
    """Whether this code runs in a greenlet whose task was cancelled."""
    if not in_greenlet():
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise ``asyncio.CancelledError`` in such a greenlet: where a cancellation was not raised at once."""
    if is_cancelled():
        raise asyncio.CancelledError


class GreenletEvent(threading.Event):
    """An event that a greenlet may wait for, too: the loop goes on meanwhile."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for so many seconds at most; return whether it is."""
        return wait_for(self._on_loop(timeout)) if in_greenlet() else super().wait(timeout)

    async def _on_loop(self, timeout: float | None) -> bool:
        ends_at = math.inf if timeout is None else time.monotonic() + timeout
        # Looked at, not signalled: any thread may set it, and what waits here is a pause after trouble.
        while not self.is_set() and (left := ends_at - time.monotonic()) > 0:
            await asyncio.sleep(min(left, CHECK_SECONDS))
        return self.is_set()


def sleep(seconds: float) -> None:
    """Sleep: in a greenlet, the loop goes on meanwhile."""
    if in_greenlet():
        wait_for(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


_cancelled: "WeakSet[asyncio.Task[Any]]" = WeakSet()
"""Tasks that ``cancel`` has cancelled."""
