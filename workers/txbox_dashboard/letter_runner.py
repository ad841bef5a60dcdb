"""The runner: carries out redrives and discards one after the other, in a thread of the dashboard.

An operation is in the database before it begins. If the dashboard ends, the rest of the operation stays there, and the
pages offer to resume it; so does ``txbox dead-letters resume``.
"""

import logging
import queue
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field

from sqlalchemy import Engine

from txbox.dead_letters import LetterOperations
from txbox.text import text_of
from txbox_dashboard.settings import DashboardSettings
from txbox_workers.brokers import DatabasePlace, letter_sender


@dataclass(slots=True)
class _Job:
    operation_id: int
    who: str
    queue_url: str | None
    stopping: threading.Event = field(default_factory=threading.Event)


class LetterRunner:
    """Carries out operations in the order in which they were requested."""

    def __init__(self, engine: Engine, settings: DashboardSettings) -> None:
        self._operations = LetterOperations(engine, schema=settings.schema, prefix=settings.prefix)
        self._settings = settings
        self._place = DatabasePlace(engine, settings.schema, settings.prefix)
        self._jobs: dict[int, _Job] = {}
        self._waiting: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._errors: dict[int, str] = {}

    @property
    def operations(self) -> LetterOperations:
        return self._operations

    def running(self) -> frozenset[int]:
        """Return the operations that are being carried out, or wait for that."""
        with self._lock:
            return frozenset(self._jobs)

    def error(self, operation_id: int) -> str | None:
        """Return the error that ended an operation early, or None."""
        return self._errors.get(operation_id)

    def start(self, operation_id: int, who: str, queue_url: str | None = None) -> None:
        """Queue an operation. Do nothing if it is queued or running already."""
        with self._lock:
            if operation_id in self._jobs:
                return
            job = self._jobs[operation_id] = _Job(operation_id, who, queue_url)
            self._errors.pop(operation_id, None)
            self._waiting.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="txbox-dashboard-letters", daemon=True)
                self._thread.start()

    def stop(self, operation_id: int) -> None:
        """End an operation after the letter in hand."""
        with self._lock:
            job = self._jobs.get(operation_id)
        if job is not None:
            job.stopping.set()

    def _run(self) -> None:
        while True:
            job = self._waiting.get()
            try:
                self._carry_out(job)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next one is carried out
                self._errors[job.operation_id] = text_of(error).partition("\n")[0]
                _log.warning("operation %d was ended: %s", job.operation_id, text_of(error))
            finally:
                with self._lock:
                    self._jobs.pop(job.operation_id, None)

    def _carry_out(self, job: _Job) -> None:
        with ExitStack() as stack:
            send = self._settings.send or stack.enter_context(letter_sender(self._place, job.queue_url))
            self._operations.carry_out(job.operation_id, send, by=job.who, pause=job.stopping.wait)


_log = logging.getLogger("txbox.dashboard")
