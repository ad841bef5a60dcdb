"""Deadlocks, and serialization failures: what a worker does about transactions that the database rolls back.

One that was rolled back is run again, after a pause, with all of its messages: ``ConflictRetries``.

Handlers that lock rows in different orders run into deadlocks. Nothing is lost, but each costs Postgres's
``deadlock_timeout``, a second in which all that wait for those rows stand still, too; the more rows a transaction locks
and the more of them there are at once, the likelier it is. So a worker that loses much of its time to them runs its
transactions in another way, and tries now and then whether that is still needed: ``Contention``::

    TOGETHER ──── too much time lost ───► ALONE ──── still too much ───► IN_TURN
    a batch is                            a message is                   batches again, but the transactions of all
    one transaction                       one transaction                workers that do so come one after the other
       ▲                                     ▲                              │
       └───────── after a while, tried ──────┴── after a while, tried; at once if fewer messages got through ──┘

A trial that fails is followed by twice the while. Turns are given by an advisory lock of the transaction, which goes
out with BEGIN; a worker that does not get its turn in time goes on without.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from sqlalchemy import Engine

from txbox import Inbox
from txbox.backoff import Backoff
from txbox.instrumentation import Contended, Retried, emit
from txbox.postgres.sql_files import SqlFile
from txbox.postgres.sqlstates import conflict_relation, is_retryable, sqlstate
from txbox.postgres.transactions import short_transaction
from txbox.retries import retry
from txbox_workers.processing.context import ProcessorContext

__all__ = ["ConflictReport", "ConflictRetries", "Contention", "Stopping", "Way"]

T = TypeVar("T")


class Stopping(Exception):
    """Nothing more is to be begun while a transaction that the database has rolled back waits to be run again."""


class Way(IntEnum):
    """How transactions are run."""

    TOGETHER = 0
    ALONE = 1
    IN_TURN = 2


@dataclass(frozen=True, slots=True)
class ConflictReport:
    """What happened since the last report.

    Attributes:
        conflicts: how many transactions were rolled back, by SQLSTATE and by the relation in which they met.
        way: how transactions are run now.
    """

    conflicts: dict[tuple[str, str], int]
    way: Way


class Contention:
    """What one worker has learnt of conflicts. Used by its threads."""

    def __init__(self, *, together: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without any.

        Args:
            together: whether there are batches at all.
            clock: of seconds.
        """
        self._ways = [Way.TOGETHER, Way.ALONE, Way.IN_TURN] if together else [Way.ALONE, Way.IN_TURN]
        self._clock = clock
        self._lock = threading.Lock()
        self._way = self._ways[0]
        self._since = self._added_at = clock()
        self._busy = self._lost = 0.0
        self._messages = 0
        self._rate_alone = 0.0
        self._on_trial = False
        self._hold_seconds = HOLD_SECONDS
        self._conflicts: Counter[tuple[str, str]] = Counter()
        self._reported_at = -REPORT_SECONDS

    @property
    def way(self) -> Way:
        """How the next transaction is to be run."""
        return self._way

    def committed(self, messages: int, seconds: float) -> ConflictReport | None:
        """Learn of a transaction that has gone well; return as ``conflicted``."""
        if self._way is self._ways[0] and not (self._on_trial or self._lost or self._conflicts):
            return None  # the usual case, without a lock
        with self._lock:
            self._pass(seconds)
            self._messages += messages
            self._look_back()
            return self._report()

    def _look_back(self) -> None:
        """Go back to the way before this one, if that is time, or was better."""
        passed = self._clock() - self._since
        if self._way is Way.IN_TURN and passed >= MEASURED_SECONDS and self._messages / passed < self._rate_alone:
            self._step(-1, trial=False)
            self._hold_seconds = min(self._hold_seconds * 2, LONGEST_HOLD_SECONDS)
        elif passed < self._hold_seconds:
            return
        elif self._way is not self._ways[0]:
            self._step(-1, trial=True)
        else:
            self._on_trial, self._hold_seconds = False, HOLD_SECONDS

    def conflicted(self, way: Way, code: str, relation: str, seconds: float) -> ConflictReport | None:
        """Learn of a transaction that was rolled back, after so many seconds.

        Args:
            way: how it was run; one that began before the way was changed says nothing of the new one.
            code: its SQLSTATE.
            relation: in which it met another one; empty if the server does not say.
            seconds: that it took.

        Returns:
            What to report, now and then.
        """
        with self._lock:
            self._conflicts[code, relation] += 1
            if way is not self._way:
                return self._report()
            self._pass(seconds)
            self._lost += seconds
            if self._way is not self._ways[-1] and (self._on_trial or self._lost > LOST_SHARE * self._busy):
                if self._on_trial:
                    self._hold_seconds = min(self._hold_seconds * 2, LONGEST_HOLD_SECONDS)
                if self._way is Way.ALONE:
                    self._rate_alone = self._messages / max(self._clock() - self._since, MEASURED_SECONDS)
                self._step(1, trial=False)
            return self._report()

    def _report(self) -> ConflictReport | None:
        now = self._clock()
        if not self._conflicts or now - self._reported_at < REPORT_SECONDS:
            return None
        self._reported_at = now
        conflicts, self._conflicts = dict(self._conflicts), Counter()
        return ConflictReport(conflicts, self._way)

    def _pass(self, seconds: float) -> None:
        """Add to the time that transactions took, and forget what is long ago.

        While nothing goes wrong their times are not added up: then it is the time that has passed.
        """
        now = self._clock()
        seconds, self._added_at = max(seconds, now - self._added_at), now
        kept = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        self._busy = self._busy * kept + seconds
        self._lost *= kept
        if self._lost < _NOTHING:
            self._lost = 0.0

    def _step(self, by: int, *, trial: bool) -> None:
        self._way = self._ways[self._ways.index(self._way) + by]
        self._since = self._clock()
        self._busy = self._lost = 0.0
        self._messages = 0
        self._on_trial = trial


