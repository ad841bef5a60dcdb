"""The maintainer: forgets what has been kept long enough, a little at a time.

A round::

    take the right to work ─▶ scans ──▶ move the horizons, COMMIT ─▶ wait until every transaction sees them
       ─▶ responses, results, leases, ids, stretch by stretch; each: renew the right, delete, record, COMMIT, pause

The horizons come first. A message of known age behind its subscriber's horizon is not run any more, so its id may be
forgotten: a transaction that records a message sees, in one snapshot, either the id or the horizon. A maintainer that
is killed between any two steps has forgotten less than it may, never more.

Any number of maintainers may run; one works (``txbox.maintenance.transactions``).
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from txbox.backoff import Backoff
from txbox.errors import InvalidConfiguration, TxboxError
from txbox.instrumentation import DatabaseLost, DatabaseRestored, Event, Hook, Maintained, Stopped, emit
from txbox.instrumentation.events import MAINTAINER
from txbox.instrumentation.logs import log_event
from txbox.maintenance.horizons import Horizons
from txbox.maintenance.retention import Retention
from txbox.maintenance.rotation import Generations
from txbox.maintenance.rotation.generations import MOST_GENERATIONS, Rotator
from txbox.maintenance.sweeper import StagingSweeper, Sweeper, estimate
from txbox.maintenance.tasks import SLACK, SweeperStatements, cursor_tasks, scan_tasks
from txbox.maintenance.transactions import LeaseGone, MaintenanceStatements, MaintenanceTransactions
from txbox.outbox.sent_messages import SentMessagesStatements, purge_sent
from txbox.outbox.snapshot_holders import find_snapshot_holders
from txbox.postgres.engines import adopt, require_server
from txbox.postgres.server import read_only_server
from txbox.postgres.sqlstates import is_outage, sqlstate
from txbox.postgres.transactions import check_table, short_transaction
from txbox.service import Service
from txbox.status import RunwayReporter
from txbox.status.runway import INTERVAL_SECONDS as RUNWAY_SECONDS
from txbox.status.staging_tables import StagingCatalogue
from txbox.text import text_of

BUDGET_MS_PER_SECOND = 20.0
"""Milliseconds per second for transactions: so few of a worker's meet one that its slowest hundredth stays the same."""

ROWS_PER_TRANSACTION = 5_000
"""Most rows that one transaction removes."""

FEWEST_ROWS = 500
"""The least a transaction may remove: more than a block has, so that each statement makes progress."""

INTERVAL_SECONDS = 10.0
"""Seconds between two rounds of the service."""

ROUND_SECONDS = 60.0
"""A task that takes longer in one round goes on in the next."""

SCAN_SECONDS = 600.0
"""Seconds between two rounds of the tasks that are never urgent."""

GENERATIONS = 4
"""Generations of a rotating inbox, which keeps up to a third more than its longest window."""

COUNTED_SENT = 1_000_000
"""Most sent messages that a plan counts."""

SETTLE_SECONDS = 10.0
"""How long a round waits for transactions that may not see the horizons; then it uses the previous ones, if any."""

HOLDER_SECONDS = 600.0
"""Seconds between two warnings about sessions that keep Postgres from cleaning up."""

