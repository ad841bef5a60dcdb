"""Signals that ask a service to stop."""

import queue
import signal
import threading
from types import FrameType

__all__ = ["SignalsStop"]


class SignalsStop:
    """While entered: the first SIGTERM or SIGINT wakes who waits, the second one does what it did before.

    A handler interrupts the main thread anywhere, also where it holds a lock: setting a ``threading.Event``, or
    logging, could wait for that lock for ever. ``SimpleQueue.put`` may be called there; its documentation says so.
    """

    def __init__(self, wake: "queue.SimpleQueue[signal.Signals | None]") -> None:
        self._wake = wake
        self._asked = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Restored by the second signal, not by the first: one that had come in between would find no handler at all.
        if self._asked:
            self._restore()
            signal.raise_signal(number)
        self._asked = True
        self._wake.put(signal.Signals(number))

    def _restore(self) -> None:
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before if callable(before) or isinstance(before, int) else signal.SIG_DFL)
