"""Gates: hold a thread at a place of a delivery's life, until it is let go on, or killed.

A thread that is held is, to all others, what the thread of a killed process is: none of its ``except`` and ``finally``
blocks run, and what it has open stays as it is until the other end closes it.
"""

import threading


class Killed(BaseException):
    """Ends the code of a handler that was held as killed, once its trial is over."""


class Gate:
    """Holds the first thread that comes to a place for the n-th time.

    Args:
        place: its name; see ``txbox_testing.faults.PLACES``.
        passes: 1 holds the first one that comes there, 2 the second.
    """

    def __init__(self, place: str, passes: int = 1) -> None:
        self.place = place
        self.passes = passes
        self.reached = threading.Event()
        self._released = threading.Event()
        self._kills = False

    def hold(self) -> None:
        """Wait until it is released; raises ``Killed`` if this thread is not to go on."""
        self.reached.set()
        self._released.wait()
        if self._kills:
            raise Killed

    def release(self, *, kill: bool = False) -> None:
        """Let the thread go on, or end its handler; a second call changes nothing."""
        if not self._released.is_set():
            self._kills = kill
            self._released.set()
