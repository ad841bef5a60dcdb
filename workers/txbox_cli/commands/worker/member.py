"""A member process of a worker: it reports to its supervisor, and does not outlive it."""

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

from txbox_cli.health import Health
from txbox_workers.coroutines import AsyncWorker
from txbox_workers.worker import Worker

REPORT_SECONDS = 0.5
SEND_SECONDS = 5.0
"""How long to wait for a supervisor that does not read."""

EXIT_SECONDS = 5.0
"""How long a process may take to start its drain, and to exit after it."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """The state of a member process, sent as a line of JSON."""

    works: str = ""  # what it works on, once it does
    not_live: str | None = None  # the reason
    not_ready: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)  # by outcome
    drained: bool | None = None  # set at the end

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Self:
        return cls(**json.loads(line))


class Member:
    """A member's link to its supervisor: a socket, which closes however the supervisor ends.

    Once it is closed, the process sends itself a SIGTERM: it drains, or ends at once if it drains already.
    """

    def __init__(self, descriptor: int, stop_seconds: float) -> None:
        """Take over the inherited socket and watch it. ``stop_seconds`` is how long a drain may take."""
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(SEND_SECONDS)
        self._stop_seconds = stop_seconds
        self._sending = threading.Lock()
        self._worker: Worker | AsyncWorker | None = None
        self._health: Health | None = None
        self._works = ""
        self._ended = self._unheard = False
        threading.Thread(target=self._watch, name="txbox-member", daemon=True).start()

    def takes(self, worker: Worker | AsyncWorker) -> None:
        """Report on this worker from now on."""
        self._health = Health(worker)
        worker.add_hook(self._health)
        self._worker = worker

    def started(self, works: str) -> None:
        """Report that the worker is at work."""
        assert self._health is not None  # noqa: S101 - for the type checker
        self._health.started()
        self._works = works
        self._report()

    def ended(self, drained: bool) -> None:
        """Send the last report."""
        self._report(drained)

    def _report(self, drained: bool | None = None) -> None:
        with self._sending:
            if self._ended or self._worker is None or self._health is None:
                return
            health = self._health
            counts = {str(outcome): count for outcome, count in self._worker.counts.items()}
            report = MemberReport(self._works, health.why_not_live(), health.why_not_ready(), counts, drained)
            self._ended = drained is not None
            try:
                self._socket.sendall(report.line())
            except OSError:  # the supervisor has ended or is frozen; half a line may have been sent
                self._ended = self._unheard = True

    def _watch(self) -> None:
        while not (self._unheard or select.select([self._socket], [], [], REPORT_SECONDS)[0]):
            if self._works:
                self._report()
        # The reader of our output has ended as well, and a handler that prints must not fail because of it.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._stop_seconds + EXIT_SECONDS)
        os._exit(1)
