"""The supervisor: keeps N processes of one worker running, and ends them all.

::

    supervisor ──spawns──▶ process 1 alone: a start that fails is reported once, and nothing else is started
               ──spawns──▶ process 2 … N, once process 1 is at work
        │  one ends by itself      ─▶ another one takes its place; MOST_DEATHS early ones in a row: all are stopped
        │  SIGTERM, SIGINT, SIGHUP ─▶ SIGTERM to each; a second signal ends the supervisor
        └─ however the supervisor ends, its sockets close: each process sends itself a SIGTERM (``member``)

Processes are spawned, not forked: each imports the module itself, and shares no connection with another. Each is in a
process group of its own, so Ctrl-C in a terminal reaches the supervisor only.
"""

import logging
import math
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TextIO

from txbox.service import StopSignals
from txbox_cli.commands.worker.member import EXIT_SECONDS, MemberReport
from txbox_cli.errors import CommandFailed

LOOK_SECONDS = 0.1
EARLY_SECONDS = 10.0
"""A process has died early if it ends before it is at work, or sooner than this afterwards."""

MOST_DEATHS = 5
"""Early deaths in a row, of one process and those that replace it, after which the supervisor gives up."""

PAUSE_SECONDS = 0.5
"""Pause before the second early death in a row is replaced; doubled for each further one. The first has no pause."""

SILENT_SECONDS = 10.0
"""A process counts as frozen when it has not reported for this long."""

MOST_LINE_BYTES = 65_536
"""A longer line of output is passed on in parts."""


