"""The board: what waits to be sent, for several threads at once, and which destinations are not to be tried for now."""

import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from txbox.backoff import Backoff
from txbox.relay.pending import Claim, Pending
from txbox.relay.sending import Done

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

    def __init__(self, most_lanes: int) -> None:
        """Begin with nothing on it.

        Args:
            most_lanes: of one claim.
        """
        self._pending = Pending(most_lanes)
        self._outages: dict[int, int] = {}
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
                    if (claim := self._pending.take(time.monotonic(), shares=self._takers)) is not None:
                        return replace(claim, server=self._server, memory=self._memory)
                    seconds = self._pending.next_change() - time.monotonic()
                    self._changed.wait(None if math.isinf(seconds) else max(seconds, 0.0))
                return None
            finally:
                self._takers -= 1

    def finish(self, claim: Claim, done: Done) -> tuple[bool, float]:
        """Bring back what came of a claim.

        Returns:
            Whether its destination was away and is not any more; for how many seconds it is not tried now that it is.
        """
        with self._changed:
            self._pending.had(claim.lanes - done.elsewhere)
            self._pending.put_off(done.elsewhere, time.monotonic())
            was_away = bool(done.settlement.sent) and self._outages.pop(claim.destination, 0) > 0
            pause = 0.0 if done.outage is None else self._pause(claim)
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
        self._pending.release(claim)
        if claim.memory == self._memory:
            self._pending.add(fresh, due)
        self._changed.notify()
