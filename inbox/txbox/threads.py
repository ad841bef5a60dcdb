"""Threads that go on whatever is raised in them, and the text of errors whose ``str`` may raise."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress

from txbox.backoff import Backoff

__all__ = ["go_on", "log_failure", "text_of"]

AGAIN = Backoff(first_seconds=0.1, longest_seconds=10.0)
"""Until what has raised is called again."""


def go_on(work: Callable[[], object], *, name: str, wait: Callable[[float], bool | None]) -> None:
    """Call something until it returns: the body of a thread that must not end before its time.

    ``name`` is the thread's, for the log. ``wait`` waits for so many seconds, and returns whether the thread is to end.
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
            except BaseException:  # noqa: BLE001, S110 - a handler of the log may raise, too
                pass
            if wait(pause):
                return


def log_failure(what: str, *arguments: object) -> None:
    """Log the exception that is handled now, with its traceback; with its text alone, where that cannot be made.

    ``what`` and ``arguments`` are as for ``logging``. Nothing is raised, whatever the exception or a handler of the log
    does.
    """
    error = sys.exception()
    try:
        _log.exception(what, *arguments)
    except BaseException:  # noqa: BLE001 - see above
        with suppress(BaseException):
            _log.error(f"{what}: %s", *arguments, "" if error is None else text_of(error))


def text_of(error: BaseException) -> str:
    """Return the text of an error; where ``str`` of it raises, its type and what it raised."""
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - an error that cannot be printed is still to be reported
        return f"{type(error).__name__} (str() of it raised {type(broken).__name__})"


_log = logging.getLogger("txbox.threads")
