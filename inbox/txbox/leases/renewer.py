"""The renewer: extends leases while their handlers run."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from txbox.backoff import run_until_return
from txbox.errors import LeaseLost
from txbox.leases.lease import Lease, elapsed
from txbox.leases.ledger import Ledger
from txbox.text import log_failure, text_of

RENEWED_AFTER = 1 / 3
"""Part of a lease's length. A ledger gives up a silent store within a third, which leaves time to try others."""

RETRY_SECONDS = 1.0
"""The delay before a failed renewal is tried again; less for short leases."""

IDLE_SECONDS = 10.0
"""How long the thread waits for another lease before it ends."""


class LeaseRenewer:
    """Renews leases of one ledger.

    All renewers of a process share one thread that starts due renewals. Each renewal has its own thread, so one that
    hangs delays no other. Threads serve coroutine handlers too: a handler that blocks the event loop still keeps its
    lease.
    """

    def __init__(self, ledger: Ledger, on_failure: Callable[[Lease, Exception], None] | None = None) -> None:
        """Take the ledger.

        ``on_failure`` is called with a lease that could not be renewed and the error, after both are logged.
        """
        self._ledger = ledger
        self._on_failure = on_failure

    @contextmanager
    def renewing(self, lease: Lease, *, until: float | None = None) -> Iterator[None]:
        """Renew a lease while the block runs.

        ``until`` is a reading of ``elapsed`` at which this process ends, so no renewal may make the lease last longer.
        """
        renewal = _Renewal(self, lease, _first_due(lease), until)
        try:
            _schedule.add(renewal)  # if no thread can be started, the lease is not renewed
            yield
        finally:
            _schedule.discard(renewal)

    def renew(self, renewal: "_Renewal") -> float | None:
        """Renew one lease; return when it is due again, or None if it is not."""
        lease, asked_at = renewal.lease, elapsed()
        length = lease.lease_seconds
        lease_seconds = length if renewal.until is None else min(length, renewal.until - asked_at)
        if lease_seconds <= lease.seconds_left:
            return None  # it already lasts as long as it may
        try:
            self._ledger.renew(lease, lease_seconds=lease_seconds)
        except LeaseLost as error:
            self._report(renewal, error)
            return None
        except Exception as error:  # noqa: BLE001 - an error that ended the thread would cost every lease it renews
            self._report(renewal, error)
            return elapsed() + min(RETRY_SECONDS, lease.lease_seconds / 10)
        return asked_at + lease.lease_seconds * RENEWED_AFTER

    def _report(self, renewal: "_Renewal", error: Exception) -> None:
        if renewal not in _schedule:
            return  # the block has already ended
        _log.warning("%r could not be renewed: %s", renewal.lease, text_of(error))
        if self._on_failure is not None:
            try:
                self._on_failure(renewal.lease, error)
            except BaseException:  # noqa: BLE001 - it is the host's code
                log_failure("the callback for renewals that failed has raised an error")


@dataclass(slots=True, eq=False)
class _Renewal:
    renewer: LeaseRenewer
    lease: Lease
    due: float
    until: float | None


class _Schedule:
    """The thread that starts due renewals; one per process, and only while there are leases to renew."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._renewals: set[_Renewal] = set()
        self._wakes_at = -math.inf  # when the thread looks again by itself
        self._thread: threading.Thread | None = None

    def __contains__(self, renewal: _Renewal) -> bool:
        with self._changed:
            return renewal in self._renewals

    def add(self, renewal: _Renewal) -> None:
        with self._changed:
            self._renewals.add(renewal)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=run_until_return,
                    args=(self._run,),
                    kwargs={"name": "the renewer of leases", "wait": time.sleep},
                    name="txbox-leases",
                    daemon=True,
                )
                self._thread.start()
            elif renewal.due < self._wakes_at:  # otherwise it looks in time, and most leases have ended by then
                self._changed.notify()

    def discard(self, renewal: _Renewal) -> None:
        with self._changed:
            self._renewals.discard(renewal)

    def _run(self) -> None:
        while (due := self._wait_for_due()) is not None:
            for number, renewal in enumerate(due):
                try:
                    threading.Thread(target=self._renew, args=(renewal,), name="txbox-lease", daemon=True).start()
                except BaseException:
                    with self._changed:  # no thread can be started for now: renewals without one are due again
                        for left in due[number:]:
                            left.due = elapsed()
                    raise

    def _wait_for_due(self) -> list[_Renewal] | None:
        with self._changed:
            idle_at = elapsed() + IDLE_SECONDS
            while True:
                now = elapsed()
                if due := [renewal for renewal in self._renewals if renewal.due <= now]:
                    for renewal in due:
                        renewal.due = math.inf  # until this renewal has ended
                    return due
                if not self._renewals and now >= idle_at:
                    self._thread = None
                    return None
                self._wakes_at = min((renewal.due for renewal in self._renewals), default=idle_at)
                self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))

    def _renew(self, renewal: _Renewal) -> None:
        try:
            due = renewal.renewer.renew(renewal)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the lease has not run out yet
            _log.error("%r could not be renewed, and is tried again: %s", renewal.lease, text_of(error))
            due = elapsed() + RETRY_SECONDS
        with self._changed:
            if due is None:
                self._renewals.discard(renewal)
            else:
                renewal.due = due
                self._changed.notify()


def _first_due(lease: Lease) -> float:
    return elapsed() + max(lease.seconds_left - lease.lease_seconds * (1 - RENEWED_AFTER), 0.0)


_log = logging.getLogger("txbox.leases")

_schedule = _Schedule()
if hasattr(os, "register_at_fork"):  # a fork copies no thread; the leases are its parent's, and a lock may be held
    os.register_at_fork(after_in_child=_schedule.__init__)  # type: ignore[misc]
