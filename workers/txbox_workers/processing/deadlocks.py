"""Deadlocks and serialization failures: what a worker does about transactions that the database rolls back.

``ConflictRetries`` runs such a transaction again after a pause, with all of its messages.

Handlers that lock rows in different orders run into deadlocks. Nothing is lost, but each deadlock costs Postgres's
``deadlock_timeout``: a second in which everyone who waits for those rows waits, too. The more rows a transaction locks
and the more transactions run at once, the likelier a deadlock is. So a worker that loses much of its time to deadlocks
changes its transaction mode, and tests now and then whether that is still needed. ``ModeSelector`` decides::

    BATCH ──── too much time lost ───► PER_MESSAGE ──── still too much ───► SERIAL
    a batch is                         a message is                         batches again, but the transactions of all
    one transaction                    one transaction                      workers in this mode run one after the other
       ▲                                  ▲                                                                       │
       └────── tried after a while ───────┴── tried after a while; at once if fewer messages were processed ──────┘

After a failed trial, the next one comes after twice the time. Transactions in mode SERIAL take an advisory lock, which
is requested together with BEGIN. A worker that does not get the lock in time begins without it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
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

P = ParamSpec("P")
T = TypeVar("T")


class Stopping(Exception):
    """Raised instead of running a rolled-back transaction again, because nothing more may begin."""


class TransactionMode(IntEnum):
    BATCH = 0
    PER_MESSAGE = 1
    SERIAL = 2


@dataclass(frozen=True, slots=True)
class ConflictReport:
    """What happened since the last report."""

    conflicts: dict[tuple[str, str], int]
    """How many transactions were rolled back, by SQLSTATE and by the relation in which they conflicted."""
    mode: TransactionMode  # how transactions are run now


class ModeSelector:
    """Chooses the transaction mode from recent conflicts. All threads of one worker use it."""

    def __init__(self, *, batches: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without conflicts. ``batches`` says whether there are batches at all."""
        self._modes = list(TransactionMode)[0 if batches else 1 :]
        self._clock = clock
        self._lock = threading.Lock()
        self._mode = self._modes[0]
        self._since = self._added_at = clock()
        self._busy = self._lost = 0.0
        self._messages = 0
        self._per_message_rate = 0.0
        self._on_trial = False
        self._hold_seconds = HOLD_SECONDS
        self._conflicts: Counter[tuple[str, str]] = Counter()
        self._reported_at = -REPORT_SECONDS

    @property
    def mode(self) -> TransactionMode:
        """How to run the next transaction."""
        return self._mode

    def committed(self, messages: int, seconds: float) -> ConflictReport | None:
        """Record that a transaction has committed; return a report now and then, like ``conflicted``."""
        if self._mode is self._modes[0] and not (self._on_trial or self._lost or self._conflicts):
            return None  # the usual case, without a lock
        with self._lock:
            self._add_busy_time(seconds)
            self._messages += messages
            self._try_previous_mode()
            return self._report()

    def _try_previous_mode(self) -> None:
        """Go back to the previous mode if it is time to try it, or if it was faster."""
        seconds = self._clock() - self._since
        if (
            self._mode is TransactionMode.SERIAL
            and seconds >= MEASURED_SECONDS
            and self._messages / seconds < self._per_message_rate
        ):
            self._step(-1, trial=False)
            self._hold_seconds = min(self._hold_seconds * 2, LONGEST_HOLD_SECONDS)
        elif seconds < self._hold_seconds:
            return
        elif self._mode is not self._modes[0]:
            self._step(-1, trial=True)
        else:
            self._on_trial, self._hold_seconds = False, HOLD_SECONDS

    def conflicted(self, mode: TransactionMode, code: str, relation: str, seconds: float) -> ConflictReport | None:
        """Record that a conflict rolled back a transaction; return a report now and then.

        ``mode`` is how the transaction was run; one that began in another mode says nothing about the present one.
        ``relation`` is where the conflict was; it is empty if the server does not say.
        """
        with self._lock:
            self._conflicts[code, relation] += 1
            if mode is not self._mode:
                return self._report()
            self._add_busy_time(seconds)
            self._lost += seconds
            if self._mode is not self._modes[-1] and (self._on_trial or self._lost > LOST_SHARE * self._busy):
                if self._on_trial:
                    self._hold_seconds = min(self._hold_seconds * 2, LONGEST_HOLD_SECONDS)
                if self._mode is TransactionMode.PER_MESSAGE:
                    self._per_message_rate = self._messages / max(self._clock() - self._since, MEASURED_SECONDS)
                self._step(1, trial=False)
            return self._report()

    def _report(self) -> ConflictReport | None:
        now = self._clock()
        if not self._conflicts or now - self._reported_at < REPORT_SECONDS:
            return None
        self._reported_at = now
        conflicts, self._conflicts = dict(self._conflicts), Counter()
        return ConflictReport(conflicts, self._mode)

    def _add_busy_time(self, seconds: float) -> None:
        """Add to the time that transactions took, and let older times count for less.

        Times are not added up while there are no conflicts. The elapsed time then stands in for them.
        """
        now = self._clock()
        seconds, self._added_at = max(seconds, now - self._added_at), now
        kept = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        self._busy = self._busy * kept + seconds
        self._lost *= kept
        if self._lost < _NOTHING:
            self._lost = 0.0

    def _step(self, by: int, *, trial: bool) -> None:
        self._mode = self._modes[self._modes.index(self._mode) + by]
        self._since = self._clock()
        self._busy = self._lost = 0.0
        self._messages = 0
        self._on_trial = trial


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
            mode, begun = self._selector.mode, time.monotonic()
            try:
                done = transaction(deliveries, *args, **kwargs)
            except Exception as error:
                if runs == TRANSACTION_RUNS or not self._may_run_again(error, runs, len(deliveries), mode, begun):
                    raise
                self._pause(runs)
            else:
                self._report(self._selector.committed(len(deliveries), time.monotonic() - begun))
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
        return messages == 1 or self.mode is not TransactionMode.PER_MESSAGE  # not as a batch again

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

LOST_SHARE = 0.1
"""A worker that loses more than this share of its transactions' time to conflicts changes its mode."""

HALF_LIFE_SECONDS = 20.0
"""After this many seconds of transactions, a time counts half."""

HOLD_SECONDS, LONGEST_HOLD_SECONDS = 15.0, 600.0
"""How long a mode is kept before the previous one is tried again: at first, and at most."""

MEASURED_SECONDS = 3.0
"""How long messages are counted before their rate is used."""

REPORT_SECONDS = 60.0
"""The shortest time between two reports."""

COUNT_LOCK_TIMEOUT = "1s"
"""How long a report waits for another worker's report."""

_NOTHING = 0.001
