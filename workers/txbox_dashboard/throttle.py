"""The throttle: bounds how many wrong tokens are heard, for each address and in total.

It keeps the wrong tokens of the last ``WINDOW_SECONDS``: when each came, and from where. As it hears ``GUESSES_IN_ALL``
of them at most, it keeps no more than these, however many addresses guess. It is the memory of one process.
"""

import time
from collections import deque
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

WINDOW_SECONDS = 300
"""How long a wrong token counts."""

GUESSES = 10
"""Wrong tokens of one address within the window, at most."""

GUESSES_IN_ALL = 100
"""Wrong tokens of all addresses within the window, at most."""


class Throttle:
    """Counts wrong tokens, and says how long an address has to wait. Not for several threads at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none; ``clock`` returns seconds that only grow."""
        self._clock = clock
        self._wrong: deque[tuple[float, str]] = deque(maxlen=GUESSES_IN_ALL)

    def wait_seconds(self, address: str | None) -> float:
        """Return after how many seconds a token of this address is heard; 0: now."""
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
    """Return what an address counts as: one of IPv6 as its network of 64 bits. All that are none count as one."""
    try:
        found = ip_address(address or "")
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or int(found) >> 64)
    return str(found)
