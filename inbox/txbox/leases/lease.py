"""The lease of a message: which owner may work on it, how long, and how often that was tried. Pure: no I/O.

::

                 acquire                        complete
    (nothing) ─────────────→ in flight ─────────────────────→ completed
                              │ ↑   ↑ │
                      release │ │   └─┘ renew; and acquire, by another owner, once the lease has run out
                              ↓ │ acquire
                             free

What holds in every store:

1. Completed is final.
2. Every acquisition has a *fence*, a number greater than that of every acquisition of the message before it, also of
   those that a failover has lost. A store that compares fences can refuse a smaller one than it has seen.
3. ``renew``, ``complete`` and ``release`` are carried out for the newest fence only; an older one is ``LeaseLost``. A
   lease that has run out, and that no other owner has taken over, is still the newest: its owner may complete it.
4. Attempts are counted when they begin. A release records how an attempt has ended; one that was neither released as
   failed nor completed may have had its effect, and counts among ``unknown_attempts``.

(M. Kleppmann, "How to do distributed locking", 2016, for the fence; C. Gray and D. Cheriton, "Leases: An Efficient
Fault-Tolerant Mechanism for Distributed File Cache Consistency", SOSP 1989, for the lease.)

No client's wall clock decides anything. The store decides whether a lease has run out (see the ledgers). The owner
measures an interval, from a moment before it asked for the lease: so its view of the lease is too short, never too
long. (Except in a virtual machine that was frozen or restored, whose clocks did not run: it takes its lease for longer
until the store answers; the fence is for that.)
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
    """It is ours: go on."""
    COMPLETED = "completed"
    """The message was completed before; its result may be there."""
    IN_FLIGHT = "in_flight"
    """Another owner works on it."""


class AttemptEnd(StrEnum):
    """How an attempt has ended that has completed nothing."""

    FAILED = "failed"
    """It had no effect."""
    UNKNOWN = "unknown"
    """It may have had its effect: it counts in ``Lease.unknown_attempts`` of the next attempt."""
    NOT_COUNTED = "not_counted"
    """As UNKNOWN, but an outage ended it: it does not count as an attempt."""
    NOT_MADE = "not_made"
    """It was called off before anything was done, and does not count."""


class Lease:
    """The right to work on one message, until it runs out.

    Attributes:
        subscriber_id: whose ledger.
        message_id: of which message.
        fence: greater than that of every earlier lease of this message; see the module.
        attempt: the number of this attempt, from 1.
        unknown_attempts: how many of the attempts before it may have had their effect, because they were killed or cut
            off, say. 0: as far as the ledger can tell, nothing has happened yet.
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
        """Made by a ledger. ``asked_at`` is a reading of ``elapsed`` before the store was asked."""
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
        """How long it lasts from its last renewal."""
        return self._lease_seconds

    @property
    def seconds_left(self) -> float:
        """For how long, at least, no other owner can take the message over; 0 if that is over."""
        return 0.0 if self._lost or self._ended else max(self._asked_at + self._lease_seconds - elapsed(), 0.0)

    @property
    def lost(self) -> bool:
        """Whether the ledger has answered that it is lost. One that has just run out may be lost without that."""
        return self._lost

    def ensure(self) -> None:
        """Raise ``LeaseLost`` if the message may not be ours any more.

        For long handlers, before a step that cannot be taken back.
        """
        if not self.seconds_left:
            raise LeaseLost(self.subscriber_id, self.message_id, self.fence)

    def begin_work(self) -> None:
        """Note that the work begins; what an earlier run under this lease did is unknown."""
        self.unknown_attempts += self.begun
        self.begun_again = self.begun
        self.begun = True
        self.returned = False

    def mark_renewed(self, lease_seconds: float, asked_at: float) -> None:
        """For a ledger: the store has renewed it for so long, from no earlier than when it was asked."""
        if asked_at >= self._asked_at:  # of two threads that renew it, the later one counts
            self._lease_seconds, self._asked_at = lease_seconds, asked_at

    def mark_ended(self) -> None:
        """For a ledger: it is released or completed."""
        self._ended = True

    def mark_lost(self) -> LeaseLost:
        """For a ledger: the store has a newer fence or none. Returns the error to raise."""
        self._lost = True
        return LeaseLost(self.subscriber_id, self.message_id, self.fence)


@dataclass(frozen=True, slots=True)
class Acquisition:
    """The answer to a request for a lease.

    Attributes:
        state: what it is.
        lease: the lease, if it is ours.
        result: what the handler had returned, encoded, if the message is completed and a result was kept.
        seconds_left: if in flight, how long the other owner's lease lasts at most, unless it renews it.
    """

    state: LeaseState
    lease: Lease | None = None
    result: bytes | None = None
    seconds_left: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a store has of a message, by its own clock."""

    completed: bool  # whether it was completed
    seconds_left: float | None  # until the lease runs out, 0 or less if it has; None: no owner has one
    result: bytes | None = None  # what the handler had returned, encoded
    fingerprint: bytes | None = None  # the SHA-256 of the payload that it came with first; None if none was asked for


def acquisition_from(
    record: LeaseRecord, subscriber_id: str, message_id: str, fingerprint: bytes | None = None
) -> Acquisition | None:
    """Return what a record means for a request that was not given the lease, or raise ``Mismatch``.

    COMPLETED or IN_FLIGHT; None if the message is free, or its lease has run out: ask again. ``fingerprint`` is that
    of the payload that has come now; None: not to be compared.
    """
    if fingerprint is not None and record.fingerprint is not None and record.fingerprint != fingerprint:
        raise Mismatch(subscriber_id, (message_id,))
    if record.completed:
        return Acquisition(LeaseState.COMPLETED, result=record.result)
    if record.seconds_left is not None and record.seconds_left > 0:
        return Acquisition(LeaseState.IN_FLIGHT, seconds_left=record.seconds_left)
    return None


def valid_lease_seconds(lease_seconds: float, of: str = "lease_seconds") -> float:
    """Return the length of a lease, or raise ``InvalidConfiguration``, where ``of`` names the argument."""
    if not isinstance(lease_seconds, int | float) or not 0.001 <= lease_seconds <= MAX_LEASE_SECONDS:
        raise InvalidConfiguration(f"{of} must be from 0.001 to {MAX_LEASE_SECONDS:g}, not {lease_seconds!r}")
    return float(lease_seconds)


def elapsed() -> float:
    """Return a reading, in seconds, of a clock that only measures intervals, the machine's sleep included."""
    return time.clock_gettime(_INTERVALS) if _INTERVALS is not None else time.monotonic()


def owner() -> str:
    """Return the name of an owner: its host and process."""
    return f"{host_name()} {os.getpid()}"


_INTERVALS: int | None = getattr(time, "CLOCK_BOOTTIME", None)
"""CLOCK_MONOTONIC stops while a machine sleeps, and leases do not."""
