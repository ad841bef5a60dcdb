"""Crash points: end the process, as SIGKILL does, at a named moment of a message's life.

A worker's events mark the moments that matter, so a crash point is a hook: ``kill_at(Committed)`` dies after the
commit and before the ack.
"""

import os
import signal
import threading

from txbox.instrumentation.events import Event, Hook

__all__ = ["kill_at"]


def kill_at(moment: type[Event], *, after: int = 1) -> Hook:
    """Make a hook that kills this process when an event happens.

    Args:
        moment: the type of the event, such as ``Received`` (before the transaction) or ``Committed`` (after it,
            before the ack).
        after: the how-manieth such event kills; counted over all threads.

    Returns:
        The hook, for ``hooks=`` of a worker.
    """
    lock = threading.Lock()
    seen = 0

    def hook(event: Event) -> None:
        nonlocal seen
        if isinstance(event, moment):
            with lock:
                seen += 1
                if seen >= after:
                    os.kill(os.getpid(), signal.SIGKILL)

    return hook
