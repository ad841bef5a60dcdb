"""Wait for conditions, never for time to pass."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str = "", *, timeout: float = 60.0, every: float = 0.02) -> T:
    """Return what the condition returns as soon as it is true; fail if it is not in time.

    Args:
        condition: called again and again.
        what: what is waited for, for the failure.
        timeout: seconds to wait for it.
        every: seconds between two calls, at least; a call that takes long, and keeps a server busy, is made less often.
    """
    deadline = time.monotonic() + timeout
    while True:
        begun = time.monotonic()
        if result := condition():
            return result
        ended = time.monotonic()
        if ended > deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition}")
        time.sleep(max(every, 2 * (ended - begun)))
