"""Repeats work in a separate thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from txbox.backoff import run_until_return


@contextmanager
def every(seconds: float, work: Callable[[], object], *, name: str, at_end: bool = False) -> Iterator[None]:
    """Call ``work`` in a thread every ``seconds`` until the block ends, and wait for the last call to end.

    Errors that it raises are logged. With ``at_end``, it is called once more when the block has ended.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            work()
        if at_end:
            work()

    thread = threading.Thread(
        target=run_until_return, args=(run,), kwargs={"name": name, "wait": ended.wait}, name=name, daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
