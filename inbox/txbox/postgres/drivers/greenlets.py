"""Greenlets: how sync code that waits runs on an event loop, in SQLAlchemy's own way, and only here.

All of txbox is written once, in sync functions. On an event loop such a function runs in one of SQLAlchemy's greenlets,
beside the coroutine that called it, and gives control back to the loop whenever it waits::

    coroutine   await run_in_greenlet(function) ┐                ┌─ await … ─┐               ┌─ the result
    greenlet                                    └─ function … ── wait_for(…) └─ … goes on … ─┘

So a statement of an async driver, for which SQLAlchemy waits in the same way, needs no second version of the code
around it. Code that waits by other means has to check ``in_greenlet``, or it would block the loop; ``sleep`` and
``GreenletEvent`` check it.

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

from txbox.errors import InvalidConfiguration, install_command

CHECK_SECONDS = 0.05
"""How often a waiting greenlet checks its event."""

P = ParamSpec("P")
T = TypeVar("T")


def in_greenlet() -> bool:
    """Whether this code runs in a greenlet on an event loop, where it can and must wait with ``wait_for``."""
    if "greenlet" not in sys.modules:
        return False
    from sqlalchemy.util.concurrency import in_greenlet

    return bool(in_greenlet())


def wait_for(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable in a greenlet, and return its result. The loop goes on meanwhile."""
    from sqlalchemy.util import await_only

    return await_only(awaitable)


async def run_in_greenlet(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a greenlet, and return its result.

    Raises:
        InvalidConfiguration: the package greenlet is not installed.
    """
    if "greenlet" not in sys.modules and find_spec("greenlet") is None:
        raise InvalidConfiguration(f"coroutines need greenlet, which is not installed: {install_command('asyncio')}")
    from sqlalchemy.util import greenlet_spawn

    return await greenlet_spawn(partial(function, *args, **kwargs))


def cancel(task: "asyncio.Task[Any]") -> None:
    """Cancel a task whose cancellations must not be forgotten; see ``without_own_cancellations``."""
    _cancelled.add(task)
    task.cancel()


def cancel_later() -> None:
    """Raise a cancellation that was caught in a greenlet again, at the task's next wait."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
        task.cancel()


def without_own_cancellations(call: Callable[[], T]) -> T:
    """Call the host's code in a greenlet, then forget the cancellations of the task that this code requested itself.

    Some libraries implement time-outs with ``task.cancel()`` but without ``uncancel()``. Such a time-out would leave a
    task that looks as if it was cancelled for good.
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
    """Whether this code runs in a greenlet of a cancelled task."""
    if not in_greenlet():
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise ``asyncio.CancelledError`` in a greenlet of a cancelled task, if that was not raised at once."""
    if is_cancelled():
        raise asyncio.CancelledError


class GreenletEvent(threading.Event):
    """An event that greenlets can wait for, too. The loop goes on meanwhile."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most so many seconds; return whether it is set."""
        return wait_for(self._on_loop(timeout)) if in_greenlet() else super().wait(timeout)

    async def _on_loop(self, timeout: float | None) -> bool:
        ends_at = math.inf if timeout is None else time.monotonic() + timeout
        # Polled, not signalled: any thread may set it, and whoever waits here pauses after trouble anyway.
        while not self.is_set() and (left := ends_at - time.monotonic()) > 0:
            await asyncio.sleep(min(left, CHECK_SECONDS))
        return self.is_set()


def sleep(seconds: float) -> None:
    """Sleep; in a greenlet, the loop goes on meanwhile."""
    if in_greenlet():
        wait_for(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


_cancelled: "WeakSet[asyncio.Task[Any]]" = WeakSet()
"""Tasks that ``cancel`` has cancelled."""
