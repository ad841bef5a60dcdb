"""The lease of a message: who may work on it, how long, and how often that was tried. Pure: no I/O, no wall clock.

::

                 acquire                        complete
    (nothing) ─────────────→ in flight ─────────────────────→ completed
                              │ ↑   ↑ │
                      release │ │   └─┘ renew; and acquire, by another, once the lease has run out
                              ↓ │ acquire
                             free

What holds in every store, whatever dies, stalls or comes late:

1. Completed is the end: nothing leads out of it.
2. Every acquisition has a *fence*, a number greater than that of every acquisition of the message before it, also of
   those that a failover has lost. Whoever writes to a store that can compare may send it along, and have the store
   refuse a smaller one than it has seen.
3. ``renew``, ``complete`` and ``release`` are carried out for the newest fence only; an older one is ``LeaseLost``. A
   lease that has run out, and that nobody has taken over, is still the newest: its owner may complete it.
4. Attempts are counted when they begin. A release says that an attempt has failed, unless it says that this is not
   known. So attempts that neither failed nor completed ended in a way that nobody knows: their effects may have
   happened. A release may also take an attempt out of the count, told as unknown or not told at all.

(M. Kleppmann, "How to do distributed locking", 2016, for the fence; C. Gray and D. Cheriton, "Leases: An Efficient
Fault-Tolerant Mechanism for Distributed File Cache Consistency", SOSP 1989, for the lease.)

No client's clock decides anything. When a lease has run out is the store's business (see the ledgers). The owner itself
looks at a clock that only measures intervals, from a moment before it asked for the lease: so it takes its lease for
shorter than it is, never for longer. (One exception: where a virtual machine is frozen or restored, all of its clocks
may have stood still. It takes its lease for longer then, until the store tells it otherwise; the fence is for that.)
"""

import os
import socket
import time
from dataclasses import dataclass
from enum import StrEnum

from txbox.errors import InvalidConfiguration, LeaseLost, Mismatch

__all__ = [
    "LEASE_SECONDS",
    "MAX_LEASE_SECONDS",
    "Acquisition",
    "Ended",
    "Lease",
    "LeaseState",
    "Record",
    "elapsed",
    "judged",
    "owner",
    "valid_lease_seconds",
]

LEASE_SECONDS = 30.0
"""How long a message stays with an owner that has died; one that lives renews its lease."""

MAX_LEASE_SECONDS = 7 * 24 * 60 * 60.0


class LeaseState(StrEnum):
    """What asking for a lease has come to."""

    ACQUIRED = "acquired"
    """It is ours: go on."""
    COMPLETED = "completed"
    """The message was completed before; its result may be there."""
    IN_FLIGHT = "in_flight"
    """Another owner works on it."""


class Ended(StrEnum):
    """How an attempt has ended that has completed nothing."""

    FAILED = "failed"
    """It is known that it had no effect."""
    UNKNOWN = "unknown"
    """It may have had its effect: whoever comes next is told."""
    NOT_COUNTED = "not_counted"
    """It may have had its effect, which is told as above, but an outage ended it: it does not count."""
    NOT_MADE = "not_made"
    """It was called off before anything was done, and does not count."""


