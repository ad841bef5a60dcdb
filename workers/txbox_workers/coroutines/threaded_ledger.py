"""A ledger in threads: its calls, which block, leave the event loop alone."""

from typing import Any

from txbox.leases import LEASE_SECONDS, Acquisition, Lease, Ledger
from txbox.leases.lease import AttemptEnd
from txbox_workers.coroutines.thread_calls import ThreadCalls


class ThreadedLedger:
    """A ledger whose calls, made in a greenlet, are made in another thread; see ``txbox.leases.Ledger``.

    The renewer, which has threads of its own, calls it directly. A call that is cancelled ends first, so no lease is
    left behind that none releases; the cancellation is raised where work would begin: see ``LeaseRunner.run``.
    """

    def __init__(self, ledger: Ledger, calls: ThreadCalls) -> None:
        """Take the ledger, and what calls in threads."""
        self._ledger = ledger
        self._calls = calls

    def __repr__(self) -> str:
        return repr(self._ledger)

    @property
    def subscriber_id(self) -> str:
        """The consumer's name."""
        return self._ledger.subscriber_id

    def check(self) -> None:
        """Check that the store answers."""
        self._calls.call(self._ledger.check)

    def acquire(
        self, message_id: str, *, lease_seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
    ) -> Acquisition:
        """Ask for the lease of a message."""
        acquired: Acquisition = self._calls.call_through(
            self._ledger.acquire, message_id, lease_seconds=lease_seconds, fingerprint=fingerprint
        )
        return acquired

    def renew(self, lease: Lease, *, lease_seconds: float | None = None) -> None:
        """Extend a lease."""
        self._calls.call(self._ledger.renew, lease, lease_seconds=lease_seconds)

    def complete(self, lease: Lease, result: bytes | None = None) -> None:
        """Record that the work is done."""
        self._calls.call_through(self._ledger.complete, lease, result)

    def release(self, lease: Lease, ended: AttemptEnd = AttemptEnd.FAILED, *, forget_attempts: bool = False) -> None:
        """Record that an attempt has ended."""
        self._calls.call_through(self._ledger.release, lease, ended, forget_attempts=forget_attempts)

    def find_expired(self, lease: Lease, sent_at: Any) -> Any:
        """Find out whether a message is too old to judge; None in a ledger without horizons."""
        find_expired = getattr(self._ledger, "find_expired", None)
        return None if find_expired is None else self._calls.call(find_expired, lease, sent_at)

    def close(self) -> None:
        """End its threads, which begin again with the next call."""
        self._calls.close()