class ConflictStatements(SqlFile, file="deadlocks.sql"):
    """The statements of ``deadlocks.sql``."""

    count_conflicts: str


class ConflictRetries:
    """Runs transactions again that the database has rolled back, and reports the conflicts."""

    def __init__(self, inbox: Inbox, engine: Engine, context: ProcessorContext, *, together: bool) -> None:
        """``together``: whether there are batches at all."""
        self._inbox = inbox
        self._engine = engine
        self._context = context
        self._contention = Contention(together=together)
        # Not when it is needed: what failed then would be the handler's failure.
        self._statements = ConflictStatements.load(inbox.schema, inbox.prefix)

    @property
    def way(self) -> Way:
        """How the next transaction is to be run."""
        return self._contention.way

    def run(self, messages: int, transaction: Callable[[], T]) -> T:
        """Run a transaction, and again if the database rolls it back for the sake of another one.

        Args:
            messages: how many it has.
            transaction: what is run.

        Raises:
            Stopping: it was rolled back, and nothing more is to be begun.
        """
        way, begun = self.way, time.monotonic()

        def run() -> T:
            nonlocal way, begun
            way, begun = self.way, time.monotonic()
            return transaction()

        def again(error: Exception, attempt: int) -> bool:
            if not is_retryable(error):
                return False
            code, seconds = sqlstate(error) or "", time.monotonic() - begun
            self._report(self._contention.conflicted(way, code, conflict_relation(error), seconds))
            emit(
                self._context.hooks,
                Retried(self._inbox.subscriber_id, self._context.source_name, code, attempt, messages),
            )
            return messages == 1 or self.way is not Way.ALONE  # not together again

        def wait(seconds: float) -> None:
            if self._context.stopping.wait(seconds):
                raise Stopping("not run again, because nothing more is to be begun")

        done = retry(run, again=again, backoff=RETRY_BACKOFF, runs=TRANSACTION_RUNS, wait=wait)
        self._report(self._contention.committed(messages, time.monotonic() - begun))
        return done

    def _report(self, report: ConflictReport | None) -> None:
        """Report conflicts to the hooks, and in the database, where the status reads them."""
        if report is None:
            return
        subscriber_id = self._inbox.subscriber_id
        way = report.way.name.lower()
        emit(self._context.hooks, Contended(subscriber_id, self._context.source_name, report.conflicts, way))
        # Nothing rests on these figures; the handler's message goes on without them.
        with suppress(Exception), short_transaction(self._engine) as connection:
            for (code, relation), count in sorted(report.conflicts.items()):
                counted = {"subscriber_id": subscriber_id, "sqlstate": code, "place": relation, "conflicts": count}
                connection.exec_driver_sql(self._statements.count_conflicts, counted)


TRANSACTION_RUNS = 6
"""How often a transaction is run before a deadlock or serialization failure counts as a failure of its messages."""

RETRY_BACKOFF = Backoff(first_seconds=0.02, longest_seconds=1.0)
"""Between the runs of a transaction that the database rolled back."""

LOST_SHARE = 0.1
"""Of the time of transactions: a worker that loses more to conflicts goes another way."""

HALF_LIFE_SECONDS = 20.0
"""Of what is remembered of such times, in seconds of transactions."""

HOLD_SECONDS, LONGEST_HOLD_SECONDS = 15.0, 600.0
"""How long another way is gone before the one before it is tried again."""

MEASURED_SECONDS = 3.0
"""How long messages are counted before their rate is believed."""

REPORT_SECONDS = 60.0
"""Between two reports, at least."""

_NOTHING = 0.001
