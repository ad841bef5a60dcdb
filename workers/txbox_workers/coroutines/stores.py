"""Ledgers and dead letters with blocking calls, used from an event loop without blocking it."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Engine

from txbox import DeadLetter, DeadLetters
from txbox.leases import LEASE_SECONDS, Acquisition, Lease, Ledger
from txbox.leases.lease import AttemptEnd
from txbox.postgres.drivers.greenlets import in_greenlet, raise_if_cancelled, wait_for

MOST_THREADS = 32

LOOK_SECONDS = 0.5
"""How often a coroutine that waits for another thread checks on it."""

P = ParamSpec("P")
T = TypeVar("T")


class ThreadCalls:
    """Runs calls from a greenlet in threads; other calls run where they are made."""

    def __init__(self, threads: int) -> None:
        """``threads`` is how many calls run at once, at most 32."""
        self._count = min(threads, MOST_THREADS)
        self._threads: ThreadPoolExecutor | None = None

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in a thread. If cancelled, raise that only after the call has ended."""
        result = self.call_through(function, *args, **kwargs)
        raise_if_cancelled()
        return result

    def call_through(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in a thread and return its result even if cancelled; the caller then makes sure that no work begins."""
        if not in_greenlet():
            return function(*args, **kwargs)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="txbox-calls")
        return wait_for(_finished(self._threads, partial(function, *args, **kwargs)))

    def close(self) -> None:
        """End the threads. The next call starts them again."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None


class ThreadedLedger:
    """A ledger that runs calls from a greenlet in another thread; see ``txbox.leases.Ledger``.

    The renewer has threads of its own and calls it directly. A cancelled call ends first, so it leaves no lease behind
    that nobody releases. The cancellation is raised where work would begin: see ``LeaseRunner.run``.
    """

    def __init__(self, ledger: Ledger, calls: ThreadCalls) -> None:
        self._ledger = ledger
        self._calls = calls

    def __repr__(self) -> str:
        return repr(self._ledger)

    @property
    def subscriber_id(self) -> str:
        return self._ledger.subscriber_id

    def check(self) -> None:
        self._calls.call(self._ledger.check)

    def acquire(
        self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        acquired: Acquisition = self._calls.call_through(
            self._ledger.acquire, message_id, lease_seconds=lease_seconds, fingerprint=fingerprint
        )
        return acquired

    def renew(self, lease: Lease, *, lease_seconds: float | None = None) -> None:
        self._calls.call(self._ledger.renew, lease, lease_seconds=lease_seconds)

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        self._calls.call_through(self._ledger.complete, lease, result)

    def release(self, lease: Lease, ended: AttemptEnd = AttemptEnd.FAILED, *, forget_attempts: bool = False) -> None:
        self._calls.call_through(self._ledger.release, lease, ended, forget_attempts=forget_attempts)

    def find_expired(self, lease: Lease, sent_at: Any) -> Any:
        """Return why a message is too old to judge, if it is; None in a ledger without horizons."""
        find_expired = getattr(self._ledger, "find_expired", None)
        return None if find_expired is None else self._calls.call(find_expired, lease, sent_at)

    def close(self) -> None:
        """End the threads. The next call starts them again."""
        self._calls.close()


class ThreadedLetters(DeadLetters):
    """Dead letters whose transactions under a lease run in another thread when called from a greenlet."""

    def __init__(self, letters: DeadLetters, calls: ThreadCalls) -> None:
        super().__init__(letters.engine, schema=letters.schema, prefix=letters.prefix)
        self._letters = letters
        self._calls = calls

    def on(self, engine: Engine) -> DeadLetters:
        return ThreadedLetters(self._letters.on(engine), self._calls)

    def park_leased(self, letter: DeadLetter, lease_attempts: int) -> int:
        """Park a message even if cancelled meanwhile: what is parked gets acked."""
        return self._calls.call_through(self._letters.park_leased, letter, lease_attempts)

    def waits(self, subscriber_id: str, message_id: str, body: bytes, lease_attempts: int) -> bool:
        return self._calls.call(self._letters.waits, subscriber_id, message_id, body, lease_attempts)

    def lease_attempts(self, subscriber_id: str, message_id: str) -> int:
        return self._calls.call(self._letters.lease_attempts, subscriber_id, message_id)


async def _finished(threads: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    call = asyncio.get_running_loop().run_in_executor(threads, function)
    await until_done(call)
    return call.result()


async def until_done(
    call: "asyncio.Future[Any]", seconds: float = math.inf, look: Callable[[], object] = lambda: None
) -> None:
    """Wait up to ``seconds`` for a call to end, however often this is cancelled: anyio cancels again and again.

    ``look`` is called before each wait, every half second.
    """
    ends_at = time.monotonic() + seconds
    while not call.done() and time.monotonic() < ends_at:
        look()
        with suppress(asyncio.CancelledError):
            await asyncio.wait([call], timeout=LOOK_SECONDS)
