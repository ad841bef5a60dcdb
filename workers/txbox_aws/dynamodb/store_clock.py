"""Track DynamoDB's clock, whose time comes with its responses in whole seconds. Pure: no I/O, no wall clock.

A response with the time D, to a request sent at reading s of an interval clock and answered at r, says: at some moment
from s to r, the store's time was from D to less than D + 1::

    our readings     ──── s ─────────────── r ──────────── t ───→
                             D ≤ time < D + 1
    so at t, it is at least  D + (t - r)  and less than  D + 1 + (t - s)

So a time is not a number but an interval; use the end that is safe (J. C. Corbett et al., "Spanner: Google's
Globally-Distributed Database", OSDI 2012, section 3, "TrueTime"; K. Marzullo and S. Owicki, "Maintaining the time in a
distributed system", PODC 1983). The best bounds of all responses are kept.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

from txbox.errors import LedgerError
from txbox.leases.server_clock import DRIFT

SKEW_SECONDS = 1.0
"""How far apart the clocks of any two of the store's hosts may be. Those of one provider differ by milliseconds."""

RESOLUTION_SECONDS = 1.0
"""The resolution of the times in the responses."""

PRECISE_SECONDS = 2.0
"""How far apart the bounds of a precise time may be: a call, and some minutes without one."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """A lower or upper bound of the store's time minus our reading, and the reading when it was found."""

    offset: float
    at: float

    def lowest(self, at: float) -> float:
        return self.offset - DRIFT * abs(at - self.at)

    def highest(self, at: float) -> float:
        return self.offset + DRIFT * abs(at - self.at)


class StoreClock:
    """The bounds of a store's time. Several threads may use it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bounds: tuple[_Bound, _Bound] | None = None
        self._distrusted_until = float("-inf")

    def is_precise(self, at: float) -> bool:
        """Whether the bounds are close at a reading of our clock. They drift apart while no responses come."""
        if self._bounds is None:
            return False
        lower, upper = self._bounds
        return upper.highest(at) - lower.lowest(at) <= PRECISE_SECONDS

    def observe(self, date: float, *, sent: float, received: float) -> bool:
        """Learn from a response.

        Args:
            date: the time in it, in seconds since 1970, truncated to whole seconds.
            sent, received: readings of our clock, before the request and after its response.

        Returns:
            False if it contradicts earlier responses, or another one has done so since the request. Either our clock
            stood still meanwhile (in a suspended virtual machine), or one of the store's hosts has a wrong time: what
            was computed for that request may be wrong.
        """
        lower = _Bound(date - received, sent)
        upper = _Bound(date + RESOLUTION_SECONDS - sent, sent)
        with self._lock:
            if sent < self._distrusted_until:
                return False  # computed before another thread found the contradiction
            if self._bounds is None:
                self._bounds = lower, upper
                return True
            lower_before, upper_before = self._bounds
            now = received
            agreed = (
                lower.lowest(now) <= upper_before.highest(now) + SKEW_SECONDS
                and upper.highest(now) >= lower_before.lowest(now) - SKEW_SECONDS
            )
            if agreed:  # the best of both
                lower = max(lower_before, lower, key=lambda bound: bound.lowest(now))
                upper = min(upper_before, upper, key=lambda bound: bound.highest(now))
            else:  # either may be right: use the outer ends of both until the next response
                lower = min(lower_before, lower, key=lambda bound: bound.lowest(now))
                upper = max(upper_before, upper, key=lambda bound: bound.highest(now))
                self._distrusted_until = received
            self._bounds = lower, upper
            return agreed

    def earliest(self, at: float) -> float:
        """Return the least that the store's time can be at a reading of our clock, in seconds since 1970.

        Raises ``LookupError`` if there was no response yet.
        """
        return at + self._both()[0].lowest(at)

    def latest(self, at: float) -> float:
        """Return the most that the store's time can be; see ``earliest``."""
        return at + self._both()[1].highest(at)

    def _both(self) -> tuple[_Bound, _Bound]:
        if self._bounds is None:
            raise LookupError("the store has not answered yet: its time cannot be reckoned")
        return self._bounds


def response_time(response: Mapping[str, Any]) -> float:
    """Return the time in the ``Date`` header of boto3's response, in seconds since 1970 (RFC 9110, section 6.6.1).

    Raises ``LedgerError`` if there is none.
    """
    header = response["ResponseMetadata"].get("HTTPHeaders", {}).get("date", "")
    try:
        return _seconds(header)
    except ValueError as error:
        raise LedgerError(
            f"the answer of DynamoDB has no time in it (its Date header is {header!r}), and leases are reckoned by it; "
            "have whatever is in between pass the header on",
            permanent=True,
        ) from error


@lru_cache(maxsize=8)  # the responses of one second have the same
def _seconds(header: str) -> float:
    return parsedate_to_datetime(header).timestamp()
