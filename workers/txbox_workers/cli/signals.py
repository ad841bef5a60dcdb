"""Signals that ask a command to end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupted_plainly", "terminated_as_interrupt"]


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Have SIGTERM, and the end of the terminal, unwind as Ctrl-C does: whatever was started is stopped."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupted_plainly() -> None:
    """Have Ctrl-C raise KeyboardInterrupt, and do nothing else, whatever a library has made of it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
