"""The event loop in which a relay runs the coroutines of its async publishers, in a thread of its own."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from typing import Any

from txbox.relay.publisher import AsyncPublisher

CoroutineFunction = Callable[[], Coroutine[Any, Any, None]]


class EventLoop:
    """Runs coroutines until it is closed. Other threads start and cancel them."""

    def __init__(self, publishers: Sequence[AsyncPublisher]) -> None:
        """Take the publishers; those that are async context managers are entered in the loop, and left at its end."""
        self._publishers = publishers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[CoroutineFunction, Callable[[], object]]] = deque()
        self._closed = False
        self._ready = threading.Event()

    def run(self) -> None:
        """Run until ``close``. Raises what a publisher raises that cannot be entered."""
        asyncio.run(self._main())

    def wait_ready(self, seconds: float) -> bool:
        """Wait until coroutines can be started, and return whether they can."""
        return self._ready.wait(seconds)

    def start(self, functions: Iterable[tuple[CoroutineFunction, Callable[[], object]]]) -> None:
        """Start coroutines, in their order; if the loop has failed, in the next one.

        With each comes what is called once it has ended, even if it was cancelled before its first step.
        """
        self._waiting.extend(functions)
        self._call(self._start_waiting)

    def cancel(self) -> None:
        """Cancel all coroutines that were started."""
        self._call(self._cancel)

    def close(self) -> None:
        """End the loop, once no coroutine is left."""
        self._closed = True
        self._call(self._end)

    def _call(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # it is closed; what it would have done, the next one does at its start
            if (loop := self._loop) is not None:
                loop.call_soon_threadsafe(function)

    async def _main(self) -> None:
        async with AsyncExitStack() as entered:
            for publisher in self._publishers:
                if isinstance(publisher, AbstractAsyncContextManager):
                    await entered.enter_async_context(publisher)
            self._closing = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            self._start_waiting()
            if self._closed:
                self._end()
            self._ready.set()
            try:
                await self._closing.wait()
                if self._tasks:
                    await asyncio.wait(self._tasks)
            finally:
                self._ready.clear()

    def _start_waiting(self) -> None:
        while self._waiting:
            function, on_end = self._waiting.popleft()
            task = asyncio.create_task(function())
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, on_end))

    def _ended(self, on_end: Callable[[], object], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        on_end()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _end(self) -> None:
        if self._closing is not None:
            self._closing.set()
