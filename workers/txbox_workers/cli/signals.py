"""Signals that ask a command to end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["hangup_terminates", "interrupted_plainly", "seen_as_interrupt", "terminated_as_interrupt"]

_asked: list[int] = []
"""The signals that asked this process to end. A list: a handler may take no lock, as it may interrupt who holds it."""


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Have SIGTERM, and the end of the terminal, unwind as Ctrl-C does: whatever was started is stopped."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked.clear()


def interrupted_plainly() -> None:
    """Have Ctrl-C raise KeyboardInterrupt, and do nothing else, whatever a library has made of it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def seen_as_interrupt() -> Iterator[None]:
    """Have what fails after a request to end be an interruption, too.

    A KeyboardInterrupt may come out anywhere, and Python drops one that comes out of a finalizer. Those of py4j talk to
    Spark, so what is left of it is a broken connection, of which the next call complains.
    """
    try:
        yield
    except Exception as error:
        if _asked:
            raise KeyboardInterrupt from error
        raise


@contextmanager
def hangup_terminates() -> Iterator[None]:
    """Have the end of the terminal do what SIGTERM does, unless it is ignored, as under ``nohup``."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _asked.append(number)
    raise KeyboardInterrupt
