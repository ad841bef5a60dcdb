"""The lease of a message: which owner may work on it, for how long, and how often that was tried. Pure: no I/O.

::

                 acquire                        complete
    (nothing) ─────────────→ in flight ─────────────────────→ completed
                              │ ↑   ↑ │
                      release │ │   └─┘ renew; and acquire, by another owner, once the lease has run out
                              ↓ │ acquire
                             free

What holds in every store:

1. Completed is final.
2. Every acquisition has a *fence*, a number greater than that of every earlier acquisition of the message, including
   those that a failover has lost. A store that compares fences can refuse one smaller than it has seen.
3. ``renew``, ``complete`` and ``release`` are carried out for the newest fence only; an older one is ``LeaseLost``. A
   lease that has run out, and that no other owner has taken over, is still the newest: its owner may complete it.
4. Attempts are counted when they begin. A release records how an attempt ended. An attempt that was neither released as
   failed nor completed may have had its effect, and counts among ``unknown_attempts``.

(M. Kleppmann, "How to do distributed locking", 2016, for the fence; C. Gray and D. Cheriton, "Leases: An Efficient
Fault-Tolerant Mechanism for Distributed File Cache Consistency", SOSP 1989, for the lease.)

No client's wall clock decides anything. The store decides whether a lease has run out (see the ledgers). The owner
measures an interval that starts before it asks for the lease, so it underestimates the time left and never
overestimates it. (Except in a virtual machine that was frozen or restored, whose clocks did not run: it overestimates
the time left until the store answers. That is what the fence is for.)
"""

import os
import time
from dataclasses import dataclass
from enum import StrEnum

from txbox.errors import InvalidConfiguration, LeaseLost, Mismatch
from txbox.text import host_name

LEASE_SECONDS = 30.0
"""How long a message stays with an owner that has died; a live owner renews its lease."""

MAX_LEASE_SECONDS = 7 * 24 * 60 * 60.0


class LeaseState(StrEnum):
    """The answer to a request for a lease."""

    ACQUIRED = "acquired"
    """The caller has the lease."""
    COMPLETED = "completed"
    """The message was completed before; its result may be there."""
    IN_FLIGHT = "in_flight"
    """Another owner is working on it."""


class AttemptEnd(StrEnum):
    """How an attempt ended that has not completed the message."""

    FAILED = "failed"
    """It had no effect."""
    UNKNOWN = "unknown"
    """It may have had its effect; the next attempt counts it in ``Lease.unknown_attempts``."""
    NOT_COUNTED = "not_counted"
    """As UNKNOWN, but an outage ended it, so it does not count as an attempt."""
    NOT_MADE = "not_made"
    """It was called off before anything was done, and does not count."""


