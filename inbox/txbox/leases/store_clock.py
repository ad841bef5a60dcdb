"""The clock of a store that only tells it along with its answers, in whole seconds. Pure: no I/O, no wall clock.

An answer that bears the time D, to a request that was sent at the reading s of a clock that measures intervals and
answered at r, says: at some moment from s to r, the store's time was from D to less than D + 1::

    our readings     ──── s ─────────────── r ──────────── t ───→
                             D ≤ time < D + 1
    so at t, it is at least  D + (t - r)  and less than  D + 1 + (t - s)

An instant is therefore not a number but an interval, and who needs to be sure takes the end that is safe for what he
does (J. C. Corbett et al., "Spanner: Google's Globally-Distributed Database", OSDI 2012, section 3, "TrueTime";
K. Marzullo and S. Owicki, "Maintaining the time in a distributed system", PODC 1983). Each answer narrows it: the
bounds that are kept are the best ones, and with many answers they are soon as close as the round trips are short.
"""

import threading
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

__all__ = ["SKEW_SECONDS", "StoreClock", "http_date"]

SKEW_SECONDS = 1.0
"""How far the clocks of any two of the store's hosts may be apart. Those of one provider differ by milliseconds."""

DRIFT = 0.001
"""How much faster or slower than the store's our clock may run. One that is being adjusted: by 0.0005."""

RESOLUTION_SECONDS = 1.0
"""Of the times that come with the answers."""

KNOWN_SECONDS = 2.0
"""How far apart the bounds may be for the time to count as known: a call, and some minutes without one."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """The store's time minus our reading, at least or at most, and as of which reading."""

    offset: float
    at: float

    def lowest(self, at: float) -> float:
        return self.offset - DRIFT * abs(at - self.at)

    def highest(self, at: float) -> float:
        return self.offset + DRIFT * abs(at - self.at)


class StoreClock:
    """What is known of a store's time. May be used by several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bounds: tuple[_Bound, _Bound] | None = None
        self._distrusted_until = float("-inf")

    def known_at(self, at: float) -> bool:
        """Whether it is known well enough: the bounds move apart while there are no answers.

        Args:
            at: a reading of our clock.
        """
        if self._bounds is None:
            return False
        lower, upper = self._bounds
        return upper.highest(at) - lower.lowest(at) <= KNOWN_SECONDS

    def observe(self, date: float, *, sent: float, received: float) -> bool:
        """Learn from an answer.

        Args:
            date: the time in it, in seconds since 1970, cut off to whole ones.
            sent, received: readings of our clock, before the request and after its answer.

        Returns:
            False: it contradicts those before it, or another one has done so since the request. Our clock stood still
            meanwhile (a virtual machine that was suspended), or one of the store's hosts has a wrong time: what was
            reckoned for that request may be wrong.
        """
        lower = _Bound(date - received, sent)
        upper = _Bound(date + RESOLUTION_SECONDS - sent, sent)
        with self._lock:
            if sent < self._distrusted_until:
                return False  # reckoned before another thread came upon the contradiction
            if self._bounds is None:
                self._bounds = lower, upper
                return True
            known_lower, known_upper = self._bounds
            now = received
            agreed = (
                lower.lowest(now) <= known_upper.highest(now) + SKEW_SECONDS
                and upper.highest(now) >= known_lower.lowest(now) - SKEW_SECONDS
            )
            if agreed:  # the best of both
                lower = max(known_lower, lower, key=lambda bound: bound.lowest(now))
                upper = min(known_upper, upper, key=lambda bound: bound.highest(now))
            else:  # either may be right: the truth is between the ends of both, until the next answer
                lower = min(known_lower, lower, key=lambda bound: bound.lowest(now))
                upper = max(known_upper, upper, key=lambda bound: bound.highest(now))
                self._distrusted_until = received
            self._bounds = lower, upper
            return agreed

    def earliest(self, at: float) -> float:
        """Return what the store's time is at least, in seconds since 1970.

        Args:
            at: a reading of our clock.

        Raises:
            LookupError: there was no answer yet.
        """
        return at + self._known()[0].lowest(at)

    def latest(self, at: float) -> float:
        """Return what the store's time is at most; see ``earliest``."""
        return at + self._known()[1].highest(at)

    def _known(self) -> tuple[_Bound, _Bound]:
        if self._bounds is None:
            raise LookupError("the store has not told its time yet")
        return self._bounds


def http_date(header: str) -> float:
    """Return the time in an HTTP ``Date`` header, in seconds since 1970 (RFC 9110, section 6.6.1).

    Raises:
        ValueError: it is none.
    """
    return parsedate_to_datetime(header).timestamp()