AGAIN = Backoff(first_seconds=1.0, longest_seconds=60.0)


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What one round has done.

    Attributes:
        worked: whether this maintainer worked; False if another one was at work, and nothing was done.
        removed: rows removed, by task; tables, for ``staging``. A task that was not due is missing.
        failed: the database's error for each task that could not be done; the others went on.
        seconds: how long the round took.
    """

    worked: bool
    removed: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """What a task would remove now.

    Attributes:
        task: its name.
        rows: rows; tables, for ``staging``.
        exact: whether they were counted. Otherwise they are estimated from a sample; for sent messages, ``rows`` is a
            lower bound.
    """

    task: str
    rows: int
    exact: bool


class Maintainer(Service):
    """Forgets what has been kept long enough. Without a ``Retention``, removes only what is certainly garbage."""

    def __init__(
        self,
        engine: Engine,
        retention: Retention | None = None,
        *,
        schema: str | None = None,
        prefix: str = "",
        force: bool = False,
        budget_ms_per_second: float = BUDGET_MS_PER_SECOND,
        rows_per_transaction: int = ROWS_PER_TRANSACTION,
        interval_seconds: float = INTERVAL_SECONDS,
        generations: int = GENERATIONS,
        hooks: Iterable[Hook] = (),
    ) -> None:
        """Set up a maintainer; it connects only at ``start``, ``run`` or ``run_once``.

        Args:
            engine: the database; uses one connection at a time.
            retention: how long each kind of data is kept; None: only garbage is removed.
            schema: the Postgres schema that holds the tables; None leaves it to the search path.
            prefix: what the tables' names start with.
            force: accept windows shorter than a queue keeps its messages.
            budget_ms_per_second: milliseconds of each second that its transactions may take; 1,000: no limit.
            rows_per_transaction: most rows that one transaction removes.
            interval_seconds: between two rounds of the service.
            generations: of an inbox that rotates. A new one is opened after the longest window divided by one less than
                this.
            hooks: get every event; see ``txbox.instrumentation``.

        Raises:
            InvalidConfiguration: an argument cannot work.
        """
        if not 1 <= budget_ms_per_second <= 1_000:
            raise InvalidConfiguration(
                f"Maintainer.budget_ms_per_second must be from 1 to 1,000, not {budget_ms_per_second!r}"
            )
        if rows_per_transaction < FEWEST_ROWS:
            raise InvalidConfiguration(
                f"Maintainer.rows_per_transaction must be at least {FEWEST_ROWS}, not {rows_per_transaction!r}"
            )
        if not 0.01 <= interval_seconds <= SCAN_SECONDS:
            raise InvalidConfiguration(
                f"Maintainer.interval_seconds must be from 0.01 to {SCAN_SECONDS:g}, not {interval_seconds!r}"
            )
        if not 2 <= generations <= MOST_GENERATIONS // 2:
            raise InvalidConfiguration(
                f"Maintainer.generations must be from 2 to {MOST_GENERATIONS // 2}, not {generations!r}"
            )
        super().__init__()
        self._engine = adopt(engine)
        self._retention = retention or Retention()
        self._sql = MaintenanceStatements.load(schema, prefix)
        self._sweeper_sql = SweeperStatements.load(schema, prefix)
        self._sent_sql = SentMessagesStatements.load(schema, prefix)
        self._rows_per_transaction = rows_per_transaction
        self._interval_seconds = interval_seconds
        self._transactions = MaintenanceTransactions(
            self._engine, self._sql, budget_ms_per_second=budget_ms_per_second, wait=self._stopping.wait
        )
        self._horizons = Horizons(self._engine, self._transactions, self._sql, self._retention, force=force)
        self._sweeper = Sweeper(
            self._transactions,
            self._sweeper_sql,
            rows_per_transaction=rows_per_transaction,
            stopping=self._stopping.is_set,
        )
        self._staging = StagingSweeper(
            self._transactions,
            StagingCatalogue(schema, prefix),
            window=self._retention.staging,
            stopping=self._stopping.is_set,
        )
        self._rotator = Rotator(
            self._engine,
            self._transactions,
            self._sql,
            self._horizons,
            Generations(self._engine, schema=schema, prefix=prefix, wait=self._stopping.wait),
            generation_count=generations,
        )
        self._hooks += [log_event, *(own := tuple(hooks))]
        self._runway_reporter = RunwayReporter(self._engine, schema=schema, prefix=prefix, hooks=own)
        self._scanned_at = self._holders_at = self._runway_at = -float("inf")
        self._is_at_work: bool | None = None
        self._failed: dict[str, str] = {}

    def add_hook(self, hook: Hook) -> None:
        """Add a hook that gets every event. Call it before the start; raises as ``Service.add_hook``."""
        super().add_hook(hook)
        self._runway_reporter.add_hook(hook)

    def run_once(self) -> MaintenanceReport:
        """Do everything that is due now, to its end, and return what was done. For cron.

        Raises:
            InvalidConfiguration: a window is too short; or the server is read-only, or its clock was set forward.
            SchemaMissing: the tables do not exist.
            DBAPIError: as the database raised it. Errors of single tasks are in the report.
        """
        self._check()
        self._scanned_at = self._runway_at = -float("inf")
        try:
            return self._round(float("inf"), once=True)
        finally:
            self._transactions.release()

    def plan(self) -> list[PlannedTask]:
        """Return what a round would remove now, without writing. For a large table this is an estimate.

        Raises:
            InvalidConfiguration: a window is too short.
            SchemaMissing: the tables do not exist.
        """
        with short_transaction(self._engine) as connection:
            check_table(connection, self._sql.tables.inbox_horizon)
            self._horizons.check(connection)
            partitioned = bool(connection.exec_driver_sql(self._sql.server_state).one().partitioned)
            inbox = self._horizons.of_inbox(connection)
            leases = self._horizons.of_leases(connection)
            sql = self._sweeper_sql
            tasks = [
                *scan_tasks(self._retention, sql),
                *cursor_tasks(self._retention, sql, {} if partitioned else inbox, leases, responses=inbox),
            ]
        planned = []
        for task in tasks:
            with short_transaction(self._engine) as connection:
                planned.append(PlannedTask(task.name, *estimate(connection, task, sql)))
        with short_transaction(self._engine) as connection:
            planned.append(PlannedTask("staging", len(self._staging.abandoned(connection)), True))
        if self._retention.sent is not None:
            limits = {"keep_sent": self._retention.sent, "limit": COUNTED_SENT + 1}
            with short_transaction(self._engine) as connection:
                found = int(connection.exec_driver_sql(self._sent_sql.count_old_sent, limits).scalar_one())
            planned.append(PlannedTask("sent", min(found, COUNTED_SENT), found <= COUNTED_SENT))
        if partitioned and inbox:
            planned.append(PlannedTask("rotation", self._rotator.rows_to_drop(inbox), exact=False))
        return planned

    def _prepare(self) -> Mapping[str, Callable[[], object]]:
        self._check()
        return {"txbox-maintainer": self._work}

    def _stopped(self, finished: bool) -> None:
        self._emit(Stopped(MAINTAINER, self._sql.name_of("maintenance"), finished))

    def _check(self) -> None:
        """Raise unless the server is writable, the tables exist, and no window is too short."""
        with short_transaction(self._engine) as connection:
            require_server(connection)
            tables = self._sql.tables
            for table in (
                tables.maintenance,
                tables.inbox_horizon,
                tables.worker_report,
                tables.archive,
                tables.kept_response,
            ):
                check_table(connection, table)
            self._read_partitioned(connection)
            self._horizons.check(connection)

    def _work(self) -> None:
        """Run rounds at intervals until the service stops."""
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    self._round(ROUND_SECONDS, once=False)
                except (DBAPIError, TxboxError) as error:
                    failures += 1
                    pause = AGAIN.seconds(failures)
                    self._emit(DatabaseLost(MAINTAINER, self._sql.name_of("maintenance"), error, pause))
                    self._stopping.wait(pause)
                else:
                    if failures:
                        self._emit(DatabaseRestored(MAINTAINER, self._sql.name_of("maintenance")))
                    failures = 0
                    self._stopping.wait(self._interval_seconds)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Let another maintainer begin at once; if the release fails, it begins when the lease runs out."""
        try:
            self._transactions.release()
        except DBAPIError as error:
            if not is_outage(error) and sqlstate(error) is None:
                raise

    def _round(self, task_seconds: float, *, once: bool) -> MaintenanceReport:
        report = self._work_if_allowed(task_seconds, once=once)
        if time.monotonic() >= self._runway_at + RUNWAY_SECONDS:  # even while another maintainer works
            self._runway_at = time.monotonic()
            self._runway_reporter.run_once()
        return report

    def _work_if_allowed(self, task_seconds: float, *, once: bool) -> MaintenanceReport:
        began = time.monotonic()
        with short_transaction(self._engine) as connection:
            partitioned = self._read_partitioned(connection)
        if not self._transactions.acquire():
            self._note_work(works=False)
            return MaintenanceReport(worked=False, seconds=time.monotonic() - began)
        self._note_work(works=True)
        removed: dict[str, int] = {}
        failed: dict[str, str] = {}
        try:
            for task, work in self._tasks(task_seconds, partitioned=partitioned, once=once):
                if self._stopping.is_set():
                    break
                task_began = time.monotonic()
                try:
                    removed[task] = work()
                except DBAPIError as error:
                    if is_outage(error):
                        raise
                    failed[task] = self._note_failure(task, error)
                    continue
                self._failed.pop(task, None)
                seconds = time.monotonic() - task_began
                self._transactions.finish(task, seconds)
                if removed[task]:
                    self._emit(Maintained(MAINTAINER, task, removed[task], seconds))
            self._transactions.finish("lease", time.monotonic() - began)
        except LeaseGone:
            _log.warning("another maintainer has taken over, as this one did not get on for too long")
            return MaintenanceReport(False, removed, failed, time.monotonic() - began)
        if any(removed.values()):
            self._warn_of_holders()
        return MaintenanceReport(True, removed, failed, time.monotonic() - began)

    def _tasks(self, seconds: float, *, partitioned: bool, once: bool) -> Iterator[tuple[str, Callable[[], int]]]:
        """Yield what is due; the horizons move before the first task that forgets ids."""
        if time.monotonic() >= self._scanned_at + SCAN_SECONDS:
            self._scanned_at = time.monotonic()
            for task in scan_tasks(self._retention, self._sweeper_sql):
                yield task.name, lambda task=task: self._sweeper.sweep_all(task)  # type: ignore[misc]
            yield "staging", self._staging.drop_all
            if self._retention.sent is not None:
                yield "sent", self._forget_sent
        inbox, leases = self._transactions.run(self._move_horizons)
        settled = self._horizons.settle(wait_seconds=SETTLE_SECONDS) if inbox or leases else {}
        in_place = {} if partitioned else inbox
        for task in cursor_tasks(self._retention, self._sweeper_sql, in_place, leases, settled, responses=inbox):
            yield (
                task.name,
                lambda task=task: self._sweeper.sweep_with_cursors(  # type: ignore[misc]
                    task, until=time.monotonic() + seconds, once=once
                ),
            )
        if partitioned:
            yield "rotation", lambda: self._rotator.rotate(inbox, settled)

    def _move_horizons(self, connection: Connection) -> tuple[Mapping[str, timedelta], Mapping[str, timedelta]]:
        self._read_partitioned(connection)  # the clock may have been set since the round began
        return self._horizons.move(connection)

    def _forget_sent(self) -> int:
        """Delete sent messages that have been kept long enough, using their index on the time."""
        assert self._retention.sent is not None  # noqa: S101 - for the type checker
        kept, sent_sql = self._retention.sent, self._sent_sql
        rows = self._rows_per_transaction

        def work(connection: Connection) -> int:
            purged = purge_sent(connection, sent_sql, kept, rows=rows)
            self._transactions.progress(connection, "sent", purged, {})
            return purged

        removed = purged = self._transactions.run(work)
        while purged == rows and not self._stopping.is_set():
            purged = self._transactions.run(work)
            removed += purged
        return removed

    def _read_partitioned(self, connection: Connection) -> bool:
        """Return whether the inbox rotates.

        Raises:
            InvalidConfiguration: this server is read-only, or its clock was set forward.
        """
        check_table(connection, self._sql.tables.processed_message)
        read_only, partitioned, server_seconds = connection.exec_driver_sql(self._sql.server_state).one()
        if read_only:
            raise read_only_server("maintenance")
        # A horizon never moves back, and ids are kept longer by this slack. The earlier of the two clocks counts.
        if (ahead := timedelta(seconds=server_seconds - time.time())) > SLACK:
            raise InvalidConfiguration(
                f"the database's clock is {ahead.total_seconds() / 3600:,.1f} hours ahead of this machine's: nothing "
                "is forgotten, as it could be too early; set the clock that is wrong"
            )
        return bool(partitioned)

    def _note_failure(self, task: str, error: DBAPIError) -> str:
        """Log a task's error, once until it changes, record it for the status, and return its text."""
        text = " ".join(text_of(error.orig or error).split())
        if self._failed.get(task) != text:
            self._failed[task] = text
            _log.error("%s: not done, and tried again later: %s", task, text)
        self._transactions.fail(task, text)
        return text

    def _note_work(self, *, works: bool) -> None:
        if works != self._is_at_work:
            self._is_at_work = works
            _log.info("this maintainer works" if works else "another maintainer works; this one waits")

    def _warn_of_holders(self) -> None:
        """Warn at intervals about sessions that keep Postgres from cleaning up what was removed."""
        if time.monotonic() < self._holders_at + HOLDER_SECONDS:
            return
        with short_transaction(self._engine) as connection:
            holders = find_snapshot_holders(connection)
        if holders:
            self._holders_at = time.monotonic()
        for holder in holders:
            who = holder.kind if holder.pid is None else f"{holder.kind} {holder.pid}"
            _log.warning(
                "removed rows are not cleaned up by Postgres: %s (%s) holds a snapshot behind %d transactions; "
                "`txbox status` says how to end it",
                who,
                holder.name or holder.owner or "unknown",
                holder.transactions,
            )

    def _emit(self, event: Event) -> None:
        emit(self._hooks, event)


_log = logging.getLogger("txbox.maintenance")
