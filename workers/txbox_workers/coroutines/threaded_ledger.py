"""A ledger in threads: its calls, which block, leave the event loop alone."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from txbox.leases import LEASE_SECONDS, Acquisition, Lease, Ledger
from txbox.leases.lease import AttemptEnd
from txbox.postgres.drivers.greenlets import in_greenlet, wait_for

MOST_THREADS = 32


class ThreadedLedger:
    """A ledger whose calls, made in a greenlet, are made in another thread; see ``txbox.leases.Ledger``.

    The renewer, which has threads of its own, calls it directly.
    """

    def __init__(self, ledger: Ledger, threads: int) -> None:
        """Take the ledger, and how many calls are made at once, at most 32."""
        self._ledger = ledger
        self._threads = ThreadPoolExecutor(min(threads, MOST_THREADS), thread_name_prefix="txbox-ledger")

    def __repr__(self) -> str:
        return repr(self._ledger)

    @property
    def subscriber_id(self) -> str:
        """The consumer's name."""
        return self._ledger.subscriber_id

    def check(self) -> None:
        """Check that the store answers."""
        self._call(self._ledger.check)

    def acquire(
        self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        """Ask for the lease of a message."""
        acquired: Acquisition = self._call(
            self._ledger.acquire, message_id, lease_seconds=lease_seconds, fingerprint=fingerprint
        )
        return acquired

    def renew(self, lease: Lease, *, lease_seconds: float | None = None) -> None:
        """Extend a lease."""
        self._call(self._ledger.renew, lease, lease_seconds=lease_seconds)

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        """Record that the work is done."""
        self._call(self._ledger.complete, lease, result)

    def release(self, lease: Lease, ended: AttemptEnd = AttemptEnd.FAILED, *, forget_attempts: bool = False) -> None:
        """Record that an attempt has ended."""
        self._call(self._ledger.release, lease, ended, forget_attempts=forget_attempts)

    def find_expired(self, lease: Lease, sent_at: Any) -> Any:
        """Find out whether a message is too old to judge; None in a ledger without horizons."""
        find_expired = getattr(self._ledger, "find_expired", None)
        return None if find_expired is None else self._call(find_expired, lease, sent_at)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_greenlet():
            return function(*args, **kwargs)
        return wait_for(_finished(self._threads, partial(function, *args, **kwargs)))


async def _finished(threads: ThreadPoolExecutor, function: Any) -> Any:
    """Call in a thread, and wait for the end of the call also if cancelled: so no lease is left behind unknown."""
    call = asyncio.get_running_loop().run_in_executor(threads, function)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise
