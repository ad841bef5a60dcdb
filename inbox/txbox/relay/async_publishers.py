"""The async publishers of a relay: entered, called and left in one event loop, which has a thread of its own."""

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
"""How long what was cancelled may go on when the loop ends; it is then left where it is."""

ENTER_SECONDS = 1.0
"""So long the first calls of a publisher wait until it is entered. Later ones fail at once, and leave others room."""

LEAVE_SECONDS = 5.0
"""How long leaving a publisher may take, at a stop; it is then cancelled."""

ENTER_BACKOFF = Backoff(first_seconds=0.5, longest_seconds=30.0)
"""Until a publisher that could not be entered is tried again."""


class EventLoop:
    """Runs coroutines until it is closed. Other threads start and cancel them."""

    def __init__(self, publishers: Sequence[AsyncPublisher], *, enter_seconds: float) -> None:
        """Take the publishers; those that are async context managers are entered in the loop, and left at its end.

        ``enter_seconds``: how long one try to enter a publisher may take.
        """
        self._publishers = publishers
        self._enter_seconds = enter_seconds
        self._entries: dict[int, PublisherEntry] = {}  # by the id of the publisher, which may be of several kinds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._tasks: dict[asyncio.Task[None], Callable[[], object]] = {}  # with what is called at the end of each
        self._left: set[asyncio.Task[Any]] = set()  # kept: the end of their memory would run what ends them
        self._waiting: deque[tuple[CoroutineFunction, Callable[[], object]]] = deque()
        self._closed = False
        self._ready = threading.Event()

    def run(self) -> None:
        """Run until ``close``. Raises what a publisher raises that cannot be left, or that ends the loop."""
        try:
            loop = asyncio.new_event_loop()  # it may fail, and leave a coroutine behind that nothing awaits
            try:
                loop.run_until_complete(self._main())
            finally:
                self._ready.clear()  # before coroutines are cancelled, and others are to take their place
                self._end_loop(loop)
        finally:
            self._end_waiting()

    @property
    def is_ready(self) -> bool:
        """Whether coroutines can be started: not before it has begun, nor after it has failed."""
        return self._ready.is_set()

    async def wait_entered(self, publisher: AsyncPublisher) -> None:
        """Return if a publisher can be called. Raises ``BrokerError`` if it is to be entered, and is not."""
        if (entry := self._entries.get(id(publisher))) is not None:
            await entry.wait()

    def start(self, functions: Iterable[tuple[CoroutineFunction, Callable[[], object]]]) -> None:
        """Start coroutines, in their order.

        With each comes what is called once it has ended, even if it was cancelled before its first step, or the loop
        has failed before.
        """
        self._waiting.extend(functions)
        self._call(self._start_waiting)
        if not self._ready.is_set():
            self._end_waiting()

    def cancel(self) -> None:
        """Cancel all coroutines that were started."""
        self._call(self._cancel)

    def close(self) -> None:
        """End the loop, once no coroutine is left."""
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
        self._start_waiting()  # what came between two runs
        if self._closed:
            self._end()
        await self._closing.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)
        # In a group, one that raises would cancel the others.
        for error in await asyncio.gather(*[entry.leave() for entry in self._entries.values()], return_exceptions=True):
            if error is not None:
                raise error

    def _start_waiting(self) -> None:
        if not self._ready.is_set():
            return  # the loop only ends what it has begun
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
        """Cancel what is left, and close the loop, in bounded time: ``asyncio.Runner`` would wait for every coroutine.

        What does not end is never run again: with its loop, it stands still.
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
        loop.close()  # which waits for no thread of a call that was cancelled


def _run(loop: asyncio.AbstractEventLoop, waiting: Coroutine[Any, Any, object]) -> None:
    with suppress(BaseException):  # a coroutine of the host's may end the loop again
        loop.run_until_complete(waiting)


def _name(task: asyncio.Task[Any]) -> str:
    """Return what one of ours is for, by its name; of others, what they run."""
    name = task.get_name()
    return getattr(task.get_coro(), "__qualname__", name) if name.startswith("Task-") else name


class PublisherEntry:
    """Enters one publisher, as often as it takes, beside the calls of all others. Made in the event loop."""

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
        """Return if the publisher is entered. Raises ``BrokerError`` if it cannot be, or takes its time."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._calls_wait_until):
                await self._tried.wait()
        if self._failure is not None:
            raise BrokerError(f"its publisher is not entered: {self._failure}")

    async def leave(self) -> None:
        """Leave the publisher, or give up entering it; the loop's end cancels it if that takes its time.

        Raises what leaving it raises.
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
        # A client may insist that one task enters and leaves it.
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
            except GeneratorExit:  # its loop has ended before
                raise
            except BaseException as error:  # it is the host's code; SystemExit would end the loop
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                failures += 1
                self._failure = describe(error)
                if isinstance(error, TimeoutError) and not str(error):
                    self._failure = f"its __aenter__ has not returned for {self._try_seconds:g} s"
            if self._leaving.is_set():  # it has made another error of its cancellation
                raise asyncio.CancelledError
            self._tried.set()
            pause = ENTER_BACKOFF.seconds(failures)
            _log.error("publisher %s cannot be entered, next try in %.1f s: %s", self._name, pause, self._failure)
            await asyncio.sleep(pause)


_log = logging.getLogger("txbox.relay")
