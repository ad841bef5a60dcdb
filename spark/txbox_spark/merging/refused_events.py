"""Finds the events that the effect fails for, such as by a constraint of its target, by applying parts of the chunk.

::

    whole chunk fails ── none ─┬─ fails, too: the statements are wrong
                               └─ 1, 2, 4, … events ─┬─ applied: good, and stay for the parts that follow
                                                     └─ fails ── suspect, halves ── … ── one event: refused; the
                                                                 next part has as many as were good before it

The suspect is the event whose values Postgres quotes in its error. If it is the first refused event, three parts find
it: all, those before it, and it alone. If it is not, or if nothing is quoted, halving finds the first one. So each of k
refused events among n takes at most about log2(n / k) parts, and one part if most are refused.

The search does not hold locks for long. After ``TURN_SECONDS`` it rolls back what it applied, applies the good events
again in one statement, and continues after them. A turn takes at least as long as applying the good events did, so the
search takes at most twice its own time. It records no id in the inbox meanwhile.

Refused events are tried again after all others are applied, as long as that helps: an event may need what another one
creates, such as the row that its foreign key refers to.

Everything applied during the search is rolled back, and the chunk is merged again without the refused events. So, as
without refused events, a single statement over all remaining events is what commits.

A part that was applied keeps its savepoint, and the next part's savepoint is within it. If it were released, whoever
waits for one of its rows would wait until the end of the transaction, not of the turn. ``fresh_event`` is rarely
truncated: within a savepoint, TRUNCATE creates new files and new catalog rows, which every later statement must skip.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from txbox.postgres.round_trip import Statement, Step, row_of, run_steps
from txbox.postgres.sql import array_literal
from txbox.postgres.sqlstates import sqlstate
from txbox.postgres.transactions import driver_cursor
from txbox_spark.merging.effect_runner import ApplyFailed
from txbox_spark.merging.fresh_event import (
    FRESH_EVENT,
    fill_from_held,
    fill_good,
    held_ids,
    held_rows,
    held_suspect,
    hold_fresh,
)
from txbox_spark.reading.columns import EventColumn
from txbox_spark.rejects.remarks import RejectedRow
from txbox_spark.runtime.explanations import ABOUT_DATA

ALL_REFUSED = 1_000
"""If this many events are refused before one is applied, and then as many of the rest, the statements are wrong."""

TURN_SECONDS = 0.1
"""How long the search may hold locks, at least, after applying the events it knows to be good."""

TURN_PARTS = 200
"""How many parts a turn applies at most; each stays in its own savepoint, within the one before it."""

MOST_DEAD = 1_000
"""How many rows may be deleted from ``fresh_event``, or rolled back, before it is truncated."""

EMPTY = f"TRUNCATE {FRESH_EVENT}"
DELETE = f"DELETE FROM {FRESH_EVENT}"  # noqa: S608 - a name of ours
BEGIN_TURN = "SAVEPOINT txbox_turn"
END_TURN = "ROLLBACK TO SAVEPOINT txbox_turn; RELEASE SAVEPOINT txbox_turn"
BEGIN_PART = "SAVEPOINT txbox_part"
UNDO_PART = ("ROLLBACK TO SAVEPOINT txbox_part", "RELEASE SAVEPOINT txbox_part")


class GoodEventsFailed(ApplyFailed):
    """The effect fails for events that it succeeded for before: what it reads or changes has changed since."""


def is_about_events(error: BaseException) -> bool:
    """Return whether an effect failed by a value or a constraint, so that it may succeed for other events."""
    return (sqlstate(error) or "")[:2] in ABOUT_DATA


def find_refused(
    connection: Connection,
    columns: Sequence[EventColumn],
    lock_effect: Callable[[Connection], Callable[[Connection], None]],
) -> list[RejectedRow]:
    """Return the events in ``fresh_event`` that an effect fails for.

    Args:
        connection: in the chunk's transaction, in a savepoint that the caller rolls back.
        columns: of ``fresh_event``.
        lock_effect: waits until nobody else applies events, and returns a function that applies those in
            ``fresh_event``.

    Raises:
        GoodEventsFailed: what the effect reads or changes has changed meanwhile; search again.
        ApplyFailed: the effect fails without any event, or no event can be applied.
        sqlalchemy.exc.DBAPIError, psycopg.Error, TxboxError: the effect fails for another reason.
    """
    connection.exec_driver_sql(hold_fresh())
    connection.exec_driver_sql(EMPTY)
    ids = list(connection.exec_driver_sql(held_ids()).scalars())
    search = _Search(connection, columns, lock_effect)
    search.apply_none()
    search.try_each(ids)
    while len(search.refused) < len(ids):
        ids = list(search.refused)
        search.try_each(ids)
    search.end_turn()
    rows = connection.exec_driver_sql(held_rows(), {"message_ids": ids})
    return [
        RejectedRow(f"refused by the effect: {search.refused[message_id]}", message_id=message_id, event=event)
        for message_id, event in rows
    ]


class _Search:
    """Tells good events from refused ones."""

    def __init__(
        self,
        connection: Connection,
        columns: Sequence[EventColumn],
        lock_effect: Callable[[Connection], Callable[[Connection], None]],
    ) -> None:
        self.refused: dict[str, str] = {}  # why, by id, sorted
        self._last_good = ""  # up to this id, all events that are not refused are good
        self._connection = connection
        self._fill, self._fill_good = _statement(fill_from_held(columns)), fill_good(columns)
        self._find_suspect = _statement(held_suspect())
        self._lock_effect = lock_effect
        self._in_turn = False
        self._ends_at = 0.0
        self._dead = 0  # about how many rows ``fresh_event`` has had since it was truncated
        self._parts = 0  # applied in this turn and not rolled back
        self._owed: list[Step] = []  # undo the part that failed last; they go with the next statements

    def apply_none(self) -> None:
        """Raise unless the effect succeeds without any event."""
        self._begin_turn()
        self._apply(self._connection)
        self.end_turn()

    def try_each(self, ids: Sequence[str]) -> None:
        """Apply events, sorted by id, after the good ones, and record which are good and which are refused."""
        at, size = 0, 1
        while at < len(ids):
            began, end = at, min(at + size, len(ids))
            error = self._try(ids[at:end])
            if error is None:
                at, size = end, 2 * size
                continue
            suspect = self._suspect(ids, at, end, error)
            while end - at > 1:
                first = max(suspect, at + 1)  # try those before the suspect, and then the suspect alone
                middle = first if at <= suspect < end else (at + end) // 2
                if (of_part := self._try(ids[at:middle])) is None:
                    at, error = middle, None  # most likely the others fail
                else:
                    end, error = middle, of_part
            size = max(1, at - began)
            if (error := error or self._try(ids[at:end])) is not None:
                self.refused[ids[at]] = str(error.why if isinstance(error, ApplyFailed) else error)
                if not self._last_good and len(self.refused) == ALL_REFUSED:
                    self._require_good(ids[end:], error)
            at = end

    def end_turn(self) -> None:
        """Roll the turn back, which releases its locks."""
        if self._in_turn:
            self._connection.exec_driver_sql(END_TURN)
            self._in_turn, self._owed = False, []

    def _try(self, ids: Sequence[str]) -> ApplyFailed | DBAPIError | None:
        """Apply events after the good ones; return the error if it is about them, or None if they are good, too."""
        if not self._in_turn or self._parts == TURN_PARTS or time.monotonic() > self._ends_at:
            self.end_turn()
            self._begin_turn()
        if (error := self._applied(ids)) is not None:
            return error
        self._parts += 1
        self._last_good = max(self._last_good, ids[-1])
        for message_id in ids:
            self.refused.pop(message_id, None)
        return None

    def _suspect(self, ids: Sequence[str], at: int, end: int, error: ApplyFailed | DBAPIError) -> int:
        """Return the index of the event that has most of what the error quotes; -1 if none has, or there is but one."""
        cause = error.__cause__ if isinstance(error, ApplyFailed) else error
        orig = cause.orig if isinstance(cause, DBAPIError) else cause
        if end - at == 1 or not isinstance(orig, psycopg.Error):
            return -1
        quoted = f"{orig.diag.message_primary} {orig.diag.message_detail}"
        search = self._find_suspect.with_values(message_ids=array_literal(ids[at:end]), quoted=quoted)
        found = row_of(self._connection, self._run(search))
        return -1 if found is None else ids.index(found[0], at, end)

    def _applied(self, ids: Sequence[str]) -> ApplyFailed | DBAPIError | None:
        """Apply events in a savepoint; return the error if it is about them. If it is not, the savepoint stays open."""
        empty = DELETE if self._dead <= MOST_DEAD else EMPTY
        self._dead = len(ids) + (self._dead if empty is DELETE else 0)
        self._run(*_steps(empty, BEGIN_PART), self._fill.with_values(message_ids=array_literal(ids)))
        try:
            self._apply(self._connection)
        except (DBAPIError, ApplyFailed) as error:
            if not is_about_events(error):
                raise
            self._owed = _steps(*UNDO_PART)
            return error
        return None

    def _run(self, *steps: Step) -> Any:
        """Run statements in one round trip, after those that are owed; return the result of the last one."""
        owed, self._owed = self._owed, []
        with driver_cursor(self._connection):
            return run_steps(self._connection, [*owed, *steps])[-1]

    def _begin_turn(self) -> None:
        """Lock the effect, and apply the good events again."""
        self._connection.exec_driver_sql(BEGIN_TURN)
        self._in_turn = True
        self._apply = self._lock_effect(self._connection)
        began_at = time.monotonic()
        self._connection.exec_driver_sql(EMPTY)
        self._dead = 0
        if self._last_good:
            good = {"last_id": self._last_good, "refused": list(self.refused)}
            self._connection.exec_driver_sql(self._fill_good, good)
            try:
                self._apply(self._connection)
            except ApplyFailed as error:
                if is_about_events(error):
                    raise GoodEventsFailed(error.why) from error
                raise
            self._connection.exec_driver_sql(EMPTY)
        self._parts = 0
        now = time.monotonic()
        self._ends_at = now + max(TURN_SECONDS, now - began_at)

    def _require_good(self, ids: Sequence[str], error: ApplyFailed | DBAPIError) -> None:
        """Raise the error unless one of these events can be applied; try at most ``ALL_REFUSED`` of them."""
        for message_id in ids[:: -(-len(ids) // ALL_REFUSED) or 1]:
            if self._applied([message_id]) is None:
                self._owed = _steps(*UNDO_PART)
                return
        raise error


def _statement(text: str) -> Statement:
    return Statement.of(text, has_plan=False)


def _steps(*texts: str) -> list[Step]:
    return [Step(_statement(text)) for text in texts]
