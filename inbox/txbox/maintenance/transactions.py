"""A maintainer's transactions: bounded, paced, and run only while it has the right to work.

Of any number of maintainers, one works at a time. The right to work is a row with an expiry time, by the database's
clock. Every transaction that does some work renews it. So a maintainer that was frozen or cut off cannot go on after
another one took over::

    A  renews ── deletes … frozen        the server ends its transaction after IDLE_SECONDS
    B            waits for A's row ──────┘ takes over, if the lease has run out
    A  renews ── frozen between two transactions
    B                                      takes over
    A                                             renews: not its own any more; nothing is done

No session lock is held, so a pooler in transaction mode may be in between.
"""

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from txbox.backoff import Backoff, retry
from txbox.postgres.server import SERVER
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import LOCK_NOT_AVAILABLE, is_retryable, sqlstate
from txbox.postgres.transactions import short_transaction
from txbox.text import host_name

T = TypeVar("T")

LEASE_SECONDS = 30.0
"""How long another maintainer waits after the last transaction of one that was killed."""

IDLE_SECONDS = 15
"""After this time the server ends a transaction whose maintainer is silent."""

LOCK_MS = 1_000
"""How long one transaction waits for locks."""

STATEMENT_MS = 10_000
"""Timeout of a statement that cannot be made smaller."""

SAVED_SECONDS = 10.0
"""How many seconds' budget may be saved up while there is nothing to do, so that a small round ends at once."""

RUNS = 5
"""How often a transaction is run if it meets a deadlock, a serialization failure or a lock."""

AGAIN = Backoff(first_seconds=0.1, longest_seconds=2.0)


class MaintenanceStatements(SqlFile, file="maintenance.sql"):
    acquire: str
    renew: str
    release: str
    read_task: str
    progress: str
    finish_task: str
    fail_task: str
    server_state: str
    inbox_subscribers: str
    lease_subscribers: str
    source_retentions: str
    move_horizons: str
    horizons: str
    still_running: str
    generation_seconds: str


class LeaseGone(Exception):
    """Another maintainer has taken over; this transaction did nothing."""


class MaintenanceTransactions:
    def __init__(
        self,
        engine: Engine,
        statements: MaintenanceStatements,
        *,
        budget_ms_per_second: float,
        wait: Callable[[float], bool | None] = time.sleep,
    ) -> None:
        """Store the database, and how much of the time is for work: 1,000 ms per second is no limit.

        ``wait`` pauses for so many seconds, and returns whether the maintainer is to stop.
        """
        self.owner = f"{host_name()} {os.getpid()} {uuid.uuid4().hex[:8]}"
        self._engine = engine
        self._sql = statements
        self._share = budget_ms_per_second / 1000.0
        self._saved = SAVED_SECONDS * self._share
        self._saved_at = time.monotonic()
        self._wait = wait

    def acquire(self) -> bool:
        """Take the right to work, or renew it; return False if another maintainer has it."""
        try:
            with short_transaction(self._engine) as connection:
                connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": f"{LOCK_MS}ms"})
                found = connection.exec_driver_sql(self._sql.acquire, self._lease)
                return found.one_or_none() is not None
        except DBAPIError as error:
            if sqlstate(error) == LOCK_NOT_AVAILABLE:  # it is working at this very moment
                return False
            raise

    def release(self) -> None:
        """Give the right to work back, if it is still this maintainer's."""
        with short_transaction(self._engine) as connection:
            connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": f"{LOCK_MS}ms"})
            connection.exec_driver_sql(self._sql.release, {"owner": self.owner})

    def run(self, work: Callable[[Connection], T], *, statement_ms: int = STATEMENT_MS) -> T:
        """Run work in a transaction, and pause afterwards if the budget is used up.

        Args:
            work: one or a few short statements; run again after a deadlock, a serialization failure, or too long a wait
                for a lock.
            statement_ms: timeout of one statement, in milliseconds.

        Raises:
            LeaseGone: another maintainer has taken over.
            DBAPIError: as the database raised it.
        """
        began = time.monotonic()
        result = retry(
            lambda: self._once(work, statement_ms),
            again=lambda error, _: is_contended(error),
            backoff=AGAIN,
            runs=RUNS,
            wait=self._wait,
        )
        self._keep_to_budget(worked=time.monotonic() - began)
        return result

    def _keep_to_budget(self, worked: float) -> None:
        now = time.monotonic()
        self._saved = min(self._saved + (now - self._saved_at) * self._share, SAVED_SECONDS * self._share) - worked
        if self._saved < 0:
            self._wait(min(-self._saved / self._share, LEASE_SECONDS / 3))
            self._saved = 0.0
            now = time.monotonic()
        self._saved_at = now

    def _once(self, work: Callable[[Connection], T], statement_ms: int) -> T:
        with self._leased(statement_ms) as connection:
            return work(connection)

    def progress(self, connection: Connection, task: str, removed: int, detail: Mapping[str, Any]) -> None:
        """Record what a task has done, in the transaction of its work."""
        noted = {"task": task, "owner": self.owner, "removed": removed, "detail": json.dumps(detail)}
        connection.exec_driver_sql(self._sql.progress, noted)

    def finish(self, task: str, seconds: float) -> None:
        noted = {"task": task, "owner": self.owner, "seconds": seconds, "detail": "{}"}
        self.run(lambda connection: connection.exec_driver_sql(self._sql.finish_task, noted))

    def fail(self, task: str, error: str) -> None:
        noted = {"task": task, "owner": self.owner, "error": error}
        self.run(lambda connection: connection.exec_driver_sql(self._sql.fail_task, noted))

    def read(self, task: str) -> tuple[dict[str, Any], float | None]:
        """Return a task's detail, and the seconds since it last ran; None if it never did."""
        with short_transaction(self._engine) as connection:
            row = connection.exec_driver_sql(self._sql.read_task, {"task": task}).one_or_none()
        return ({}, None) if row is None else (dict(row.detail), row.seconds)

    def pause(self, seconds: float) -> None:
        """Wait for this many seconds, or until the maintainer is to stop."""
        self._wait(seconds)

    @property
    def _lease(self) -> dict[str, object]:
        return {"owner": self.owner, "lease_seconds": LEASE_SECONDS}

    @contextmanager
    def _leased(self, statement_ms: int) -> Iterator[Connection]:
        limits = {
            "lock_timeout": f"{LOCK_MS}ms",
            "statement_timeout": f"{statement_ms}ms",
            "idle_timeout": f"{IDLE_SECONDS}s",
        }
        with short_transaction(self._engine) as connection:
            if connection.exec_driver_sql(self._sql.renew, {**self._lease, **limits}).one_or_none() is None:
                raise LeaseGone
            yield connection


def is_contended(error: BaseException) -> bool:
    """Return whether a transaction could not get its locks and may get them if it is run again."""
    return is_retryable(error) or sqlstate(error) == LOCK_NOT_AVAILABLE