class Lease:
    """The right to work on one message until the lease runs out.

    Attributes:
        subscriber_id: the ledger's subscriber.
        message_id: the message.
        fence: greater than that of every earlier lease of this message; see the module.
        attempt: the number of this attempt, from 1.
        unknown_attempts: how many earlier attempts may have had their effect, for example because they were killed or
            cut off. 0: as far as the ledger can tell, nothing has happened yet.
        begun: whether the work has begun under this lease.
        begun_again: whether it has begun more than once, so that what the first run did is unknown.
        returned: whether the work has returned.
    """

    __slots__ = (
        "_asked_at",
        "_ended",
        "_lease_seconds",
        "_lost",
        "attempt",
        "begun",
        "begun_again",
        "fence",
        "message_id",
        "returned",
        "subscriber_id",
        "unknown_attempts",
    )

    def __init__(
        self,
        subscriber_id: str,
        message_id: str,
        *,
        fence: int,
        attempt: int,
        unknown_attempts: int,
        lease_seconds: float,
        asked_at: float,
    ) -> None:
        """Make a lease; only ledgers do. ``asked_at`` is a reading of ``elapsed`` before the store was asked."""
        self.subscriber_id = subscriber_id
        self.message_id = message_id
        self.fence = fence
        self.attempt = attempt
        self.unknown_attempts = unknown_attempts
        self._lease_seconds = lease_seconds
        self._asked_at = asked_at
        self._lost = False
        self._ended = False
        self.begun = False
        self.begun_again = False
        self.returned = False

    def __repr__(self) -> str:
        return f"Lease({self.subscriber_id!r}, {self.message_id!r}, fence={self.fence}, attempt={self.attempt})"

    @property
    def lease_seconds(self) -> float:
        """How many seconds it lasts from its last renewal."""
        return self._lease_seconds

    @property
    def seconds_left(self) -> float:
        """For how many seconds, at least, no other owner can take the message over; 0 once it has run out."""
        return 0.0 if self._lost or self._ended else max(self._asked_at + self._lease_seconds - elapsed(), 0.0)

    @property
    def lost(self) -> bool:
        """Whether the ledger has answered that it is lost. A lease that has just run out may be lost without that."""
        return self._lost

    def ensure(self) -> None:
        """Raise ``LeaseLost`` if another owner may have the message by now.

        For long handlers: call it before a step that cannot be undone.
        """
        if not self.seconds_left:
            raise LeaseLost(self.subscriber_id, self.message_id, self.fence)

    def begin_work(self) -> None:
        """Record that the work begins; what an earlier run under this lease did becomes unknown."""
        self.unknown_attempts += self.begun
        self.begun_again = self.begun
        self.begun = True
        self.returned = False

    def mark_renewed(self, lease_seconds: float, asked_at: float) -> None:
        """Record that the store renewed it for ``lease_seconds``, counted from ``asked_at``. For ledgers."""
        if asked_at >= self._asked_at:  # of two threads that renew it, the later one counts
            self._lease_seconds, self._asked_at = lease_seconds, asked_at

    def mark_ended(self) -> None:
        """Record that it is released or completed. For ledgers."""
        self._ended = True

    def mark_lost(self) -> LeaseLost:
        """Record that the store has a newer fence or none, and return the error to raise. For ledgers."""
        self._lost = True
        return LeaseLost(self.subscriber_id, self.message_id, self.fence)


@dataclass(frozen=True, slots=True)
class Acquisition:
    """The answer to a request for a lease.

    Attributes:
        state: which answer it is.
        lease: the lease, if it was acquired.
        result: what the handler returned, encoded, if the message is completed and a result was kept.
        seconds_left: if in flight, how long the other owner's lease lasts at most unless it is renewed.
    """

    state: LeaseState
    lease: Lease | None = None
    result: bytes | None = None
    seconds_left: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a store knows about a message, by its own clock."""

    completed: bool
    seconds_left: float | None  # until the lease runs out, 0 or less if it has; None: no owner has one
    result: bytes | None = None  # what the handler returned, encoded
    fingerprint: bytes | None = None  # SHA-256 of the first payload; None if none was asked for


def acquisition_from(
    record: LeaseRecord, subscriber_id: str, message_id: str, fingerprint: bytes | None = None
) -> Acquisition | None:
    """Return what a record means for a request that did not get the lease, or raise ``Mismatch``.

    COMPLETED or IN_FLIGHT; None if the message is free or its lease has run out: ask again. ``fingerprint`` is that of
    the current payload; None: do not compare.
    """
    if fingerprint is not None and record.fingerprint is not None and record.fingerprint != fingerprint:
        raise Mismatch(subscriber_id, (message_id,))
    if record.completed:
        return Acquisition(LeaseState.COMPLETED, result=record.result)
    if record.seconds_left is not None and record.seconds_left > 0:
        return Acquisition(LeaseState.IN_FLIGHT, seconds_left=record.seconds_left)
    return None


def valid_lease_seconds(lease_seconds: float, of: str = "lease_seconds") -> float:
    """Return the length of a lease, or raise ``InvalidConfiguration``; ``of`` names the argument."""
    if not isinstance(lease_seconds, int | float) or not 0.001 <= lease_seconds <= MAX_LEASE_SECONDS:
        raise InvalidConfiguration(f"{of} must be from 0.001 to {MAX_LEASE_SECONDS:g}, not {lease_seconds!r}")
    return float(lease_seconds)


def elapsed() -> float:
    """Return a reading, in seconds, of a clock that only measures intervals, including the machine's sleep."""
    return time.clock_gettime(_INTERVALS) if _INTERVALS is not None else time.monotonic()


def owner() -> str:
    """Return the name of this process as an owner: host and process id."""
    return f"{host_name()} {os.getpid()}"


_INTERVALS: int | None = getattr(time, "CLOCK_BOOTTIME", None)
"""CLOCK_MONOTONIC stops while a machine sleeps; leases do not."""
