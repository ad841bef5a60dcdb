"""The clock of a database server, compared with ours, which only measures intervals: was it set? Pure: no I/O.

Each answer of the server bears its time. From one answer to the next, its clock and ours go on by the same, as far as
the round trips let us tell::

    server       D0                              D1
    our clock    s0 ──── r0          s1 ──── r1             (sent, received)
    expected:    D0 + (s1 - r0)  ≤  D1  ≤  D0 + (r1 - s0)

A clock that was set *forward* makes leases look run out whose owners are at work. So a ledger that notices it goes on
by the time before, for as long as a lease lasts: owners that live renew theirs within that, by the clock as it is now.
A process has nothing to compare its first answer with.
"""

import threading
from dataclasses import dataclass

DRIFT = 0.001
"""How much faster or slower than the server's our clock may run. One that is being adjusted: by 0.0005."""

TOLERANCE_SECONDS = 1.0
"""What is no step: a leap second, an adjustment."""


@dataclass(frozen=True, slots=True)
class _Reading:
    server: float
    sent: float
    received: float


class ServerClock:
    """The last reading of a server's clock. May be used by several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: _Reading | None = None
        self._held_until: float | None = None

    def latest(self, at: float) -> float | None:
        """Return the server's time at most, in seconds since 1970, at a reading of our clock; None: no answer yet.

        If the server's clock was set forward, it is the time as it was before.
        """
        last = self._last
        return None if last is None else last.server + (at - last.sent) * (1 + DRIFT) + TOLERANCE_SECONDS

    def observe(self, server: float, *, sent: float, received: float, hold_seconds: float) -> float:
        """Learn from an answer.

        Args:
            server: the time in it, in seconds since 1970.
            sent, received: readings of our clock, before the question and after the answer.
            hold_seconds: for how long to go on by the time before, if the clock was set forward.

        Returns:
            By how many seconds the clock was set since the answer before, less than 0 if back; 0 if it was not, or if
            that was returned before.
        """
        answer = _Reading(server, sent, received)
        with self._lock:
            last = self._last
            if last is None:
                self._last = answer
                return 0.0
            slack = TOLERANCE_SECONDS + DRIFT * abs(sent - last.sent)
            lowest = last.server + (sent - last.received) - slack
            highest = last.server + (received - last.sent) + slack
            if lowest <= server <= highest:
                if sent >= last.sent:
                    self._last = answer
                self._held_until = None
                return 0.0
            if self._held_until is not None and received < self._held_until and server > highest:
                return 0.0
            news = self._held_until is None or server < lowest
            if server > highest and self._held_until is None:
                self._held_until = received + hold_seconds
            else:
                self._last, self._held_until = answer, None
            return server - last.server - (sent - last.sent) if news else 0.0
