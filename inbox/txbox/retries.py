"""Retries: work that is run again after a pause."""

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

from txbox.backoff import Backoff

T = TypeVar("T")


def retry(
    work: Callable[[], T],
    *,
    again: Callable[[Exception, int], bool],
    backoff: Backoff,
    runs: int | None = None,
    wait: Callable[[float], bool | None] = time.sleep,
) -> T:
    """Run work until it succeeds, and return its result; raises what the last run has raised.

    Args:
        work: what is run.
        again: called with what a run has raised, and the number of that run, counted from 1; returns whether another
            run may succeed. Not called for the last run.
        backoff: the pauses between the runs, by the number of the run before.
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
