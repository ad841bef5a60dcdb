"""The throttle: limits wrong tokens, of each address and in total.

It keeps the wrong tokens of the last ``WINDOW_SECONDS``: when each came, and from where. It checks at most
``GUESSES_IN_ALL`` in that time, so it keeps no more than these, however many addresses guess. Each process has its own.
"""

import time
from collections import deque
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

WINDOW_SECONDS = 300
"""How long a wrong token counts."""

GUESSES = 10
"""The most wrong tokens of one address within the window."""

GUESSES_IN_ALL = 100
"""The most wrong tokens of all addresses within the window."""


class Throttle:
    """Counts wrong tokens, and says how long an address has to wait. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds that never decrease."""
        self._clock = clock
        self._wrong: deque[tuple[float, str]] = deque(maxlen=GUESSES_IN_ALL)

    def wait_seconds(self, address: str | None) -> float:
        """Return the seconds until a token from this address is checked again; 0 means now."""
        now, guesser = self._clock(), _guesser(address)
        while self._wrong and self._wrong[0][0] + WINDOW_SECONDS <= now:
            self._wrong.popleft()
        own = [at for at, of in self._wrong if of == guesser]
        everyone = [at for at, _ in self._wrong]
        bounds = ((own, GUESSES), (everyone, GUESSES_IN_ALL))
        return max((times[-most] + WINDOW_SECONDS - now for times, most in bounds if len(times) >= most), default=0)

    def note(self, address: str | None) -> None:
        """Count a wrong token of this address."""
        self._wrong.append((self._clock(), _guesser(address)))


def _guesser(address: str | None) -> str:
    """Return what an address counts as: an IPv6 address as its /64 network, and all that are no address as one."""
    try:
        found = ip_address(address or "")
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or int(found) >> 64)
    return str(found)
