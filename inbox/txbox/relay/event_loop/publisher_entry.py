"""The entry of an async publisher: its async context manager, entered and left in one task of the event loop."""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress

from txbox.backoff import Backoff
from txbox.dead_letters.failures import describe
from txbox.errors import BrokerError

ENTER_SECONDS = 1.0
"""So long the first calls of a publisher wait until it is entered. Later ones fail at once, and leave others room."""

LEAVE_SECONDS = 5.0
"""How long leaving a publisher may take, at a stop; it is then cancelled."""

ENTER_BACKOFF = Backoff(first_seconds=0.5, longest_seconds=30.0)
"""Until a publisher that could not be entered is tried again."""


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
