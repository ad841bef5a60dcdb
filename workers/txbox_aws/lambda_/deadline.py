"""The deadline of an invocation: until when a handler may begin, and when everything must have ended.

::

    begin                                                   last begin                 end
      ├── handler ── handler ── handler ──┤ … as long as ………… │ ……………… margin …………… │ Lambda ends the process
                                            another one fits    commit, and the answer

An invocation begins at least one handler, unless only the margin is left. If it waited for a handler that fits, one
that takes long would be handed back for ever.
"""

import functools
import threading
from typing import Any

from txbox.leases.lease import elapsed
from txbox.postgres.drivers.greenlets import sleep
from txbox_workers.handlers import BatchHandler, Handler

MARGIN_SECONDS = 1.0
"""The time before the end of an invocation in which no handler begins any more: for the commit and the answer."""

LARGEST_MARGIN = 0.5
"""The largest share of an invocation's time for the margin: even a function with a time-out of a second begins
something."""

FORGETTING = 0.9
"""The expected time of the next handler shrinks by this factor each time: one handler that took a minute is soon
forgotten."""


class Deadline(threading.local):
    """When the invocation in this thread has to end. Implements ``Halt``: it is set when nothing more may begin.

    A thread is never in two invocations. Time is measured by an interval clock, from what Lambda says is left.

    Attributes:
        has_refused: whether something was not begun in this invocation for lack of time.
    """

    def __init__(self, margin_seconds: float) -> None:
        """Make the deadline once, for all invocations; each calls ``begin``.

        Nothing begins in the last ``margin_seconds`` of an invocation.
        """
        self._margin_seconds = margin_seconds
        self._ends_at: float | None = None
        self._last_begin_at: float | None = None
        self._expected_seconds = 0.0
        self._has_run = False
        self.has_refused = False

    def begin(self, seconds: float | None) -> None:
        """Begin an invocation that ends after ``seconds``; None means that it does not end."""
        self._has_run = self.has_refused = False
        if seconds is None:
            self._ends_at = self._last_begin_at = None
        else:
            self._ends_at = elapsed() + seconds
            self._last_begin_at = self._ends_at - min(self._margin_seconds, seconds * LARGEST_MARGIN)

    def ends_at(self) -> float | None:
        """Return the reading of ``elapsed`` at which the invocation ends; None if it does not."""
        return self._ends_at

    def seconds_left(self) -> float | None:
        """Return the seconds until the invocation ends; None if it does not."""
        return None if self._ends_at is None else self._ends_at - elapsed()

    def seconds_to_margin(self) -> float | None:
        """Return the seconds until the margin begins; None if the invocation does not end."""
        return None if self._last_begin_at is None else self._last_begin_at - elapsed()

    def has_run(self, seconds: float) -> None:
        """Record how long a handler took, so that the next one begins only if there is time for it."""
        self._has_run = True
        self._expected_seconds = max(seconds, self._expected_seconds * FORGETTING)

    def is_set(self) -> bool:
        """Whether no handler may begin any more."""
        left = self.seconds_to_margin()
        if left is None:
            return False
        refused = left <= (self._expected_seconds if self._has_run else 0.0)
        self.has_refused = self.has_refused or refused
        return refused

    def wait(self, timeout: float | None = None) -> bool:
        """Wait ``timeout`` seconds, but not beyond the last moment to begin something; return whether it is set."""
        left = self.seconds_to_margin()
        # Nothing signals a deadline, so sleep.
        sleep(max(min((seconds for seconds in (timeout, left) if seconds is not None), default=0.0), 0.0))
        return self.is_set()


def seconds_left(context: Any) -> float | None:
    """Return how long an invocation may still take, by Lambda's context; None if the context does not say."""
    ask = getattr(context, "get_remaining_time_in_millis", None)
    return None if ask is None else max(ask() / 1000, 0.0)


def timed(handler: Handler, deadline: Deadline) -> Handler:
    """Return a handler that reports to the deadline how long it took."""

    @functools.wraps(handler)
    def run(*arguments: Any, **options: Any) -> object:
        begun = elapsed()
        try:
            return handler(*arguments, **options)
        finally:
            deadline.has_run(elapsed() - begun)

    return run


def timed_batch(handler: BatchHandler, deadline: Deadline) -> BatchHandler:
    """Return a batch handler that reports to the deadline how long it took per message."""

    @functools.wraps(handler)
    def run(session: Any, messages: list[Any], *arguments: Any, **options: Any) -> object:
        begun = elapsed()
        try:
            return handler(session, messages, *arguments, **options)
        finally:
            deadline.has_run((elapsed() - begun) / len(messages))

    return run