class StartFailed(Exception):
    """The first process could not start, and has said why."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Process:
    """A process of the worker. It reports through a socket, and its output is passed on line by line."""

    def __init__(self, command: Callable[[int], Sequence[str]], output: threading.Lock) -> None:
        """Start the process. ``command`` returns the command line for the descriptor of its end of the socket."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._socket.setblocking(False)
        self._unread = b""
        self.pid = self._process.pid
        self._works_since = self._heard_at = math.inf
        self.report = MemberReport()
        streams = (self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)
        self._pumps = [
            threading.Thread(target=_pump, args=(*stream, output), name="txbox-output", daemon=True)
            for stream in streams
        ]
        for pump in self._pumps:
            pump.start()

    @property
    def silent(self) -> bool:
        """Whether a report is overdue."""
        return time.monotonic() - self._heard_at > SILENT_SECONDS

    @property
    def early(self) -> bool:
        """Whether it was not at work, or not for long."""
        return time.monotonic() - self._works_since < EARLY_SECONDS  # -inf for one that never was at work

    def has_ended(self) -> bool:
        """Read its reports. Return whether it has ended."""
        ended = self._process.poll() is not None  # checked before the last report is read
        with suppress(OSError):
            while data := self._socket.recv(MOST_LINE_BYTES):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self.report, self._heard_at = MemberReport.read(line), time.monotonic()
                    self._works_since = min(self._works_since, self._heard_at)
        return ended

    def ending(self) -> str:
        """Return how it ended, in words."""
        status = self.status
        return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"

    @property
    def status(self) -> int:
        """Its exit status, negative for a signal. Waits until it ends."""
        return self._process.wait()

    def signal(self, number: "signal.Signals") -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Kill it if it still runs, and pass on the rest of its output."""
        self._process.kill()
        self._process.wait()
        for pump in self._pumps:
            pump.join(1.0)  # a child of its own may hold the pipe
        self.has_ended()
        self._socket.close()


@dataclass(slots=True)
class _Place:
    """A slot for a process and those that replace it."""

    process: Process | None = None
    deaths: int = 0  # early ones in a row
    start_at: float = 0.0


class Supervisor:
    """Keeps processes of one worker running until it is told to stop."""

    def __init__(self, command: Callable[[int], Sequence[str]], processes: int, stop_seconds: float) -> None:
        """``command`` returns the command line for a socket's descriptor. ``stop_seconds`` limits a drain."""
        self._command, self._stop_seconds = command, stop_seconds
        self._places = [_Place() for _ in range(processes)]
        self._output = threading.Lock()
        self._proven = False  # one process has been at work
        self._begun = False  # all have been at work
        self._stopping = False
        self._gave_up = ""
        self._drained = True
        self.counts: Counter[str] = Counter()

    def run(self, begun: Callable[[str], object]) -> bool:
        """Run until SIGTERM or SIGINT, then drain all processes. Return whether all have drained.

        Args:
            begun: called once all processes are at work, with what they work on.

        Raises:
            StartFailed: the first process ended before it was at work, and has said why.
            CommandFailed: processes ended again and again.
        """
        asked: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        with StopSignals(asked):
            try:
                while not self._stopping:
                    self._tend()
                    if not self._begun and (works := self._works()):
                        self._begun = True
                        begun(works)
                    if not self._stopping:
                        with suppress(queue.Empty):
                            asked.get(timeout=LOOK_SECONDS)
                            self._stopping = True
                self._drain()
            finally:
                for process in self._processes():
                    process.close()
        if self._gave_up:
            raise CommandFailed(self._gave_up)
        return self._drained

    def why_not_live(self) -> str | None:
        """Return which process does not work and cannot recover by itself, or None."""
        for process in self._processes():
            if process.silent:
                return f"process {process.pid} has not reported for {SILENT_SECONDS:g} s"
            if process.report.not_live:
                return f"process {process.pid}: {process.report.not_live}"
        return None

    def why_not_ready(self) -> str | None:
        """Return why not all processes are at work and can use what they need, or None."""
        if self._stopping:
            return "it is stopping"
        processes = self._processes()
        working = sum(bool(process.report.works) for process in processes)
        if working < len(self._places):
            return f"{working} of {len(self._places)} processes have started"
        reasons = (f"process {one.pid}: {one.report.not_ready}" for one in processes if one.report.not_ready)
        return next(reasons, None) or self.why_not_live()

    def _processes(self) -> list[Process]:
        return [process for place in self._places if (process := place.process) is not None]

    def _works(self) -> str:
        """Return what the processes work on, once all do."""
        works = [process.report.works for process in self._processes()]
        return works[0] if len(works) == len(self._places) and all(works) else ""

    def _tend(self) -> None:
        """Replace processes that have ended, and start those that are missing; the first one starts alone."""
        for place in self._places:
            if place.process is not None and place.process.has_ended():
                self._bury(place, place.process)
            if place.process is None and not self._stopping and time.monotonic() >= place.start_at:
                place.process = Process(self._command, self._output)
            self._proven = self._proven or bool(place.process and place.process.report.works)
            if not self._proven:
                return

    def _bury(self, place: _Place, process: Process) -> None:
        place.process = None
        process.close()
        self.counts.update(process.report.counts)
        if not self._proven and not process.report.works:
            if process.status > 0:
                raise StartFailed(process.status)
            raise CommandFailed(f"the first process ended {process.ending()} while it started")
        place.deaths = place.deaths + 1 if process.early else 0
        if place.deaths >= MOST_DEATHS:
            self._stopping = True
            self._gave_up = (
                f"gave up: {place.deaths} processes in a row ended within {EARLY_SECONDS:g} s, the last one "
                f"{process.ending()}; the lines above may say why, or the system's log (a lack of memory?)"
            )
            return
        pause = PAUSE_SECONDS * 2 ** (place.deaths - 2) if place.deaths > 1 else 0.0
        place.start_at = time.monotonic() + pause
        when = f" in {pause:g} s" if pause else ""
        _log.warning("process %d ended %s; another one takes its place%s", process.pid, process.ending(), when)

    def _drain(self) -> None:
        for process in self._processes():
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._stop_seconds + EXIT_SECONDS
        while any(not process.has_ended() for process in self._processes()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        for process in self._processes():
            process.close()
            self.counts.update(process.report.counts)
            # A process that was still importing cannot drain, and has begun nothing.
            untouched = not process.report.works and process.status == -signal.SIGTERM
            self._drained = self._drained and (bool(process.report.drained) or untouched)


def _pump(source: IO[bytes], sink: TextIO, output: threading.Lock) -> None:
    """Pass on whole lines: those of two processes never mix."""
    with source:
        while line := source.readline(MOST_LINE_BYTES):
            # If the reader of our output has ended, the process must still be read: otherwise it blocks for ever.
            with output, suppress(OSError, ValueError):
                sink.buffer.write(line if line.endswith(b"\n") else line + b"\n")
                sink.buffer.flush()


_log = logging.getLogger("txbox.processes")
