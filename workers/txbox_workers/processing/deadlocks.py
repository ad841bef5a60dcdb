"""Deadlocks and serialization failures: what a worker does about transactions that the database rolls back.

``ConflictRetries`` runs such a transaction again after a pause, with all of its messages. A worker that loses much of
its time in this way changes its transaction mode, see ``transaction_modes``.

Transactions in mode SERIAL take an advisory lock once they have recorded their messages. One that does not get it in
time is rolled back, and begins again without it.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Engine

from txbox import Inbox
from txbox.backoff import Backoff
from txbox.instrumentation import Contended, Retried, emit
from txbox.postgres.round_trip import PreparedLost
from txbox.postgres.server import SERVER
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import conflict_relation, is_retryable, sqlstate
from txbox.postgres.transactions import short_transaction
from txbox_workers.delivery import Delivery
from txbox_workers.processing.processor import ProcessorContext
from txbox_workers.processing.transaction_modes import ConflictReport, ModeSelector, TransactionMode

P = ParamSpec("P")
T = TypeVar("T")


class Stopping(Exception):
    """Raised instead of running a rolled-back transaction again, because nothing more may begin."""


class ConflictStatements(SqlFile, file="deadlocks.sql"):
    count_conflicts: str


class ConflictRetries:
    """Runs transactions again that the database has rolled back, and reports the conflicts."""

    def __init__(self, inbox: Inbox, engine: Engine, context: ProcessorContext, *, batches: bool) -> None:
        """``batches`` says whether there are batches at all."""
        self._inbox = inbox
        self._engine = engine
        self._context = context
        self._selector = ModeSelector(batches=batches)
        # Not when they are needed: an error then would count as the handler's failure.
        self._statements = ConflictStatements.load(inbox.schema, inbox.prefix)

    @property
    def mode(self) -> TransactionMode:
        """How to run the next transaction."""
        return self._selector.mode

    def run(
        self,
        transaction: Callable[Concatenate[Sequence[Delivery], P], T],
        deliveries: Sequence[Delivery],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a transaction of these deliveries; run it again if the database rolls it back in favour of another one.

        Raises ``Stopping`` if it was rolled back and nothing more may begin.
        """
        runs = 0
        while True:
            runs += 1
            begun, mode = time.monotonic(), self._selector.begin()
            try:
                try:
                    done = transaction(deliveries, *args, **kwargs)
                finally:
                    self._selector.end(mode)
            except Exception as error:
                if runs == TRANSACTION_RUNS or not self._may_run_again(error, runs, len(deliveries), mode, begun):
                    raise
                self._pause(runs)
            else:
                self._report(self._selector.committed(mode, len(deliveries)))
                return done

    def _pause(self, runs: int) -> None:
        if self._context.stopping.wait(RETRY_BACKOFF.seconds(runs)):
            raise Stopping("not run again, because nothing more is to be begun")

    def _may_run_again(self, error: Exception, run: int, messages: int, mode: TransactionMode, begun: float) -> bool:
        """Report a conflict, and return whether another run may succeed."""
        if isinstance(error, PreparedLost):
            return True
        if not is_retryable(error):
            return False
        code, seconds = sqlstate(error) or "", time.monotonic() - begun
        self._report(self._selector.conflicted(mode, code, conflict_relation(error), seconds))
        self._context.spans.retried({"db.response.status_code": code, "txbox.attempt": run})
        subscriber_id, source_name = self._inbox.subscriber_id, self._context.source_name
        emit(self._context.hooks, Retried(subscriber_id, source_name, code, run, messages))
        return messages == 1 or self.mode in (mode, TransactionMode.BATCH, TransactionMode.SERIAL)

    def _report(self, report: ConflictReport | None) -> None:
        """Report conflicts to the hooks, and to the database, where the status reads them."""
        if report is None:
            return
        subscriber_id = self._inbox.subscriber_id
        mode = report.mode.name.lower()
        emit(self._context.hooks, Contended(subscriber_id, self._context.source_name, report.conflicts, mode))
        # Only the status reads these counts: a failed write is ignored, and a write that would wait for long fails.
        with suppress(Exception), short_transaction(self._engine) as connection:
            connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": COUNT_LOCK_TIMEOUT})
            for (code, relation), count in sorted(report.conflicts.items()):
                counted = {"subscriber_id": subscriber_id, "sqlstate": code, "relation": relation, "conflicts": count}
                connection.exec_driver_sql(self._statements.count_conflicts, counted)


TRANSACTION_RUNS = 6
"""How often a transaction runs before a deadlock or serialization failure counts as a failure of its messages."""

RETRY_BACKOFF = Backoff(first_seconds=0.02, longest_seconds=1.0)
"""The delay between the runs of a transaction that the database rolled back."""

COUNT_LOCK_TIMEOUT = "1s"
"""How long a report waits for another worker's report."""
