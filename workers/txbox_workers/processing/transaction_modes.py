"""How a worker runs its transactions while handlers conflict: the mode that gets most done, as measured.

Handlers that lock rows in different orders run into deadlocks. Nothing is lost, but each deadlock costs Postgres's
``deadlock_timeout``: a second in which everyone who waits for those rows waits, too. Smaller transactions lock fewer
rows, and transactions that run one after the other cannot conflict. Both cost something, and how much depends on the
handlers. So a worker that loses much of its time tries the other modes for a moment each, and keeps the best::

    BATCH          HALVES            PER_MESSAGE          SERIAL
    a batch is     two transactions  a message is         batches, but the transactions of all workers in this
    one            for a batch       one transaction      mode run one after the other

After a while it tries whether less would do. Each time that this fails, it waits twice as long for the next.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class TransactionMode(IntEnum):
    BATCH = 0
    HALVES = 1
    PER_MESSAGE = 2
    SERIAL = 3


@dataclass(frozen=True, slots=True)
class ConflictReport:
    """What happened since the last report."""

    conflicts: dict[tuple[str, str], int]
    """How many transactions were rolled back, by SQLSTATE and by the relation in which they conflicted."""
    mode: TransactionMode  # how transactions are run now


class ModeSelector:
    """Chooses the transaction mode. All threads of one worker use it."""

    def __init__(self, *, batches: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without conflicts. ``batches`` says whether there are batches at all."""
        self._modes = list(TransactionMode) if batches else [TransactionMode.PER_MESSAGE, TransactionMode.SERIAL]
        self._clock = clock
        self._lock = threading.Lock()
        self._mode = self._modes[0]
        self._running: Counter[TransactionMode] = Counter()
        self._measured = _Measurement(clock())
        self._comparison: _Comparison | None = None
        self._chosen_at = self._blamed_after = float("-inf")
        self._hold_seconds = HOLD_SECONDS
        self._conflicts: Counter[tuple[str, str]] = Counter()
        self._reported_at = -REPORT_SECONDS

    @property
    def mode(self) -> TransactionMode:
        """How to run the next transaction."""
        return self._mode

    def begin(self) -> TransactionMode:
        """Return how to run a transaction; it runs until ``end``."""
        with self._lock:
            mode = self._mode
            self._running[mode] += 1
            return mode

    def end(self, mode: TransactionMode) -> None:
        """Note that a transaction is over, whatever came of it."""
        with self._lock:
            self._running[mode] -= 1
            if mode is not self._mode and not self._is_mixed():
                self._measured = _Measurement(self._clock())

    def _is_mixed(self) -> bool:
        """Whether transactions still run that began in another mode: they get in the way of those measured."""
        return any(count for mode, count in self._running.items() if mode is not self._mode)

    def committed(self, mode: TransactionMode, messages: int) -> ConflictReport | None:
        """Record that a transaction has committed, and how it was run; return a report now and then."""
        with self._lock:
            if mode is self._mode:
                self._measured.committed(messages)
            self._choose()
            return self._report()

    def conflicted(self, mode: TransactionMode, code: str, relation: str, seconds: float) -> ConflictReport | None:
        """Record that a conflict rolled back a transaction; return a report now and then.

        ``relation`` is where the conflict was; it is empty if the server does not say.
        """
        with self._lock:
            self._conflicts[code, relation] += 1
            if mode is self._mode:
                self._measured.conflicted(self._clock(), seconds)
            self._choose()
            return self._report()

    def _choose(self) -> None:
        """Go on to another mode if it is time to."""
        now, measured = self._clock(), self._measured
        if self._comparison is not None:
            if measured.is_bad(now) or (measured.is_enough(now) and not self._is_mixed()):
                self._compare(self._comparison, now)
        elif measured.lost_much(now) and now >= self._blamed_after and self._mode is not self._modes[-1]:
            again = now - self._chosen_at < 2 * max(self._hold_seconds, CALM_SECONDS)
            if not again:
                self._hold_seconds = HOLD_SECONDS
            self._begin(self._modes[self._modes.index(self._mode) + 1 :], now, again=again)
        elif self._mode is not self._modes[0] and now - self._chosen_at >= self._hold_seconds:
            self._begin([self._less()], now)
        elif measured.is_old(now):
            self._measured = _Measurement(now)

    def _less(self) -> TransactionMode:
        """Return the mode to try in place of the present one once things may have become better."""
        halves = TransactionMode.HALVES
        return halves if self._mode > halves in self._modes else self._modes[0]

    def _begin(self, others: Sequence[TransactionMode], now: float, *, again: bool = False) -> None:
        """Compare the present mode with others, one after the other."""
        self._comparison = _Comparison(self._mode, again, list(others), {self._mode: self._measured.rated(now)})
        self._go_on(self._comparison.untried.pop(0), now)

    def _compare(self, comparison: "_Comparison", now: float) -> None:
        """Note what was measured; go on to what is still to be tried, or keep the best."""
        comparison.rates[self._mode] = self._measured.rated(now)
        if comparison.untried:
            self._go_on(comparison.untried.pop(0), now)
            return
        best, self._comparison = comparison.best(), None
        if comparison.again or best is comparison.began_in:
            self._hold_seconds = min(self._hold_seconds * 2, LONGEST_HOLD_SECONDS)
        else:
            self._hold_seconds = max(self._hold_seconds, HOLD_SECONDS * comparison.gain(best))
        if best is comparison.began_in:
            self._blamed_after = now + self._hold_seconds
        self._chosen_at = now
        self._go_on(best, now)

    def _go_on(self, mode: TransactionMode, now: float) -> None:
        self._mode = mode
        self._measured = _Measurement(now)

    def _report(self) -> ConflictReport | None:
        now = self._clock()
        if not self._conflicts or now - self._reported_at < REPORT_SECONDS:
            return None
        self._reported_at = now
        conflicts, self._conflicts = dict(self._conflicts), Counter()
        return ConflictReport(conflicts, self._mode)