class Lease:
    """The right to work on one message, until it runs out.

    Attributes:
        subscriber_id: whose ledger.
        message_id: of which message.
        fence: greater than that of every earlier lease of this message; see the module.
        attempt: the how-manieth attempt this is, from 1.
        unknown_attempts: how many of the attempts before it ended in a way that nobody knows, killed perhaps: their
            effects may have happened. 0: as far as the ledger knows, nothing has happened yet.
        begun: whether the work has begun under this lease.
        begun_again: whether it has begun there more than once, so nobody knows what came of it before.
        returned: whether it has come to its end there.
    """

    __slots__ = (
        "_asked_at",
        "_given_up",
        "_lost",
        "_seconds",
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
        seconds: float,
        asked_at: float,
    ) -> None:
        """Made by a ledger.

        Args:
            subscriber_id: as above.
            message_id: as above.
            fence: as above.
            attempt: as above.
            unknown_attempts: as above.
            seconds: how long it lasts.
            asked_at: a reading of ``elapsed`` before the store was asked.
        """
        self.subscriber_id = subscriber_id
        self.message_id = message_id
        self.fence = fence
        self.attempt = attempt
        self.unknown_attempts = unknown_attempts
        self._seconds = seconds
        self._asked_at = asked_at
        self._lost = False
        self._given_up = False
        self.begun = False
        self.begun_again = False
        self.returned = False

    def __repr__(self) -> str:
        return f"Lease({self.subscriber_id!r}, {self.message_id!r}, fence={self.fence}, attempt={self.attempt})"

    @property
    def seconds(self) -> float:
        """How long it lasts from its last renewal."""
        return self._seconds

    @property
    def seconds_left(self) -> float:
        """How long nobody else may take the message over, at least; 0 if that is over."""
        return 0.0 if self._lost or self._given_up else max(self._asked_at + self._seconds - elapsed(), 0.0)

    @property
    def lost(self) -> bool:
        """Whether the ledger has said that it is lost. A lease that has just run out may be lost without it."""
        return self._lost

    def ensure(self) -> None:
        """See that the message is still ours; for long handlers, before a step that cannot be taken back.

        Raises:
            LeaseLost: it is not, or may not be any more.
        """
        if not self.seconds_left:
            raise LeaseLost(self.subscriber_id, self.message_id, self.fence)

    def begin_work(self) -> None:
        """Note that the work begins; if it had begun before under this lease, nobody knows what came of that."""
        self.unknown_attempts += self.begun
        self.begun_again = self.begun
        self.begun = True
        self.returned = False

    def renewed(self, seconds: float, asked_at: float) -> None:
        """Note, for a ledger, that the store has renewed it: for so long, from no earlier than when it was asked."""
        if asked_at >= self._asked_at:  # of two threads that renew it, the later one counts
            self._seconds, self._asked_at = seconds, asked_at

    def given_up(self) -> None:
        """Note, for a ledger, that its owner has given it up: it is released or completed."""
        self._given_up = True

    def was_lost(self) -> LeaseLost:
        """Note, for a ledger, that the store knows a newer fence or none; return the error to raise."""
        self._lost = True
        return LeaseLost(self.subscriber_id, self.message_id, self.fence)


@dataclass(frozen=True, slots=True)
class Acquisition:
    """What asking for a lease has come to.

    Attributes:
        state: what it is.
        lease: the lease, if it is ours.
        result: what the handler had returned, encoded, if the message is completed and a result was kept.
        seconds: how long the other owner's lease still lasts at most, unless it renews it, if the message is in flight.
    """

    state: LeaseState
    lease: Lease | None = None
    result: bytes | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """What a store knows of a message, by its own clock.

    Attributes:
        completed: whether it was completed.
        seconds_left: until the lease runs out, 0 or less if it has; None: nobody has one.
        result: what the handler had returned, encoded.
        fingerprint: the SHA-256 of the payload that it came with first; None if none was asked for.
    """

    completed: bool
    seconds_left: float | None
    result: bytes | None = None
    fingerprint: bytes | None = None


def judged(record: Record, subscriber_id: str, message_id: str, fingerprint: bytes | None = None) -> Acquisition | None:
    """Tell what a record means for somebody who was not given the lease.

    Args:
        record: what the store knows.
        subscriber_id, message_id: of whom and what.
        fingerprint: of the payload that has come now; None: not to be compared.

    Returns:
        Completed or in flight; None if the message is free, or its lease has run out: ask again.

    Raises:
        Mismatch: the id came with another payload before.
    """
    if fingerprint is not None and record.fingerprint is not None and record.fingerprint != fingerprint:
        raise Mismatch(subscriber_id, (message_id,))
    if record.completed:
        return Acquisition(LeaseState.COMPLETED, result=record.result)
    if record.seconds_left is not None and record.seconds_left > 0:
        return Acquisition(LeaseState.IN_FLIGHT, seconds=record.seconds_left)
    return None


def valid_lease_seconds(seconds: float, of: str) -> float:
    """Return the length of a lease if it can be one.

    Raises:
        InvalidConfiguration: it cannot; ``of`` says whose argument it is.
    """
    if not isinstance(seconds, int | float) or not 0.001 <= seconds <= MAX_LEASE_SECONDS:
        raise InvalidConfiguration(f"{of} must be from 0.001 to {MAX_LEASE_SECONDS:g} seconds, not {seconds!r}")
    return float(seconds)


def elapsed() -> float:
    """Return a reading, in seconds, of a clock that only measures intervals, the machine's sleep included."""
    return time.clock_gettime(_INTERVALS) if _INTERVALS is not None else time.monotonic()


def owner() -> str:
    """Return what an owner is called: its host and process."""
    return f"{socket.gethostname()} {os.getpid()}"


_INTERVALS: int | None = getattr(time, "CLOCK_BOOTTIME", None)
"""CLOCK_MONOTONIC stands still while a machine sleeps, and leases do not."""
