"""The reporter: write a worker's row in worker_report every few seconds, and learn whether the worker is paused.

It sends one statement in a transaction of its own, from a thread of its own. So even an idle worker notices within
seconds that the database is lost. While the database cannot be reached, the worker stays as it is, paused or not. A
killed worker leaves its row behind, which is stale after a while.
"""

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import AssertionPool, Connection, Engine, StaticPool
from sqlalchemy.exc import DBAPIError

from txbox import RightsMissing, TxboxError, __version__
from txbox.backoff import run_until_return
from txbox.operations.pauses import Pause
from txbox.outbox.message_ids import new_message_id
from txbox.postgres.driver_cursor import run
from txbox.postgres.sql import with_moments
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import is_outage
from txbox.postgres.transactions import check_table, short_transaction
from txbox.status.activity import KEPT_DAYS
from txbox.text import host_name, storable, text_of

REPORT_SECONDS = 3.0
"""The time between two reports, and so the longest until a pause is noticed."""

RATE_SECONDS = 1.0
"""The shortest time from which a rate is computed: a change of state is reported at once."""

GIVE_WAY_SECONDS = 0.2
"""How long a polling thread waits for a report that waits for a connection."""

STOP_SECONDS = 5.0
"""How long a stopping worker waits for its row to be deleted."""


@dataclass(frozen=True, slots=True)
class ReportPlace:
    """The tables that a worker reports to."""

    engine: Engine
    schema: str | None
    prefix: str


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """A worker's current figures."""

    state: str  # working, paused or drained
    outcomes: Mapping[str, int]  # how many deliveries had which outcome
    deadlocks: int  # handlers' transactions that the database rolled back because of a deadlock
    retries: int  # transactions that ran again, including those after deadlocks
    last_batch_at: float | None  # when the last deliveries came, by ``time.monotonic``; None: none so far
    oldest_sent_at: datetime | None  # when the oldest of those messages was sent; None: unknown

    @property
    def counts(self) -> Mapping[str, int]:
        """The counts that are added up as activity."""
        return {**self.outcomes, "deadlocks": self.deadlocks, "retries": self.retries}


class ReportStatements(SqlFile, file="reporter.sql"):
    bind_report: str
    read_pause: str
    report: str
    delete_report: str


Call = Callable[[Callable[[], Any]], Any]


