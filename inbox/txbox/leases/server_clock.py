"""Detect whether a database server's clock was set, by comparing it with ours, which only measures intervals. Pure.

Each answer of the server bears its time. Between two answers, its clock and ours advance by the same amount, as
precisely as the round trips allow::

    server       D0                              D1
    our clock    s0 ──── r0          s1 ──── r1             (sent, received)
    expected:    D0 + (s1 - r0)  ≤  D1  ≤  D0 + (r1 - s0)

If a clock is set *forward*, leases whose owners are at work look run out. So a ledger that notices it goes by the old
time for the length of one lease: within that, live owners renew their leases by the new clock. A process has nothing to
compare its first answer with.
"""

import threading
from dataclasses import dataclass

DRIFT = 0.001
"""How much faster or slower than the server's clock ours may run. While it is adjusted, that is 0.0005."""

TOLERANCE_SECONDS = 1.0
"""Differences up to this are no step: a leap second, an adjustment."""


@dataclass(frozen=True, slots=True)
class _Reading:
    server: float
    sent: float
    received: float


class ServerClock:
    """The last reading of a server's clock. Several threads may use it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: _Reading | None = None
        self._held_until: float | None = None

    def latest(self, at: float) -> float | None:
        """Return the latest that the server's time can be, in seconds since 1970, at a reading of our clock.

        None: no answer yet.

        If the server's clock was set forward, this goes by the time before that.
        """
        last = self._last
        return None if last is None else last.server + (at - last.sent) * (1 + DRIFT) + TOLERANCE_SECONDS

    def observe(self, server: float, *, sent: float, received: float, hold_seconds: float) -> float:
        """Compare an answer with the one before.

        Args:
            server: the time in it, in seconds since 1970.
            sent, received: readings of our clock, before the question and after the answer.
            hold_seconds: how long to go by the old time if the clock was set forward.

        Returns:
            By how many seconds the clock was set since the last answer, negative if back; 0 if it was not set, or if
            that was already returned.
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
