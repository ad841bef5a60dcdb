"""The keeper: renews leases while their handlers run."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from txbox.errors import LeaseLost
from txbox.ledgers.lease import Lease, elapsed
from txbox.ledgers.ledger import Ledger

__all__ = ["LeaseKeeper"]

RENEWED_AFTER = 1 / 3
"""Of a lease's length: so two renewals may fail before it runs out."""

RETRY_SECONDS = 1.0
"""Until a renewal is tried again that has failed; less for short leases."""

IDLE_SECONDS = 60.0
"""How long the thread waits for another lease before it ends."""


@dataclass(slots=True, eq=False)
class _Kept:
    lease: Lease
    due: float
    until: float | None


class LeaseKeeper:
    """Renews leases from one thread, which is there only while there is something to do.

    A thread also where handlers are coroutines: one that blocks the event loop keeps its lease all the same.
    """

    def __init__(self, ledger: Ledger, on_failure: Callable[[Lease, Exception], None] | None = None) -> None:
        """Take the ledger.

        Args:
            ledger: whose leases.
            on_failure: is told of a lease that could not be renewed; the log is told in any case.
        """
        self._ledger = ledger
        self._on_failure = on_failure
        self._kept: set[_Kept]
        self._thread: threading.Thread | None
        self._begin()

    @contextmanager
    def keep(self, lease: Lease, *, until: float | None = None) -> Iterator[None]:
        """While the block runs, renew a lease.

        Args:
            lease: which.
            until: a reading of ``elapsed`` after which no renewal may make it last, as whoever works on it ends then.
        """
        if self._process != os.getpid():
            # A fork takes no thread along; the leases are its parent's, and the lock may be held by nobody for ever.
            self._begin()
        kept = _Kept(lease, elapsed() + lease.seconds * RENEWED_AFTER, until)
        with self._changed:
            self._kept.add(kept)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="txbox-leases", daemon=True)
                self._thread.start()
            else:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._kept.discard(kept)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._kept = set()
        self._thread = None

    def _run(self) -> None:
        while (due := self._wait_for_due()) is not None:
            for kept in due:
                self._renew(kept)

    def _wait_for_due(self) -> list[_Kept] | None:
        with self._changed:
            idle_at = elapsed() + IDLE_SECONDS
            while True:
                now = elapsed()
                if due := [kept for kept in self._kept if kept.due <= now]:
                    return due
                if not self._kept and now >= idle_at:
                    self._thread = None
                    return None
                self._changed.wait(min((kept.due for kept in self._kept), default=idle_at) - now)

    def _renew(self, kept: _Kept) -> None:
        lease, asked_at = kept.lease, elapsed()
        seconds = lease.seconds if kept.until is None else min(lease.seconds, kept.until - asked_at)
        if seconds <= lease.seconds_left:
            self._again_at(kept, None)  # it lasts as long as it may
            return
        try:
            self._ledger.renew(lease, seconds=seconds)
        except LeaseLost as error:
            self._again_at(kept, None)
            self._failed(kept, error)
        except Exception as error:  # noqa: BLE001 - a keeper that ends silently loses every lease it keeps
            self._again_at(kept, elapsed() + min(RETRY_SECONDS, lease.seconds / 10))
            self._failed(kept, error)
        else:
            self._again_at(kept, asked_at + lease.seconds * RENEWED_AFTER)

    def _again_at(self, kept: _Kept, due: float | None) -> None:
        with self._changed:
            if due is None:
                self._kept.discard(kept)
            else:
                kept.due = due

    def _failed(self, kept: _Kept, error: Exception) -> None:
        _log.warning("%r could not be renewed: %s", kept.lease, error)
        if self._on_failure is not None:
            try:
                self._on_failure(kept.lease, error)
            except Exception:  # noqa: BLE001 - as above
                _log.exception("whoever is told of leases that could not be renewed has failed")


_log = logging.getLogger("txbox")