class _Measurement:
    """What transactions in one mode have done since a moment."""

    def __init__(self, since: float) -> None:
        self._since = self._lost_until = since
        self._lost = 0.0
        self._messages = self._transactions = self._conflicts = 0

    def committed(self, messages: int) -> None:
        self._messages += messages
        self._transactions += 1

    def conflicted(self, now: float, seconds: float) -> None:
        """Count the time of a transaction that was rolled back, and only once what others have lost meanwhile."""
        self._transactions += 1
        self._conflicts += 1
        self._lost += max(now - max(self._lost_until, now - seconds), 0.0)
        self._lost_until = now

    def rated(self, now: float) -> tuple[bool, float]:
        """Return whether there were no conflicts, and the messages committed per second."""
        return not self._conflicts, self._messages / max(now - self._since, MEASURED_SECONDS)

    def is_enough(self, now: float) -> bool:
        seconds = now - self._since
        least = MEASURED_SECONDS if self._conflicts else CALM_MEASURED_SECONDS
        return seconds >= (least if self._transactions >= MEASURED_TRANSACTIONS else LONGEST_MEASURED_SECONDS)

    def is_bad(self, now: float) -> bool:
        """Whether there are conflicts enough to end a measurement that others still get in the way of."""
        return self._conflicts >= LEAST_CONFLICTS and now - self._since >= MEASURED_SECONDS

    def is_old(self, now: float) -> bool:
        return now - self._since >= WINDOW_SECONDS

    def lost_much(self, now: float) -> bool:
        """Whether conflicts cost too much; a few are no verdict."""
        return self._conflicts >= LEAST_CONFLICTS and self._lost > LOST_SHARE * (now - self._since)


@dataclass(slots=True)
class _Comparison:
    """Several modes, measured one after the other.

    began_in: the mode before it.
    again: conflicts came back soon after the last one.
    untried: modes that are still to be measured.
    rates: what was measured.
    """

    began_in: TransactionMode
    again: bool
    untried: list[TransactionMode]
    rates: dict[TransactionMode, tuple[bool, float]]

    def best(self) -> TransactionMode:
        """Return the fastest mode; of those about as fast as that, the first one without conflicts."""
        most = max(rate for _, rate in self.rates.values())
        fast = [mode for mode in sorted(self.rates) if self.rates[mode][1] >= ABOUT * most]
        return next((mode for mode in fast if self.rates[mode][0]), fast[0])

    def gain(self, best: TransactionMode) -> float:
        """Return how many times as fast as the slowest the best one is."""
        least = min(rate for _, rate in self.rates.values())
        return min(self.rates[best][1] / max(least, _NOTHING), MOST_GAIN)


LOST_SHARE = 0.1
"""A worker that loses more than this share of its time to conflicts looks for another mode."""

LEAST_CONFLICTS = 2
"""So many conflicts it takes at least."""

WINDOW_SECONDS = 20.0
"""For how long at most that is added up."""

MEASURED_SECONDS, CALM_MEASURED_SECONDS, LONGEST_MEASURED_SECONDS = 1.0, 2.0, 60.0
"""For how long a mode is measured: at least, at least if there are no conflicts, and at most."""

MEASURED_TRANSACTIONS = 20
"""How many transactions are measured at least, unless that takes too long."""

ABOUT = 0.9
"""Of two modes whose rates differ by less than this ratio, neither is the faster one."""

HOLD_SECONDS, LONGEST_HOLD_SECONDS = 1.0, 600.0
"""How long a mode is kept before less is tried: at first, and at most."""

MOST_GAIN = 30.0
"""The first hold is as many times longer as the chosen mode is faster than the slowest, up to this."""

CALM_SECONDS = 60.0
"""Conflicts that come back sooner than this show that a mode was chosen by luck."""

REPORT_SECONDS = 60.0
"""The shortest time between two reports."""

_NOTHING = 1e-9
