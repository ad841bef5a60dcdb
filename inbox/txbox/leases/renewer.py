"""The keeper: renews leases while their handlers run."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from txbox.errors import LeaseLost
from txbox.leases.lease import Lease, elapsed
from txbox.leases.ledger import Ledger
from txbox.threads import go_on, log_failure, text_of

__all__ = ["LeaseKeeper"]

RENEWED_AFTER = 1 / 3
"""Of a lease's length. A ledger gives up a silent store in a third of it at most, so others may be tried then."""

RETRY_SECONDS = 1.0
"""Until a renewal is tried again that has failed; less for short leases."""

IDLE_SECONDS = 10.0
"""How long the thread waits for another lease before it ends."""


class LeaseKeeper:
    """Renews leases of one ledger.

    All keepers of a process share one thread that knows when a lease is due, and each renewal has a thread for itself:
    one that hangs keeps no other lease from being renewed. Threads also where handlers are coroutines: one that blocks
    the event loop keeps its lease all the same.
    """

    def __init__(self, ledger: Ledger, on_failure: Callable[[Lease, Exception], None] | None = None) -> None:
        """Take the ledger.

        Args:
            ledger: whose leases.
            on_failure: is told of a lease that could not be renewed; the log is told in any case.
        """
        self._ledger = ledger
        self._on_failure = on_failure

    @contextmanager
    def keep(self, lease: Lease, *, until: float | None = None) -> Iterator[None]:
        """While the block runs, renew a lease.

        Args:
            lease: which.
            until: a reading of ``elapsed`` after which no renewal may make it last, as whoever works on it ends then.
        """
        kept = _Kept(self, lease, _first_due(lease), until)
        try:
            _rounds.add(kept)  # a thread may not be had for it, and then it is not kept
            yield
        finally:
            _rounds.discard(kept)

    def renew(self, kept: "_Kept") -> float | None:
        """Renew one lease; return when it is due again, None if it is not."""
        lease, asked_at = kept.lease, elapsed()
        seconds = lease.seconds if kept.until is None else min(lease.seconds, kept.until - asked_at)
        if seconds <= lease.seconds_left:
            return None  # it lasts as long as it may
        try:
            self._ledger.renew(lease, seconds=seconds)
        except LeaseLost as error:
            self._failed(kept, error)
            return None
        except Exception as error:  # noqa: BLE001 - a keeper that ends silently loses every lease it keeps
            self._failed(kept, error)
            return elapsed() + min(RETRY_SECONDS, lease.seconds / 10)
        return asked_at + lease.seconds * RENEWED_AFTER

    def _failed(self, kept: "_Kept", error: Exception) -> None:
        if kept not in _rounds:
            return  # it has ended meanwhile, and that is no news
        _log.warning("%r could not be renewed: %s", kept.lease, text_of(error))
        if self._on_failure is not None:
            try:
                self._on_failure(kept.lease, error)
            except BaseException:  # noqa: BLE001 - it is the host's code
                log_failure("whoever is told of renewals that failed has failed himself")


@dataclass(slots=True, eq=False)
class _Kept:
    keeper: LeaseKeeper
    lease: Lease
    due: float
    until: float | None


class _Rounds:
    """The thread that knows what is due; there is one in a process, and only while there are leases to keep."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: set[_Kept] = set()
        self._thread: threading.Thread | None = None

    def __contains__(self, kept: _Kept) -> bool:
        with self._changed:
            return kept in self._kept

    def add(self, kept: _Kept) -> None:
        with self._changed:
            self._kept.add(kept)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=go_on,
                    args=(self._run,),
                    kwargs={"name": "the keeper of leases", "wait": time.sleep},
                    name="txbox-leases",
                    daemon=True,
                )
                self._thread.start()
            else:
                self._changed.notify()

    def discard(self, kept: _Kept) -> None:
        with self._changed:
            self._kept.discard(kept)

    def _run(self) -> None:
        while (due := self._wait_for_due()) is not None:
            for number, kept in enumerate(due):
                try:
                    threading.Thread(target=self._renew, args=(kept,), name="txbox-lease", daemon=True).start()
                except BaseException:
                    with self._changed:  # no thread is to be had for now: those that have none are due again
                        for left in due[number:]:
                            left.due = elapsed()
                    raise

    def _wait_for_due(self) -> list[_Kept] | None:
        with self._changed:
            idle_at = elapsed() + IDLE_SECONDS
            while True:
                now = elapsed()
                if due := [kept for kept in self._kept if kept.due <= now]:
                    for kept in due:
                        kept.due = math.inf  # until its renewal has ended
                    return due
                if not self._kept and now >= idle_at:
                    self._thread = None
                    return None
                wakes_at = min((kept.due for kept in self._kept), default=idle_at)
                self._changed.wait(min(wakes_at - now, threading.TIMEOUT_MAX))

    def _renew(self, kept: _Kept) -> None:
        try:
            due = kept.keeper.renew(kept)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the lease is not over yet
            _log.error("%r could not be renewed, and is tried again: %s", kept.lease, text_of(error))
            due = elapsed() + RETRY_SECONDS
        with self._changed:
            if due is None:
                self._kept.discard(kept)
            else:
                kept.due = due
                self._changed.notify()


def _first_due(lease: Lease) -> float:
    """When a lease is to be renewed first: reckoned from when it was asked for, as its end is."""
    return elapsed() + max(lease.seconds_left - lease.seconds * (1 - RENEWED_AFTER), 0.0)


_log = logging.getLogger("txbox")

_rounds = _Rounds()
if hasattr(os, "register_at_fork"):  # a fork takes no thread along; the leases are its parent's, and a lock may be held
    os.register_at_fork(after_in_child=_rounds.__init__)  # type: ignore[misc]
