"""The event loop in which a relay runs the coroutines of its async publishers, in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from txbox.relay.publisher import AsyncPublisher


class EventLoop:
    """Runs coroutines until it is closed. Other threads start and cancel them."""

    def __init__(self, publishers: Sequence[AsyncPublisher]) -> None:
        """Take the publishers; those that are async context managers are entered in the loop, and left at its end."""
        self._publishers = publishers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._ready = threading.Event()
        self._changing = threading.Lock()

    def run(self) -> None:
        """Run until ``close``. Raises what a publisher raises that cannot be entered."""
        asyncio.run(self._main())

    def wait_ready(self, seconds: float) -> bool:
        """Wait until coroutines can be started, and return whether they can."""
        return self._ready.wait(seconds)

    def start(self, coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Start coroutines, in their order."""
        assert self._loop is not None  # noqa: S101 - it is ready
        self._loop.call_soon_threadsafe(self._start, coroutines)

    def cancel(self) -> None:
        """Cancel all coroutines that were started."""
        with self._changing:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._cancel)

    def close(self) -> None:
        """End the loop, once no coroutine is left."""
        with self._changing:
            self._closed = True
            if self._closing is not None and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._closing.set)

    async def _main(self) -> None:
        async with AsyncExitStack() as entered:
            for publisher in self._publishers:
                if isinstance(publisher, AbstractAsyncContextManager):
                    await entered.enter_async_context(publisher)
            with self._changing:
                if self._closed:
                    return
                self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
            self._ready.set()
            try:
                await self._closing.wait()
                if self._tasks:
                    await asyncio.wait(self._tasks)
            finally:
                self._ready.clear()

    def _start(self, coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
        for coroutine in coroutines:
            task = asyncio.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
