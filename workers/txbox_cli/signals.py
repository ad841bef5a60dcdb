"""Signals that end a command."""

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
"""Signals that asked this process to end. A list: a handler may interrupt the holder of a lock, so it takes none."""

_dropped: list[int] = []
"""Those of ``_asked`` that were raised in a finalizer, where Python drops exceptions."""

_at_once: list[Callable[[], object]] = []
"""Functions that a handler calls before it raises. None of them takes a lock."""


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that everything started is stopped."""
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
    """Make Ctrl-C raise KeyboardInterrupt, whatever handler a library has installed.

    Args:
        at_once: called first, whichever signal arrives. It must not take a lock.
    """
    _at_once[:] = [at_once]
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def seen_as_interrupt() -> Iterator[None]:
    """Turn an error after a request to end into a KeyboardInterrupt.

    A KeyboardInterrupt may be raised anywhere, and Python prints and drops one raised in a finalizer. py4j's finalizers
    talk to Spark, so a dropped one leaves a broken connection, and the next call fails. Here it is not printed, and
    ``ended_in_time`` sends the signal again.
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
    """End within ``END_SECONDS`` of a request to end, whatever another process or a library does.

    Args:
        kill: ends what this process may be waiting for. Called after ``KILL_SECONDS``.
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

    # A thread: a handler may interrupt the holder of a lock, so it cannot do as much.
    watcher = threading.Thread(target=watch, name="txbox-end", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextmanager
def hangup_terminates() -> Iterator[None]:
    """Make SIGHUP do what SIGTERM does, unless it is ignored, as under ``nohup``."""
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
