"""The board: what waits to be sent, for several threads at once, and which destinations are not to be tried for now."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from txbox.backoff import Backoff
from txbox.bounded_memory import Recent
from txbox.relay.fair_share import SLOW_SECONDS, Shares, Standing, Work
from txbox.relay.pending import Claim, Pending
from txbox.relay.sender import Done

__all__ = ["OUTAGE_BACKOFF", "Board"]

OUTAGE_BACKOFF = Backoff(first_seconds=0.5, longest_seconds=30.0)
"""Between tries while a destination or the database cannot be reached."""


class Board:
    """One thread puts up what it has found, others take claims and bring back what came of them.

    What is on it is a memory of one run of one server. It ends with any of the relay's connections, for a crash of the
    server may have undone what it rests on: from ``forget`` on nothing is handed out, and nothing of older claims is
    taken back, until a look at everything has been put up::

        m1 is refused: held ── crash: m1 waits as before ─────────────── m1, m2 are sent in order
                    "next: m2" ───────── forgotten ──── look at everything: "next: m1"
    """

    def __init__(
        self,
        most_lanes: int,
        *,
        senders: int = 4,
        most_senders: int | None = None,
        call_began: Callable[[int], float | None] = lambda _: None,
    ) -> None:
        """Begin with nothing on it.

        Args:
            most_lanes: of one claim.
            senders, most_senders: see ``Shares``.
            call_began: returns when the call of a publisher began that a thread makes now, by ``time.monotonic``; None
                if it makes none.
        """
        self._pending = Pending(most_lanes)
        self._shares = Shares(senders, senders if most_senders is None else most_senders)
        self._call_began = call_began
        self._under_way: dict[
            int, tuple[int, Standing, int]
        ] = {}  # by the first lane of a claim; the last is its thread
        self._outages: Recent[int, int] = Recent()
        self._takers = 0
        self._closed = False
        self._memory = 0
        self._blind = False
        self._server = ""
        self._changed = threading.Condition()
        self._turn = threading.Lock()

    @property
    def memory(self) -> int:
        """The number of the memory; another one after each time it was forgotten."""
        return self._memory

    @property
    def blind(self) -> bool:
        """Whether it was forgotten, and everything has to be looked at."""
        return self._blind

    def put(
        self,
        fresh: Mapping[int, int],
        due: Iterable[int],
        *,
        server: str = "",
        anew: bool = False,
        memory: int | None = None,
    ) -> None:
        """Put up lanes with new messages, from these positions on, and lanes with held keys that are due.

        Args:
            fresh: positions by lane.
            due: lanes.
            server: which run of which server has said so.
            anew: that is everything there is: what was put up before does not count.
            memory: what ``memory`` was when the look began. If it is another one by now, this comes too late.
        """
        with self._changed:
            if memory not in (None, self._memory) or (self._blind and not anew):
                return
            if anew:
                self._pending.forget()
                self._memory += not self._blind
                self._blind, self._server = False, server
            self._pending.add(fresh, due)
            self._changed.notify()

    def forget(self) -> None:
        """Forget what was put up, and hand out nothing before everything has been looked at."""
        with self._changed:
            self._forget()

    def take(self) -> Claim | None:
        """Wait for a claim, and take it; None once the board is closed."""
        with self._changed:
            self._takers += 1
        # One waits for news, the others for their turn to: what comes hundreds of times a second wakes one thread.
        with self._turn, self._changed:
            try:
                while not self._closed:
                    now = time.monotonic()
                    if (claim := self._next(now)) is not None:
                        standing = self._shares.standing(claim.destination)
                        self._under_way[min(claim.lanes)] = claim.destination, standing, threading.get_ident()
                        return replace(claim, server=self._server, memory=self._memory)
                    seconds = self._pending.next_change(after=now) - now
                    if self._pending.destinations and self._under_way:
                        seconds = min(seconds, SLOW_SECONDS / 2)  # a call may have turned out to hang
                    self._changed.wait(None if math.isinf(seconds) else max(seconds, 0.0))
                return None
            finally:
                self._takers -= 1

    def wanted(self) -> int:
        """Return how many senders there should be now."""
        with self._changed:
            self._count(time.monotonic())
            return self._shares.wanted

    def finish(self, claim: Claim, done: Done) -> tuple[bool, float]:
        """Bring back what came of a claim.

        Returns:
            Whether its destination was away and is not any more; for how many seconds it is not tried now that it is.
        """
        with self._changed:
            self._pending.had(claim.lanes - done.elsewhere)
            self._pending.put_off(done.elsewhere, time.monotonic())
            was_away = bool(done.settlement.sent) and self._outages.pop(claim.destination, 0) > 0
            pause = 0.0
            if done.outage is not None:
                self._shares.away(claim.destination)
                pause = self._pause(claim)
            elif done.destination is not None:
                self._shares.answered(claim.destination, done.slowest)
            self._give_back(claim, done.fresh, done.due)
        return was_away and done.outage is None, pause

    def postpone(self, claim: Claim) -> float:
        """Bring back a claim of which nothing came, as a connection may be lost, and with it what was known.

        Returns:
            For how many seconds its destination is not tried.
        """
        with self._changed:
            pause = self._pause(claim)
            self._give_back(claim, {}, ())
            self._forget()
        return pause

    def close(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _next(self, now: float) -> Claim | None:
        self._count(now)
        shares, alone = self._shares, self._pending.destinations < 2
        return self._pending.take(
            now,
            rank=lambda destination: shares.rank(destination, alone=alone),
            shares=lambda destination: min(self._takers, shares.free(destination)),
        )

    def _count(self, now: float) -> None:
        self._shares.count(
            Work(destination, standing, (began := self._call_began(thread)) is not None and now - began > SLOW_SECONDS)
            for destination, standing, thread in self._under_way.values()
        )

    def _pause(self, claim: Claim) -> float:
        failures = self._outages[claim.destination] = self._outages.get(claim.destination, 0) + 1
        seconds = OUTAGE_BACKOFF.seconds(failures)
        self._pending.pause(claim, time.monotonic() + seconds)
        return seconds

    def _forget(self) -> None:
        self._memory += 1
        self._blind = True
        self._pending.forget()

    def _give_back(self, claim: Claim, fresh: Mapping[int, int], due: Iterable[int]) -> None:
        self._under_way.pop(min(claim.lanes), None)
        self._pending.release(claim)
        if claim.memory == self._memory:
            self._pending.add(fresh, due)
        self._changed.notify()
