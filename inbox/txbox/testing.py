"""Crash points: kill the process, as SIGKILL does, at a worker's event."""

import os
import signal
import threading

from txbox.instrumentation.events import Event, Hook

__all__ = ["kill_at"]


def kill_at(moment: type[Event], *, after: int = 1) -> Hook:
    """Return a hook that kills this process at the n-th event of a type (``after``), counted over all threads.

    ``moment`` is the type, such as ``Received`` (before the transaction) or ``Committed`` (after it, before the ack).
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
