"""Work beside the work: done again and again, from a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from txbox.threads import go_on

__all__ = ["every"]


@contextmanager
def every(seconds: float, work: Callable[[], object], *, name: str, at_end: bool = False) -> Iterator[None]:
    """Do something every so many seconds until the block ends, and wait for the last time to end.

    Args:
        seconds: between two times; the first is that long after the beginning.
        work: what it raises goes to the log, and it is done again.
        name: of the thread.
        at_end: do it once more when the block has ended.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            work()
        if at_end:
            work()

    thread = threading.Thread(
        target=go_on, args=(run,), kwargs={"name": name, "wait": ended.wait}, name=name, daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
