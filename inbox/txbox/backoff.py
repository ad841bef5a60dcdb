"""How long to wait before the next try."""

import random
from dataclasses import dataclass

from txbox.errors import InvalidConfiguration

__all__ = ["Backoff"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with equal jitter.

    The n-th wait is drawn evenly from the upper half of ``first_seconds * 2 ** (n - 1)``, which never exceeds
    ``longest_seconds``: it grows, and workers that failed together do not come back together. (M. Brooker,
    "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.)
    """

    first_seconds: float = 1.0
    longest_seconds: float = 900.0

    def __post_init__(self) -> None:
        if not 0 <= self.first_seconds <= self.longest_seconds:
            raise InvalidConfiguration(
                "Backoff.first_seconds must be at least 0 and at most longest_seconds, "
                f"not {self.first_seconds!r} with {self.longest_seconds!r}"
            )

    def seconds(self, attempt: int) -> float:
        """Return how long to wait after this attempt, counted from 1."""
        exponent = min(max(attempt, 1) - 1, _LARGEST_EXPONENT)
        longest = min(self.first_seconds * 2.0**exponent, self.longest_seconds)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret


_LARGEST_EXPONENT = 62
