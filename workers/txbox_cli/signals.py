"""Signals that ask a command to end."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

KILL_SECONDS = 4.0
END_SECONDS = 8.0

_asked: list[int] = []
"""The signals that asked this process to end. A list: a handler may take no lock, as it may interrupt who holds it."""

_dropped: list[int] = []
"""What of ``_asked`` came out of a finalizer, where Python drops it."""

_at_once: list[Callable[[], object]] = []
"""What a handler calls, before it raises; none of it takes a lock."""


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
        _dropped.clear()
        _at_once.clear()


def interrupted_plainly(at_once: Callable[[], object]) -> None:
    """Have Ctrl-C raise KeyboardInterrupt, whatever a library has made of it.

    Args:
        at_once: is called before, whichever signal asks to end. It may take no lock.
    """
    _at_once[:] = [at_once]
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def seen_as_interrupt() -> Iterator[None]:
    """Have what fails after a request to end be an interruption, too.

    A KeyboardInterrupt may come out anywhere, and Python shows and drops one that comes out of a finalizer. Those of
    py4j talk to Spark, so what is left of it is a broken connection, of which the next call complains. Here it is not
    shown, and ``ended_in_time`` sends it again.
    """
    before = sys.unraisablehook

    def keep_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
        if _asked and issubclass(unraisable.exc_type, KeyboardInterrupt):
            _dropped.append(_asked[-1])
        else:
            before(unraisable)

    sys.unraisablehook = keep_interrupt
    try:
        yield
    except Exception as error:
        if _asked:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = before


@contextmanager
def ended_in_time(kill: Callable[[], object]) -> Iterator[None]:
    """After a request to end, end within ``END_SECONDS``, whatever another process or a library does.

    Args:
        kill: ends what this process may be waiting for; called after ``KILL_SECONDS``.
    """
    over = threading.Event()

    def is_over_within(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not over.wait(0.2):
            if time.monotonic() > end:
                return False
            if _dropped:
                signal.pthread_kill(threading.main_thread().ident or 0, _dropped.pop())
        return True

    def watch() -> None:
        while not over.wait(0.2):
            if not _asked:
                continue
            if not is_over_within(KILL_SECONDS):
                kill()
            if not is_over_within(END_SECONDS - KILL_SECONDS):
                sys.stderr.write("txbox: interrupted; run it again, or resume the run\n")
                sys.stderr.flush()
                os._exit(130)
            return

    # A thread, since a handler may not do as much: it may interrupt who holds a lock.
    watcher = threading.Thread(target=watch, name="txbox-end", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


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
    for act in _at_once:
        act()
    raise KeyboardInterrupt
