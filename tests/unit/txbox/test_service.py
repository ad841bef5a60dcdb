"""Threads of a service."""

import signal
import sys
import threading
from collections.abc import Callable, Mapping

from support.waiting import wait_until
from txbox.service import Service


class Growing(Service):
    """Its first thread has started another one before its second thread starts."""

    def __init__(self) -> None:
        super().__init__()
        self.added = threading.Event()
        self.ran: list[str] = []

    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        return {"first": self._first, "second": self._wait}

    def _stopped(self, finished: bool) -> None:
        assert finished

    def _first(self) -> None:
        self._add("third", self._wait)
        self.added.set()
        self._wait()

    def _wait(self) -> None:
        self.ran.append(threading.current_thread().name)
        self._stopping.wait()

    def _thread(self, name: str, work: Callable[[], object]) -> threading.Thread:
        thread = super()._thread(name, work)
        if name == "second":
            start = thread.start

            def start_late() -> None:
                assert self.added.wait(10)
                start()

            thread.start = start_late  # type: ignore[method-assign]
        return thread


def test_a_thread_may_start_another_one_before_all_have_started() -> None:
    service = Growing()
    service.start()
    assert service.running
    assert service.stop(10)
    assert sorted(service.ran) == ["first", "second", "third"]


class Ending(Service):
    """One of its two threads ends before its time."""

    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        return {"ends": lambda: None, "stays": self._stopping.wait}

    def _stopped(self, finished: bool) -> None:
        assert finished


def test_a_service_with_a_thread_that_has_ended_is_not_running() -> None:
    service = Ending()
    service.start()
    wait_until(lambda: not service.running, "it says so")
    assert service._is_alive()
    assert service.stop(10)


class Signalled(Service):
    """Its thread takes the signal that is to end it, once the main thread waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        return {"takes it": self._take}

    def _stopped(self, finished: bool) -> None:
        assert finished

    def _take(self) -> None:
        assert self.begun.wait(10)
        main = threading.main_thread().ident
        wait_until(lambda: sys._current_frames()[main].f_code.co_name == "next_signal", "the main thread waits")
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        self._stopping.wait()


def test_a_signal_that_another_thread_takes_ends_a_run() -> None:
    """It does not wake the main thread, in which its handler is to run; nor does one that comes just before a wait."""
    service = Signalled()
    assert service.run(10, started=service.begun.set)
