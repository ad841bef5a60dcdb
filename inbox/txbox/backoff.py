"""Exponential backoff, and what uses it: ``retry`` for a piece of work, ``run_until_return`` for a thread's body."""

import itertools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from txbox.errors import InvalidConfiguration
from txbox.text import text_of

__all__ = ["Backoff"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with equal jitter.

    The n-th wait is drawn evenly from the upper half of ``first_seconds * 2 ** (n - 1)``, which is capped at
    ``longest_seconds``. Waits grow, and workers that failed together do not come back together. (M. Brooker,
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
        """Return how many seconds to wait after this attempt, counted from 1."""
        exponent = min(max(attempt, 1) - 1, _LARGEST_EXPONENT)
        longest = min(self.first_seconds * 2.0**exponent, self.longest_seconds)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret


_LARGEST_EXPONENT = 62


T = TypeVar("T")


def retry(
    work: Callable[[], T],
    *,
    again: Callable[[Exception, int], bool],
    backoff: Backoff,
    runs: int | None = None,
    wait: Callable[[float], bool | None] = time.sleep,
) -> T:
    """Run ``work`` until it succeeds, and return its result. Raise what the last run raised.

    Args:
        work: the function to run.
        again: gets what a run raised and the number of that run, counted from 1; returns whether to run again. It is
            not called for the last run.
        backoff: the pauses between runs, by the number of the run before.
        runs: at most so many; None: no limit.
        wait: pauses for so many seconds; returns whether to give up, as ``threading.Event.wait`` does.
    """
    for run in itertools.count(1):
        try:
            return work()
        except Exception as error:
            if run == runs or not again(error, run) or wait(backoff.seconds(run)):
                raise
    raise AssertionError("unreachable")


AGAIN = Backoff(first_seconds=0.1, longest_seconds=10.0)
"""Pauses of ``run_until_return``."""


def run_until_return(work: Callable[[], object], *, name: str, wait: Callable[[float], bool | None]) -> None:
    """Call ``work`` until it returns, again after whatever it raises: the body of a thread that must not end early.

    ``name`` is the thread's name, for the log. ``wait`` pauses for so many seconds, and returns whether the thread must
    end.
    """
    failures = 0
    while True:
        try:
            work()
            return
        except BaseException as error:  # noqa: BLE001 - a thread that ends silently is the worst outcome
            failures += 1
            pause = AGAIN.seconds(failures)
            try:
                _log.error("%s raised an unexpected error, and runs again: %s", name, text_of(error))
                _log.debug("%s failed", name, exc_info=True)
            except BaseException:  # noqa: BLE001, S110 - a log handler may raise, too
                pass
            if wait(pause):
                return


_log = logging.getLogger("txbox.threads")