class WorkerReporter:
    """Reports one worker, from its start to its end."""

    def __init__(
        self,
        place: ReportPlace,
        *,
        subscriber_id: str,
        source: str,
        source_retention_seconds: float | None,
        figures: Callable[[], WorkerFigures],
        on_answer: Callable[[Pause | None], None],
        on_outage: Callable[[Exception], None],
        call: Call = lambda work: work(),
    ) -> None:
        """Prepare. It does not connect before ``start``.

        Args:
            place: where to report.
            subscriber_id: the worker's subscriber.
            source: the name of its source.
            source_retention_seconds: how long the source keeps a message; None if unknown.
            figures: returns the worker's figures.
            on_answer: called after each report, with the subscriber's pause or None.
            on_outage: called with the error when an outage of the database has prevented a report.
            call: calls what uses the engine and returns its result; used in the reporter's thread and in that of
                ``start``.
        """
        self._engine = place.engine
        self._statements = ReportStatements.load(place.schema, place.prefix)
        self._worker = {
            "worker_id": new_message_id(),
            "subscriber_id": subscriber_id,
            "source": storable(source),
            "source_retention_seconds": source_retention_seconds,
            "host": host_name(),
            "pid": os.getpid(),
            "version": __version__,
        }
        self._figures = figures
        self._on_answer = on_answer
        self._on_outage = on_outage
        self._call = call
        # A worker that was stopped and started again keeps its counts.
        self._counted_before = json.dumps(figures().counts)
        self._counted: Mapping[str, int] = {}
        self._counted_at = time.monotonic()
        self._rates: Mapping[str, float] = {}
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._connected = threading.Event()
        self._connected.set()
        self._failing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Ask once, so that a worker of a paused subscriber starts paused; then start the thread.

        Raises:
            SchemaMissing: the tables do not exist, or are of an older version.
            TxboxError: the database cannot be used.
        """
        if isinstance(self._engine.pool, StaticPool | AssertionPool):
            _log.warning("%s reports nothing, and cannot be paused: its pool has one connection for all", self._name)
            return
        try:
            pause = self._call(self._check)
        except RightsMissing as error:
            self._log_failure(error)
        except DBAPIError as error:
            raise TxboxError(f"the database cannot be used: {text_of(error)}") from error
        else:
            self._on_answer(pause)
        self._wake.set()
        self._thread = threading.Thread(
            target=run_until_return,
            args=(self._run,),
            kwargs={"name": "the reporter", "wait": self._ended.wait},
            name="txbox-reporter",
            daemon=True,
        )
        self._thread.start()

    def _check(self) -> Pause | None:
        with short_transaction(self._engine) as connection:
            check_table(connection, self._statements.tables.paused)
            check_table(connection, self._statements.tables.worker_report)
            check_table(connection, self._statements.tables.reported_activity)
            return self._asked(connection, self._statements.read_pause, self._worker)

    def wake(self) -> None:
        """Make the next report at once."""
        self._wake.set()

    def give_way(self) -> None:
        """Wait while a report waits for a connection. A thread calls this when it has just given its own back.

        A pool gives a connection to the first that asks. If it has only one for each polling thread, a busy thread asks
        again at once, no report would ever get one, and no pause would be noticed.
        """
        self._connected.wait(GIVE_WAY_SECONDS)

    def stop(self) -> None:
        """Delete the row; wait for that, but not for long."""
        self._ended.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    @property
    def _name(self) -> object:
        return self._worker["subscriber_id"]

    def _run(self) -> None:
        while not self._ended.is_set():
            # Spread out the reports of workers that were started together.
            self._wake.wait(REPORT_SECONDS * random.uniform(0.8, 1.0))  # noqa: S311 - no secret
            self._wake.clear()
            if self._ended.is_set():
                break
            try:
                self._call(self._report)
            except Exception as error:  # noqa: BLE001 - whatever it is, the worker goes on
                # An exhausted pool is no outage: the worker is busy.
                if isinstance(error, DBAPIError) and is_outage(error):
                    self._on_outage(error)
                else:
                    self._log_failure(error)
            else:
                self._failing = False
        try:
            self._call(self._report_last)
        except Exception as error:  # noqa: BLE001 - only the status needs it
            _log.debug("%s: the report of this worker could not be deleted: %s", self._name, text_of(error))

    def _report_last(self) -> None:
        with short_transaction(self._engine) as connection:
            run(connection, self._statements.bind_report, self._worker)
            run(connection, self._statements.report, self._values(time.monotonic()))
        # The worker's counts stay in the charts even if its row cannot be deleted.
        with short_transaction(self._engine) as connection:
            run(connection, self._statements.bind_report, self._worker)
            run(connection, self._statements.delete_report, {**self._worker, "kept": timedelta(days=KEPT_DAYS)})

    def _report(self) -> None:
        values = self._values(time.monotonic())
        self._connected.clear()
        try:
            with short_transaction(self._engine) as connection:
                self._connected.set()
                run(connection, self._statements.bind_report, self._worker)
                pause = self._asked(connection, self._statements.report, values)
        finally:
            self._connected.set()
        self._on_answer(pause)

    def _values(self, now: float) -> dict[str, Any]:
        figures = self._figures()
        if (seconds := now - self._counted_at) >= RATE_SECONDS:
            before = self._counted
            self._rates = {name: (count - before.get(name, 0)) / seconds for name, count in figures.outcomes.items()}
            self._counted, self._counted_at = figures.outcomes, now
        return {
            **self._worker,
            "state": figures.state,
            "outcomes": json.dumps(figures.outcomes),
            "per_second": json.dumps(self._rates),
            "deadlocks": figures.deadlocks,
            "retries": figures.retries,
            "last_batch_seconds_ago": None if figures.last_batch_at is None else now - figures.last_batch_at,
            "oldest_sent_at": figures.oldest_sent_at,
            "counted_before": self._counted_before,
        }

    @staticmethod
    def _asked(connection: Connection, statement: str, values: Mapping[str, Any]) -> Pause | None:
        row = run(connection, statement, values).mappings().one_or_none()
        return None if row is None else Pause(**with_moments(row, "paused_at"))

    def _log_failure(self, error: Exception) -> None:
        """Log only the first of several failures in a row."""
        if not self._failing:
            _log.warning("%s cannot report that it works, and notices no pause: %s", self._name, text_of(error))
        self._failing = True


_log = logging.getLogger("txbox.worker")
