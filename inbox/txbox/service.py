"""A service: threads that work until a call or a signal stops them. Workers and relays are services."""

import contextvars
import logging
import math
import queue
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

from txbox.backoff import run_until_return
from txbox.errors import InvalidConfiguration

STOP_SECONDS = 30.0
"""How long a stop waits for work under way: what Kubernetes grants by default."""

STOP_CHECK_SECONDS = 0.1
"""How often a start checks whether it is told to stop."""

SIGNAL_CHECK_SECONDS = 1.0
"""How long one wait for a signal lasts, before Python checks for signals itself."""


class StopSignals:
    """While entered, put the first SIGTERM or SIGINT into a queue; let the second do what it did before.

    A handler interrupts the main thread anywhere, even where it holds a lock: setting a ``threading.Event``, or
    logging, could wait for that lock for ever. ``SimpleQueue.put`` is documented to be safe there.
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
        # The second signal restores the handlers, not the first: one that came in between would find no handler.
        if self._asked:
            self._restore()
            signal.raise_signal(number)
        self._asked = True
        self._wake.put(signal.Signals(number))

    def _restore(self) -> None:
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before if callable(before) or isinstance(before, int) else signal.SIG_DFL)


def next_signal(wake: "queue.SimpleQueue[signal.Signals | None]") -> signal.Signals | None:
    """Wait for the signal that ``StopSignals`` puts into a queue, and return it; None if another thread put None there.

    A signal that the system gives to another thread, or that comes just before this wait begins, does not end the wait:
    its handler runs in this thread, after the wait.
    """
    while True:
        with suppress(queue.Empty):
            return wake.get(timeout=SIGNAL_CHECK_SECONDS)


class Service(ABC):
    """Starts threads and stops them. Subclasses define what the threads do, and what to check first."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._wake: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._starter: threading.Thread | None = None
        self._hooks: list[Callable[[Any], None]] = []

    @property
    def running(self) -> bool:
        """Whether all its threads are at work; after a stop, whether one has not finished."""
        if self._stopping.is_set():
            return self._is_alive()
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop, and begins nothing more."""
        return self._stopping.is_set()

    def add_hook(self, hook: Callable[[Any], None]) -> None:
        """Give every event to one more hook; see ``txbox.instrumentation``.

        Raises:
            InvalidConfiguration: the service is already running.
        """
        self._refuse_running("add hooks before its start")
        self._hooks.append(hook)

    def start(self) -> None:
        """Check the database and the source, then start the threads and return.

        Raises:
            TxboxError: the database cannot be used. ``SchemaMissing``: its tables do not exist.
            BrokerError: a source does not exist, cannot be reached, or refuses.
            InvalidConfiguration: the service is already running.
        """
        with self._starting:
            self._make_ready()
            self._start()

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        """Begin nothing more, and finish work under way within ``timeout`` seconds.

        Return True if everything was finished, False if time ran out; what is left will be delivered again.
        """
        self._call_off()
        self._wake.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            # A handler or a hook may stop its own service; its thread then ends afterwards.
            if thread is not threading.current_thread() and thread.ident is not None:  # None: it is starting just now
                thread.join(max(deadline - time.monotonic(), 0.0))
        finished = not self._is_alive()
        if self._threads:
            if finished:
                self._threads = []
            self._stopped(finished)
        return finished

    def run(self, timeout: float = STOP_SECONDS, *, started: Callable[[], object] | None = None) -> bool:
        """Start, work until SIGTERM or SIGINT (or ``stop`` from another thread), then finish work under way.

        Signals are handled if this is the main thread; a second signal ends the process at once. Raise as ``start``
        does, and return as ``stop`` does. Also return False if told to stop during a start that does not end in time.

        Args:
            timeout: seconds that finishing may take, or a start after it was told to stop.
            started: called once the service is at work, after all checks.
        """
        with ExitStack() as signals:
            with self._starting:
                # Before the signal handlers are ours, so that a signal during the start is not forgotten.
                self._make_ready()
                signals.enter_context(StopSignals(self._wake))
                if not self._has_started(timeout):
                    return False
            if started is not None:
                started()
            number = next_signal(self._wake)
            if number is not None:
                _log.info("%s: finishing what was begun; send it again to exit at once", number.name)
            return self.stop(timeout)

    def _make_ready(self) -> None:
        self._refuse_running("make another one")
        self._stopping.clear()
        self._wake = queue.SimpleQueue()

    def _refuse_running(self, remedy: str) -> None:
        if self._is_alive() or (self._starter is not None and self._starter.is_alive()):
            raise InvalidConfiguration(f"this {type(self).__name__} is running already; {remedy}")

    def _has_started(self, timeout: float) -> bool:
        """Start in a thread: a broker, a database or a lock may block the start, and a signal interrupts no such wait.

        Return False if told to stop, and the start has not ended ``timeout`` seconds later. Raise what the start
        raises.
        """
        raised: list[BaseException] = []

        def start() -> None:
            try:
                self._start()
            except BaseException as error:  # noqa: BLE001 - it is raised again, by the thread that waits for it
                raised.append(error)

        context = contextvars.copy_context()
        self._starter = starter = threading.Thread(target=context.run, args=(start,), name="txbox-start", daemon=True)
        starter.start()
        deadline = math.inf
        while starter.is_alive() and time.monotonic() < deadline:
            starter.join(STOP_CHECK_SECONDS)
            if math.isinf(deadline) and not self._wake.empty():
                deadline = time.monotonic() + timeout
                self._call_off()
        if raised:
            raise raised[0]
        if starter.is_alive():
            _log.warning("told to stop while starting, which has not ended within %g s: stopped waiting", timeout)
            return False
        return True

    def _start(self) -> None:
        self._threads = [self._thread(name, work) for name, work in self._prepare().items()]
        if self._stopping.is_set():
            self._call_off()  # told to stop during the start: what was made since begins nothing
        for thread in tuple(self._threads):  # one that works already may add others
            thread.start()
        if self._stopping.is_set():
            self._call_off()  # what its threads have made since

    def _add(self, name: str, work: Callable[[], object]) -> None:
        """Start one more thread that does the same as others, and ends when the service stops."""
        thread = self._thread(name, work)
        thread.start()
        self._threads.append(thread)

    def _thread(self, name: str, work: Callable[[], object]) -> threading.Thread:
        return threading.Thread(
            target=run_until_return,
            args=(work,),
            kwargs={"name": name, "wait": self._stopping.wait},
            name=name,
            daemon=True,
        )

    def _is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    @abstractmethod
    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        """Check what the service needs; return what each thread runs until it stops, by the thread's name."""

    def _call_off(self) -> None:
        """Make the threads begin nothing more."""
        self._stopping.set()

    @abstractmethod
    def _stopped(self, finished: bool) -> None:
        """Report that the service stopped, and whether all work was finished."""


_log = logging.getLogger("txbox.service")
