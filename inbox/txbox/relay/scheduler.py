"""The scheduler: decides which destination is sent to next, and which ones are left alone for now."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from txbox.backoff import Backoff
from txbox.bounded_memory import Recent
from txbox.relay.fair_share import SLOW_SECONDS, AsyncShare, ClaimInProgress, DestinationHealth, FairShare
from txbox.relay.pending import FEW_LANES, Claim, PendingLanes
from txbox.relay.sender import ClaimResult

OUTAGE_BACKOFF = Backoff(first_seconds=0.5, longest_seconds=30.0)
"""The delay between tries while a destination or the database cannot be reached."""


class InProgress(NamedTuple):
    """A claim that a sender holds."""

    destination: int  # number of the destination
    health: DestinationHealth  # of the destination when the claim was taken
    thread: int | None  # of the sender; None: the async sender, which has many
    began: float  # when, by ``time.monotonic``


@dataclass(frozen=True, slots=True)
class DestinationChange:
    """What a claim's result means for its destination."""

    restored: bool  # could not be reached before, and can be now
    pause_seconds: float  # how long it is left alone because it cannot be reached; 0.0 if it can


class Scheduler:
    """Collects what the poller finds, gives claims to senders and takes back their results. Thread-safe.

    Its memory holds answers of one run of one server. The memory ends with any of the relay's connections, because a
    crash of the server may have undone what it describes. After ``forget``, the scheduler gives out no claim and takes
    nothing back from older ones until the poller has read the whole outbox::

        m1 is refused: held ── crash: m1 waits as before ─────────────── m1, m2 are sent in order
                    "next: m2" ───────── forgotten ──── whole outbox: "next: m1"
    """

    def __init__(
        self,
        most_lanes: int,
        *,
        senders: int = 4,
        most_senders: int | None = None,
        call_began: Callable[[int], float | None] = lambda _: None,
        concurrency: int = 1,
        all_async: bool | None = False,
    ) -> None:
        """Start empty.

        Args:
            most_lanes: of one claim.
            senders: see ``FairShare``.
            most_senders: see ``FairShare``.
            call_began: see ``Dispatcher.call_began``.
            concurrency: see ``AsyncShare``.
            all_async: whether all destinations belong to the async sender, or none. None: some do, and whoever reads a
                destination's messages first finds out which. If only one kind of sender did so, destinations that hang
                there would hide those of the other kind.
        """
        self._pending = PendingLanes(most_lanes)
        self._share = FairShare(senders, senders if most_senders is None else most_senders)
        self._async_share = AsyncShare(concurrency)
        self._all_async = all_async
        self._async: Recent[int, bool] = Recent()  # by destination: whether it is known to belong to the async sender
        self._call_began = call_began
        self._in_progress: dict[int, InProgress] = {}  # by a claim's first lane
        self._outages: Recent[int, int] = Recent()
        self._waiting_senders = 0
        self.closed = False
        self.generation = 0  # of the current memory; ``forget`` changes it
        self.needs_everything = False  # the memory was forgotten, so the whole outbox must be read
        self._server = ""
        lock = threading.RLock()
        self._changed, self._async_changed = threading.Condition(lock), threading.Condition(lock)
        self._woken = False
        self._waiting = threading.Lock()

    def add(
        self,
        fresh: Mapping[int, int],
        due: Iterable[int],
        *,
        server: str = "",
        everything: bool = False,
        generation: int | None = None,
    ) -> None:
        """Add lanes with new messages from these positions on, and lanes with held keys that are due.

        ``everything``: the whole outbox was read, and this replaces what was added before. ``generation``: that of the
        memory when the poll began; if it has changed, this comes too late and is ignored.
        """
        with self._changed:
            if generation not in (None, self.generation) or (self.needs_everything and not everything):
                return
            if everything:
                self._pending.forget()
                self.generation += not self.needs_everything
                self.needs_everything, self._server = False, server
            self._pending.add(fresh, due)
            self._notify()

    def forget(self) -> None:
        """Forget what was added, and give out no claim until the whole outbox has been read."""
        with self._changed:
            self._forget()

    def take(self) -> Claim | None:
        """Wait for a claim and take it; return None once the scheduler is closed."""
        with self._changed:
            self._waiting_senders += 1
        # One thread waits for changes and the others wait to be that one: changes come hundreds of times a second.
        with self._waiting, self._changed:
            try:
                while not self.closed:
                    now = time.monotonic()
                    if (claim := self._next(now)) is not None:
                        return self._given(claim, now, self._share.health(claim.destination), threading.get_ident())
                    seconds = self._pending.next_change(after=now) - now
                    if self._pending.destinations and self._in_progress:
                        seconds = min(seconds, SLOW_SECONDS / 2)  # a call may turn out to hang
                    self._changed.wait(None if math.isinf(seconds) else max(seconds, 0.0))
                return None
            finally:
                self._waiting_senders -= 1

    def take_async(self, most_lanes: int, *, seconds: float) -> list[Claim]:
        """Wait for claims for the async sender, and take all it may have now.

        Args:
            most_lanes: of all claims together; 0: only wait.
            seconds: how long to wait at most.

        Returns:
            The claims; none after ``wake`` or ``close``, or when the time is up.
        """
        deadline = time.monotonic() + seconds
        with self._async_changed:
            while True:
                now, claims = time.monotonic(), []
                if not self.closed and most_lanes > 0:
                    claims = self._next_async(now, most_lanes)
                if claims or self._woken or now >= deadline:
                    self._woken = False
                    return claims
                change = deadline if most_lanes <= 0 else min(self._pending.next_change(after=now), deadline)
                self._async_changed.wait(None if math.isinf(change) else max(change - now, 0.0))

    def wake(self) -> None:
        """End the wait of the async sender."""
        with self._async_changed:
            self._woken = True
            self._async_changed.notify()

    def wanted_senders(self) -> int:
        with self._changed:
            self._count(time.monotonic())
            return self._share.wanted_senders

    def finish(self, claim: Claim, result: ClaimResult) -> DestinationChange:
        with self._changed:
            self._pending.mark_unlocked(claim.lanes - result.locked)
            self._pending.mark_locked(result.locked, time.monotonic())
            was_away = bool(result.settlement.sent) and self._outages.pop(claim.destination, 0) > 0
            pause = 0.0
            if result.is_async is not None and self._all_async is None:
                self._async[claim.destination] = result.is_async
            share = self._async_share if self._is_async(claim.destination) else self._share
            if result.outage is not None:
                share.mark_unreachable(claim.destination)
                pause = self._pause(claim)
            elif result.destination is not None:
                share.answered(claim.destination, result.slowest_seconds)
            self._release(claim, result.fresh, result.due)
        return DestinationChange(was_away and result.outage is None, pause)

    def fail(self, claim: Claim) -> float:
        """Take back a claim without a result, and return for how many seconds its destination is left alone.

        A connection may be lost, so the memory ends.
        """
        with self._changed:
            pause = self._pause(claim)
            self._release(claim, {}, ())
            self._forget()
        return pause

    def hold_back(self, destinations: frozenset[int]) -> None:
        """Give out no claims of these destinations, which are paused, and only of these, until the next call."""
        with self._changed:
            self._pending.hold_back(destinations)
            self._notify()

    def is_in_progress(self, destination: int) -> bool:
        with self._changed:
            return any(destination == claim.destination for claim in self._in_progress.values())

    def close(self) -> None:
        with self._changed:
            self.closed = self._woken = True
            self._notify()

    def _next(self, now: float) -> Claim | None:
        self._count(now)
        share, alone = self._share, self._pending.destinations < 2
        return self._pending.take(
            now,
            rank=lambda destination: share.rank(destination, alone=alone) if not self._is_async(destination) else None,
            parts=lambda destination: min(self._waiting_senders, share.free_senders(destination)),
        )

    def _next_async(self, now: float, most_lanes: int) -> list[Claim]:
        share, claims = self._async_share, []
        share.count(
            ClaimInProgress(claim.destination, claim.health, now - claim.began > SLOW_SECONDS)
            for claim in self._in_progress.values()
            if claim.thread is None
        )
        while most_lanes > 0 and share.free > 0:
            claim = self._pending.take(
                now,
                rank=lambda destination: share.rank(destination) if self._is_async(destination) is not False else None,
                # Leave some for each destination that waits.
                most_lanes=min(max(most_lanes // max(self._pending.destinations, 1), 1), FEW_LANES),
            )
            if claim is None:
                break
            health = share.health(claim.destination)
            share.add(ClaimInProgress(claim.destination, health))
            claims.append(self._given(claim, now, health, None))
            most_lanes -= len(claim.lanes)
        return claims

    def _is_async(self, destination: int) -> bool | None:
        """Return whether a destination belongs to the async sender; None: not known yet, so it may try."""
        return self._async.get(destination, self._all_async)

    def _given(self, claim: Claim, now: float, health: DestinationHealth, thread: int | None) -> Claim:
        self._in_progress[min(claim.lanes)] = InProgress(claim.destination, health, thread, now)
        return replace(claim, server=self._server, generation=self.generation, answered=health < DestinationHealth.NEW)

    def _count(self, now: float) -> None:
        self._share.count(
            ClaimInProgress(
                claim.destination,
                claim.health,
                (began := self._call_began(claim.thread)) is not None and now - began > SLOW_SECONDS,
            )
            for claim in self._in_progress.values()
            if claim.thread is not None
        )

    def _notify(self) -> None:
        self._changed.notify()
        self._async_changed.notify()

    def _pause(self, claim: Claim) -> float:
        failures = self._outages[claim.destination] = self._outages.get(claim.destination, 0) + 1
        seconds = OUTAGE_BACKOFF.seconds(failures)
        self._pending.pause(claim, time.monotonic() + seconds)
        return seconds

    def _forget(self) -> None:
        self.generation += 1
        self.needs_everything = True
        self._pending.forget()

    def _release(self, claim: Claim, fresh: Mapping[int, int], due: Iterable[int]) -> None:
        self._in_progress.pop(min(claim.lanes), None)
        self._pending.release(claim)
        if claim.generation == self.generation:
            self._pending.add(fresh, due)
        self._notify()
