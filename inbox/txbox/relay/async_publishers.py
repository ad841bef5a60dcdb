"""The async publishers of a relay: entered, called and left in one event loop with its own thread."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any

from txbox.backoff import Backoff
from txbox.dead_letters.failures import describe
from txbox.errors import BrokerError
from txbox.relay.publisher import AsyncPublisher

CoroutineFunction = Callable[[], Coroutine[Any, Any, None]]

END_SECONDS = 5.0
"""How long cancelled coroutines may keep running when the loop ends; after that they are abandoned."""

ENTER_SECONDS = 1.0
"""How long a publisher's first calls wait until it is entered. Later calls fail at once and make room for others."""

LEAVE_SECONDS = 5.0
"""How long leaving a publisher may take at a stop before it is cancelled."""

ENTER_BACKOFF = Backoff(first_seconds=0.5, longest_seconds=30.0)
"""The delay before entering a publisher is tried again."""


class EventLoop:
    """Runs coroutines until it is closed. Other threads start and cancel them."""

    def __init__(self, publishers: Sequence[AsyncPublisher], *, enter_seconds: float) -> None:
        """Take the publishers; the loop enters those that are async context managers, and leaves them at its end.

        ``enter_seconds``: how long one try to enter a publisher may take.
        """
        self._publishers = publishers
        self._enter_seconds = enter_seconds
        self._entries: dict[int, PublisherEntry] = {}  # by the publisher's id; one publisher may serve several kinds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._tasks: dict[asyncio.Task[None], Callable[[], object]] = {}  # each with its end callback
        self._left: set[asyncio.Task[Any]] = set()  # keep them: garbage collection would run their finally blocks
        self._waiting: deque[tuple[CoroutineFunction, Callable[[], object]]] = deque()
        self._closed = False
        self._ready = threading.Event()

    def run(self) -> None:
        """Run until ``close``. Raise what a publisher raises that cannot be left, or that ends the loop."""
        try:
            loop = asyncio.new_event_loop()  # may fail, and must leave no coroutine behind that nothing awaits
            try:
                loop.run_until_complete(self._main())
            finally:
                self._ready.clear()  # before coroutines are cancelled and others try to replace them
                self._end_loop(loop)
        finally:
            self._end_waiting()

    @property
    def is_ready(self) -> bool:
        """Whether coroutines can be started: from the loop's start until it ends or fails."""
        return self._ready.is_set()

    async def wait_entered(self, publisher: AsyncPublisher) -> None:
        """Return once a publisher may be called. Raise ``BrokerError`` if it must be entered and is not."""
        if (entry := self._entries.get(id(publisher))) is not None:
            await entry.wait()

    def start(self, functions: Iterable[tuple[CoroutineFunction, Callable[[], object]]]) -> None:
        """Start coroutines, in their order.

        Each comes with a callback that runs once it has ended, even if it was cancelled before its first step or the
        loop had already failed.
        """
        self._waiting.extend(functions)
        self._call(self._start_waiting)
        if not self._ready.is_set():
            self._end_waiting()

    def cancel(self) -> None:
        self._call(self._cancel)

    def close(self) -> None:
        """End the loop once no coroutine is left."""
        self._closed = True
        self._call(self._end)

    def _call(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # it is closed
            if (loop := self._loop) is not None:
                loop.call_soon_threadsafe(function)

    async def _main(self) -> None:
        self._entries = {
            id(publisher): PublisherEntry(publisher, try_seconds=self._enter_seconds)
            for publisher in {id(publisher): publisher for publisher in self._publishers}.values()
            if isinstance(publisher, AbstractAsyncContextManager)
        }
        self._closing = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        self._start_waiting()  # what arrived between two runs
        if self._closed:
            self._end()
        await self._closing.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)
        # In a TaskGroup, one that raises would cancel the others.
        for error in await asyncio.gather(*[entry.leave() for entry in self._entries.values()], return_exceptions=True):
            if error is not None:
                raise error

    def _start_waiting(self) -> None:
        if not self._ready.is_set():
            return  # a loop that is ending starts nothing new
        for function, on_end in self._take_waiting():
            task = asyncio.create_task(function())
            self._tasks[task] = on_end
            task.add_done_callback(self._ended)

    def _end_waiting(self) -> None:
        for _, on_end in self._take_waiting():
            on_end()

    def _take_waiting(self) -> Iterator[tuple[CoroutineFunction, Callable[[], object]]]:
        with suppress(IndexError):  # two threads may take them
            while True:
                yield self._waiting.popleft()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if (on_end := self._tasks.pop(task, None)) is not None:
            on_end()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _end(self) -> None:
        if self._closing is not None:
            self._closing.set()

    def _end_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what is left and close the loop in bounded time; ``asyncio.Runner`` would wait for every coroutine.

        A coroutine that does not end never runs again, because its loop is closed.
        """
        deadline = time.monotonic() + END_SECONDS
        cancelled: set[asyncio.Task[Any]] = set()
        while (left := asyncio.all_tasks(loop)) and time.monotonic() < deadline:
            for task in left - cancelled:
                task.cancel()
            cancelled |= left
            _run(loop, asyncio.wait(left, timeout=deadline - time.monotonic()))
        if left:
            names = "; ".join(sorted(map(_name, left)))
            self._left |= left
            _log.error(
                "left where they are, %g s after they were cancelled, as their loop ends: %s", END_SECONDS, names
            )
        for task in list(self._tasks):
            self._ended(task)
        if not left:
            _run(loop, asyncio.wait([loop.create_task(loop.shutdown_asyncgens())], timeout=END_SECONDS))
        loop.close()  # this does not wait for threads of cancelled calls


def _run(loop: asyncio.AbstractEventLoop, waiting: Coroutine[Any, Any, object]) -> None:
    with suppress(BaseException):  # a coroutine of the host's may stop the loop again
        loop.run_until_complete(waiting)


def _name(task: asyncio.Task[Any]) -> str:
    """Return the name of one of our tasks; for any other, what it runs."""
    name = task.get_name()
    return getattr(task.get_coro(), "__qualname__", name) if name.startswith("Task-") else name


class PublisherEntry:
    """Enters one publisher, retrying as often as needed while the others are called. Made in the event loop."""

    def __init__(self, publisher: AbstractAsyncContextManager[object], *, try_seconds: float) -> None:
        """Take the publisher, and how long one try to enter it may take before it is cancelled."""
        self._publisher = publisher
        self._try_seconds = try_seconds
        self._calls_wait_until = asyncio.get_running_loop().time() + ENTER_SECONDS
        self._tried = asyncio.Event()
        self._failure: str | None = f"its __aenter__ has not returned for {ENTER_SECONDS:g} s"
        self._leaving = asyncio.Event()
        self._name = type(publisher).__qualname__
        self._task = asyncio.create_task(self._live(), name=f"__aenter__ of publisher {self._name}")

    async def wait(self) -> None:
        """Return if the publisher is entered. Raise ``BrokerError`` if entering fails or takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._calls_wait_until):
                await self._tried.wait()
        if self._failure is not None:
            raise BrokerError(f"its publisher is not entered: {self._failure}")

    async def leave(self) -> None:
        """Leave the publisher, or stop trying to enter it. If that takes too long, the loop's end cancels it.

        Raises what leaving the publisher raises.
        """
        self._leaving.set()
        if self._failure is not None:
            self._task.cancel()
        await asyncio.wait([self._task], timeout=LEAVE_SECONDS)
        if not self._task.done():
            _log.error("%s has not ended within %g s of the stop", self._task.get_name(), LEAVE_SECONDS)
        elif not self._task.cancelled():
            self._task.result()

    async def _live(self) -> None:
        # A client may require that the same task enters and leaves it.
        async with AsyncExitStack() as stack:
            await self._enter(stack)
            self._failure = None
            self._tried.set()
            try:
                await self._leaving.wait()
            finally:
                self._task.set_name(f"__aexit__ of publisher {self._name}")

    async def _enter(self, stack: AsyncExitStack) -> None:
        failures = 0
        while True:
            try:
                async with asyncio.timeout(self._try_seconds):
                    await stack.enter_async_context(self._publisher)
                return
            except GeneratorExit:  # its loop has already ended
                raise
            except BaseException as error:  # it is the host's code; SystemExit would end the loop
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                failures += 1
                self._failure = describe(error)
                if isinstance(error, TimeoutError) and not str(error):
                    self._failure = f"its __aenter__ has not returned for {self._try_seconds:g} s"
            if self._leaving.is_set():  # it turned its cancellation into another error
                raise asyncio.CancelledError
            self._tried.set()
            pause = ENTER_BACKOFF.seconds(failures)
            _log.error("publisher %s cannot be entered, next try in %.1f s: %s", self._name, pause, self._failure)
            await asyncio.sleep(pause)


_log = logging.getLogger("txbox.relay")
