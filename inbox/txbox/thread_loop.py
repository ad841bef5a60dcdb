"""A loop for threads: what it runs is entered again after an error, until it returns."""

import logging
from collections.abc import Callable

from txbox.backoff import Backoff
from txbox.error_logging import text_of

AGAIN = Backoff(first_seconds=0.1, longest_seconds=10.0)
"""Until what has raised is called again."""


def run_until_return(work: Callable[[], object], *, name: str, wait: Callable[[float], bool | None]) -> None:
    """Call something until it returns, again after whatever it raises: the body of a thread that must not end early.

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


_log = logging.getLogger("txbox.threads")
