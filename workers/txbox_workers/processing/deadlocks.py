"""Deadlocks, and serialization failures: what a worker does about transactions that the database rolls back.

One that was rolled back is run again, after a pause, with all of its messages: ``ConflictRetries``.

Handlers that lock rows in different orders run into deadlocks. Nothing is lost, but each costs Postgres's
``deadlock_timeout``, a second in which all that wait for those rows wait, too; the more rows a transaction locks and
the more of them there are at once, the likelier it is. So a worker that loses much of its time to them changes the mode
of its transactions, and tries now and then whether that is still needed: ``ModeSelector``::

    BATCH ──── too much time lost ───► PER_MESSAGE ──── still too much ───► SERIAL
    a batch is                         a message is                         batches again, but the transactions of all
    one transaction                    one transaction                      workers in this mode run one after the other
       ▲                                  ▲                                                                       │
       └────── tried after a while ───────┴── tried after a while; at once if fewer messages were processed ──────┘

After a trial that fails, the next one comes after twice the time. Transactions in mode SERIAL take an advisory lock,
which goes out with BEGIN; a worker that does not get it in time begins without it.
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
    """Nothing more is to be begun while a transaction that the database has rolled back waits to be run again."""


class TransactionMode(IntEnum):
    """How transactions are run."""

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
    """Chooses the transaction mode from recent conflicts. Used by all threads of one worker."""

    def __init__(self, *, batches: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without any conflict; ``batches``: whether there are batches at all."""
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
        """How the next transaction is to be run."""
        return self._mode

    def committed(self, messages: int, seconds: float) -> ConflictReport | None:
        """Note a transaction that has committed; return as ``conflicted``."""
        if self._mode is self._modes[0] and not (self._on_trial or self._lost or self._conflicts):
            return None  # the usual case, without a lock
        with self._lock:
            self._add_busy_time(seconds)
            self._messages += messages
            self._try_previous_mode()
            return self._report()

    def _try_previous_mode(self) -> None:
        """Go back to the mode before this one, if it is time to try it, or if it was better."""
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
        """Note a transaction that was rolled back because of a conflict; return what to report, now and then.

        ``mode`` is how it was run; one that began in another mode says nothing of the present one. ``relation`` is
        where it met another one; empty if the server does not say.
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

        While there are no conflicts, times are not added up: then the time that has passed is taken.
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
    """The statements of ``deadlocks.sql``."""

    count_conflicts: str


class ConflictRetries:
    """Runs transactions again that the database has rolled back, and reports the conflicts."""

    def __init__(self, inbox: Inbox, engine: Engine, context: ProcessorContext, *, batches: bool) -> None:
        """``batches``: whether there are batches at all."""
        self._inbox = inbox
        self._engine = engine
        self._context = context
        self._selector = ModeSelector(batches=batches)
        # Not when it is needed: what failed then would be the handler's failure.
        self._statements = ConflictStatements.load(inbox.schema, inbox.prefix)

    @property
    def mode(self) -> TransactionMode:
        """How the next transaction is to be run."""
        return self._selector.mode

    def run(
        self,
        transaction: Callable[Concatenate[Sequence[Delivery], P], T],
        deliveries: Sequence[Delivery],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a transaction of these deliveries, and again if the database rolls it back for the sake of another one.

        Raises ``Stopping``: it was rolled back, and nothing more is to be begun.
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
        """Report conflicts to the hooks, and in the database, where the status reads them."""
        if report is None:
            return
        subscriber_id = self._inbox.subscriber_id
        mode = report.mode.name.lower()
        emit(self._context.hooks, Contended(subscriber_id, self._context.source_name, report.conflicts, mode))
        # Only the status reads these counts: a failed write is ignored, and one that would have to wait fails.
        with suppress(Exception), short_transaction(self._engine) as connection:
            connection.exec_driver_sql(SERVER.bound_wait, {"lock_timeout": COUNT_LOCK_TIMEOUT})
            for (code, relation), count in sorted(report.conflicts.items()):
                counted = {"subscriber_id": subscriber_id, "sqlstate": code, "relation": relation, "conflicts": count}
                connection.exec_driver_sql(self._statements.count_conflicts, counted)


TRANSACTION_RUNS = 6
"""How often a transaction is run before a deadlock or serialization failure counts as a failure of its messages."""

RETRY_BACKOFF = Backoff(first_seconds=0.02, longest_seconds=1.0)
"""Between the runs of a transaction that the database rolled back."""

LOST_SHARE = 0.1
"""Of the time of transactions: a worker that loses more to conflicts changes its mode."""

HALF_LIFE_SECONDS = 20.0
"""After so many seconds of transactions, a time counts half."""

HOLD_SECONDS, LONGEST_HOLD_SECONDS = 15.0, 600.0
"""How long a mode is kept before the one before it is tried again."""

MEASURED_SECONDS = 3.0
"""How long messages are counted before their rate is used."""

REPORT_SECONDS = 60.0
"""Between two reports, at least."""

COUNT_LOCK_TIMEOUT = "1s"
"""How long a report waits for one of another worker."""

_NOTHING = 0.001
